"""A log that fails, as one does that can't reach its server."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator


class _FailingHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        raise ConnectionError("no log server")


@contextlib.contextmanager
def failing_log() -> Iterator[None]:
    """Has all logging of zrpc fail in the block."""
    logger, handler = logging.getLogger("zrpc"), _FailingHandler()
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
