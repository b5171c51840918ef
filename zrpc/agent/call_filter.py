"""Says in log records which worker has made them, and during which call."""

from __future__ import annotations

import logging
import os

from zrpc.agent.current import latest_agent
from zrpc.calls.cancel_scope import current_scope
from zrpc.calls.function_names import name_of_function


class CallFilter(logging.Filter):
    """Adds the worker and the call to each log record; rejects none.

    Add it to a handler of ``logging``, so that it sees the records of all loggers. Those of zrpc's
    own loggers have these attributes anyway. It may be used in several handlers and threads. An
    attribute that the program has set by ``extra`` is left as it is.

    - ``rank``: the rank of the worker, a string; empty outside of a mesh.
    - ``worker``: its name; empty outside of a mesh.
    - ``call``: in a handler, the function that was called, the caller's number of the call, and the
      caller: ``step #17 from worker0``. Caller and number together are unique. Otherwise empty.

    Example:
        >>> import logging
        >>> handler = logging.StreamHandler()
        >>> handler.addFilter(CallFilter())
        >>> form = "%(levelname)s [%(rank)s %(call)s] %(message)s"
        >>> handler.setFormatter(logging.Formatter(form))
        >>> logging.basicConfig(handlers=[handler])
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Adds the attributes; returns True."""
        agent, scope = latest_agent(), current_scope()
        info = None if agent is None else agent.worker_info
        found = vars(record)
        found.setdefault("rank", os.environ.get("RANK", "") if info is None else str(info.rank))
        found.setdefault("worker", "" if info is None else info.name)
        call = ""
        if scope is not None:
            function = "" if scope.function is None else f"{name_of_function(scope.function)} "
            call = f"{function}#{scope.call_id} from {scope.caller.name}"
        found.setdefault("call", call)
        return True


_OWN = CallFilter()


def tag_own_loggers() -> None:
    """Adds the attributes of `CallFilter` to the records of zrpc's loggers."""
    for name, logger in list(logging.root.manager.loggerDict.items()):
        # A placeholder stands for a name if only its children were asked for.
        if name.partition(".")[0] == "zrpc" and isinstance(logger, logging.Logger):
            logger.addFilter(_OWN)  # has no effect if it has it already
