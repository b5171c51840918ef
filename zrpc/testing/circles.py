"""Who waits in a circle, among the workers of a test that does not end."""

from __future__ import annotations

from collections.abc import Collection

from zrpc.inspection.meshes import ask, directories, meshes
from zrpc.inspection.report import Report

__all__ = ["circles"]

# Seconds.
_ASK_WITHIN = 1.0


def circles(pids: Collection[int]) -> str:
    """The circles of waiting in meshes with a worker in these processes; empty for none.

    Takes a second at most. May be called from any thread but those that workers receive in.
    """
    found, _ = meshes(ask(directories(), _ASK_WITHIN))
    reports = [Report(mesh) for mesh in found if set(pids) & set(mesh.pids.values())]
    return "\n\n".join("\n".join(lines) for report in reports for lines in report.cycles())
