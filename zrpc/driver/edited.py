"""Modules that were edited while workers run: in a notebook, the driver may have reloaded them."""

from __future__ import annotations

import contextlib
import os
import sys
import sysconfig
from collections.abc import Callable
from typing import Any


def tell_of_edits(tell: Callable[[str], None]) -> Callable[[], None]:
    """Tells of edited modules before each cell, if this is IPython; returns what ends that."""
    shell: Any = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if shell is None:
        return lambda: None
    times: dict[str, float] = {}
    _edited(times)

    def look(_: Any) -> None:
        for name in _edited(times):
            tell(
                f"zrpc: the module {name} was edited. Workers that have imported it run its old "
                "version, until mesh.close() and the next start_mesh"
            )

    shell.events.register("pre_run_cell", look)
    return lambda: shell.events.unregister("pre_run_cell", look)


def _edited(times: dict[str, float]) -> list[str]:
    """Returns the program's own modules that were edited since the last call.

    Args:
        times: when each file was changed, by the module; is updated.
    """
    installed = tuple(f"{path}{os.sep}" for path in sysconfig.get_paths().values())
    new = []
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__dict__", {}).get("__file__")
        if not isinstance(file, str) or file.startswith(installed):
            continue
        with contextlib.suppress(OSError):  # it is in an archive, or gone
            edited = os.stat(file).st_mtime
            if edited != times.setdefault(name, edited):
                times[name] = edited
                new.append(name)
    return new
