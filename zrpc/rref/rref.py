"""The handle of a value that lives on some worker."""

from __future__ import annotations

import weakref
from typing import Any, Generic, TypeVar

from zrpc.agent import Agent
from zrpc.caller import UNSET_RPC_TIMEOUT
from zrpc.cancel_scope import current_scope
from zrpc.current import find_agent
from zrpc.errors import NotInitializedError, OwnerDied, RpcError, RpcTimeoutError, WorkerDied
from zrpc.rref.ids import ForkId, RRefId
from zrpc.rref.layer import FORKS, RRefLayer, layer_of
from zrpc.rref.protocol import FORK_SIZE, Fork
from zrpc.rref.proxy import RRefProxy
from zrpc.rref.value import OwnedValue
from zrpc.wire.kind import Kind
from zrpc.wire.pickling import decoder, encoder, register_reducer
from zrpc.worker_info import WorkerInfo

__all__ = ["PyRRef", "RRef", "plug_in"]

T = TypeVar("T")


class RRef(Generic[T]):
    """A reference to a value of type ``T`` that lives on one worker, its *owner*.

    ``RRef(value)`` makes this worker the owner of ``value``; `zrpc.remote` makes a value
    elsewhere. An RRef can be passed to other workers, as an argument, as a result, or inside
    of any container or object; the value stays where it is, and lives as long as an RRef to it
    exists anywhere. It can't be pickled in any other way.

    RRefs to one value are equal and have the same hash. All methods may be called from any
    thread.

    Args:
        value: what the RRef refers to; it is not copied.
        type_hint: the type of ``value``, for readers; zrpc does not use it.

    Raises:
        RuntimeError: there is no agent; call `zrpc.init_rpc` first.

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
        "_failure",
        "_fork_id",
        "_layer",
        "_methods",
        "_owner",
        "_rref_id",
        "_value",
    )

    _layer: RRefLayer
    _rref_id: RRefId
    _fork_id: ForkId | None  # None at the owner
    _owner: WorkerInfo
    _value: OwnedValue | None  # None at a user
    _failure: Exception | None  # of the call that was to make the value
    _methods: frozenset[str]  # names that the value is known to have

    def __init__(self, value: T, type_hint: Any = None) -> None:
        agent = find_agent()
        if agent is None:
            raise NotInitializedError(
                "Current RPC agent is not set! Did you initialize the RPC framework (e.g. by "
                "calling zrpc.init_rpc)?"
            )
        layer = layer_of(agent)
        rref_id = layer.new_id()
        owned = layer.own(rref_id)
        owned.begun = True
        owned.set(value)
        self._fill(layer, rref_id, None, agent.worker_info, owned)

    def _fill(
        self,
        layer: RRefLayer,
        rref_id: RRefId,
        fork_id: ForkId | None,
        owner: WorkerInfo,
        value: OwnedValue | None,
    ) -> None:
        self._layer = layer
        self._rref_id = rref_id
        self._fork_id = fork_id
        self._owner = owner
        self._value = value
        self._failure = None
        self._methods = frozenset()

    @classmethod
    def _of_fork(cls, layer: RRefLayer, fork: Fork, value: OwnedValue | None) -> RRef[Any]:
        """The handle of a fork that has arrived, which the layer counts already."""
        rref: RRef[Any] = cls.__new__(cls)
        owner = layer.agent.membership.infos[fork.owner]
        rref._fill(layer, fork.rref_id, fork.fork_id if value is None else None, owner, value)
        return rref

    @classmethod
    def _create(
        cls, agent: Agent, to: WorkerInfo, body: Any, timeout: float, subject: RRefId | None = None
    ) -> RRef[Any]:
        """What `zrpc.remote` returns; see `RRefLayer.create`."""
        layer = layer_of(agent)
        rref: RRef[Any] = cls.__new__(cls)
        rref_id, fork_id, value = layer.create(to, body, timeout, subject, weakref.ref(rref))
        failure = getattr(rref, "_failure", None)  # where it has failed already
        rref._fill(layer, rref_id, fork_id, to, value)
        rref._failure = failure
        return rref

    def fail(self, error: Exception) -> None:
        """The call that was to make the value has failed; in any thread.

        :meta private:
        """
        self._failure = error

    def __del__(self) -> None:
        # Only a note: see RRefLayer.dropped. A handle that was never filled has no layer.
        layer = getattr(self, "_layer", None)
        if layer is not None:
            layer.dropped.append((self._rref_id, self._fork_id))

    def is_owner(self) -> bool:
        """Whether this worker owns the value."""
        return self._value is not None

    def owner(self) -> WorkerInfo:
        """The worker that owns the value."""
        return self._owner

    def owner_name(self) -> str:
        """The name of the worker that owns the value."""
        return self._owner.name

    def confirmed_by_owner(self) -> bool:
        """Whether the owner knows of this RRef; always true at the owner."""
        return self._fork_id is None or self._layer.confirmed(self._fork_id)

    def to_here(self, timeout: float = UNSET_RPC_TIMEOUT) -> T:
        """Waits for the value, and returns a copy of it, or the value itself at the owner.

        Args:
            timeout: seconds; 0 for none. Default: that of all calls.

        Raises:
            RpcTimeoutError: it took longer, or the call that was to make the value did.
            OwnerDied: the owner is gone.
            Exception: what the function raised that was to make the value.
        """
        agent = self._layer.agent
        self._check()
        if self._value is not None:
            timeout = agent.caller.timeout(timeout)
            scope = current_scope()
            return self._value.get(timeout if scope is None else scope.bounded(timeout))  # type: ignore[no-any-return]
        return self._ask(Kind.FETCH, None, timeout)  # type: ignore[no-any-return]

    def local_value(self) -> T:
        """The value itself, at the owner; waits for it where it is still being made.

        Raises:
            RuntimeError: this worker is not the owner.
        """
        if self._value is None:
            raise RpcError(
                f"For {self!r}, can't call localValue() on user "
                f"{self._layer.agent.worker_info}. Call it on owner {self._owner}"
            )
        return self._value.get()  # type: ignore[no-any-return]

    def rpc_sync(self, timeout: float = UNSET_RPC_TIMEOUT) -> Any:
        """A proxy whose methods run on the value at its owner, and return their results.

        ``rref.rpc_sync().f(x)`` costs one message each way.

        Args:
            timeout: of the call, in seconds; 0 for none. Default: that of all calls.
        """
        return RRefProxy(self._call_method, timeout)

    def rpc_async(self, timeout: float = UNSET_RPC_TIMEOUT) -> Any:
        """As `rpc_sync`, but the methods return a Future at once."""
        return RRefProxy(self._call_method_async, timeout)

    def remote(self, timeout: float = UNSET_RPC_TIMEOUT) -> Any:
        """As `rpc_sync`, but the results stay at the owner, and the methods return RRefs.

        The first use of a method's name asks the owner whether there is one, so that a
        missing one is told here.
        """
        return RRefProxy(self._call_method_remotely, timeout)

    def backward(self, dist_autograd_ctx_id: int = -1, retain_graph: bool = False) -> None:
        """Runs a backward pass with the value, a scalar tensor, as its root.

        Args:
            dist_autograd_ctx_id: of the autograd context; its gradients are there afterwards.
                Without one, at the owner, it is the value's own ``backward()``.
            retain_graph: keep the graph for another pass.

        Raises:
            RuntimeError: the value is no tensor; this is a user and no context is given; or
                what `zrpc.autograd.backward` raises.
        """
        self._check()
        self._layer.backward(self._owner, self, dist_autograd_ctx_id, retain_graph)

    def _ask(self, kind: Kind, body: Any, timeout: float) -> Any:
        """Asks the owner about the value, and waits for the answer."""
        subject = self._layer.subject(self._rref_id)
        try:
            return self._layer.agent.caller.call(
                self._owner,
                kind,
                body,
                timeout,
                extension=subject,
                holds=self,
                died=OwnerDied,
            )
        except (RpcTimeoutError, OwnerDied):
            self._check()  # where there is no value to wait for, that is the error to tell
            raise

    def _call_method(self, timeout: float, name: str, args: Any, kwargs: Any) -> Any:
        self._check()
        return self._ask(Kind.METHOD, (name, args, kwargs), timeout)

    def _call_method_async(self, timeout: float, name: str, args: Any, kwargs: Any) -> Any:
        self._check()
        return self._layer.agent.caller.call_async(
            self._owner,
            Kind.METHOD,
            (name, args, kwargs),
            timeout,
            extension=self._layer.subject(self._rref_id),
            holds=self,
            died=OwnerDied,
        )

    def _call_method_remotely(self, timeout: float, name: str, args: Any, kwargs: Any) -> Any:
        self._check()
        agent = self._layer.agent
        if name not in self._methods:
            agent.caller.call(self._owner, Kind.CALL, (_check_method, (self, name), {}), timeout)
            self._methods |= {name}
        return self._create(agent, self._owner, (name, args, kwargs), timeout, self._rref_id)

    def _check(self) -> None:
        """Raises where it is known that there is no value to be had."""
        failure = self._failure
        if isinstance(failure, RpcTimeoutError):
            raise RpcTimeoutError(f"RRef creation via rpc.remote() timed out: {failure}")
        if isinstance(failure, WorkerDied):
            raise OwnerDied(*failure.args)
        if failure is not None:
            raise type(failure)(*failure.args)
        if self._value is None:
            self._layer.check_owner(self._owner)

    def __eq__(self, other: object) -> bool:
        return self._rref_id == other._rref_id if isinstance(other, RRef) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._rref_id)

    def __repr__(self) -> str:
        if self._fork_id is None:
            return f"OwnerRRef({self._rref_id})"
        return f"UserRRef(RRefId = {self._rref_id}, ForkId = {self._fork_id})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _reduce_rref(self)  # by the dispatch table for RRef itself; here for subclasses


# The class under torch's RRef, of which those are that come from `remote` or another worker.
PyRRef = RRef


def plug_in(agent: Agent) -> RRefLayer:
    """Plugs RRefs into an agent, see `join_mesh`."""
    return RRefLayer(agent, RRef._of_fork)


def _check_method(rref: RRef[Any], name: str) -> None:
    """At the owner: raises AttributeError where the value has no such attribute."""
    getattr(rref.local_value(), name)


def _reduce_rref(rref: RRef[Any]) -> Any:
    message = encoder()
    layer = rref._layer
    if message is None or message.agent is not layer.agent:
        raise RpcError(
            f"Can not pickle rref in python pickler, rref can only be pickled when using RPC, by "
            f"the worker that has it ({layer.agent.worker_info})"
        )
    fork = layer.hand_on(rref._rref_id, rref._fork_id, rref._owner.number, message.destination)
    message.undo(lambda: layer.take_back(fork))
    forks = message.extension(FORKS)
    forks.extend(fork.pack())
    return _receive_rref, (len(forks) // FORK_SIZE - 1,)


def _receive_rref(index: int) -> Any:
    attachments = decoder().message.attachments or {}
    return attachments[FORKS][index]


register_reducer(RRef, _reduce_rref)
