"""zrpc's exceptions, as one tree.

::

    RuntimeError
    └── RpcError                      any error of zrpc's own
        ├── NotInitializedError       a call before init_rpc, or after shutdown
        ├── AuthenticationError       a peer can't prove that it belongs to the mesh
        ├── RendezvousError           the workers did not find each other
        ├── RpcTimeoutError           a deadline passed (also a TimeoutError)
        ├── RpcCancelledError         the call was cancelled (also a CancelledError of futures)
        ├── SerializationError        a value can't be pickled or unpickled
        ├── ProtocolError             a peer sent an invalid message
        ├── RemoteError               the callee failed; the message describes it
        ├── BackwardError             a worker's part of a backward pass failed
        ├── CallbackError             a future's callback can't be called (also a TypeError)
        ├── QueueClosed               a queue takes no more items, or has none left
        ├── GroupError                members of a group failed (also an ExceptionGroup)
        ├── OptionError               an option has no such value (also a ValueError)
        └── WorkerDied                the peer is lost (also a ConnectionError)
            └── OwnerDied             the owner of an RRef's value is lost

The root is a ``RuntimeError`` because ``torch.distributed.rpc`` raises that, so
``except RuntimeError`` in existing programs still works. An exception of the *callee's*
function is not in this tree: the caller gets it with its own type, and a `RemoteError` with
the remote traceback is its ``__cause__``.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

__all__ = [
    "AuthenticationError",
    "BackwardError",
    "CallbackError",
    "GroupError",
    "NotInitializedError",
    "OptionError",
    "OwnerDied",
    "ProtocolError",
    "QueueClosed",
    "RemoteError",
    "RendezvousError",
    "RpcCancelledError",
    "RpcError",
    "RpcTimeoutError",
    "SerializationError",
    "WorkerDied",
]


T = TypeVar("T", bound=BaseException)
# The text of an error of a group names that many of its members.
_SHOWN_MEMBERS = 8


class RpcError(RuntimeError):
    """The root of zrpc's own errors.

    Attributes:
        executed: for a call that timed out, was cancelled or was lost, or that could not be
            unpickled: whether its function has run. If False, it has not, and never will, so the
            call can be made again. If True, it has. If None, that is not known: make the call
            again only if the function may run twice.

    Example:
        >>> def call_again_if_safe(to, function):
        ...     try:
        ...         return rpc_sync(to, function, timeout=10)
        ...     except (RpcTimeoutError, WorkerDied) as error:
        ...         if error.executed is not False:
        ...             raise
        ...     return rpc_sync(to, function, timeout=10)
        >>> call_again_if_safe("worker1", dict)
        {}
    """

    executed: bool | None = None


class NotInitializedError(RpcError):
    """This process is not a worker: call `zrpc.init_rpc` first."""


class RendezvousError(RpcError):
    """The workers did not find each other: the master can't be reached, ranks are missing,
    two workers have the same name, or the world sizes differ.
    """


class AuthenticationError(RpcError):
    """A peer or this worker can't prove that it belongs to the mesh.

    The workers have different cluster secrets, or a secret that they need is missing. Or other
    users can read the file with the secret, or an entry of the store is forged.
    """


class RpcTimeoutError(RpcError, TimeoutError):
    """A call, a fetch or a shutdown took longer than its timeout.

    The message names the function, the worker, and what the limit was. Unless `RpcError.executed`
    is False, the callee may still be running, or may have run. Its effects are not undone.
    """


class SerializationError(RpcError):
    """A value can't be pickled for the wire, or can't be unpickled by the receiver."""


class RpcCancelledError(RpcError, CancelledError):
    """A call was cancelled: by ``cancel()`` on its future, or with the call that made it.

    It is also a ``concurrent.futures.CancelledError``. It isn't asyncio's, which would cancel the
    task that awaits the future. The callee may still be running, or may have run.
    """


class ProtocolError(RpcError):
    """A peer sent bytes that aren't a message, or a message that is not allowed."""


@contextlib.contextmanager
def expecting(what: str) -> Iterator[None]:
    """Raises a ProtocolError that names ``what`` if a block, or a function, can't read a body."""
    try:
        yield
    except (struct.error, ValueError, TypeError, LookupError, AttributeError, RecursionError) as e:
        raise ProtocolError(f"expected {what}: {e}") from e


class RemoteError(RpcError):
    """A failure on another worker, described in the message.

    A call raises it if the callee's own exception can't be sent: it can't be pickled, or would
    end the caller, as ``SystemExit`` would. It is also the ``__cause__`` of every exception that
    was sent, since a traceback can't be sent as an object.
    """


class BackwardError(RpcError):
    """A worker's part of a backward pass failed; the message names the worker and the error."""


class CallbackError(RpcError, TypeError):
    """A callback of a future has raised a TypeError: it takes no future, for example.

    ``torch.futures`` raises a RuntimeError then. The ``__cause__`` is the callback's own error.
    """


