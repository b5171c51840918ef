"""Installs the drop-in when Python starts, then runs the ``sitecustomize`` that this one hides.

``zrpc run`` puts this directory on ``PYTHONPATH``. It is removed from ``sys.path`` here, so that
the program sees its own ``sys.path``.
"""

from __future__ import annotations

import importlib
import os
import sys

_directory = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [path for path in sys.path if os.path.abspath(path) != _directory]

try:
    from zrpc.drop_in.finder import install
except ImportError:  # an interpreter that doesn't have zrpc
    pass
else:
    install()

# While this module keeps its name in sys.modules, the hidden one can't be imported.
_this = sys.modules.pop("sitecustomize", None)
try:
    importlib.import_module("sitecustomize")
except ModuleNotFoundError as error:
    if error.name != "sitecustomize":
        raise
    if _this is not None:
        sys.modules["sitecustomize"] = _this
