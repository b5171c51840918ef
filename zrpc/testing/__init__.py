"""Meshes of zrpc workers for tests: as threads of one process, or as processes.

pytest loads the plugin `zrpc.testing.plugin` automatically. It provides the fixtures ``mesh``,
``make_mesh``, ``mesh_factory`` and ``no_leaks``, and the marker ``zrpc``. Outside of pytest, use
`local_mesh`.

Importing this package imports neither torch nor zmq; its names are imported when first used.
Other rooms may import these names, `startup`, `watchdog`, `procfs`, `served` and `faults`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zrpc.testing.device import FakeDevice, Operation, fake_device
    from zrpc.testing.failure import WorkerExited, WorkerFailed, WorkerTraceback
    from zrpc.testing.leaks import LeakError, no_leaks
    from zrpc.testing.mesh import Mesh
    from zrpc.testing.spec import MeshSpec
    from zrpc.testing.startup import local_mesh
    from zrpc.testing.watchdog import MeshTimeout

__all__ = [
    "FakeDevice",
    "LeakError",
    "Mesh",
    "MeshSpec",
    "MeshTimeout",
    "Operation",
    "WorkerExited",
    "WorkerFailed",
    "WorkerTraceback",
    "fake_device",
    "local_mesh",
    "no_leaks",
]

_NAMES = {
    "device": ("FakeDevice", "Operation", "fake_device"),
    "failure": ("WorkerExited", "WorkerFailed", "WorkerTraceback"),
    "leaks": ("LeakError", "no_leaks"),
    "mesh": ("Mesh",),
    "spec": ("MeshSpec",),
    "startup": ("local_mesh",),
    "watchdog": ("MeshTimeout",),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
