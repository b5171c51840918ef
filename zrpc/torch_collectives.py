"""Collectives under torch's private names, for programs that use them there."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from zrpc.agent.current import current_agent
from zrpc.constants import UNSET_RPC_TIMEOUT, Seconds
from zrpc.errors import NotInitializedError
from zrpc.services.collectives import Collectives

__all__ = ["_all_gather", "_barrier", "_wait_all_workers"]

logger = logging.getLogger(__name__)


def _all_gather(
    obj: Any, worker_names: Iterable[str] | None = None, timeout: Seconds = UNSET_RPC_TIMEOUT
) -> dict[str, Any]:
    """Returns the object that each worker passed, by worker name; all of them must call it.

    Without a timeout it waits without limit, but not for workers that are gone: those that left, or
    whose process has ended, are not counted. One that was declared dead makes it fail everywhere.
    """
    limit = 0 if timeout == UNSET_RPC_TIMEOUT else timeout
    return current_agent().service(Collectives).gather(obj, worker_names or None, limit)


def _barrier(worker_names: Iterable[str]) -> None:
    """Waits until all these workers have called it; errors are logged."""
    try:
        _all_gather(None, worker_names)
    except NotInitializedError:
        raise
    except RuntimeError:
        logger.exception("Failed to complete barrier")


def _wait_all_workers(timeout: Seconds = 0) -> None:
    """Waits until all workers have called it."""
    _all_gather(None, timeout=timeout)
