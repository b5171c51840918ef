"""Exceptions on the wire: the text always, and the callee's own exception if it can be pickled.

They are no part of an autograd graph. A tensor of the graph in an exception's args arrives as one
whose use in a backward pass raises. One on a device arrives as a text that names it: device maps
don't hold for exceptions, which must arrive in any case. So does an RRef: an exception is packed by
itself, outside of the message that would keep the value alive on the way.
"""

from __future__ import annotations

import io
import pickle
import sys
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from zrpc import stand_in
from zrpc.error_parts import ErrorReducers, copy_of_error, pickle_can_make
from zrpc.errors import RemoteError, RpcError
from zrpc.runtime.interrupts import raise_if_of_handler
from zrpc.runtime.resource_limits import advice
from zrpc.wire.cut import cut_off
from zrpc.wire.pickling import dumps

# Of tests, by the names of their classes in pytest.
_OUTCOMES = ("Skipped", "XFailed", "Failed")
# See `leave_out`.
_left_out: tuple[type, ...] = ()
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
    hint = advice(error) or _advice_on_name(error)
    text = f"On {where}:\n{_safe_repr(error)}\n{traceback_of(error)}"
    if hint is not None:
        text = f"On {where}: {hint}\n{text}"
    return pickle.dumps(
        (_safe_repr(error), text, _pickled(error, same_main, in_graph)), pickle.HIGHEST_PROTOCOL
    )


def _advice_on_name(error: BaseException) -> str | None:
    """Returns what to do if a function that came by value uses a name that its sender lacks."""
    trace = error.__traceback__ if isinstance(error, NameError) else None
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return None
    names, main = trace.tb_frame.f_globals, sys.modules.get("__main__")
    if names.get("__name__") != "__main__" or names is vars(main):
        return None
    return (
        f"{trace.tb_frame.f_code.co_name} came by value from another worker's main script, and has "
        "the globals of that script: define the name there too, or move the function to a module "
        "that both import"
    )


def load_exception(body: Any) -> Exception:
    """Returns the callee's error, with the remote traceback as its cause.

    It is a `RemoteError` if the callee's own can't be rebuilt here or would stop the caller. In a
    process with pytest, it may also be one of pytest's outcomes, such as that of ``pytest.skip``:
    these are no Exceptions, but meant for the test that has made the call.
    """
    what, text, pickled = pickle.loads(body)
    if pickled is not None:
        try:
            error = pickle.loads(pickled)
        except Exception as reason:
            raise_if_of_handler(reason)
            text = f"{text}\n(It can't be rebuilt here: {_safe_repr(reason)})"
        else:
            set_cause(error, RemoteError(text))
            return error  # type: ignore[no-any-return]
    return RemoteError(f"Original exception on remote side was {what}\n{text}")


def traceback_of(error: BaseException) -> str:
    """Returns the traceback of an error and its causes as text. Never fails by itself."""
    try:
        return "".join(traceback.format_exception(error))
    except Exception as reason:  # no memory, or an attribute of the error can't be read
        raise_if_of_handler(reason)
        return f"(its traceback can't be shown: {type(reason).__name__})"


def set_cause(error: BaseException, cause: BaseException | None) -> None:
    """Sets the cause of an error, of any class, and removes its context."""
    _set_context(error, None)
    _set_cause(error, cause)


def copied(error: BaseException, cause: BaseException | None = None) -> BaseException:
    """Returns a copy with this cause and no traceback; the error itself if it can't be copied.

    What a group consists of is copied too: a program may raise one of these by itself.
    """
    try:
        parts = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
        made = copy_of_error(error, [copied(each, each.__cause__) for each in parts])
        if str(made) == str(error):
            set_cause(made, cause)
            return made
    except (Exception, SystemExit) as reason:
        raise_if_of_handler(reason)
    return error


def error_text(body: Any) -> str:
    """Returns the `repr` of the callee's error, without unpickling the error."""
    what, _, _ = pickle.loads(body)
    return str(what)


