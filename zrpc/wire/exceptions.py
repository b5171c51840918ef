"""Exceptions on the wire: the text always, and the callee's own exception if it can be pickled."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable
from typing import Any

import cloudpickle

from zrpc.errors import RemoteError
from zrpc.runtime.resource_limits import advice

__all__ = ["dump_exception", "load_exception"]


def dump_exception(error: BaseException, where: str, same_main: bool) -> bytes:
    """Returns bytes that `load_exception` makes the error from. Never fails.

    Args:
        error: what a handler raised.
        where: the worker that it was raised on, for the text.
        same_main: whether a name in ``__main__`` means the same at the receiver.
    """
    try:
        lines = traceback.format_exception(type(error), error, error.__traceback__)
    except MemoryError:
        lines = ["(there is no memory for its traceback)"]
    hint = advice(error)
    text = f"On {where}:\n{_safe_repr(error)}\n{''.join(lines)}"
    if hint is not None:
        text = f"On {where}: {hint}\n{text}"
    return pickle.dumps(
        (_safe_repr(error), text, _pickled(error, same_main)), pickle.HIGHEST_PROTOCOL
    )


def load_exception(body: Any) -> Exception:
    """Returns the callee's error, with the remote traceback as its cause.

    It is a `RemoteError` if the callee's own can't be rebuilt here or would stop the caller.
    """
    what, text, pickled = pickle.loads(body)
    if pickled is not None:
        try:
            error = pickle.loads(pickled)
        except Exception as reason:
            text = f"{text}\n(It can't be rebuilt here: {_safe_repr(reason)})"
        else:
            error.__cause__ = RemoteError(text)
            return error  # type: ignore[no-any-return]
    return RemoteError(f"Original exception on remote side was {what}\n{text}")


def _pickled(error: BaseException, same_main: bool) -> bytes | None:
    """Returns the error as a pickle that is known to load, or None."""
    if not isinstance(error, Exception):
        return None  # SystemExit and its like must not stop the caller
    pickled = _checked(error, pickle.dumps)
    if pickled is None or (b"__main__" in pickled and not same_main):
        return _checked(error, cloudpickle.dumps)
    return pickled


def _checked(error: Exception, dumps: Callable[[Any], bytes]) -> bytes | None:
    try:
        pickled = dumps(error)
        # An exception pickles as its type and args, which may not fit its __init__.
        return pickled if type(pickle.loads(pickled)) is type(error) else None
    except BaseException:  # SystemExit too
        return None


def _safe_repr(error: BaseException) -> str:
    try:
        return repr(error)
    except BaseException:
        return f"<{type(error).__name__} whose repr fails>"
