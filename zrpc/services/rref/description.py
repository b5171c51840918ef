"""What an RRef says of itself, and to somebody who looks for an attribute of its value."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zrpc.membership.worker_info import WorkerInfo
    from zrpc.services.actors.order import CallOrder
    from zrpc.services.rref.messages import ForkId, RRefId


class Described:
    """The base of RRef that describes it."""

    __slots__ = ()

    if TYPE_CHECKING:
        _class: type | None
        _fork_id: ForkId | None
        _order: CallOrder | None
        _owner: WorkerInfo
        _rref_id: RRefId
    else:

        def __getattr__(self, name: str) -> Any:
            if name[:1] == "_":  # as Python and torch ask any object for
                raise AttributeError(f"an RRef has no attribute {name!r}")
            raise AttributeError(
                f"{self!r} has no attribute {name!r}: to call a method of its value, write "
                f"rref.rpc_sync().{name}(...), or rref.rpc_async().{name}(...) for a future "
                f"(Ray's actor.{name}.remote(...)). rref.to_here() returns a copy of the value"
            )

    def __repr__(self) -> str:
        if self._order is not None:
            what = str(self._order.label)
        else:
            what = "value" if self._class is None else self._class.__qualname__
        return f"RRef({what} on {self._owner.name})"

    def __str__(self) -> str:  # the text of torch's RRefs, which programs match
        if self._fork_id is None:
            return f"OwnerRRef({self._rref_id})"
        return f"UserRRef(RRefId = {self._rref_id}, ForkId = {self._fork_id})"
