"""The error that an answer brings."""

from __future__ import annotations

from zrpc.errors import raised_by_function
from zrpc.wire.exceptions import load_exception
from zrpc.wire.kind import Tag
from zrpc.wire.message import Message

__all__ = ["error_in"]


def error_in(answer: Message) -> Exception:
    """Returns the error in an answer: the function's own, if the callee has read the request."""
    error = load_exception(answer.body)
    unread = answer.attachments is not None and Tag.UNREAD in answer.attachments
    return error if unread else raised_by_function(error)
