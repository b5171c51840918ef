"""The name and the rank of a worker."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from zrpc.wire.member_id import MemberId, member_id_of

_NAME = re.compile(r"[A-Za-z0-9_:-]{1,127}\Z")


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """The name and the id (rank) of one worker.

    Pass it as ``to`` of a call in place of the name: it is hashable, comparable, picklable and
    immutable, and so safe in any thread.

    Args:
        name: letters, digits, ``-``, ``_`` and ``:``, from 1 to 127 characters.
        id: the worker's rank, from 0.
        incarnation: how many members of the mesh had this rank before. Two that differ in nothing
            else are equal: both stand for the worker that has the name and the rank now.

    Raises:
        RuntimeError: the name has another form.

    Example:
        >>> WorkerInfo("trainer", 1)
        WorkerInfo(id=1, name=trainer)
        >>> WorkerInfo("trainer", 1).rank
        1

    See also ``torch.distributed.rpc.WorkerInfo``.
    """

    name: str
    id: int
    incarnation: int = field(default=0, compare=False)
    # Unlike the rank, it never names another incarnation.
    member_id: MemberId = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _NAME.match(self.name):
            raise RuntimeError(
                "Worker name must match ^[A-Za-z0-9-_:]*$, and must be non-empty and shorter "
                f"than 128 chars, but got {self.name!r}"
            )
        object.__setattr__(self, "member_id", member_id_of(self.id, self.incarnation))

    @property
    def rank(self) -> int:
        """The worker's rank: another name of ``id``."""
        return self.id

    def __repr__(self) -> str:
        return f"WorkerInfo(id={self.id}, name={self.name})"
