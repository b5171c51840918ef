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
    from zrpc.testing.device import FakeDevice as FakeDevice
    from zrpc.testing.device import Operation as Operation
    from zrpc.testing.device import fake_device as fake_device
    from zrpc.testing.failure import WorkerExited as WorkerExited
    from zrpc.testing.failure import WorkerFailed as WorkerFailed
    from zrpc.testing.failure import WorkerTraceback as WorkerTraceback
    from zrpc.testing.leaks import LeakError as LeakError
    from zrpc.testing.leaks import no_leaks as no_leaks
    from zrpc.testing.mesh import Mesh as Mesh
    from zrpc.testing.spec import MeshSpec as MeshSpec
    from zrpc.testing.startup import local_mesh as local_mesh
    from zrpc.testing.watchdog import MeshTimeout as MeshTimeout

_NAMES = {
    "device": "FakeDevice Operation fake_device",
    "failure": "WorkerExited WorkerFailed WorkerTraceback",
    "leaks": "LeakError no_leaks",
    "mesh": "Mesh",
    "spec": "MeshSpec",
    "startup": "local_mesh",
    "watchdog": "MeshTimeout",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}
__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
