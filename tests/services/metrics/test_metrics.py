"""The metrics page, read by Prometheus's own parser."""

from __future__ import annotations

import contextlib
import json
import re
import select
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

import zrpc
from tests.support.waiting import until
from tests.support.warm import warm_commands
from zrpc.errors import OptionError
from zrpc.launch.port import ReservedPort
from zrpc.services.metrics.address import metrics_address
from zrpc.testing import Mesh
from zrpc.testing.plugin import MakeMesh

ROOT = Path(__file__).parents[3]
CALLS = 5


class Page:
    """What a worker serves, by name and labels."""

    def __init__(self, port: int) -> None:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as answer:
            families = list(text_string_to_metric_families(answer.read().decode()))
        self.samples = {
            (sample.name, *sorted(sample.labels.items())): sample.value
            for family in families
            for sample in family.samples
        }
        self.names = {name for name, *_ in self.samples}

    def value(self, name: str, **labels: str) -> float:
        return self.samples[(name, *sorted(labels.items()))]


def adds(left: int, right: int) -> int:
    return left + right


def fails() -> None:
    raise KeyError("on purpose")


@pytest.fixture
def first_port() -> Iterator[int]:
    """The first of two neighbouring ports, which the system gives to nobody else for now."""
    with contextlib.ExitStack() as stack:
        while True:
            first = stack.enter_context(ReservedPort())
            second = stack.enter_context(socket.socket())
            second.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with contextlib.suppress(OSError, OverflowError):  # it is taken, or there is none
                second.bind(("", first.number + 1))
                break
        yield first.number


@pytest.fixture
def mesh_port(
    monkeypatch: pytest.MonkeyPatch, make_mesh: MakeMesh, first_port: int
) -> tuple[Mesh, int]:
    """A mesh of two workers, and the port of the first; the next one is of the second."""
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setenv("ZRPC_METRICS_PORT", str(first_port))
    return make_mesh(2), first_port


@pytest.mark.system
def test_page_has_the_numbers_of_the_calls_made_and_all_that_the_dashboard_shows(
    mesh_port: tuple[Mesh, int],
) -> None:
    mesh, port = mesh_port
    for number in range(CALLS):
        assert mesh.run(0, zrpc.rpc_sync, 1, adds, (number, 1)) == number + 1
    with pytest.raises(KeyError):
        mesh.run(0, zrpc.rpc_sync, 1, fails)
    reference = mesh.run(0, zrpc.remote, 1, adds, (1, 2))
    mesh.run(0, reference.to_here)
    # The value can come before the answer to the call that has made it.
    until(lambda: Page(port).value("zrpc_calls_in_flight", worker="worker0") == 0)
    caller, callee = Page(port), Page(port + 1)

    assert caller.value("zrpc_worker", worker="worker0", rank="0") == 1
    mine = {"worker": "worker0", "function": "adds"}
    assert caller.value("zrpc_call_seconds_count", **mine) == CALLS + 1
    stats = mesh.run(0, zrpc.stats)
    bounds = [*map(repr, stats.bucket_seconds), "+Inf"]
    counts = [caller.value("zrpc_call_seconds_bucket", le=bound, **mine) for bound in bounds]
    assert counts == sorted(counts)
    assert counts[-1] == caller.value("zrpc_call_seconds_bucket", le="128.0", **mine) == CALLS + 1
    assert caller.value("zrpc_call_errors_total", **mine) == 0
    total = caller.value("zrpc_call_seconds_sum", **mine)
    assert total == pytest.approx(stats.calls["adds"].seconds)
    failed = {"worker": "worker0", "function": "fails"}
    assert caller.value("zrpc_call_errors_total", **failed) == 1
    assert caller.value("zrpc_rrefs_held", worker="worker0") == 1

    runs = {"worker": "worker1", "function": "adds"}
    assert callee.value("zrpc_handler_runs_total", **runs) == CALLS + 1
    assert callee.value("zrpc_handler_run_seconds_total", **runs) > 0
    assert callee.value("zrpc_handler_errors_total", worker="worker1", function="fails") == 1
    assert callee.value("zrpc_rrefs_owned", worker="worker1") == 1
    assert callee.value("zrpc_threads", worker="worker1", state="queued") == 0
    ways = ("direct", "ipc", "shared_memory", "tcp", "inproc")
    received = [callee.value("zrpc_received_bytes_total", worker="worker1", way=w) for w in ways]
    assert sum(received) >= 32 * (CALLS + 2)
    assert callee.value("zrpc_peer_received_bytes_total", worker="worker1", peer="worker0") > 0
    assert callee.value("process_resident_memory_bytes") > 2**20

    names = caller.names | callee.names
    dashboard = json.loads((ROOT / "examples" / "grafana_dashboard.json").read_text())
    expressions = [t["expr"] for panel in dashboard["panels"] for t in panel["targets"]]
    used = {n for each in expressions for n in re.findall(r"\b(?:zrpc|process)_\w+", each)}
    assert len(used) > 10
    assert used - names == set()


