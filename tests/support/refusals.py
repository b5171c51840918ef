"""An agent whose messages can't be sent, as if there were no descriptor or memory left."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from zrpc.agent.agent import Agent


@contextlib.contextmanager
def refusing(agent: Agent, error_for: Callable[[int, bytes], Exception | None]) -> Iterator[None]:
    """Asks before each message to a peer, with its first frame, for an error to raise instead."""
    send = agent.network.send

    def attempt(peer: int, first: bytes, *more: Any) -> None:
        if error := error_for(peer, first):
            raise error
        send(peer, first, *more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agent.network, "send", attempt)
        yield
