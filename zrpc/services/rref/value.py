"""A value at its owner: not made yet, ready, or failed."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from types import AsyncGeneratorType, GeneratorType
from typing import TYPE_CHECKING, Any

from zrpc.actors import ActorLabel, options_of
from zrpc.agent.current import current_agent
from zrpc.calls.callee import Callee
from zrpc.calls.function_names import handler_name, name_of_function
from zrpc.calls.result_sink import ResultSink, SinkBefore
from zrpc.errors import (
    RemoteError,
    RpcError,
    RpcTimeoutError,
    SerializationError,
    raised_again,
    raised_by_function,
)
from zrpc.runtime.interrupts import uninterrupted
from zrpc.runtime.thread_pool import pass_gate
from zrpc.wire.exceptions import copied, set_cause, traceback_of
from zrpc.wire.message import Message

if TYPE_CHECKING:
    from zrpc.calls.cancel_scope import CancelScope
    from zrpc.services.actors.mailbox import Mailbox
    from zrpc.services.rref.messages import RRefId

    _Follower = tuple[Callable[[], None], CancelScope | None]

# In the place of a method's name: the value itself is called.
ITSELF = "__call__"
_GENERATORS = GeneratorType, AsyncGeneratorType
# In the place of a method's name: it is only asked whether there is a value.
READY = "ready()"

# From this number on, followers that nobody waits for any longer are looked for.
_MANY = 64


@dataclass(slots=True, weakref_slot=True, eq=False)
class Actor:
    """What the RRefs to one actor share. Only they keep it, so it ends with the last of them.

    Attributes:
        value: the object itself, so that no other has its id meanwhile.
        mailbox: the actor's.
        made_as: the RRef that its maker got; None if the program has made it by itself.
    """

    value: Any
    mailbox: Mailbox
    made_as: RRefId | None = None


@dataclass(slots=True, eq=False)
class OwnedValue:
    """The value that an RRef refers to. All methods may be called from any thread.

    Attributes:
        begun: whether the call that makes the value has arrived; others may ask for it before.
        ended: whether there was a value, which was used up.
        rref_id: of the call that makes the value; None if there is none.
        actor: what the RRefs to an actor share; None for any other value, and after its end.
        mailbox: of an actor; None for any other value. Set before the value is.
        name: an actor's own; empty if it has none.
        ready: whether there is a value or an error; set last, and read without a lock.
    """

    begun: bool = False
    ended: bool = False
    rref_id: RRefId | None = None
    actor: Actor | None = None
    mailbox: Mailbox | None = None
    name: str = ""
    ready: bool = False
    _value: Any = None
    _error: BaseException | None = None
    # Guards the followers; they are called without it.
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _followers: list[_Follower] | None = None  # usually there are none

    def set(self, value: Any = None, error: BaseException | None = None) -> None:
        """Sets the value or the error, once, and calls the followers.

        If one fails, for lack of memory, the next call of this goes on with it.
        """
        followers: list[_Follower] | None = None
        try:
            with uninterrupted, self._lock:
                if not self.ready:
                    self._value, self._error = value, error
                    if error is not None:
                        # As text: a traceback's frames would keep the call's arguments alive.
                        cause = RemoteError(traceback_of(error))
                        set_cause(error.with_traceback(None), cause)
                    self.ready = True
                followers, self._followers = self._followers, None
            while followers:
                followers[0][0]()
                del followers[0]
        except BaseException:
            if followers:
                self._followers = followers
            raise

    def holds(self, value: object) -> bool:
        """Returns whether this is the value."""
        return self._value is value

    def share(self, actor: Actor) -> None:
        """Makes this one of the RRefs to an actor."""
        self.actor, self.mailbox = actor, actor.mailbox

    def end(self, error: BaseException) -> None:
        """Replaces the value, which has been used up, by an error."""
        with uninterrupted, self._lock:
            self._error, self._value, self.ended = error, None, True
            self.actor = None

    def when_ready(self, follower: Callable[[], None], scope: CancelScope | None = None) -> None:
        """Calls ``follower()`` when there is a value or an error: now, if there is one already.

        Or never, if ``scope`` is cancelled before: its caller no longer waits.
        """
        if self.ready:  # the usual case
            follower()
            return
        with uninterrupted, self._lock:
            if not self.ready:
                followers = self._followers or []
                if len(followers) >= _MANY and len(followers).bit_count() == 1:  # now and then
                    followers = [f for f in followers if f[1] is None or not f[1].cancelled]
                followers.append((follower, scope))
                self._followers = followers
                return
        follower()

    def before_others(self, follower: Callable[[], None]) -> bool:
        """Calls ``follower()`` before what else waits for the value; False if there is one already.

        It runs in the thread that sets the value.
        """
        with uninterrupted, self._lock:
            if not self.ready:
                self._followers = [(follower, None), *(self._followers or ())]
            return not self.ready

    def get(self, timeout: float = 0) -> Any:
        """Waits for the value and returns it, or raises the error.

        Raises:
            RpcTimeoutError: the timeout, in seconds, passed first; 0 means no limit.
        """
        if not self.ready:
            self._wait(timeout)
        if self._error is not None:
            # A copy: its traceback refers to the frames of the caller, and these to the RRef.
            raise copied(self._error, self._error.__cause__).with_traceback(None)
        return self._value

    def answer(self, sink: ResultSink, request: Message) -> None:
        """Answers with a copy. In the pool: pickling may take long and run the user's code."""
        if self.mailbox is not None:
            request.scope.begun = True  # for `Mailbox.sweep`
            self.mailbox.do(self.mailbox.on_begun(request.scope))
        try:
            content = self.get()
        except BaseException as error:
            sink.fail(request, error, report=False)
        else:
            sink.answer(request, content)

    def _wait(self, timeout: float) -> None:
        gate = threading.Lock()
        gate.acquire()
        release = gate.release
        entry = release, None
        self.when_ready(release)
        try:
            if not pass_gate(gate, timeout or -1):
                raise RpcTimeoutError(
                    f"RPC ran for more than set timeout ({timeout * 1000:.0f} ms) and will now be "
                    "marked with an error: the RRef's value has not been made yet"
                )
        finally:
            with uninterrupted, self._lock:
                if self._followers is not None and entry in self._followers:
                    self._followers.remove(entry)


