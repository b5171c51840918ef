"""Whether zrpc stands in for torch's RPC in this process, for a program that knows only that."""

from __future__ import annotations

_active = False


def begin() -> None:
    """Notes that torch's names are zrpc's from now on; see `zrpc.drop_in`."""
    global _active
    _active = True


def is_active() -> bool:
    """Returns whether the program is to find torch's behaviour if zrpc's own differs on purpose."""
    return _active
