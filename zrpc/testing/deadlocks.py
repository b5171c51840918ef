"""Finds deadlocks among the workers of a test that hangs."""

from __future__ import annotations

from collections.abc import Collection

from zrpc.services.inspection.discovery import ask, directories, meshes
from zrpc.services.inspection.report import Report

__all__ = ["describe_deadlocks"]

_ANSWER_SECONDS = 1.0


def describe_deadlocks(pids: Collection[int]) -> str:
    """Describes the deadlocks in meshes that have a worker in these processes.

    Returns an empty text if there are none. Takes a second at most. May be called from any
    thread but those in which workers receive.
    """
    found, _ = meshes(ask(directories(), _ANSWER_SECONDS))
    reports = [Report(mesh) for mesh in found if set(pids) & set(mesh.pids.values())]
    return "\n\n".join("\n".join(lines) for report in reports for lines in report.cycles())
