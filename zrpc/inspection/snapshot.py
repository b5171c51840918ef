"""What a worker tells about itself, and how that travels: JSON, without anything to unpickle."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

__all__ = ["FORMAT", "Call", "Doing", "Frame", "Member", "Pool", "Request", "Snapshot"]

# Raised when the fields change.
FORMAT = 1


class Frame(NamedTuple):
    """Where a function is: in which file and line, and the function's name."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


@dataclass(slots=True)
class Call:
    """A call of the worker that is not answered.

    Attributes:
        id: its number, of this worker's.
        to: the rank of the callee.
        what: the function's or method's name; empty where there is none.
        kind: what kind of request.
        age: for how long it has been under way, in seconds.
        left: seconds until its deadline; None where it has none.
        waited_for: whether a thread or a coroutine waits for it, as far as that can be seen.
    """

    id: int
    to: int
    what: str
    kind: str
    age: float
    left: float | None
    waited_for: bool


@dataclass(slots=True)
class Request:
    """A call of another worker, or of this one, that this one has not answered.

    Attributes:
        caller: the rank.
        id: the caller's number.
        what: the function's or method's name; empty where that is not known.
        kind: what kind of request.
        queued: whether it waits for a thread of the pool.
        makes: the value of an RRef that it makes; empty for none.
        needs: the value of an RRef that it asks for; empty for none.
    """

    caller: int
    id: int
    what: str
    kind: str
    queued: bool = False
    makes: str = ""
    needs: str = ""


@dataclass(slots=True)
class Doing:
    """What a thread, or a coroutine, does.

    Attributes:
        name: of the thread or coroutine.
        frames: the stack, the innermost call last.
        where: the innermost frame of the program's own; None where there is none.
        own: whether it belongs to the worker; not so the main thread.
        task: whether it is a coroutine.
        loop: whether it is the thread in which the coroutines of the worker run.
        cpu: the processor time that the thread has used, in seconds; None if not known.
        calls: the numbers of the calls that it waits for.
        request: the caller's rank and number of the request that it works for.
        what: the handler's name, or the empty string.
    """

    name: str
    frames: list[Frame]
    where: Frame | None = None
    own: bool = True
    task: bool = False
    loop: bool = False
    cpu: float | None = None
    calls: list[int] = field(default_factory=list)
    request: tuple[int, int] | None = None
    what: str = ""


@dataclass(slots=True)
class Pool:
    """The threads that run handlers.

    Attributes:
        size: how many may run at once (``num_worker_threads``).
        running: how many run; one that waits for another worker does not.
        threads: how many there are.
        queued: how many jobs wait for a thread.
        full_for: for how long jobs had to wait without a pause, in seconds; None if they don't.
    """

    size: int
    running: int
    threads: int
    queued: int
    full_for: float | None = None


@dataclass(slots=True)
class Member:
    """A worker of the mesh, as another knows it.

    Attributes:
        rank: its rank.
        name: its name.
        directory: its private one on its host; empty where it has none.
        same_host: whether that is this host.
        lost: why it is gone; empty where it is not.
    """

    rank: int
    name: str
    directory: str
    same_host: bool
    lost: str = ""


@dataclass(slots=True)
class Snapshot:
    """One worker at one moment.

    Attributes:
        rank, name: who; its rank as a number that tells incarnations apart, see
            `zrpc.worker_info`, as all ranks here.
        pid: of its process.
        host: the name of its host.
        directory: its private one.
        members: all workers, itself included.
        pool: the threads that run handlers.
        doings: its threads and coroutines.
        calls: what it has asked others and waits for; the first thousand.
        requests: what others have asked it; the first thousand.
        calls_in_all, requests_in_all: how many there are.
        notes: further sentences, such as what a peer has said.
    """

    rank: int
    name: str
    pid: int
    host: str
    directory: str
    members: list[Member]
    pool: Pool
    doings: list[Doing]
    calls: list[Call]
    requests: list[Request]
    calls_in_all: int = 0
    requests_in_all: int = 0
    notes: list[str] = field(default_factory=list)

    def dump(self) -> bytes:
        """As JSON."""
        return json.dumps({"format": FORMAT, **asdict(self)}).encode()

    def as_dict(self) -> dict[str, Any]:
        """As what JSON knows."""
        content: dict[str, Any] = json.loads(self.dump())
        return content

    @classmethod
    def parse(cls, data: bytes) -> Snapshot:
        """Reads what `dump` wrote.

        Raises:
            ValueError: it is something else, or of another version of zrpc.
        """
        content = json.loads(data)
        if not isinstance(content, dict) or content.pop("format", None) != FORMAT:
            raise ValueError("expected a snapshot of this version of zrpc, found another")
        try:
            content["members"] = [Member(**member) for member in content["members"]]
            content["pool"] = Pool(**content["pool"])
            content["doings"] = [_doing(**doing) for doing in content["doings"]]
            content["calls"] = [Call(**call) for call in content["calls"]]
            content["requests"] = [Request(**request) for request in content["requests"]]
            return cls(**content)
        except (TypeError, KeyError) as error:
            raise ValueError(f"expected a snapshot, found something else: {error}") from error


def _doing(frames: Any, where: Any, request: Any, **rest: Any) -> Doing:
    return Doing(
        frames=[Frame(*frame) for frame in frames],
        where=None if where is None else Frame(*where),
        request=None if request is None else (request[0], request[1]),
        **rest,
    )
