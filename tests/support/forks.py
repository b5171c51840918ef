"""Children of the test's process by a fork, in which only a function of the test runs."""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable

from tests.support.waiting import until

__all__ = ["exit_code", "fork"]


def fork(work: Callable[[], object]) -> int:
    """Returns the pid of a child, whose exit code is what ``work()`` returns.

    Nothing means 0; if ``work`` raises, the child prints that and exits with 99.
    """
    child = os.fork()
    if child:
        return child
    code: object = 99
    try:
        code = work()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(int(code or 0))  # type: ignore[call-overload]


def exit_code(child: int) -> int:
    """Returns how a child has exited; kills it if it doesn't in time."""
    try:
        until(lambda: os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT))
    except BaseException:
        os.kill(child, signal.SIGKILL)
        raise
    finally:
        status = os.waitpid(child, 0)[1]
    return os.waitstatus_to_exitcode(status)
