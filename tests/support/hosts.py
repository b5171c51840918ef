"""Meshes of threads whose workers count as being on different hosts."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator

import pytest

from zrpc.testing import Mesh
from zrpc.testing.plugin import MakeMesh
from zrpc.transport.address import host_key
from zrpc.transport.curve import supports_curve

__all__ = ["mesh_on_hosts", "needs_tcp", "on_hosts"]

needs_tcp = pytest.mark.skipif(not supports_curve(), reason="needs CURVE")


def on_hosts(monkeypatch: pytest.MonkeyPatch, hosts: Iterator[int]) -> None:
    """Places the workers that are made from now on, in this process, on hosts of these numbers."""
    monkeypatch.setenv("ZRPC_IFACE", "127.0.0.1")
    monkeypatch.setattr("zrpc.bootstrap.host_key", lambda *_: f"{host_key()}/{next(hosts)}")


def mesh_on_hosts(
    make_mesh: MakeMesh, monkeypatch: pytest.MonkeyPatch, workers: int, hosts: int = 2
) -> tuple[Mesh, list[list[int]]]:
    """A mesh, and the workers on each of its hosts, the host with the fewest first."""
    on_hosts(monkeypatch, itertools.cycle(range(hosts)))
    mesh = make_mesh(workers=workers)
    by_host: defaultdict[str, list[int]] = defaultdict(list)
    for rank, record in mesh.agent(0).membership.records.items():
        by_host[record.host_key].append(rank)
    return mesh, sorted(by_host.values(), key=len)
