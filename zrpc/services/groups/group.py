"""Groups, of workers or of references: sequences that are called as one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar, overload

from typing_extensions import override

from zrpc.actors import as_actor_class
from zrpc.agent.agent import Agent
from zrpc.agent.current import current_agent
from zrpc.calls.cancel_scope import current_scope
from zrpc.calls.future import Future
from zrpc.constants import DEFAULT_PREFETCH, UNSET_RPC_TIMEOUT, Seconds
from zrpc.errors import NotInitializedError, RpcError, RpcTimeoutError, has_shut_down
from zrpc.membership.worker_info import WorkerInfo
from zrpc.runtime.interrupts import raise_if_of_handler
from zrpc.runtime.thread_pool import pass_gate
from zrpc.services.groups.call import GroupCall, Target
from zrpc.services.groups.calls import call_each, future_of_all, make_each, stream_each
from zrpc.services.groups.future import GroupFuture
from zrpc.services.groups.service import GroupService
from zrpc.services.rref.proxy import Proxy
from zrpc.services.rref.rref import RRef
from zrpc.services.rref.value import READY
from zrpc.services.streams.service import StreamService, checked_deadline, checked_prefetch
from zrpc.services.streams.stream import Stream
from zrpc.wire.kind import Kind

M = TypeVar("M")
T = TypeVar("T")

if TYPE_CHECKING:
    _Sequence = Sequence
else:  # an abstract class would run code of Python's for each `isinstance`
    _Sequence = Generic


class Group(_Sequence[M]):
    """A sequence of members that are called as one; `zrpc.group` makes one.

    It has a length, an order, indices and slices. A slice is a group. A group can be sent.

    Args:
        members: in order.
    """

    def __init__(self, members: Sequence[M]) -> None:
        self._members = tuple(members)

    @property
    def members(self) -> tuple[M, ...]:
        """The members now, in order."""
        return self._members

    def __len__(self) -> int:
        return len(self.members)

    @overload
    def __getitem__(self, place: int) -> M: ...
    @overload
    def __getitem__(self, place: slice) -> Self: ...
    def __getitem__(self, place: int | slice) -> Any:
        found = self.members[place]
        return self._of(found) if isinstance(place, slice) else found

    def _of(self, members: Any) -> Self:
        return type(self)(members)

    def __iter__(self) -> Iterator[M]:
        return iter(self.members)

    def __reversed__(self) -> Iterator[M]:
        return reversed(self.members)

    def __contains__(self, member: object) -> bool:
        return self._as_member(member) in self.members

    def index(self, value: Any, start: int = 0, stop: int | None = None) -> int:
        """Returns the place of a member; raises ValueError if it is none."""
        members = self.members
        return members.index(self._as_member(value), start, len(members) if stop is None else stop)

    def count(self, value: Any) -> int:
        """Returns how often a member is in the group."""
        return self.members.count(self._as_member(value))

    def _as_member(self, value: Any) -> Any:
        """Returns what stands for a value among the members."""
        return value


Sequence.register(Group)


class WorkerGroup(Group[str]):
    """A group of workers, by name; see `zrpc.group`.

    After a restart, the worker that has the name is called.

    Args:
        members: their names.
        pattern: if it is given, the names are looked up at each use.
    """

    def __init__(self, members: Sequence[str], pattern: str | None = None) -> None:
        super().__init__(members)
        self._pattern = pattern

    @property
    def members(self) -> tuple[str, ...]:
        """The names of the workers now."""
        if self._pattern is None:
            return self._members
        return tuple(_names_that_match(current_agent(), self._pattern))

    @override
    def _as_member(self, value: Any) -> Any:
        return value.name if isinstance(value, WorkerInfo) else value

    def __repr__(self) -> str:
        live = "" if self._pattern is None else f"{self._pattern!r}, live: "
        names = self._members
        with contextlib.suppress(NotInitializedError):  # a repr must not fail after the shutdown
            names = self.members
        return f"<group of workers: {live}{', '.join(names)}>"

    def call(self, body: Any, timeout: Seconds) -> list[Any]:
        """Does what `zrpc.rpc_sync` does for a group."""
        return _results(self.call_async(body, timeout))

    def call_async(self, body: Any, timeout: Seconds) -> GroupFuture[Any]:
        """Does what `zrpc.rpc_async` does for a group."""
        call_async = current_agent().caller.call_async
        return call_each(self._call(lambda to: partial(call_async, to, Kind.CALL), body, timeout))

    def stream(self, body: Any, timeout: Seconds, prefetch: int, deadline: Seconds) -> Stream[Any]:
        """Does what `zrpc.rpc_stream` does for a group."""
        options: Any = {"timeout": timeout, "prefetch": checked_prefetch(prefetch)}
        deadline = checked_deadline(deadline)
        opens = current_agent().service(StreamService).open
        call = self._call(lambda to: _asking(partial(opens, to, **options)), body, deadline)
        return stream_each(call, timeout)

    def create(self, body: Any, timeout: Seconds) -> RRefGroup[Any]:
        """Does what `zrpc.remote` does for a group."""
        body = as_actor_class(body[0]), *body[1:]
        create = partial(RRef._create, current_agent(), made_by=body[0])
        return RRefGroup(make_each(self._call(lambda to: partial(create, to), body, timeout)))

    def _call(self, ask: Callable[[WorkerInfo], Any], body: Any, timeout: Seconds) -> GroupCall:
        """Returns a call of the workers, which is asked of one by what ``ask`` returns for it.

        Raises:
            RpcError: no worker matches the pattern any longer.
        """
        agent, members, pattern = current_agent(), self.members, self._pattern
        if pattern is not None and not members:
            raise RpcError(
                f"expected workers whose names match {pattern!r}, found none in the mesh now"
            )

        def joining(info: WorkerInfo) -> Target | None:
            belongs = pattern is not None and fnmatchcase(info.name, pattern)
            return Target(info, ask(info)) if belongs else None

        infos = [agent.membership.find(name) for name in members]
        targets = [Target(info, ask(info)) for info in infos]
        return GroupCall(agent, targets, body, timeout, None if pattern is None else joining)


class RRefGroup(Group[RRef[T]]):
    """A group of references; `zrpc.remote` to a group of workers makes one, or `zrpc.group`.

    The proxies of `rpc_sync`, `rpc_async` and `remote` are those of `zrpc.RRef`: they call the
    method of each value. All methods may be called from any thread.

    Example:
        >>> import zrpc
        >>> lists = zrpc.remote(zrpc.group("worker*"), list, args=(zrpc.each(["a", "bc", "d"]),))
        >>> lists.rpc_sync().__len__()
        [1, 2, 1]
        >>> lists[1:].rpc_async().count("c").wait()
        [1, 0]
    """

    def __repr__(self) -> str:
        return f"<group of RRefs: {', '.join(map(repr, self._members))}>"

    def rpc_sync(self, timeout: Seconds = UNSET_RPC_TIMEOUT) -> Proxy[list[Any]]:
        """Returns a proxy whose methods run on each value, and return the list of their results.

        Args:
            timeout: of the whole call, in seconds; 0 means no limit. Default: the default timeout
                of all calls.
        """
        return Proxy(self._ask, timeout)

    def rpc_async(self, timeout: Seconds = UNSET_RPC_TIMEOUT) -> Proxy[GroupFuture[Any]]:
        """Like `rpc_sync`, but the methods return a future of the list at once."""
        return Proxy(self._ask_async, timeout)

    def remote(self, timeout: Seconds = UNSET_RPC_TIMEOUT) -> Proxy[RRefGroup[Any]]:
        """Like `rpc_sync`, but the results stay at their owners, and the methods return groups.

        The first use of a method's name asks whether the values have that method, as that of an
        RRef does.
        """
        return Proxy(self._ask_remotely, timeout)

    def rpc_stream(
        self,
        timeout: Seconds = UNSET_RPC_TIMEOUT,
        prefetch: int = DEFAULT_PREFETCH,
        deadline: Seconds = 0,
    ) -> Proxy[Stream[Any]]:
        """Like `rpc_sync`, for methods that are generators: each returns a Stream of all items.

        The items come as they are made, each with the place of its member. With `zrpc.share` the
        method may also be no generator. For more, and for the arguments, see `zrpc.rpc_stream`.

        Example:
            >>> import zrpc
            >>> class Model:
            ...     def generate(self, prompt):
            ...         yield from prompt.split()
            >>> models = zrpc.remote(zrpc.group("worker*"), Model)
            >>> sorted(models.rpc_stream().generate(zrpc.each(["a b", "c", ""])))
            [(0, 'a'), (0, 'b'), (1, 'c')]
        """
        limits = checked_prefetch(prefetch), checked_deadline(deadline)
        return Proxy(partial(self._ask_for_items, *limits), timeout)

    def ready(self, timeout: Seconds = UNSET_RPC_TIMEOUT) -> None:
        """Waits until all values are made; see `zrpc.RRef.ready`.

        Args:
            timeout: in seconds; 0 means no limit. Default: the default timeout of all calls.

        Raises:
            GroupError: some are not made in time, or never will be.

        Example:
            >>> import zrpc
            >>> zrpc.remote(zrpc.group("worker*"), dict).ready(timeout=5)
        """
        self._ask_each(timeout, lambda rref, call: rref._ask_beside(READY, timeout, call))

    def stop(self, timeout: Seconds = UNSET_RPC_TIMEOUT) -> None:
        """Ends the actors, all at the same time; see `zrpc.RRef.stop`.

        Args:
            timeout: in seconds; 0 means no limit. Default: the default timeout of all calls.

        Raises:
            GroupError: some have not ended in time, are no actors, or have failed as they ended.
                The others have ended.

        Example:
            >>> import zrpc
            >>> lists = zrpc.remote(zrpc.group("worker*"), zrpc.actor(list, concurrency=1))
            >>> lists.stop()
        """
        self._ask_each(timeout, lambda rref, call: rref._orders().stop(rref, timeout, call))

    def _ask_each(
        self, timeout: Seconds, ask: Callable[[RRef[T], Callable[..., Any]], Future[Any] | None]
    ) -> None:
        """Asks the owners of all values by ``ask(rref, call_async)``, and waits for the answers.

        It returns None if nothing will come.

        Raises:
            OptionError: the timeout is infinite or not a number.
            TypeError: it has another type.
        """
        caller = self._agent().caller
        caller.time_limit(timeout)  # else each member would refuse it

        def asked() -> Iterator[tuple[int, Future[Any] | None, Exception | None]]:
            for place, rref in enumerate(self._members):
                future = failure = None
                try:
                    future = ask(rref, caller.call_async)
                except Exception as error:
                    raise_if_of_handler(error)
                    failure = error
                yield place, future, failure

        _results(future_of_all(asked(), [rref.owner_name() for rref in self._members]))

    def _ask_for_items(self, prefetch: int, deadline: Seconds, body: Any, timeout: Seconds) -> Any:
        def ask(rref: RRef[T]) -> Any:
            return _asking(partial(rref._ask_for_items, prefetch, timeout=timeout))

        return stream_each(self._call(ask, body, deadline), timeout)

    def _ask(self, body: Any, timeout: Seconds) -> list[Any]:
        return _results(self._ask_async(body, timeout))

    def _ask_async(self, body: Any, timeout: Seconds) -> GroupFuture[Any]:
        return call_each(self._call(lambda rref: rref._ask_async, body, timeout))

    def _ask_remotely(self, body: Any, timeout: Seconds) -> RRefGroup[Any]:
        name, _, _ = body
        unknown = RRefGroup([rref for rref in self._members if name not in rref._methods])
        if unknown:
            unknown._ask_each(timeout, lambda rref, call: rref._ask_beside(name, timeout, call))
        for rref in unknown:
            rref._methods |= {name}
        return RRefGroup(make_each(self._call(lambda rref: rref._ask_for_value, body, timeout)))

    def _call(self, ask: Callable[[RRef[T]], Any], body: Any, timeout: Seconds) -> GroupCall:
        """Returns a call of the values, which is asked of one by what ``ask`` returns for it."""
        targets = [Target(rref.owner(), ask(rref)) for rref in self._members]
        return GroupCall(self._agent(), targets, body, timeout)

    def _agent(self) -> Agent:
        return self._members[0]._service.agent if self._members else current_agent()


def _asking(opens: Callable[..., Stream[Any]]) -> Callable[..., Stream[Any]]:
    """Returns what asks a member for a stream, as `Target.ask`."""
    return lambda body, seconds, plain=False: opens(body=body, deadline=seconds, plain=plain)


def _results(future: Future[list[Any]]) -> list[Any]:
    """Waits for a future; if that is interrupted, its calls are cancelled."""
    try:
        return future.wait()
    except BaseException:
        future.cancel()  # does nothing if it is done
        raise


def gather(
    agent: Agent, members: str | Iterable[Any], size: int | None, timeout: Seconds, live: bool
) -> WorkerGroup | RRefGroup[Any]:
    """Returns a new group; see `zrpc.group`."""
    if isinstance(members, str):
        names = _await_workers(agent, members, size, agent.caller.timeout(timeout))
        return WorkerGroup(names, members if live else None)
    if size is not None or live:
        raise ValueError(
            "expected a pattern of names, such as 'worker*', for size= and live=: a list has its "
            "members already"
        )
    if isinstance(members, bytes) or not isinstance(members, Iterable):
        raise TypeError(
            "expected a pattern of names, or a list of workers or RRefs, for a group, but got "
            f"{members!r}: a group of one is group([member])"
        )
    listed = list(members)
    if not listed:
        raise ValueError("expected members for a group, found none")
    if all(isinstance(each, RRef) for each in listed):
        return RRefGroup(listed)
    for each in listed:
        if isinstance(each, bool) or not isinstance(each, str | int | WorkerInfo):
            raise TypeError(
                "expected workers (names, ranks, WorkerInfos), or RRefs and nothing else, for a "
                f"group, found one of type {type(each).__name__}"
            )
    return WorkerGroup([agent.membership.find(each).name for each in listed])


def _await_workers(agent: Agent, pattern: str, size: int | None, timeout: float) -> list[str]:
    """Returns the names of the workers that match a pattern, once there are enough of them.

    Raises:
        RpcTimeoutError: there are not.
        RpcError: there is none, and no size was given.
    """
    names = _names_that_match(agent, pattern)
    if size is None:
        if not names:
            known = ", ".join(info.name for info in agent.get_worker_infos()[:8])
            raise RpcError(
                f"expected workers whose names match {pattern!r}, found none; there are {known}. "
                "Pass size= to wait for them"
            )
        return names
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ValueError(f"expected a size of 1 or more for a group, found {size!r}")
    scope = current_scope()
    timeout = timeout if scope is None else scope.bounded(timeout)
    deadline = monotonic() + timeout
    gates = agent.service(GroupService).gates
    handle = agent.joined.add(lambda _: gates.open())
    try:
        while True:
            gate = gates.add()  # first: a worker that joins after the look opens it
            names = _names_that_match(agent, pattern)
            if len(names) >= size:
                return names
            if agent.closed:
                raise has_shut_down()
            left = max(0.0, deadline - monotonic()) if timeout else -1
            if not pass_gate(gate, left):
                raise RpcTimeoutError(
                    f"expected {size} workers whose names match {pattern!r} within {timeout:g} s, "
                    f"found {len(names)}{': ' if names else ''}{', '.join(names)}"
                )
    finally:
        handle.remove()
        gates.open()  # the last gate is no longer waited for


def _names_that_match(agent: Agent, pattern: str) -> list[str]:
    """Returns the names of the members that match a pattern, by rank."""
    return [info.name for info in agent.get_worker_infos() if fnmatchcase(info.name, pattern)]
