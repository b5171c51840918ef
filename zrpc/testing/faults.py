"""Faults of a mesh under test: workers that are killed or stopped, networks that are cut or slow.

Workers of a mesh of processes can be killed and paused. What goes on between two workers, of either
kind of mesh, can be cut, delayed, dropped and duplicated, where the mesh was made with
``faults=True``: then its connections go through relays in the test's process.

A fault ends with its ``with`` statement, by its `Fault.end`, or with the mesh. All functions may be
called from any thread, at any time, whatever the workers are doing.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

from zrpc.testing.relays import Link, Mischief, Relays

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

    def __init__(self, end: Callable[[], None], mischief: Mischief | None = None) -> None:
        self._end: Callable[[], None] | None = end
        self._mischief = mischief

    @property
    def happened(self) -> int:
        """How many messages were dropped or duplicated; 0 for faults of other kinds."""
        return 0 if self._mischief is None else self._mischief.happened

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
    """Kills a worker (SIGKILL), and waits until it is dead; as `zrpc.testing.Mesh.kill`.

    Raises:
        TypeError: the mesh is one of threads.
    """
    mesh.kill(worker)


def pause(mesh: Mesh, worker: str | int) -> Fault:
    """Stops a worker's process (SIGSTOP), with all its threads; the fault's end lets it go on.

    Raises:
        TypeError: the mesh is one of threads.
    """
    mesh.pause(worker)
    return Fault(lambda: mesh.resume(worker))


def resume(mesh: Mesh, worker: str | int) -> None:
    """Lets a worker that is paused go on (SIGCONT).

    Raises:
        TypeError: the mesh is one of threads.
    """
    mesh.resume(worker)


def cut(mesh: Mesh, one: str | int, other: str | int) -> Fault:
    """Cuts the network between two workers, both ways, without a word to either.

    As in a network, nothing is lost where the cut is mended before the workers notice: what was
    under way arrives then.

    Args:
        mesh: made with ``faults=True``.
        one: a worker's name or rank.
        other: another's.

    Raises:
        RuntimeError: the mesh was made without ``faults=True``.
        LookupError: there is no such worker.
        ValueError: it is one and the same worker.
    """

    def change(by: int) -> Callable[[Link], None]:
        def apply(link: Link) -> None:
            link.cuts += by

        return apply

    return _fault(mesh, [(one, other), (other, one)], change(1), change(-1))


def delay(mesh: Mesh, one: str | int, other: str | int, seconds: float) -> Fault:
    """Has everything between two workers take longer, each way.

    Args:
        mesh: made with ``faults=True``.
        one: a worker's name or rank.
        other: another's.
        seconds: how much longer. Delays of several faults add up.

    Raises:
        RuntimeError: the mesh was made without ``faults=True``.
        LookupError: there is no such worker.
        ValueError: it is one and the same worker, or ``seconds`` is negative.
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
    """Loses the next messages from one worker to another.

    A message is one of ZeroMQ's: a call, an answer, or one of those by which zrpc counts
    references and shuts down. Heartbeats are none.

    Args:
        mesh: made with ``faults=True``.
        sender: a worker's name or rank.
        receiver: another's.
        count: how many; None for all until the fault ends.

    Raises:
        RuntimeError: the mesh was made without ``faults=True``.
        LookupError: there is no such worker.
        ValueError: it is one and the same worker.
    """
    return _mischief(mesh, sender, receiver, Mischief(0, count))


def duplicate(mesh: Mesh, sender: str | int, receiver: str | int, count: int | None = 1) -> Fault:
    """Delivers the next messages from one worker to another twice; see `drop`.

    ZeroMQ never does that itself, and zrpc doesn't make up for it: a function that is called by
    such a message runs twice.
    """
    return _mischief(mesh, sender, receiver, Mischief(2, count))


def _mischief(mesh: Mesh, sender: str | int, receiver: str | int, mischief: Mischief) -> Fault:
    fault = _fault(
        mesh,
        [(sender, receiver)],
        lambda link: link.mischiefs.append(mischief),
        lambda link: link.mischiefs.remove(mischief),
    )
    fault._mischief = mischief
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
