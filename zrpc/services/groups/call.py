"""One call of all members of a group: whom it goes to, with what, and until when."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from time import monotonic
from typing import Any, NamedTuple

from zrpc.agent.agent import Agent
from zrpc.calls.future_error import without_frames
from zrpc.calls.pending_calls import OVERHEAD_BYTES
from zrpc.errors import RpcTimeoutError
from zrpc.membership.worker_info import WorkerInfo
from zrpc.services.groups.packing import Bodies

# A call that is made within this time has the timeout of the whole: an error then says where that
# comes from.
_AT_ONCE_SECONDS = 0.001


class Target(NamedTuple):
    """A member, as a call sees it.

    Attributes:
        info: the worker that is called.
        ask: sends a request: a body, and a timeout.
    """

    info: WorkerInfo
    ask: Callable[..., Any]


class Joining(NamedTuple):
    """Workers that belong to a group as soon as they join.

    Attributes:
        pattern: of their names.
        target: makes a target of one.
    """

    pattern: str
    target: Callable[[WorkerInfo], Target]


class GroupCall:
    """A call that is about to be made. Its time begins now.

    Args:
        agent: makes it.
        targets: the members.
        body: a function or the name of a method, args and kwargs.
        timeout: of the whole, in seconds; 0 for no limit, negative for the default.
        joining: which workers that join meanwhile are called for items of `zrpc.share`.

    Attributes:
        agent, joining: the same.
        bodies: makes the requests.
        names: of the members, by place.
        targets: the members by place, first those that are called first.

    Raises:
        ValueError: an argument has not as many values as there are members.
        SerializationError: an argument for all can't be pickled.
    """

    def __init__(
        self,
        agent: Agent,
        targets: Sequence[Target],
        body: tuple[Any, Any, Any],
        timeout: float,
        joining: Joining | None = None,
    ) -> None:
        self.agent = agent
        self.joining = joining
        self.bodies = Bodies(agent, [each.info for each in targets], *body)
        self.names = [each.info.name for each in targets]
        self.targets = {place: targets[place] for place in self._in_order_of_room(targets)}
        self._timeout = timeout
        self._seconds = agent.caller.timeout(timeout)
        self._begun = monotonic()

    def _in_order_of_room(self, targets: Sequence[Target]) -> list[int]:
        """Returns the places of the members: last those whose calls may have to wait for room.

        Otherwise one member that is slow, or stands still, would use up the time of all others.
        """
        calls, nbytes = self.agent.caller.calls, self.bodies.nbytes
        loads = calls.loads() if calls.limit else {}

        def may_wait(place: int) -> bool:
            return any(
                load.waiting or load.used + nbytes + OVERHEAD_BYTES > calls.limit
                for load in loads.get(targets[place].info.member_id, ())
            )

        return sorted(range(len(targets)), key=may_wait)

    def ask_all(self) -> Iterator[tuple[int, Any, Exception | None]]:
        """Asks each member; yields its place, what that has returned, and the error if it failed.

        The others are asked nevertheless.
        """
        for place, target in self.targets.items():
            asked, failure = None, None
            try:
                asked = target.ask(self.bodies.body(place), self.time_left())
            except Exception as error:
                failure = without_frames(error)  # they refer to what goes to the other members
            yield place, asked, failure

    def time_left(self) -> float:
        """Returns the timeout of a request that is sent now.

        Raises:
            RpcTimeoutError: no time is left.
        """
        passed = monotonic() - self._begun
        if not self._seconds or passed < _AT_ONCE_SECONDS:
            return self._timeout
        if passed < self._seconds:
            return self._seconds - passed
        error = RpcTimeoutError(
            f"the call was not sent within the timeout of the group ({self._seconds:g} s): the "
            "calls of its other members took that long to be sent, or this worker was busy"
        )
        error.executed = False
        raise error
