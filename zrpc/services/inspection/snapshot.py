"""A snapshot of a worker, and how it travels: as JSON, so that nothing has to be unpickled."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

from zrpc.wire.member_id import MemberId, rank_of

# Raised when the fields change.
FORMAT = 6


class Frame(NamedTuple):
    """A function on a stack: its file, the line that runs, and its name."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


@dataclass(slots=True)
class Call:
    """An outstanding call of the worker.

    Attributes:
        id: its number among this worker's calls.
        to: the callee.
        what: the function's or method's name; empty if there is none.
        kind: the kind of request.
        age: seconds since the call was made.
        left: seconds until its deadline; None if it has none.
        waited_for: whether a thread or a coroutine is seen to wait for it.
        reader: if it is a stream: the caller and the number of the request whose handler reads it;
            None if that is no handler.
    """

    id: int
    to: MemberId
    what: str
    kind: str
    age: float
    left: float | None
    waited_for: bool
    reader: tuple[MemberId, int] | None = None


@dataclass(slots=True)
class Request:
    """A call to this worker, its own calls to itself included, that it has not answered.

    Attributes:
        caller: the worker that made the call.
        id: the caller's number of the call.
        what: the function's or method's name; empty if it is not known.
        kind: the kind of request.
        queued: whether it waits for a thread of the pool.
        standing: where it stands, for people.
        makes: the RRef whose value it makes; empty if it makes none.
        needs: the RRef whose value it asks for; empty if it asks for none.
        actor: the class of the actor that it calls, if it waits for its turn there.
        behind: the caller and the number of each call that runs there; one of them must end first.
            Of a call in a batch that runs: the first one of the batch.
        rests: whether it is a generator that rests until its items are read.
    """

    caller: MemberId
    id: int
    what: str
    kind: str
    queued: bool = False
    standing: str = ""
    makes: str = ""
    needs: str = ""
    actor: str = ""
    behind: list[tuple[MemberId, int]] = field(default_factory=list)
    rests: bool = False


@dataclass(slots=True)
class Actor:
    """An actor that the worker owns.

    Attributes:
        name: of its class.
        running: the caller and the number of each call that it runs.
        waiting: how many calls wait for their turn.
    """

    name: str
    running: list[tuple[MemberId, int]]
    waiting: int


@dataclass(slots=True)
class Activity:
    """What a thread, or a coroutine that waits, is doing.

    Attributes:
        name: the name of the thread, or "a coroutine".
        frames: the stack, the innermost call last.
        where: the innermost frame of the program's own code; None if there is none.
        own: whether it belongs to the worker; the main thread does not.
        task: whether it is a coroutine.
        loop: whether it is the thread of the worker's event loop.
        cpu: the processor time that the thread has used, in seconds; None if not known.
        calls: the numbers of the calls that it waits for.
        any: whether it goes on as soon as one of them does.
        reads: the numbers of the streams that it reads, if it is no handler.
        request: the caller and the number of the request that it handles.
        what: the name of the handler, or the empty string.
    """

    name: str
    frames: list[Frame]
    where: Frame | None = None
    own: bool = True
    task: bool = False
    loop: bool = False
    cpu: float | None = None
    calls: list[int] = field(default_factory=list)
    any: bool = False
    reads: list[int] = field(default_factory=list)
    request: tuple[MemberId, int] | None = None
    what: str = ""


@dataclass(slots=True)
class Pool:
    """The threads that run handlers.

    Attributes:
        size: how many may run at once (``num_worker_threads``).
        running: how many run; a thread that waits for another worker does not count.
        threads: how many exist.
        queued: how many jobs wait for a thread.
        full_for: seconds for which some job has always been waiting; 0 if none waits.
    """

    size: int
    running: int
    threads: int
    queued: int
    full_for: float = 0.0


@dataclass(slots=True)
class Member:
    """A worker of the mesh, as another worker knows it.

    Attributes:
        directory: its private directory on its host; empty if it has none.
        same_host: whether it runs on the host of the worker that tells of it.
        lost: why it is gone; empty if it is not.
        silence: seconds since its last sign of life, 0 while it answers heartbeats; None if there
            was none.
    """

    member: MemberId
    name: str
    directory: str
    same_host: bool
    lost: str = ""
    silence: float | None = None


@dataclass(slots=True)
class Snapshot:
    """One worker at one moment.

    Attributes:
        directory: its private directory.
        members: all workers of the mesh, this one included.
        activities: its threads and coroutines.
        calls: its outstanding calls, the first thousand.
        requests: the requests that it has not answered, the first thousand.
        calls_in_all: the number of all outstanding calls.
        requests_in_all: the number of all requests that are not answered.
        actors: the actors that it owns, the first thousand.
        stats: `zrpc.stats`, processor time, memory and state; None if they were not asked for.
    """

    member: MemberId
    name: str
    pid: int
    host: str
    directory: str
    members: list[Member]
    pool: Pool
    activities: list[Activity]
    calls: list[Call]
    requests: list[Request]
    calls_in_all: int = 0
    requests_in_all: int = 0
    actors: list[Actor] = field(default_factory=list)
    stats: dict[str, Any] | None = None

    def dump(self) -> bytes:
        """Returns the snapshot as JSON."""
        return json.dumps({"format": FORMAT, **asdict(self)}).encode()

    def without_frames(self) -> Snapshot:
        """Returns it without stacks, which take most of the space."""
        return replace(self, activities=[replace(each, frames=[]) for each in self.activities])

    def as_dict(self) -> dict[str, Any]:
        """Returns what `dump` writes as a dict, with the rank of each worker added."""
        content: dict[str, Any] = json.loads(self.dump())
        for worker in (content, *content["members"]):
            worker["rank"] = rank_of(worker["member"])
        return content

    @classmethod
    def parse(cls, data: bytes) -> Snapshot:
        """Reads what `dump` wrote.

        Raises:
            ValueError: the data is something else, or comes from another version of zrpc.
        """
        content = json.loads(data)
        if not isinstance(content, dict) or content.pop("format", None) != FORMAT:
            raise ValueError("expected a snapshot of this version of zrpc, found another")
        try:
            content["members"] = [Member(**member) for member in content["members"]]
            content["pool"] = Pool(**content["pool"])
            content["activities"] = [_activity(**each) for each in content["activities"]]
            content["calls"] = [_call(**call) for call in content["calls"]]
            content["requests"] = [_request(**request) for request in content["requests"]]
            content["actors"] = [_actor(**each) for each in content["actors"]]
            return cls(**content)
        except (TypeError, KeyError) as error:
            raise ValueError(f"expected a snapshot, found something else: {error}") from error


def _call(reader: Any, **rest: Any) -> Call:
    return Call(reader=None if reader is None else (reader[0], reader[1]), **rest)


def _request(behind: Any, **rest: Any) -> Request:
    return Request(behind=[(caller, number) for caller, number in behind], **rest)


def _actor(running: Any, **rest: Any) -> Actor:
    return Actor(running=[(caller, number) for caller, number in running], **rest)


def _activity(frames: Any, where: Any, request: Any, **rest: Any) -> Activity:
    return Activity(
        frames=[Frame(*frame) for frame in frames],
        where=None if where is None else Frame(*where),
        request=None if request is None else (request[0], request[1]),
        **rest,
    )
