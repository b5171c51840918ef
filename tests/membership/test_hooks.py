"""The functions that are called when a worker joins or is gone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from zrpc.membership.hooks import Hooks
from zrpc.membership.worker_info import WorkerInfo

ONE, OTHER = WorkerInfo("one", 1), WorkerInfo("other", 2)
AGAIN = WorkerInfo("one", 1, 1)


async def later(info: WorkerInfo) -> None:
    pass


class LateHooks(Hooks):
    """Hooks that are called when the test calls `run`."""

    def __init__(self) -> None:
        self._jobs: list[Callable[[], None]] = []
        super().__init__(self._jobs.append)
        self.seen: list[object] = []

    def run(self) -> list[object]:
        """Returns what the hooks have added to `seen`."""
        while self._jobs:
            self._jobs.pop(0)()
        return self.seen


@pytest.fixture
def hooks() -> LateHooks:
    return LateHooks()


def test_a_hook_that_fails_is_logged_and_others_are_called(
    hooks: LateHooks, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(error: type[BaseException], info: WorkerInfo) -> None:
        raise error("the hook's own")

    for error in (ValueError, SystemExit):
        hooks.add(partial(fail, error))
    hooks.add(hooks.seen.append)
    hooks.notify(ONE)
    assert hooks.run() == [ONE]
    assert all("name=one" in record.getMessage() for record in caplog.records)
    assert [record.exc_info[0] for record in caplog.records] == [ValueError, SystemExit]


def test_a_hook_may_remove_itself_and_add_others(hooks: LateHooks) -> None:
    def once(info: WorkerInfo) -> None:
        handle.remove()
        hooks.add(hooks.seen.append)

    handle = hooks.add(once)
    hooks.notify(ONE)
    assert hooks.run() == [ONE]
    hooks.notify(OTHER)
    assert hooks.run() == [ONE, OTHER]


def test_later_hooks_are_not_called_for_a_forgotten_worker(hooks: LateHooks) -> None:
    for info in (ONE, OTHER, AGAIN):
        hooks.notify(info)
    hooks.forget(ONE.member_id)
    hooks.add(lambda info: hooks.seen.append(info.member_id))
    assert hooks.run() == [OTHER.member_id, AGAIN.member_id]


@pytest.mark.parametrize("hook", [None, 1, later, partial(later)])
def test_what_would_never_run_is_refused(hooks: LateHooks, hook: Any) -> None:
    with pytest.raises(TypeError, match=r"function that takes a WorkerInfo .*, but got"):
        hooks.add(hook)