class MethodCheck:
    """Checks that a value has a method. In messages to people, it has the name of the method."""

    def __init__(self, name: str) -> None:
        self.__qualname__ = name

    def __call__(self, value: Any) -> None:
        """Raises AttributeError if there is none, or TypeError if the value can't be called."""
        if self.__qualname__ == READY:
            return
        if self.__qualname__ != ITSELF:
            # What the class has is not asked of the value: a property runs in the call's turn.
            if not any(self.__qualname__ in vars(each) for each in type(value).__mro__):
                getattr(value, self.__qualname__)
        elif not callable(value):
            raise TypeError(f"{type(value).__name__!r} object is not callable")


@dataclass(slots=True, eq=False)
class ValueSink(SinkBefore[Callee]):
    """Keeps the outcome of an execution as a value here, and answers the caller without it.

    Args:
        adopt: makes an actor of a value whose class, or what has made it, is marked.
    """

    _value: OwnedValue
    _adopt: Callable[[OwnedValue, Any, CancelScope], None]

    def answer(self, request: Message, value: Any) -> None:
        """Takes what the function has returned."""
        if isinstance(value, _GENERATORS):  # here, since the owner itself could read it
            self.fail(request, _no_value(value))
            return
        self._sink.count(request)  # before anyone has the value
        self._adopt(self._value, value, request.scope)
        self._value.set(value)
        self._sink.answer(request, None)

    def fail(self, request: Message, error: BaseException, report: bool = True) -> None:
        """Takes what the function has raised."""
        self._name_actor(request.scope.function, error)
        try:
            if report:
                # A worker that uses the value gets the error, but perhaps none does.
                self._sink.report_failure(error, handler_name(request))
        finally:  # also if it can't be logged
            self._sink.count(request, error)
            called = request.scope.function is not None
            self._value.set(error=raised_by_function(error) if called else error)
            self._sink.answer(request, None)

    def _name_actor(self, function: Any, error: BaseException) -> None:
        """Notes in the error of a constructor which actor it was to make, and on which worker."""
        if (options := options_of(function)) is not None:
            label = ActorLabel(options.title, self._value.name)
            worker = current_agent().worker_info.name
            with contextlib.suppress(Exception):  # of a class whose errors take no attributes
                BaseException.add_note(error, f"It was to make the actor {label} on {worker}.")

    def refuse(self, request: Message, error: BaseException) -> None:
        """Takes the error of a call that never begins."""
        self._value.set(error=raised_again(error) if isinstance(error, RpcError) else error)
        self._sink.answer(request, None)


def _no_value(generator: Any) -> SerializationError:
    return SerializationError(
        f"expected a value for an RRef, found the generator {name_of_function(generator)}: call "
        "its function by rpc_stream, which sends its items one by one, or return a list of them"
    )
