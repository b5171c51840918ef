"""The functions that are called when a worker joins or is gone."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from zrpc.membership.hooks import Hooks
from zrpc.membership.worker_info import WorkerInfo

ONE, OTHER = WorkerInfo("one", 1), WorkerInfo("other", 2)


class Jobs:
    """Jobs that are run when the test calls `run`."""

    def __init__(self) -> None:
        self.jobs = []

    def submit(self, job: Callable[[], None]) -> None:
        self.jobs.append(job)

    def run(self) -> None:
        jobs, self.jobs = self.jobs, []
        for job in jobs:
            job()


@pytest.fixture
def jobs() -> Jobs:
    return Jobs()


@pytest.fixture
def hooks(jobs: Jobs) -> Hooks:
    return Hooks(jobs.submit)


def test_a_hook_is_called_for_each_worker_once(hooks: Hooks, jobs: Jobs) -> None:
    seen = []
    hooks.notify(ONE)  # before
    hooks.add(seen.append)
    hooks.notify(OTHER)  # and after
    assert seen == []  # not in the thread that notifies
    jobs.run()
    assert seen == [ONE, OTHER]


def test_hooks_are_called_in_their_order(hooks: Hooks, jobs: Jobs) -> None:
    seen = []
    for name in "abc":
        hooks.add(lambda info, name=name: seen.append((name, info.id)))
    hooks.notify(ONE)
    hooks.notify(OTHER)
    jobs.run()
    assert seen == [("a", 1), ("b", 1), ("c", 1), ("a", 2), ("b", 2), ("c", 2)]


def test_a_hook_that_is_removed_is_not_called(hooks: Hooks, jobs: Jobs) -> None:
    seen = []
    handle = hooks.add(seen.append)
    with hooks.add(seen.append):  # as torch's handles do
        pass
    hooks.notify(ONE)
    handle.remove()
    handle.remove()
    jobs.run()
    hooks.notify(OTHER)
    jobs.run()
    assert seen == []


@pytest.mark.parametrize("error", [ValueError, SystemExit])
def test_a_hook_that_fails_is_logged_and_others_are_called(
    hooks: Hooks, jobs: Jobs, caplog: pytest.LogCaptureFixture, error: type[BaseException]
) -> None:
    seen = []

    def fail(info: WorkerInfo) -> None:
        raise error("the hook's own")

    hooks.add(fail)
    hooks.add(seen.append)
    hooks.notify(ONE)
    jobs.run()
    assert seen == [ONE]
    (record,) = caplog.records
    assert "name=one" in record.getMessage()
    assert record.exc_info[0] is error


def test_a_hook_may_remove_itself_and_add_others(hooks: Hooks, jobs: Jobs) -> None:
    seen = []

    def once(info: WorkerInfo) -> None:
        handle.remove()
        hooks.add(seen.append)

    handle = hooks.add(once)
    hooks.notify(ONE)
    jobs.run()
    hooks.notify(OTHER)
    jobs.run()
    assert seen == [ONE, OTHER]


def test_later_hooks_are_not_called_for_a_forgotten_worker(hooks: Hooks, jobs: Jobs) -> None:
    again = WorkerInfo("one", 1, 1)
    for info in (ONE, OTHER, again):
        hooks.notify(info)
    hooks.forget(ONE.member_id)
    seen = []
    hooks.add(seen.append)
    jobs.run()
    assert [info.member_id for info in seen] == [OTHER.member_id, again.member_id]
