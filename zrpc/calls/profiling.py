"""Shows calls and handlers in torch's profiler, as torch's RPC does.

Whether a profiler is active is one attribute of a module of torch, which takes 10 ns to read. So
each place that may be shown looks there first.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import profiler

from zrpc.calls.function_names import call_title, function_of, kind_name
from zrpc.calls.pending_calls import name_of
from zrpc.wire.kind import Kind
from zrpc.wire.message import Message

__all__ = ["begin_profile", "end_profile", "handler_profile", "profiler"]


def begin_profile(kind: Kind, body: Any, waits: bool, caller: str, callee: str) -> Any:
    """Shows a call of the current thread from now on, until `end_profile`; see `call_title`."""
    shown = torch.profiler.record_function(call_title(kind, name_of(body), waits, caller, callee))
    shown.__enter__()  # type: ignore[no-untyped-call]
    return shown


def end_profile(shown: Any) -> None:
    """Ends what `begin_profile` returned."""
    shown.__exit__(None, None, None)


def handler_profile(request: Message, caller: str, callee: str) -> Any:
    """Returns a context manager that shows the handler of a request."""
    what = function_of(request) or kind_name(request.kind)
    return torch.profiler.record_function(f"rpc_handler#{what}({caller} -> {callee})")
