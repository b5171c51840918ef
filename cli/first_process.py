"""Lets signals end a command that is the first process of a container, as they end any other.

The kernel drops a signal to such a process if the signal's effect would be the default one. So
SIGTERM would do nothing until the command has a handler for it. This is done as the module is
imported, since the imports after it take a while. A program that only imports zrpc's commands is
left alone.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

_COMMANDS = ("zrpc", "-m")  # sys.argv[0] while `python -m zrpc.cli` imports this


def _exit(number: int, frame: FrameType | None) -> None:
    os._exit(128 + number)


if os.getpid() == 1 and os.path.basename(sys.argv[0]) in _COMMANDS:
    for _number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(_number) is signal.SIG_DFL:
            signal.signal(_number, _exit)
