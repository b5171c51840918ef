"""What an RRef says of itself, and to somebody who looks for an attribute of its value."""

from __future__ import annotations

from typing import Any, NoReturn

from zrpc.errors import NotInitializedError, RpcError


def represent(rref: Any) -> str:
    """Returns what it is for people: the actor or the class of the value, and its owner."""
    if rref._order is not None:
        what = str(rref._order.label)
    else:
        what = "value" if rref._class is None else rref._class.__qualname__
    return f"RRef({what} on {rref._owner.name})"


def torch_text(rref: Any) -> str:
    """Returns the text of torch's RRefs, which programs match."""
    if rref._fork_id is None:
        return f"OwnerRRef({rref._rref_id})"
    return f"UserRRef(RRefId = {rref._rref_id}, ForkId = {rref._fork_id})"


def refuse_attribute(rref: Any, name: str) -> NoReturn:
    """Raises the error of an attribute that an RRef does not have."""
    if name[:1] == "_":  # as Python and torch ask any object for
        raise AttributeError(f"an RRef has no attribute {name!r}")
    raise AttributeError(
        f"{rref!r} has no attribute {name!r}: to call a method of its value, write "
        f"rref.rpc_sync().{name}(...), or rref.rpc_async().{name}(...) for a future "
        f"(Ray's actor.{name}.remote(...)). rref.to_here() returns a copy of the value"
    )


def refuse_pickler(rref: Any) -> NoReturn:
    """Raises an error, for torch's own pickler: only calls can send an RRef."""
    if rref._service.agent.closed:
        raise NotInitializedError(f"{rref} has gone. Cannot call fork an UserRRef after deletion.")
    raise RpcError(f"expected a call that sends {rref}, but got torch's pickler")


def has_gone(rref: Any) -> NotInitializedError:
    """Returns the error of a fetch after the shutdown."""
    return NotInitializedError(
        f"RPC has not been initialized: {rref} is gone, since this worker has shut down, "
        "or this process was forked from it. Cannot call to_here() on it after deletion."
    )
