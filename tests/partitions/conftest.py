"""Programs on hosts that a switch connects."""

from __future__ import annotations

from tests.transport.conftest import start_workers

__all__ = ["start_workers"]