@pytest.mark.system
def test_page_ends_with_the_worker_and_a_taken_port_is_only_logged(
    mesh_port: tuple[Mesh, int], make_mesh: MakeMesh, caplog: pytest.LogCaptureFixture
) -> None:
    mesh, port = mesh_port
    other = make_mesh(2)
    assert other.run(0, zrpc.rpc_sync, 1, adds, (1, 2)) == 3
    assert f"serves no metrics: http://127.0.0.1:{port}: Address already in use" in caplog.text
    assert Page(port).names
    mesh.shutdown()
    with pytest.raises(OSError, match="refused"):
        Page(port)


@pytest.mark.system
def test_visitors_that_say_nothing_hold_few_threads_and_end_with_the_worker(
    mesh_port: tuple[Mesh, int],
) -> None:
    mesh, port = mesh_port
    before = threading.active_count()
    with contextlib.ExitStack() as stack:
        visitors = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(30)
        ]

        def ended() -> int:
            return sum(not visitor.recv(1) for visitor in select.select(visitors, [], [], 0)[0])

        until(lambda: ended() >= 20)
        assert 0 < threading.active_count() - before < 10
        mesh.shutdown()
        until(lambda: ended() == len(visitors))
    until(lambda: threading.active_count() <= before)


def test_address_of_a_worker() -> None:
    for env, rank, expected in (
        ({}, 0, None),
        ({"ZRPC_METRICS_PORT": ""}, 0, None),
        ({"ZRPC_METRICS_PORT": "9400"}, 3, ("127.0.0.1", 9403)),
        ({"ZRPC_METRICS_PORT": "9400", "LOCAL_RANK": "1"}, 9, ("127.0.0.1", 9401)),
        ({"ZRPC_METRICS_PORT": "0.0.0.0:9400"}, 0, ("0.0.0.0", 9400)),
        ({"ZRPC_METRICS_PORT": "[::1]:9400"}, 0, ("::1", 9400)),
    ):
        assert metrics_address(env, rank) == expected
    text = r"expected PORT or ADDRESS:PORT in ZRPC_METRICS_PORT"
    for value in ("many", "0", "70000", "65535", "localhost", "-1", "1.5"):
        with pytest.raises(OptionError, match=text):
            metrics_address({"ZRPC_METRICS_PORT": value}, 1)


def test_without_the_package_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, make_mesh: MakeMesh
) -> None:
    monkeypatch.setenv("ZRPC_METRICS_PORT", "9400")
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(OptionError, match="pip install prometheus-client"):
        make_mesh(1)


SCRIPT = """
import sys, urllib.request, zrpc
with zrpc.session() as worker:
    zrpc.barrier()
    url = f"http://127.0.0.1:{int(sys.argv[1]) + worker.rank}/metrics"
    lines = urllib.request.urlopen(url, timeout=20).read().decode().splitlines()
    print([line for line in lines if line.startswith("zrpc_worker{")])
"""


@pytest.mark.system
def test_launcher_gives_each_worker_a_port(tmp_path: Path, first_port: int) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    launch = [warm_commands().python, "-m", "zrpc.cli", "launch", "-n", "2"]
    port = str(first_port)
    done = subprocess.run(
        [*launch, "--metrics-port", port, "script.py", port],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert sorted(done.stdout.splitlines()) == [
        f'[{rank}] [\'zrpc_worker{{rank="{rank}",worker="worker{rank}"}} 1.0\']'
        for rank in range(2)
    ], done.stderr
