"""Which calls become a batch, and when: the rules, for any order of events."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from zrpc.services.batching.gathering import Gathering

EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.just(0)),
        st.tuples(st.just("remove"), st.integers(0, 30)),
        st.tuples(st.just("pass"), st.integers(1, 8)),  # time, in units of a quarter of a second
        st.tuples(st.just("run"), st.just(0)),
    ),
    max_size=60,
)


class Watched:
    """A gathering, with the timer and the pool around it."""

    def __init__(self, max_size: int, max_wait: float) -> None:
        self.gathering: Gathering[int] = Gathering(max_size, max_wait)
        self.max_size, self.max_wait = max_size, max_wait
        self.now, self.added, self.ordered = 0.0, 0, 0
        self.came: dict[int, float] = {}  # those that wait
        self.taken: list[int] = []

    def add(self, _: int) -> None:
        self.came[self.added] = self.now
        self.ordered += self.gathering.add(self.added, self.now)
        self.added += 1

    def remove(self, call: int) -> None:
        self.gathering.remove(call)
        self.came.pop(call, None)

    def wait(self, quarters: int) -> None:
        end = self.now + quarters / 4
        while (due := self.gathering.due()) is not None and due <= end:
            self.now = due
            assert self.gathering.expire(due)
            self.ordered += 1
        self.now = end
        assert not self.gathering.expire(end)

    def run(self, _: int = 0) -> None:
        if self.ordered:
            self.ordered -= 1
            batch = self.gathering.take()
            # The oldest ones, in their order, and no more than fit.
            assert batch == list(self.came)[: self.max_size]
            self.taken += batch
            for call in batch:
                del self.came[call]

    def check(self) -> None:
        # What has waited for long enough is taken by the runs that are ordered already.
        late = [call for call, came in self.came.items() if self.now >= came + self.max_wait]
        assert len(late) <= self.ordered * self.max_size
        # Full batches don't wait for time.
        assert len(self.came) < (self.ordered + 1) * self.max_size
        assert self.gathering.idle == (not self.came and not self.ordered)


@given(st.integers(1, 4), st.sampled_from([0.0, 0.5, 1.0]), EVENTS)
def test_each_call_is_taken_once_and_in_time(
    max_size: int, max_wait: float, events: list[tuple[str, int]]
) -> None:
    watched = Watched(max_size, max_wait)
    do = {"add": watched.add, "remove": watched.remove, "pass": watched.wait, "run": watched.run}
    for name, value in events:
        do[name](value)
        watched.check()
    watched.wait(8)
    while watched.ordered:
        watched.run()
    assert not watched.came
    assert watched.gathering.idle
    assert len(set(watched.taken)) == len(watched.taken)


def test_runs_for_all_that_wait_can_be_ordered_at_once() -> None:
    gathering: Gathering[int] = Gathering(max_size=2, max_wait=9.0)
    ordered = sum(gathering.add(number, 0.0) for number in range(5))
    assert ordered == 2
    assert gathering.order_all() == 1
    assert [gathering.take() for _ in range(3)] == [[0, 1], [2, 3], [4]]
    assert gathering.idle
    assert gathering.order_all() == 0


def test_while_a_run_waits_for_a_thread_calls_join_it() -> None:
    gathering: Gathering[str] = Gathering(max_size=3, max_wait=1.0)
    assert not gathering.add("a", 0.0)
    assert gathering.expire(1.0)
    assert not gathering.add("b", 5.0)
    assert gathering.due() is None  # the run that is ordered takes it, too
    assert gathering.take() == ["a", "b"]
