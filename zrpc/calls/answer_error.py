"""The error that an answer brings."""

from __future__ import annotations

from zrpc.errors import RpcError, raised_by_function
from zrpc.wire.exceptions import load_exception
from zrpc.wire.kind import Tag
from zrpc.wire.message import Message

__all__ = ["error_in"]


def error_in(answer: Message) -> Exception:
    """Returns the error in an answer: the function's own, if the callee has read the request."""
    error = load_exception(answer.body)
    tags = answer.attachments or ()
    if Tag.UNCALLED in tags and isinstance(error, RpcError):
        error.executed = False
        return error
    return error if Tag.UNREAD in tags else raised_by_function(error)
