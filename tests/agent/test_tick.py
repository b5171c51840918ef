"""What a worker does ten times a second."""

from __future__ import annotations

import threading

import pytest

from tests.support.waiting import SOON
from zrpc.testing import Mesh


def test_the_other_parts_of_a_tick_go_on_if_one_fails(
    mesh: Mesh, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent, failed, gone_on = mesh.agent(0), threading.Event(), threading.Event()

    def fail() -> None:
        failed.set()
        raise KeyError("on purpose")

    def go_on() -> None:
        if failed.is_set():
            gone_on.set()

    with monkeypatch.context() as patch:
        patch.setattr(agent.outbox, "retry", go_on)
        patch.setattr(agent.peers, "tick", fail)
        assert gone_on.wait(SOON)
    assert "a part of a tick failed" in caplog.text
    assert "on purpose" in caplog.text
