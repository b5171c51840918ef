"""What a worker does and has done, in numbers and in time."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager

from zrpc.agent.current import current_agent
from zrpc.agent.stats import Stats, take_stats
from zrpc.services.tracing.service import DEFAULT_RECORDS, trace_mesh

__all__ = ["span", "stats", "trace"]


def stats() -> Stats:
    """Returns what this worker has done so far, in numbers.

    It is cheap: the numbers are counted anyway. To see another worker's, call it there.

    Returns:
        A dataclass that can be pickled; ``dataclasses.asdict`` makes it ready for JSON.

    Raises:
        NotInitializedError: this process is not a worker.

    May be called from any thread, handlers included.

    Example:
        >>> rpc_sync("worker1", max, args=(1, 2))
        2
        >>> stats().calls["max"].number
        1
        >>> rpc_sync("worker1", stats).handlers["max"].number
        1
    """
    return take_stats(current_agent())


def trace(
    path: str | os.PathLike[str], max_records: int = DEFAULT_RECORDS
) -> AbstractContextManager[None]:
    """Records what all workers do while a ``with`` statement runs, and writes it to one file.

    Open the file at https://ui.perfetto.dev. Each worker is a process there. It shows each call at
    its caller and at its callee, with arrows between them, the time on the wire and in the queue,
    references, backward passes, and the program's own spans (see `span`). What was in progress when
    the trace began or ended is left out. ``otherData`` in the file says how many records were
    dropped, and why traces of workers are missing.

    Args:
        path: the file; it is replaced.
        max_records: how many records each worker keeps, some 400 bytes each; the oldest are
            dropped. A call is one record at each end.

    Returns:
        A context manager.

    Raises:
        OSError: the file can't be written.
        NotInitializedError: this process is not a worker.

    May be called from any thread. Workers that join later are not recorded.

    Example:
        >>> import tempfile
        >>> with tempfile.NamedTemporaryFile(suffix=".json") as file, trace(file.name):
        ...     rpc_sync("worker1", max, args=(1, 2))
        2
    """
    return trace_mesh(current_agent(), path, max_records)


def span(name: str) -> AbstractContextManager[None]:
    """Shows the time of a ``with`` statement in a trace, under a name.

    It costs next to nothing while no trace is on. It may be used in coroutines too.

    Args:
        name: what is shown.

    Raises:
        NotInitializedError: this process is not a worker.

    May be called from any thread.

    Example:
        >>> with span("load a batch"):
        ...     batch = torch.ones(2)
    """
    return current_agent().span(name)
