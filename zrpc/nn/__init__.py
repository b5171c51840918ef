"""Modules that live on other workers."""

from __future__ import annotations

from zrpc.nn.remote_module import RemoteModule

__all__ = ["RemoteModule"]
