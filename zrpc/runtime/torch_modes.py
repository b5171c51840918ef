"""The modes of torch that belong to a thread: what a handler leaves on must not reach the next."""

from __future__ import annotations

import torch
from torch._C import (
    _is_any_autocast_enabled,
    _len_torch_function_stack,
    _pop_torch_function_stack,
)

_is_grad_enabled = torch.is_grad_enabled
_DEVICES = ("cpu", "cuda", "xpu", "mps", "hpu", "ipu", "xla", "mtia", "maia", "privateuseone")


_AUTOCAST_DEVICES = tuple(filter(torch.amp.is_autocast_available, _DEVICES))


def reset_modes() -> None:
    """Enables grad in this thread, and disables autocast and the modes of `torch.overrides`.

    A default device is one of the latter. This takes a fifth of a microsecond if there is nothing
    to do.
    """
    if not _is_grad_enabled():
        torch.set_grad_enabled(True)
    if _is_any_autocast_enabled():
        _disable_autocast()
    if _len_torch_function_stack():
        torch.set_default_device(None)
        while _len_torch_function_stack():
            _pop_torch_function_stack()


def _disable_autocast() -> None:
    for device in _AUTOCAST_DEVICES:
        if torch.is_autocast_enabled(device):
            torch.set_autocast_enabled(device, False)
    while (nesting := torch.autocast_decrement_nesting()) > 0:
        pass
    if nesting < 0:  # it was enabled outside of a block
        torch.autocast_increment_nesting()
    torch.clear_autocast_cache()
