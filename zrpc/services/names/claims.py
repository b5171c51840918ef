"""What a program does with names: makes actors under them, and finds these.

Nothing here is part of the protocol: the members agree on who has a name (see
`zrpc.services.names.registry`), and the rest is calls as any program makes them.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from zrpc.actors import options_of
from zrpc.agent.agent import Agent
from zrpc.agent.current import current_agent
from zrpc.calls.function_names import name_of
from zrpc.calls.future import Future
from zrpc.constants import Seconds
from zrpc.errors import RpcError, RpcTimeoutError, WorkerDied
from zrpc.functions import async_execution
from zrpc.membership.worker_info import WorkerInfo
from zrpc.services.names.messages import Holder, Naming
from zrpc.services.names.service import NameService
from zrpc.services.names.waiting import Deadline, Waiting
from zrpc.services.rref.creation import error_of_creation
from zrpc.services.rref.orders import ActorOrders
from zrpc.services.rref.rref import RRef
from zrpc.services.rref.service import RRefService
from zrpc.wire.kind import Kind, Tag

_MAX_NAME = 1024


class _CallLost(Exception):
    """The call that makes an actor is lost; its RRef has the error."""


def make_named(
    agent: Agent, to: WorkerInfo, body: Any, timeout: Seconds, name: str, exist_ok: bool
) -> RRef[Any]:
    """Makes an actor under a name; returns when it has the name.

    Args:
        agent: of this worker.
        to: the owner.
        body: the function or class, args and kwargs.
        timeout: of the claim, and of the call that makes the actor.
        name: the name.
        exist_ok: return the actor that has the name, if there is one.

    Raises:
        RpcError: the name is taken.
        RpcTimeoutError: the name could not be claimed in time.
        WorkerDied: the owner is lost.
        ValueError: a name of this form is not allowed.
    """
    _check(name)
    deadline, past = Deadline(agent, timeout), None
    while True:
        rref, holder = _claim(agent, to, body, timeout, deadline, name, past)
        if holder is None:
            agent.service(ActorOrders).keep(rref)
            return rref
        found = _ask_holder(agent, name, holder, exist_ok, deadline)
        if found is None:
            past = holder  # it has given the name up, or is lost: wait for the next
            continue
        if exist_ok:
            other: RRef[Any] = found[1]
            return other
        error = RpcError(
            f"the name {name!r} is taken by {found[0]}: take another name, pass exist_ok=True to "
            "share it, or free it: by stop() if it is an actor's, else it lasts until the owner "
            "leaves"
        )
        error.executed = False
        raise error


def find_named(agent: Agent, name: str, timeout: Seconds) -> RRef[Any]:
    """Waits until an actor has a name; returns a reference to it.

    Raises:
        RpcTimeoutError: no actor had it in time.
        ValueError: a name of this form is not allowed.
    """
    _check(name)
    deadline, past = Deadline(agent, timeout), None
    while True:
        past = _await_holder(agent, name, past, deadline)
        found = _ask_holder(agent, name, past, None, deadline)
        if found is not None:
            rref: RRef[Any] = found[1]
            return rref


def _await_holder(agent: Agent, name: str, past: Holder | None, deadline: Deadline) -> Holder:
    """Waits until a name has a holder, other than ``past``."""
    service = agent.service(NameService)
    waiting: Waiting[Holder] = Waiting(deadline, partial(_not_found, name, deadline))
    with service.waits(waiting):
        number = service.ask(name, lambda holder, _: waiting.answer(holder), past=past)
        try:
            return waiting.get()
        finally:
            service.drop_question(name, number)


def _check(name: object) -> None:
    if not isinstance(name, str) or not 0 < len(name) <= _MAX_NAME:
        raise ValueError(
            f"expected the name of an actor, of 1 to {_MAX_NAME} characters, got {name!r:.99}"
        )


def _claim(
    agent: Agent,
    to: WorkerInfo,
    body: Any,
    timeout: Seconds,
    deadline: Deadline,
    name: str,
    past: Holder | None,
) -> tuple[RRef[Any], Holder | None]:
    """Sends what makes an actor; returns it, and the holder if its name was taken."""
    rref_id = agent.service(RRefService).new_id()
    too_late = partial(_not_claimed, name, to, past, deadline)
    waiting: Waiting[Holder | None] = Waiting(deadline, too_late, to.member_id)
    with agent.service(NameService).waits(waiting, rref_id):
        options = options_of(body[0])
        what = name_of(body) if options is None else options.title
        restarts = options is not None and options.restarts
        naming = Naming(name, what, options is not None, past, restarts)
        about: Any = {"rref_id": rref_id, "name": name, "more": [(Tag.NAMING, naming.pack())]}
        failed = partial(waiting.fail, _CallLost())
        rref = RRef._create(agent, to, body, timeout, failed=failed, **about)
        is_made = False
        try:
            holder = waiting.get()
            is_made = holder is None
            return rref, holder
        except _CallLost as lost:
            raise error_of_creation(rref._failure or lost, rref._order) from None
        except WorkerDied as error:
            died = error if rref._order is None else rref._order.died(str(error))
            died.executed = error.executed
            raise died from None
        finally:
            if not is_made:  # an error may keep the RRef, which would make the actor again
                agent.service(ActorOrders).forget(rref_id)


def _ask_holder(
    agent: Agent, name: str, holder: Holder, shares: bool | None, deadline: Deadline
) -> tuple[str, Any] | None:
    """Asks a holder what it has, see `get_actor`."""
    info = agent.membership.infos.get(holder.member)
    if info is None or holder.member in agent.membership.lost:
        return None
    body: Any = get_actor, (name, holder.number, shares), {}
    try:
        found: tuple[str, Any] | None = agent.caller.call(info, Kind.CALL, body, deadline.left())
    except WorkerDied:
        return None
    return found


# A call that takes too long is known by the function's name: so this has the one that programs use.
@async_execution
def get_actor(name: str, number: int, shares: bool | None) -> Future[Any]:
    """Returns a future of what this worker has under a name by a claim: a text, and a reference.

    Args:
        name: the name.
        number: of the claim.
        shares: True for a maker that shares what is made, also if that has failed meanwhile; False
            for one that does not, and gets no reference; None for a search.

    Returns:
        Of None, if there is nothing.
    """
    return current_agent().service(NameService).describe(name, number, shares)


def _not_claimed(
    name: str, owner: WorkerInfo, past: Holder | None, deadline: Deadline
) -> RpcTimeoutError:
    why = (
        f"{owner.name} or the worker that grants names does not answer"
        if past is None
        else "the worker that has it is lost for this one, and not for the one that grants names"
    )
    return RpcTimeoutError(
        f"expected to have the name {name!r} for an actor on {owner.name} within "
        f"{deadline.timeout:g} s, but {why}"
    )


def _not_found(name: str, deadline: Deadline) -> RpcTimeoutError:
    error = RpcTimeoutError(
        f"expected an actor with the name {name!r} within {deadline.timeout:g} s, found none: "
        f"has zrpc.remote(..., name={name!r}) made it?"
    )
    error.executed = False
    return error
