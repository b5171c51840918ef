"""Contexts whose blocks Ctrl-C interrupts, at their beginning or their end."""

from __future__ import annotations

import contextlib
import itertools
import sys
from types import FrameType
from typing import Any

import pytest

import zrpc.autograd as dist_autograd
from tests.services.autograd.split_models import X, assert_freed, call, layer
from tests.support.steps import at_step, interrupt, some_steps
from zrpc.testing import Mesh

pytestmark = [pytest.mark.zrpc(workers=3, timeout=60), pytest.mark.system]


def test_ctrl_c_keeps_no_worker_from_learning_that_a_context_has_ended(mesh: Mesh) -> None:
    def begin_and_end() -> None:
        with dist_autograd.context():
            for name in ("worker1", "worker2"):
                call(name, max, 1, 2)

    with mesh.agent(0).as_current():
        for number in some_steps(begin_and_end):
            with contextlib.suppress(KeyboardInterrupt), at_step(number, interrupt):
                begin_and_end()
            assert_freed(mesh)


def test_ctrl_c_as_a_block_begins_leaves_no_thread_in_a_context(caller: Mesh) -> None:
    """Between what a block begins with and the block, whose end is then not called."""
    begins = ("_GeneratorContextManager.__enter__", "in_context.__enter__")
    left = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if frame.f_code.co_qualname not in begins:
            return None
        if event == "return":
            left -= 1
            if not left:
                raise KeyboardInterrupt
        return trace

    def run() -> None:
        with dist_autograd.context() as context_id:
            dist_autograd.backward(context_id, [call("worker1", layer, 1, X).sum()])

    for number in itertools.count(1):
        left = number
        sys.settrace(trace)
        with contextlib.suppress(KeyboardInterrupt):
            run()
        sys.settrace(None)
        run()
        if left > 0:
            break
    assert number > 2
