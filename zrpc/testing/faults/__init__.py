"""Faults for a mesh under test: kills and pauses workers, cuts and slows the network.

Workers that are processes can be killed and paused. In a mesh of either kind that was made with
``faults=True``, messages between two workers can be held back, delayed, dropped and duplicated:
its connections go through relays in the test's process.

A fault lasts until its ``with`` statement ends, `Fault.end` is called, or the mesh is shut down.
All functions may be called from any thread, at any time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from zrpc.testing.faults.proxy import Disturbance, Relays

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

    def __init__(self, end: Callable[[], None], disturbance: Disturbance | None = None) -> None:
        self._end: Callable[[], None] | None = end
        self._disturbance = disturbance

    @property
    def happened(self) -> int:
        """The number of messages dropped or duplicated; 0 for faults of other kinds."""
        return 0 if self._disturbance is None else self._disturbance.happened

    def end(self) -> None:
        """Ends the fault. Idempotent."""
        end, self._end = self._end, None
        if end is not None:
            end()

    def __enter__(self) -> Fault:
        return self

    def __exit__(self, *exc_info: object) -> None:
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
    return _disturb(mesh, [(one, other), (other, one)], Disturbance(cut=True))


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
    return _disturb(mesh, [(one, other), (other, one)], Disturbance(delay=seconds))


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
    return _disturb(mesh, [(sender, receiver)], Disturbance(copies=0, left=count))


def duplicate(mesh: Mesh, sender: str | int, receiver: str | int, count: int | None = 1) -> Fault:
    """Delivers the next messages from one worker to another twice; see `drop`.

    ZeroMQ itself never does that, and zrpc does not compensate for it: a function whose call is
    duplicated runs twice.
    """
    return _disturb(mesh, [(sender, receiver)], Disturbance(copies=2, left=count))


def _disturb(
    mesh: Mesh, pairs: Sequence[tuple[str | int, str | int]], disturbance: Disturbance
) -> Fault:
    """Disturbs the ways from one worker to another; each pair is a sender and a receiver."""
    relays: Relays = mesh.relays
    ranks = [(mesh.rank(sender), mesh.rank(receiver)) for sender, receiver in pairs]
    if any(sender == receiver for sender, receiver in ranks):
        raise ValueError(f"expected two workers, but got {pairs[0][0]!r} twice")
    with relays.lock:
        links = [relays.link(*pair) for pair in ranks]
        for link in links:
            link.append(disturbance)
    relays.changed()

    def undo() -> None:
        with relays.lock:
            for link in links:
                link.remove(disturbance)
        relays.changed()

    return Fault(undo, disturbance)
