"""What a worker does and has done, in numbers and in time."""

from __future__ import annotations

from zrpc.agent.current import current_agent
from zrpc.agent.stats import Stats, take_stats

__all__ = ["stats"]


def stats() -> Stats:
    """Returns what this worker has done so far, in numbers.

    It is cheap: the numbers are counted anyway. To see another worker's, call it there.

    Returns:
        A dataclass that can be pickled; ``dataclasses.asdict`` makes it ready for JSON.

    Raises:
        NotInitializedError: there is no agent.

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
