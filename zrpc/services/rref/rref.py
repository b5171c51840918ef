"""RRef, the handle of a value that lives on some worker."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from zrpc.actors import ActorLabel, as_actor_class, options_of
from zrpc.agent.agent import Agent
from zrpc.agent.current import agent_that_is_set
from zrpc.calls.call_options import CallOptions
from zrpc.calls.cancel_scope import current_scope
from zrpc.calls.future import Future
from zrpc.constants import DEFAULT_PREFETCH, UNSET_RPC_TIMEOUT, Seconds
from zrpc.errors import OwnerDied, RpcError, RpcTimeoutError
from zrpc.membership.worker_info import WorkerInfo
from zrpc.runtime.interrupts import raise_if_of_handler
from zrpc.services.actors.mailbox import BESIDE
from zrpc.services.actors.order import Beside, CallOrder
from zrpc.services.rref import description
from zrpc.services.rref.creation import Creation, error_of_creation
from zrpc.services.rref.extended import BackwardOfValue, MakesStreams
from zrpc.services.rref.forks import reduce_rref
from zrpc.services.rref.messages import Fork, ForkId, RRefId, pack_id
from zrpc.services.rref.orders import ActorOrders
from zrpc.services.rref.proxy import Proxy
from zrpc.services.rref.service import RRefService
from zrpc.services.rref.value import READY, OwnedValue
from zrpc.wire.exceptions import leave_out
from zrpc.wire.kind import Kind, Tag
from zrpc.wire.message import Extensions, Message
from zrpc.wire.pickling import register_reducer

if TYPE_CHECKING:
    from zrpc.services.streams.stream import Stream

T = TypeVar("T")


class RRef(Generic[T]):
    """A reference to a value of type ``T`` that lives on one worker, its *owner*.

    ``RRef(value)`` makes this worker the owner of ``value``; `zrpc.remote` makes a value
    elsewhere. An RRef can be passed to other workers, as an argument, as a result, or inside
    any container or object. The value stays on its owner, and lives as long as an RRef to it
    exists anywhere. An RRef can't be pickled in any other way.

    RRefs to one value are equal and have the same hash. All methods may be called from any
    thread.

    Args:
        value: the value that the RRef refers to; it is not copied.
        type_hint: the type of ``value``, for readers; zrpc does not use it.

    Raises:
        RuntimeError: this process is not a worker; call `zrpc.init_rpc` first.

    Example:
        >>> rref = RRef([1, 2])
        >>> rref.is_owner(), rref.local_value()
        (True, [1, 2])
        >>> rref.rpc_sync().index(2)
        1

    See also ``torch.distributed.rpc.RRef`` and its "Remote Reference Protocol".
    """

    __slots__ = (
        "__weakref__",
        "_class",
        "_failure",
        "_fork_id",
        "_methods",
        "_order",
        "_owner",
        "_rref_id",
        "_service",
        "_value",
    )

    _class: type | None  # of the value, if that is known
    _order: CallOrder | None  # numbers the calls to an actor
    _value: OwnedValue | None  # None at a user

    __repr__ = description.represent
    __str__ = description.torch_text
    _serialize = description.refuse_pickler
    if not TYPE_CHECKING:
        __getattr__ = description.refuse_attribute

    def __init__(self, value: T, type_hint: Any = None) -> None:
        agent = agent_that_is_set()
        service = agent.service(RRefService)
        self._fill(service, service.new_id(), None, agent.worker_info)
        self._class = type(value)
        self._value = owned = service.retain_value(self._rref_id)
        owned.begun = True
        service.adopt(owned, value)
        if owned.mailbox is not None:
            self._number_calls(ActorLabel(owned.mailbox.title))
        owned.set(value)

    def _fill(
        self, service: RRefService, rref_id: RRefId, fork_id: ForkId | None, owner: WorkerInfo
    ) -> None:
        # Of the call that was to make the value; a message if the owner has sent it.
        self._failure: Exception | Message | None = None
        self._class = None
        self._rref_id = rref_id
        self._fork_id = fork_id  # None at the owner
        self._owner = owner
        self._value = None
        self._methods: frozenset[str] = frozenset()  # names that the value is known to have
        self._order = None
        self._service = service  # last: see `__del__`

    @classmethod
    def _of_fork(cls, service: RRefService, fork: Fork, value: OwnedValue | None) -> RRef[Any]:
        """Makes the handle of a fork that has arrived; the service has counted it already."""
        rref: RRef[Any] = cls.__new__(cls)
        owner = service.agent.membership.infos[fork.owner]
        rref._fill(service, fork.rref_id, fork.fork_id if value is None else None, owner)
        rref._value = value
        return rref

    @classmethod
    def _create(
        cls,
        agent: Agent,
        to: WorkerInfo,
        body: Any,
        timeout: Seconds,
        subject: RRef[Any] | None = None,
        rref_id: RRefId | None = None,
        more: Extensions = (),
        name: str = "",
        made_by: Any = None,
        failed: Callable[[], object] | None = None,
    ) -> RRef[Any]:
        """Makes the RRef that `zrpc.remote` returns: of the result of a function.

        The body is the function, args and kwargs; with a ``subject``, the name of a method of its
        value comes first. The id of the value may be drawn already, ``more`` extends the message,
        ``name`` is an actor's own, and ``made_by`` the function if the body hides it. ``failed`` is
        called if the call is lost, soon after the RRef has the error.
        """
        service = agent.service(RRefService)
        rref: RRef[Any] = cls.__new__(cls)
        rref_id, drawn = rref_id or service.new_id(), service.new_id()
        fork_id = None if to.member_id == service.member else drawn
        # Before the call, which may fail at any time, and before anything is counted: if Ctrl-C
        # comes after that, this handle is dropped as any other.
        rref._fill(service, rref_id, fork_id, to)
        if isinstance(made_by or body[0], type):
            rref._class = made_by or body[0]
        if subject is None and (options := options_of(made_by or body[0])) is not None:
            body = (as_actor_class(body[0]), *body[1:])
            more_of_it: Any = {"rref_id": rref_id, "more": more, "name": name, "made_by": made_by}
            again = partial(cls._create, agent, body=body, timeout=timeout, **more_of_it)
            label = ActorLabel(options.title, name, options.restarts)
            rref._number_calls(label, again)
        creation = Creation(service, rref_id, fork_id, to, weakref.WeakMethod(rref.fail), failed)
        # The end of the subject must not overtake the call.
        subject_id, order = (subject._rref_id, subject._order) if subject else (None, None)
        holds = subject or rref._order
        rref._value = creation.start(body, timeout, subject_id, holds=holds, order=order, more=more)
        return rref

    def _number_calls(self, label: ActorLabel, again: Callable[..., Any] | None = None) -> None:
        """Numbers the calls from now on, since the value is an actor; see `ActorOrders`."""
        self._order = self._orders().order_of(self._rref_id, label, self._owner, again)

    def _orders(self) -> ActorOrders:
        return self._service.agent.service(ActorOrders)

    def fail(self, error: Exception | Message) -> None:
        """Notes that the call that was to make the value has failed; in any thread.

        A message has the error in it: it is not unpickled here, which may be the I/O thread.

        :meta private:
        """
        self._failure = error

    def __del__(self) -> None:
        # Only notes it: see RRefService.dropped. A handle that was never filled has no service.
        service = getattr(self, "_service", None)
        if service is not None:
            service.dropped.append((self._rref_id, self._fork_id))

    def is_owner(self) -> bool:
        """Returns whether this worker owns the value."""
        return self._value is not None

    def owner(self) -> WorkerInfo:
        """Returns the worker that owns the value."""
        return self._owner if self._order is None else self._orders().owner_of(self)

    def owner_name(self) -> str:
        """Returns the name of the worker that owns the value."""
        return self.owner().name

    def confirmed_by_owner(self) -> bool:
        """Returns whether the owner knows of this RRef; always true at the owner."""
        return self._fork_id is None or self._service.is_confirmed(self._fork_id)

    def to_here(self, timeout: Seconds = UNSET_RPC_TIMEOUT) -> T:
        """Waits for the value, and returns a copy of it; at the owner, the value itself.

        Args:
            timeout: in seconds; 0 means no limit. Default: the default timeout of all calls.

        Raises:
            RpcTimeoutError: it took longer, or the call that was to make the value did.
            OwnerDied: the owner is lost.
            Exception: what was raised by the function that was to make the value.
        """
        agent = self._service.agent
        self._check()
        if self._value is not None:
            if self._order is not None:  # the value itself is returned, but in its turn
                self._ask((READY, None, None), timeout)
            timeout = agent.caller.timeout(timeout)
            self._wait_here(timeout)
            scope = current_scope()
            return self._value.get(timeout if scope is None else scope.bounded(timeout))  # type: ignore[no-any-return]
        if agent.closed:
            raise description.has_gone(self)
        return self._ask(None, timeout, Kind.FETCH)  # type: ignore[no-any-return]

    def local_value(self) -> T:
        """Returns the value itself, at the owner; waits for it if it is still being made.

        Raises:
            RuntimeError: this worker is not the owner.
            OwnerDied: the owner is lost. This worker may have its name and rank.
        """
        if self._value is None:
            self._check()
            raise RpcError(
                f"For UserRRef(rref_id={self._rref_id}, fork_id={self._fork_id}), can't call "
                "localValue() on user "
                f"{self._service.agent.worker_info}. Call it on owner {self._owner}"
            )
        self._wait_here(0)
        return self._value.get()  # type: ignore[no-any-return]

    def rpc_sync(self, timeout: Seconds = UNSET_RPC_TIMEOUT) -> T:
        """Returns a proxy whose methods run on the value at its owner, and return their results.

        ``rref.rpc_sync().f(x)`` costs one message each way. ``rref.rpc_sync()(x)`` calls the value
        itself: a module, for example, or a function.

        Args:
            timeout: the timeout of the call, in seconds; 0 means no limit. Default: the default
                timeout of all calls.
        """
        return Proxy(self._ask, timeout)  # type: ignore[return-value]

    def rpc_async(self, timeout: Seconds = UNSET_RPC_TIMEOUT) -> Proxy[Future[Any]]:
        """Like `rpc_sync`, but the methods return a Future at once."""
        return Proxy(self._ask_async, timeout)

    def remote(self, timeout: Seconds = UNSET_RPC_TIMEOUT) -> Proxy[RRef[Any]]:
        """Like `rpc_sync`, but the results stay at the owner, and the methods return RRefs.

        The first use of a method's name asks the owner, and raises AttributeError or TypeError.
        """
        return Proxy(self._ask_remotely, timeout)

    def rpc_stream(
        self,
        timeout: Seconds = UNSET_RPC_TIMEOUT,
        prefetch: int = DEFAULT_PREFETCH,
        deadline: Seconds = 0,
    ) -> Proxy[Stream[Any]]:
        """Like `rpc_sync`, for methods that are generators: each returns a Stream of its items.

        Args:
            timeout: seconds that an item may take, while the reader waits for it; 0 means no limit.
                Default: the default timeout of all calls.
            prefetch: the number of items that the generator may be ahead of its reader.
            deadline: seconds for the whole stream; 0 means no limit.

        Example:
            >>> class Model:
            ...     def generate(self, prompt):
            ...         yield from prompt.split()
            >>> model = remote("worker1", Model)
            >>> list(model.rpc_stream().generate("one by one"))
            ['one', 'by', 'one']
        """
        return Proxy(partial(self._ask_for_items, prefetch, deadline), timeout)

    def backward(self, dist_autograd_ctx_id: int = -1, retain_graph: bool = False) -> None:
        """Runs a backward pass with the value, a scalar tensor, as its root.

        Args:
            dist_autograd_ctx_id: the id of the autograd context that gets the gradients.
                Without one, at the owner, the value's own ``backward()`` is called.
            retain_graph: keep the graph for another pass.

        Raises:
            RuntimeError: the value is not a tensor; no context is given and this worker is not
                the owner; or what `zrpc.autograd.backward` raises.
        """
        self._check()
        autograd = self._service.agent.service(BackwardOfValue)  # type: ignore[type-abstract]
        autograd.backward_of_value(self._owner, self, dist_autograd_ctx_id, retain_graph)

    def ready(self, timeout: Seconds = UNSET_RPC_TIMEOUT) -> None:
        """Waits until the value is made. It copies nothing, and does not wait for an actor's calls.

        Args:
            timeout: in seconds; 0 means no limit. Default: the default timeout of all calls.

        Raises:
            RpcTimeoutError: it took longer, or the call that was to make the value did.
            OwnerDied: the owner is lost.
            Exception: what was raised by the function that was to make the value.

        Example:
            >>> remote("worker1", dict).ready(timeout=5)
        """
        self._ask_beside(READY, timeout)

    def stop(self, timeout: Seconds = UNSET_RPC_TIMEOUT) -> None:
        """Ends an actor: returns when its running calls have ended and it is closed.

        Calls that wait, and those that are made later, fail with ``executed`` False. Then the
        actor's method ``close()`` is called, if it has one. Its calls beside the others (see
        `zrpc.concurrent`) are not waited for. It does nothing if the actor is stopped already. In a
        method of the actor itself it returns at once: the actor ends when that has ended.

        Args:
            timeout: in seconds; 0 means no limit. Default: the default timeout of all calls. The
                actor ends also if it takes longer.

        Raises:
            RpcTimeoutError: it took longer, or the worker that would make it again did not answer.
            OwnerDied: the owner is lost. Nobody makes the actor again then.
            RpcError: the value is no actor.
            Exception: what ``close()`` has raised, or what was to make the value.

        Example:
            >>> import zrpc
            >>> jobs = remote("worker1", zrpc.actor(list, concurrency=1))
            >>> jobs.stop()
            >>> jobs.rpc_sync().pop()
            Traceback (most recent call last):
            zrpc.errors.RpcError: the actor list on worker1 was stopped by worker0 (rank 0)
        """
        self._orders().stop(self, timeout)

    def _about(self, beside: str = "", turn: bytes = b"") -> CallOptions:
        """Returns what a call about the value needs; ``beside`` is one outside of the order."""
        extension = Tag.SUBJECT, pack_id(*self._rref_id) + turn
        about: CallOptions = {"extension": extension, "holds": self, "died": OwnerDied}
        if self._order is not None:
            about["order"] = Beside(self._order, beside) if beside else self._order
        return about

    def _ask(self, body: Any, timeout: Seconds, kind: Kind = Kind.METHOD) -> Any:
        """Asks the owner about the value, and waits for the answer."""
        self._check()
        extension = Tag.SUBJECT, pack_id(*self._rref_id)
        try:
            return self._service.caller.call(
                self._owner,
                kind,
                body,
                timeout,
                extension=extension,
                holds=self,
                died=OwnerDied,
                order=self._order,
            )
        except (RpcTimeoutError, OwnerDied):
            if self._failure is not None:  # if the value can't be had, its error says why
                raise error_of_creation(self._failure, self._order) from None
            raise

    def _ask_beside(
        self, name: str, timeout: Seconds, call: Callable[..., Any] | None = None
    ) -> Any:
        """Asks the owner whether there is a value that has a method; waits for no call of it."""
        self._check()
        call, about = call or self._service.caller.call, self._about(name, pack_id(*BESIDE))
        return call(self._owner, Kind.METHOD, (name, None, None), timeout, **about)

    def _wait_here(self, timeout: Seconds) -> None:
        """Waits in a handler at the owner until there is a value: by a call, which can be seen."""
        assert self._value is not None
        if not self._value.ready and current_scope() is not None:
            with contextlib.suppress(Exception):  # of what was to make the value, or a time-out
                self._ask_beside(READY, timeout)

    def _ask_async(self, body: Any, timeout: Seconds) -> Any:
        try:
            self._check()
        except Exception as error:  # a call in flight fails by its future when the owner is lost
            raise_if_of_handler(error)
            failed: Future[Any] = Future()
            failed.set_exception(error)
            return failed
        about = self._about()
        return self._service.caller.call_async(self._owner, Kind.METHOD, body, timeout, **about)

    def _ask_for_items(
        self, prefetch: int, deadline: Seconds, body: Any, timeout: Seconds, plain: bool = False
    ) -> Any:
        self._check()
        about = self._about()
        streams = self._service.agent.service(MakesStreams)  # type: ignore[type-abstract]
        return streams.open(self._owner, body, timeout, prefetch, deadline, plain, **about)

    def _ask_remotely(self, body: Any, timeout: Seconds) -> Any:
        name, _, _ = body
        if name not in self._methods:
            self._ask_beside(name, timeout)
            self._methods |= {name}
        return self._ask_for_value(body, timeout)

    def _ask_for_value(self, body: Any, timeout: Seconds) -> RRef[Any]:
        """Asks a method of the value for another value, which stays at the owner."""
        self._check()
        return self._create(self._service.agent, self._owner, body, timeout, self)

    def _check(self) -> None:
        """Raises if it is known that the value can't be had."""
        agent = self._service.agent
        lost = self._value is None and self._owner.member_id in agent.membership.lost
        if lost and not agent.closed:  # else the call itself says that this worker has shut down
            self._orders().check(self)
        if self._failure is not None:
            raise error_of_creation(self._failure, self._order)

    def __eq__(self, other: object) -> bool:
        return self._rref_id == other._rref_id if isinstance(other, RRef) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._rref_id)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return reduce_rref(self)  # for subclasses; RRef itself is in the dispatch table


# In torch, the base of RRef, and the class of RRefs from `remote` or from another worker.
PyRRef = RRef


def plug_in(agent: Agent) -> RRefService:
    """Plugs RRefs into an agent; see `join_mesh`."""
    return RRefService(agent, RRef._of_fork)


register_reducer(RRef, reduce_rref)
leave_out(RRef)
