"""Which devices have an autocast mode depends on the version of torch."""

from __future__ import annotations

from zrpc.runtime import torch_modes


def test_devices_that_this_torch_does_not_know_have_no_autocast() -> None:
    assert torch_modes._has_autocast("cpu")
    assert not torch_modes._has_autocast("no such device")
