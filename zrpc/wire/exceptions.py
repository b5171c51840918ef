"""Exceptions on the wire: the text always, and the callee's own exception if it can be pickled.

They are no part of an autograd graph. A tensor of the graph in an exception's args arrives as one
whose use in a backward pass raises.
"""

from __future__ import annotations

import copy
import io
import pickle
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from zrpc import by_value
from zrpc.errors import RemoteError
from zrpc.runtime.interrupts import raised_by_handler
from zrpc.runtime.resource_limits import advice

__all__ = [
    "copied",
    "dump_exception",
    "error_text",
    "load_exception",
    "set_cause",
    "traceback_of",
]

# For classes that refuse to have attributes set, as frozen dataclasses do.
_set_cause = BaseException.__dict__["__cause__"].__set__
_set_context = BaseException.__dict__["__context__"].__set__


def dump_exception(
    error: BaseException, where: str, same_main: bool, in_graph: bool = False
) -> bytes:
    """Returns bytes that `load_exception` makes the error from. Never fails.

    Args:
        error: what a handler raised.
        where: the worker that it was raised on, for the text.
        same_main: whether a name in ``__main__`` means the same at the receiver.
        in_graph: whether tensors that require grad are part of an autograd graph.
    """
    hint = advice(error)
    text = f"On {where}:\n{_safe_repr(error)}\n{traceback_of(error)}"
    if hint is not None:
        text = f"On {where}: {hint}\n{text}"
    return pickle.dumps(
        (_safe_repr(error), text, _pickled(error, same_main, in_graph)), pickle.HIGHEST_PROTOCOL
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
            if raised_by_handler(reason):
                raise
            text = f"{text}\n(It can't be rebuilt here: {_safe_repr(reason)})"
        else:
            set_cause(error, RemoteError(text))
            return error  # type: ignore[no-any-return]
    return RemoteError(f"Original exception on remote side was {what}\n{text}")


def traceback_of(error: BaseException) -> str:
    """Returns the traceback of an error and its causes as text. Never fails."""
    try:
        return "".join(traceback.format_exception(error))
    except Exception as reason:  # no memory, or an attribute of the error can't be read
        return f"(its traceback can't be shown: {type(reason).__name__})"


def set_cause(error: BaseException, cause: BaseException | None) -> None:
    """Sets the cause of an error, of any class, and removes its context."""
    _set_context(error, None)
    _set_cause(error, cause)


def copied(error: BaseException, cause: BaseException | None = None) -> BaseException:
    """Returns a copy with this cause and no traceback; the error itself if it can't be copied."""
    for copied_by in (copy.copy, _bare_copy):
        # copy.copy calls the class with the error's args, which need not fit its __init__.
        try:
            made = copied_by(error)
            if type(made) is type(error) and str(made) == str(error):
                set_cause(made, cause)
                return made
        except (Exception, SystemExit) as reason:  # noqa: PERF203 - two at most
            if raised_by_handler(reason):
                raise
    return error


def _bare_copy(error: BaseException) -> BaseException:
    """Returns a copy that is made without its ``__init__``."""
    made = type(error).__new__(type(error), *error.args)
    made.__dict__.update(error.__dict__)
    return made


def error_text(body: Any) -> str:
    """Returns the `repr` of the callee's error, without unpickling the error."""
    what, _, _ = pickle.loads(body)
    return str(what)


def _pickled(error: BaseException, same_main: bool, in_graph: bool) -> bytes | None:
    """Returns the error as a pickle that is known to load, or None."""
    if not isinstance(error, Exception):
        return None  # SystemExit and its like must not stop the caller
    by_name, by_copy = (
        (_dump_cut, _dump_cut_by_value) if in_graph else (pickle.dumps, by_value.dumps)
    )
    pickled = _checked(error, by_name)
    if pickled is None or (b"__main__" in pickled and not same_main):
        return _checked(error, by_copy)
    return pickled


def _checked(error: Exception, dumps: Callable[[Any], bytes]) -> bytes | None:
    try:
        pickled = dumps(error)
        # An exception pickles as its type and args, which may not fit its __init__.
        return pickled if type(pickle.loads(pickled)) is type(error) else None
    except BaseException:  # SystemExit too
        return None


def _dump_cut(error: Exception) -> bytes:
    file = io.BytesIO()
    _CuttingPickler(file).dump(error)
    return file.getvalue()


def _dump_cut_by_value(error: Exception) -> bytes:
    file = io.BytesIO()
    _ByValueCuttingPickler(file).dump(error)
    return file.getvalue()


def _reduce_cut(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.requires_grad:
        return _cut_from_graph, (value.detach(),)
    return NotImplemented


class _CuttingPickler(pickle.Pickler):
    """Cuts tensors from their graph."""

    def reducer_override(self, obj: Any) -> Any:
        return _reduce_cut(obj)


class _ByValueCuttingPickler(by_value.ByValuePickler):
    """The same for what only cloudpickle pickles."""

    def reducer_override(self, obj: Any) -> Any:
        reduced = _reduce_cut(obj)
        return super().reducer_override(obj) if reduced is NotImplemented else reduced


def _cut_from_graph(tensor: torch.Tensor) -> Any:
    with torch._C._InferenceMode(False):  # enables grad as well
        return _Cut.apply(torch.empty(0, requires_grad=True), [tensor])


class _Cut(torch.autograd.Function):
    """``(token, [tensor]) -> tensor``: the tensor requires grad, but its gradient is not known."""

    @staticmethod
    def forward(ctx: Any, token: torch.Tensor, tensors: list[torch.Tensor]) -> torch.Tensor:
        return tensors[0]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> NoReturn:
        raise RuntimeError(
            "expected a loss that depends on arguments and results of calls, found one that "
            "depends on a tensor in the args of a remote exception, whose gradient is not sent: "
            "return the tensor, or use its detach()"
        )


def _safe_repr(error: BaseException) -> str:
    try:
        return repr(error)
    except BaseException:
        return f"<{type(error).__name__} whose repr fails>"
