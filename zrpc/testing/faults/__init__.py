"""Faults for a mesh under test: kills and pauses workers, cuts and slows the network.

Workers that are processes can be killed and paused. In a mesh of either kind that was made with
``faults=True``, messages between two workers can be held back, delayed, dropped and duplicated:
its connections go through relays in the test's process.

A fault lasts until its ``with`` statement ends, `Fault.end` is called, or the mesh is shut down.
All functions may be called from any thread, at any time.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

from zrpc.testing.faults.proxy import Link, MessageFault, Relays

if TYPE_CHECKING:
    from zrpc.testing.mesh import Mesh

__all__ = ["Fault", "cut", "delay", "drop", "duplicate", "kill", "pause", "resume"]


class Fault:
    """A fault that lasts until it is ended.

    Example:
        >>> from zrpc.testing import faults, local_mesh
        >>> with local_mesh(2, faults=True) as mesh, faults.delay(mesh, 0, 1, seconds=0.1):
        ...     pass
    """

    def __init__(self, end: Callable[[], None], message_fault: MessageFault | None = None) -> None:
        self._end: Callable[[], None] | None = end
        self._message_fault = message_fault

    @property
    def happened(self) -> int:
        """The number of messages dropped or duplicated; 0 for faults of other kinds."""
        return 0 if self._message_fault is None else self._message_fault.happened

    def end(self) -> None:
        """Ends the fault. Idempotent."""
        end, self._end = self._end, None
        if end is not None:
            end()

    def __enter__(self) -> Fault:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.end()


def kill(mesh: Mesh, worker: str | int) -> None:
    """Kills a worker (SIGKILL), and waits until it is dead; see `zrpc.testing.Mesh.kill`.

    Raises:
        TypeError: the workers are threads.
    """
    mesh.kill(worker)


def pause(mesh: Mesh, worker: str | int) -> Fault:
    """Pauses a worker's process (SIGSTOP) until the fault ends.

    Raises:
        TypeError: the workers are threads.
    """
    mesh.pause(worker)
    return Fault(lambda: mesh.resume(worker))


def resume(mesh: Mesh, worker: str | int) -> None:
    """Resumes a paused worker (SIGCONT).

    Raises:
        TypeError: the workers are threads.
    """
    mesh.resume(worker)


def cut(mesh: Mesh, one: str | int, other: str | int) -> Fault:
    """Cuts the network between two workers, in both directions, without closing connections.

    As in a real network, nothing is lost if the cut ends before the workers notice it: messages
    in flight arrive then.

    Args:
        mesh: a mesh made with ``faults=True``.
        one: a worker's name or rank.
        other: another worker's name or rank.

    Raises:
        RuntimeError: the mesh was made without ``faults=True``.
        LookupError: there is no such worker.
        ValueError: both are the same worker.
    """

    def change(by: int) -> Callable[[Link], None]:
        def apply(link: Link) -> None:
            link.cuts += by

        return apply

    return _fault(mesh, [(one, other), (other, one)], change(1), change(-1))


def delay(mesh: Mesh, one: str | int, other: str | int, seconds: float) -> Fault:
    """Delays all messages between two workers, in both directions.

    Args:
        mesh: a mesh made with ``faults=True``.
        one: a worker's name or rank.
        other: another worker's name or rank.
        seconds: the delay in each direction. The delays of several faults add up.

    Raises:
        RuntimeError: the mesh was made without ``faults=True``.
        LookupError: there is no such worker.
        ValueError: both are the same worker, or ``seconds`` is negative or not finite.
    """
    if not 0 <= seconds < float("inf"):
        raise ValueError(f"seconds must be 0 or more, but got {seconds}")
    pairs = [(one, other), (other, one)]
    return _fault(
        mesh,
        pairs,
        lambda link: link.delays.append(seconds),
        lambda link: link.delays.remove(seconds),
    )


def drop(mesh: Mesh, sender: str | int, receiver: str | int, count: int | None = 1) -> Fault:
    """Drops the next messages from one worker to another.

    A message is one of ZeroMQ's: a call, an answer, or one with which zrpc counts references or
    shuts down. Heartbeats do not count.

    Args:
        mesh: a mesh made with ``faults=True``.
        sender: a worker's name or rank.
        receiver: another worker's name or rank.
        count: the number of messages; None for all until the fault ends.

    Raises:
        RuntimeError: the mesh was made without ``faults=True``.
        LookupError: there is no such worker.
        ValueError: both are the same worker.
    """
    return _add_message_fault(mesh, sender, receiver, MessageFault(0, count))


def duplicate(mesh: Mesh, sender: str | int, receiver: str | int, count: int | None = 1) -> Fault:
    """Delivers the next messages from one worker to another twice; see `drop`.

    ZeroMQ itself never does that, and zrpc does not compensate for it: a function whose call is
    duplicated runs twice.
    """
    return _add_message_fault(mesh, sender, receiver, MessageFault(2, count))


def _add_message_fault(
    mesh: Mesh, sender: str | int, receiver: str | int, message_fault: MessageFault
) -> Fault:
    fault = _fault(
        mesh,
        [(sender, receiver)],
        lambda link: link.message_faults.append(message_fault),
        lambda link: link.message_faults.remove(message_fault),
    )
    fault._message_fault = message_fault
    return fault


def _fault(
    mesh: Mesh,
    pairs: list[tuple[str | int, str | int]],
    begin: Callable[[Link], None],
    end: Callable[[Link], None],
) -> Fault:
    relays: Relays = mesh.relays
    ranks = [(mesh.rank(sender), mesh.rank(receiver)) for sender, receiver in pairs]
    if any(sender == receiver for sender, receiver in ranks):
        raise ValueError(f"expected two workers, but got {pairs[0][0]!r} twice")
    with relays.lock:
        links = [relays.link(*pair) for pair in ranks]
        for link in links:
            begin(link)
    relays.changed()

    def undo() -> None:
        with relays.lock:
            for link in links:
                end(link)
        relays.changed()

    return Fault(undo)
