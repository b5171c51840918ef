"""Runs programs that import ``torch.distributed.rpc`` on zrpc, unchanged.

`install` puts zrpc's functions and classes in the place of those in torch's modules. A program's
``import torch.distributed.rpc as rpc`` is then torch's module with zrpc in it. ``zrpc run`` and
``zrpc launch --drop-in`` do that in a program and in all Python processes that it starts.

Importing this package imports neither torch nor the rest of zrpc. zrpc is loaded when a program
first uses a name that was replaced.
"""

from __future__ import annotations

from zrpc.drop_in.finder import child_environment, install

__all__ = ["child_environment", "install"]
