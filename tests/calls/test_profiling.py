"""Calls and handlers in torch's profiler."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import zrpc as rpc
from tests.support.waiting import until
from zrpc.calls.observation import profiler
from zrpc.testing import Mesh


def shown(profiled: Any) -> list[str]:
    return [event.name for event in profiled.events() if "worker" in event.name]


def fail() -> None:
    raise KeyError("on purpose")


@pytest.mark.system
def test_calls_have_the_titles_that_torch_gives_them(mesh: Mesh) -> None:
    def program() -> Any:
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            rpc.rpc_sync("worker1", torch.add, (torch.ones(2), 1))
            rpc.rpc_async("worker1", max, (1, 2)).wait()
            rref = rpc.remote("worker1", max, (1, 2))
            rref.to_here()
            rref.rpc_sync().bit_length()
            with pytest.raises(KeyError):
                rpc.rpc_sync("worker1", fail)
        return shown(profiled)

    titles = [title for title in mesh.run(0, program) if not title.startswith("rpc_handler")]
    assert titles == [
        "rpc_sync#torch.add(worker0 -> worker1)",
        "rpc_async#max(worker0 -> worker1)",
        "rpc_remote#max(worker0 -> worker1)",
        "to_here(worker0 -> worker1)",
        "rref#bit_length(worker0 -> worker1)",
        "rpc_sync#fail(worker0 -> worker1)",
    ]
    assert not profiler._is_profiler_enabled
    assert mesh.run(0, rpc.rpc_sync, "worker1", max, args=(1, 2)) == 2


@pytest.mark.skipif(
    "profile_all_threads" not in (torch._C._profiler._ExperimentalConfig.__init__.__doc__ or ""),
    reason="this version of torch profiles one thread",
)
def test_handlers_are_shown_if_all_threads_are_profiled(mesh: Mesh) -> None:
    def program() -> Any:
        everywhere = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
        with profile(activities=[ProfilerActivity.CPU], experimental_config=everywhere) as profiled:
            rpc.rpc_sync("worker1", torch.add, (torch.ones(2), 1))
            rpc.remote("worker1", max, (1, 2)).to_here()
            until(lambda: not mesh.agent(1).pool.active)  # an answer leaves before its handler ends
        return shown(profiled)

    titles = mesh.run(0, program)
    assert titles.count("rpc_handler#add(worker0 -> worker1)") == 1
    assert titles.count("rpc_handler#max(worker0 -> worker1)") == 1
