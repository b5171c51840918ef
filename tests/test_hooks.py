"""What is called when a worker joins, or is gone."""

from __future__ import annotations

import pytest

from zrpc.hooks import Hooks
from zrpc.worker_info import WorkerInfo

ONE, OTHER = WorkerInfo("one", 1), WorkerInfo("other", 2)


class Jobs:
    """Jobs that are run when the test says so."""

    def __init__(self):
        self.jobs = []

    def submit(self, job):
        self.jobs.append(job)

    def run(self):
        jobs, self.jobs = self.jobs, []
        for job in jobs:
            job()


@pytest.fixture
def jobs():
    return Jobs()


@pytest.fixture
def hooks(jobs):
    return Hooks(jobs.submit)


def test_a_hook_is_called_for_each_worker_once(hooks, jobs):
    seen = []
    hooks.tell(ONE)  # before
    hooks.add(seen.append)
    hooks.tell(OTHER)  # and after
    assert seen == []  # not in the thread that tells
    jobs.run()
    assert seen == [ONE, OTHER]


def test_hooks_are_called_in_their_order(hooks, jobs):
    seen = []
    for name in "abc":
        hooks.add(lambda info, name=name: seen.append((name, info.id)))
    hooks.tell(ONE)
    hooks.tell(OTHER)
    jobs.run()
    assert seen == [("a", 1), ("b", 1), ("c", 1), ("a", 2), ("b", 2), ("c", 2)]


def test_a_hook_that_is_removed_is_not_called(hooks, jobs):
    seen = []
    handle = hooks.add(seen.append)
    with hooks.add(seen.append):  # as torch's handles do
        pass
    hooks.tell(ONE)
    handle.remove()
    handle.remove()
    jobs.run()
    hooks.tell(OTHER)
    jobs.run()
    assert seen == []


@pytest.mark.parametrize("error", [ValueError, SystemExit])
def test_a_hook_that_fails_is_logged_and_others_are_called(hooks, jobs, caplog, error):
    seen = []

    def fail(info):
        raise error("the hook's own")

    hooks.add(fail)
    hooks.add(seen.append)
    hooks.tell(ONE)
    jobs.run()
    assert seen == [ONE]
    (record,) = caplog.records
    assert "name=one" in record.getMessage()
    assert record.exc_info[0] is error


def test_a_hook_may_remove_itself_and_add_others(hooks, jobs):
    seen = []

    def once(info):
        handle.remove()
        hooks.add(seen.append)

    handle = hooks.add(once)
    hooks.tell(ONE)
    jobs.run()
    hooks.tell(OTHER)
    jobs.run()
    assert seen == [ONE, OTHER]


def test_who_is_forgotten_is_not_told_to_those_that_come_later(hooks, jobs):
    again = WorkerInfo("one", 1, 1)
    for info in (ONE, OTHER, again):
        hooks.tell(info)
    hooks.forget(ONE.number)
    seen = []
    hooks.add(seen.append)
    jobs.run()
    assert [info.number for info in seen] == [OTHER.number, again.number]
