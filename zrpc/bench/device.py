"""The device that tensors are on while they are measured."""

from __future__ import annotations

from typing import Any

import torch

_FAKE = "fake"


def check_device(name: str) -> str:
    """Returns a device's name with its index, if this process can use it.

    ``fake:0`` and ``fake:1`` are those of `zrpc.testing.fake_device`, to try the benchmark without
    a device.

    Raises:
        ValueError: it can't.
    """
    if name.partition(":")[0] == _FAKE:
        from zrpc.testing import fake_device

        fake_device()
    try:
        device = torch.device(name)
        module: Any = torch.get_device_module(device)
        count = module.device_count() if module.is_available() else 0
    except (RuntimeError, AttributeError) as error:
        raise ValueError(f"expected a device, such as cuda or cuda:1, but got {name!r}") from error
    if device.type == "cpu":
        raise ValueError("expected a device other than the CPU, which is the default")
    index = device.index or 0
    if index >= count:
        raise ValueError(
            f"expected a device that torch can use here, but got {name!r}: torch "
            f"{torch.__version__} finds {count} of type {device.type}"
        )
    return f"{device.type}:{index}"


def name_of_device(name: str) -> str:
    """Returns what a device is, for a reader, such as the model of a GPU."""
    module: Any = torch.get_device_module(torch.device(name))
    model = module.get_device_name(torch.device(name)) if hasattr(module, "get_device_name") else ""
    return f"{name} ({model})" if model else name