def _pickled(error: BaseException, same_main: bool, in_graph: bool) -> bytes | None:
    """Returns the error as a pickle that is known to load, or None."""
    if _is_outcome(error):
        return _checked(error, partial(_dump, in_graph=in_graph))
    if not isinstance(error, Exception):
        return None  # SystemExit and its like must not stop the caller
    if stand_in.is_active() and not pickle_can_make(error):
        return None  # as in torch
    copies = stand_in.is_active()  # for a caller whose script lacks a name
    pickled = _checked(error, partial(_dump, in_graph=in_graph))
    if pickled is None or (b"__main__" in pickled and (copies or not same_main)):
        first = partial(_reduce_part, in_graph=in_graph)
        return _checked(error, partial(dumps, same_main=same_main, copies=copies, first=first))
    return pickled


def _checked(error: BaseException, dumps: Callable[[Any], bytes]) -> bytes | None:
    try:
        pickled = dumps(error)
        # Its class, or what it consists of, may say how to pickle it, and be wrong.
        return pickled if type(pickle.loads(pickled)) is type(error) else None
    except BaseException:  # SystemExit too
        return None


def _dump(error: BaseException, in_graph: bool) -> bytes:
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.in_graph = in_graph
    pickler.dump(error)
    return file.getvalue()


def _is_outcome(error: Any) -> bool:
    """Whether a function has called ``pytest.skip``, ``pytest.xfail`` or ``pytest.fail``."""
    outcomes = sys.modules.get("_pytest.outcomes")  # loaded, if it was called
    return outcomes is not None and type(error) in [getattr(outcomes, n) for n in _OUTCOMES]


def _outcome(name: str, args: tuple[Any, ...], attributes: dict[str, Any]) -> BaseException:
    outcomes = sys.modules.get("_pytest.outcomes")
    if outcomes is None:
        raise RuntimeError("it is an outcome of a test, and pytest is not loaded here")
    outcome: BaseException = getattr(outcomes, name)(*args)
    vars(outcome).update(attributes)
    return outcome


def leave_out(cls: type) -> None:
    """Sends a text in the place of any instance of ``cls`` that is part of an exception."""
    global _left_out
    _left_out = *_left_out, cls


def _reduce_part(value: Any, in_graph: bool) -> Any:
    if isinstance(value, _left_out):
        return str, (f"<left out: {value!r}; return it, or pass it as an argument, to send it>",)
    if not isinstance(value, torch.Tensor):
        return NotImplemented
    if not (value.is_cpu or value.is_meta):
        return str, (
            f"<left out: a tensor on {value.device} of shape {tuple(value.shape)} and dtype "
            f"{value.dtype}; raise the error with tensor.cpu() to send it>",
        )
    if in_graph and value.requires_grad:
        return _cut_from_graph, (value.detach(),)
    return NotImplemented


class _Pickler(pickle.Pickler):
    """Takes exceptions apart, and cuts tensors from their graph if there is one."""

    dispatch_table = ErrorReducers()
    in_graph = False

    def reducer_override(self, obj: Any) -> Any:
        if _is_outcome(obj):  # pytest's classes claim to be in a module in which they are not
            return _outcome, (type(obj).__name__, obj.args, vars(obj))
        return _reduce_part(obj, self.in_graph)


def _cut_from_graph(tensor: torch.Tensor) -> torch.Tensor:
    [cut] = cut_off(
        [tensor],
        RpcError(
            "expected a loss that depends on arguments and results of calls, found one that "
            "depends on a tensor in the args of a remote exception, whose gradient is not sent: "
            "return the tensor, or use its detach()"
        ),
    )
    return cut


def _safe_repr(error: BaseException) -> str:
    try:
        return repr(error)
    except BaseException as reason:
        raise_if_of_handler(reason)
        return f"<{type(error).__name__} whose repr fails>"
