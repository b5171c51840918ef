"""Copies of what the main script of a receiver lacks, for messages from workers under ``zrpc run``.

Programs that were written for torch know nothing of functions by value. So the receiver asks the
sender for a copy, instead of having the call fail.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

from zrpc.by_value import find_in_main
from zrpc.calls.caller import Caller
from zrpc.constants import UNSET_RPC_TIMEOUT
from zrpc.membership.view import Membership
from zrpc.wire.kind import Kind
from zrpc.wire.member_id import MemberId
from zrpc.wire.pickling import dumps


def fetching(membership: Membership, caller: Caller) -> Callable[[MemberId, str], Any]:
    """Returns a function that asks a member for what its main script has under a name."""

    def fetch(member: MemberId, name: str) -> Any:
        body: Any = _Copy.of_main, (name,), {}
        return caller.call(membership.infos[member], Kind.CALL, body, UNSET_RPC_TIMEOUT)

    return fetch


class _Copy:
    """A value that goes by value, though it has a name. What it uses goes by name, as always."""

    def __init__(self, name: str, value: object) -> None:
        self._name = name
        self._value = value

    @classmethod
    def of_main(cls, name: str) -> _Copy:
        """Returns what the main script has under a name; on the worker that has sent the name."""
        return cls(name, find_in_main(name))

    def __reduce__(self) -> Any:
        body = dumps(self._value, same_main=True, copies=True, whole=self._name)
        return pickle.loads, (body,)
