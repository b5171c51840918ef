"""Waits for what workers return or raise."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, wait
from typing import TypeVar

from zrpc.testing.failure import add_others
from zrpc.testing.worker import Work, Worker

T = TypeVar("T")

# One worker's failure often makes the others fail: wait this long for their errors.
_OTHER_FAILURES_SECONDS = 1.0


def results_of(
    workers: Sequence[Worker], work: Sequence[Work[T]], interrupts: bool = False
) -> list[T]:
    """Returns the results of all; raises the first failure, which names the others.

    Args:
        workers: the workers, in the order of their work.
        work: what they do.
        interrupts: whether the work is interrupted if the wait for it is, as by Ctrl-C.
    """
    __tracebackhide__ = True
    try:
        done, rest = wait(work, return_when=FIRST_EXCEPTION)
    except BaseException:
        for worker, each in zip(workers, work, strict=True):
            if interrupts:
                worker.interrupt(each)
        raise
    first = next((w for w in work if w in done and w.exception() is not None), None)
    if first is not None:
        wait(rest, timeout=_OTHER_FAILURES_SECONDS)
        others = {
            worker.label: error
            for worker, each in zip(workers, work, strict=True)
            if each is not first and each.done() and (error := each.exception())
        }
        error = first.exception()
        assert error is not None  # that is how it was chosen
        raise add_others(error, others)
    return [each.result() for each in work]


def result_of(worker: Worker, work: Work[T]) -> T:
    """Returns the result; an error's traceback shows the worker's frames only.

    If the wait is interrupted, as by Ctrl-C, the work is, too.
    """
    __tracebackhide__ = True
    try:
        error = work.exception()
    except BaseException:
        worker.interrupt(work)
        raise
    if error is not None:
        raise error
    return work.result()