class GroupError(RpcError, ExceptionGroup):
    """Some members of a group have failed; the others were not cancelled.

    It is an ``ExceptionGroup`` too: ``except*`` handles the members' errors by their types.
    `RpcError.executed` is False if no function has run, so that the whole call can be made again.

    Attributes:
        results: what the others returned, by their place. If a handler raises the error, its caller
            gets a text in the place of each RRef.

    Example:
        >>> import zrpc
        >>> def check(rank):
        ...     if rank == 1:
        ...         raise LookupError("not here")
        ...     return rank
        >>> try:
        ...     zrpc.rpc_sync(zrpc.group("worker*"), check, args=(zrpc.each([0, 1, 2]),))
        ... except GroupError as error:
        ...     print(error.errors, error.results)
        {1: LookupError('not here')} {0: 0, 2: 2}
    """

    results: dict[int, Any]
    _places: Sequence[int]  # of its exceptions

    def __new__(cls, message: str, errors: Sequence[Exception]) -> GroupError:  # noqa: D102
        made: GroupError = ExceptionGroup.__new__(cls, message, errors)
        made._places, made.results = range(len(errors)), {}
        return made

    @property
    def errors(self) -> dict[int, Exception]:
        """The errors of those that have failed, by their place in the group."""
        return dict(zip(self._places, self.exceptions, strict=True))

    @classmethod
    def of(
        cls,
        errors: Mapping[int, Exception],
        results: Mapping[int, Any],
        names: Sequence[str],
        what: str = "members of the group",
    ) -> GroupError:
        """Returns the error of a group, by places; ``names`` says what is at each place.

        :meta private:
        """
        shown = [
            f"{names[place]}: {text_of(error)}"
            for place, error in [*errors.items()][:_SHOWN_MEMBERS]
        ]
        if len(errors) > len(shown):
            shown.append(f"and {len(errors) - len(shown)} more")
        failed = f"{len(errors)} of {len(names)} {what} failed"
        error = cls(f"{failed}: {'; '.join(shown)}", [*errors.values()])
        error._places, error.results = [*errors], dict(results)
        if not results and all(map(was_not_executed, errors.values())):
            error.executed = False
        return error

    def derive(self, excs: Sequence[Exception]) -> GroupError:  # type: ignore[override]
        """Returns the error of some of the members, with the same results; for ``except*``."""
        error = type(self)(self.message, excs)
        places = {id(each): place for place, each in self.errors.items()}
        if all(id(each) in places for each in excs):
            error._places = [places[id(each)] for each in excs]
        error.results, error.executed = self.results, self.executed
        return error


class OptionError(RpcError, ValueError):
    """An option or a timeout has a value that is not possible.

    ``torch.distributed.rpc`` raises a RuntimeError then.
    """


class QueueClosed(RpcError):
    """A `zrpc.Queue` was closed: it takes no more items, and those that it had are taken.

    A call that waits for an item also ends with this error once all workers have called
    ``shutdown``, since no worker will put one.
    """


class WorkerDied(RpcError, ConnectionError):
    """The peer is lost: its process exited or was stopped, the network to it is cut, or it left
    the mesh without an answer. The message says which, and when the peer was last heard from.
    """


class OwnerDied(WorkerDied):
    """The worker that owned an RRef's value is lost, and so is the value."""


def text_of(error: BaseException) -> str:
    """Returns the class and the text of an error of the program, whose ``__str__`` may fail."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return f"{type(error).__name__}: <its __str__ failed>"


def raised_again(error: Exception) -> Exception:
    """Returns a copy of one of our errors, which refers to no frames."""
    copied = type(error)(*error.args)
    copied.__dict__.update(error.__dict__)
    return copied


def raised_by_function(error: T) -> T:
    """Corrects an error that a function has raised: it has run, though a call of its own has not.

    Returns:
        The error.
    """
    if isinstance(error, RpcError) and error.executed is False:
        error.executed = None
    return error


def was_not_executed(error: BaseException) -> bool:
    """Returns whether an error says that the function was not called; see `RpcError.executed`."""
    return isinstance(error, RpcError) and error.executed is False


def of_lost_message(text: str, executed: bool | None) -> RpcError:
    """Returns the error of a call whose request or answer is lost; see `RpcError.executed`."""
    error = RpcError(text)
    error.executed = executed
    return error


_START_MESH = "or zrpc.start_mesh in a program or a notebook that starts its own workers."
# What a thread that is no worker may do, by what lets it: a mesh of this process. Entries of one
# that is collected vanish.
_advice: WeakKeyDictionary[object, str] = WeakKeyDictionary()


def advise(owner: object, text: str | None) -> None:
    """Ends the errors of `not_initialized` with a text while ``owner`` lives; None removes it."""
    if text is None:
        _advice.pop(owner, None)
    else:
        _advice[owner] = text


def not_initialized() -> NotInitializedError:
    """Returns the error of a call in a process, or a context, without an agent."""
    advice = next(iter(list(_advice.values())), _START_MESH)
    return NotInitializedError(f"RPC has not been initialized. Call zrpc.init_rpc first, {advice}")


def deadline_passed(what: str, seconds: float) -> RpcTimeoutError:
    """Returns the error of a call that is not sent, since its timeout is below 0."""
    error = RpcTimeoutError(
        f"RPC ran for more than set timeout ({seconds * 1000:.0f} ms) and will now be marked with "
        f"an error: {what} was not sent, since its deadline had passed before. Only -1 stands for "
        "the default timeout, and 0 for no limit"
    )
    error.executed = False
    return error


def has_shut_down() -> NotInitializedError:
    """Returns the error of a call through an agent that has shut down."""
    return NotInitializedError(
        "RPC has not been initialized: this worker has shut down, and its pending calls have "
        "failed; or this process was forked from a worker, and isn't one itself"
    )
