"""What ``zrpc top`` asks of a worker: its `zrpc.stats`, its processor time, memory and state."""

from __future__ import annotations

import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from zrpc.agent.agent import Agent
from zrpc.agent.shutdown import Phase
from zrpc.agent.stats import take_stats
from zrpc.options import DEFAULT_WARN_AFTER_SEC

__all__ = ["take_numbers"]


def take_numbers(agent: Agent) -> dict[str, Any]:
    """Returns the numbers of a worker, ready for JSON. May be called from any thread."""
    return {
        **asdict(take_stats(agent)),
        "cpu_seconds": time.process_time(),
        "memory_bytes": _resident_bytes(),
        "state": _state(agent),
    }


def _resident_bytes() -> int:
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, IndexError, ValueError):  # not Linux
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def _state(agent: Agent) -> str:
    if any(service.stats().get("breakpoints") for service in agent.services):
        return "at a breakpoint"
    if agent.graceful_shutdown.phase >= Phase.BEGUN:
        return "leaving"
    oldest = agent.caller.calls.oldest()
    limit = agent.options.warn_after or DEFAULT_WARN_AFTER_SEC
    if oldest is not None and time.monotonic() - oldest.begun >= limit:
        return "stuck"
    return "running"
