"""Torch's private names that programs use and that zrpc itself has no need for."""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

from zrpc.agent.agent import Agent
from zrpc.agent.current import current_agent, find_agent
from zrpc.backend_registry import BackendType
from zrpc.constants import DEFAULT_RPC_TIMEOUT_SEC
from zrpc.errors import not_initialized
from zrpc.options import ZmqRpcBackendOptions, checked_timeout
from zrpc.services.autograd.service import AutogradService

_F = TypeVar("_F", bound=Callable[..., Any])

_TensorPipeRpcBackendOptionsBase = ZmqRpcBackendOptions


class ProcessGroupRpcBackendOptions(ZmqRpcBackendOptions):
    """The options of torch 1.4 to 1.7, with a timeout that may be a ``timedelta``."""

    def __init__(
        self, *, rpc_timeout: float | timedelta = DEFAULT_RPC_TIMEOUT_SEC, **options: Any
    ) -> None:
        super().__init__(rpc_timeout=checked_timeout("rpc_timeout", rpc_timeout), **options)


# For `isinstance`. Programs get an agent by `init_rpc`.
RpcAgent = TensorPipeAgent = Agent


def _require_initialized(func: _F) -> _F:
    """Makes ``func`` raise `zrpc.NotInitializedError` unless there is an agent."""

    @functools.wraps(func)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if find_agent() is None:
            raise not_initialized()
        return func(*args, **kwargs)

    return wrapper  # type: ignore[return-value]


def backend_registered(backend_name: str) -> bool:
    """Returns whether there is a back end of this name."""
    return backend_name in BackendType.__members__


class _Context:
    """An autograd context as torch's private functions return it: it knows its id."""

    def __init__(self, context_id: int) -> None:
        self._id = context_id

    def _context_id(self) -> int:
        return self._id


def _current_context() -> _Context:
    """Returns the context that this thread is in, or raises RuntimeError."""
    return _Context(current_agent().service(AutogradService).contexts.current())


def _retrieve_context(context_id: int) -> _Context:
    """Returns a context of this worker, or raises RuntimeError."""
    current_agent().service(AutogradService).contexts.find(context_id)
    return _Context(context_id)


def _is_valid_context(context_id: int) -> None:
    """Raises RuntimeError if there is no such context on this worker."""
    _retrieve_context(context_id)
