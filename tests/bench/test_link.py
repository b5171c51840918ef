"""Large tensors between two network namespaces of this machine."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from subprocess import DEVNULL, PIPE

import pytest
from click.testing import CliRunner

from zrpc.bench import link
from zrpc.bench.link import WAYS
from zrpc.bench.namespaces import NamespaceError, two_namespaces
from zrpc.cli import main


@pytest.fixture(autouse=True)
def _needs_namespaces() -> None:
    try:
        with two_namespaces():
            pass
    except NamespaceError as error:
        pytest.skip(str(error))


@pytest.mark.system
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_leaves_no_namespace(number: signal.Signals) -> None:
    program = """if True:
        import signal
        from zrpc.bench.namespaces import two_namespaces
        with two_namespaces() as names:
            print(*names, flush=True)
            signal.pause()
    """
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=PIPE, stderr=DEVNULL, text=True) as process:
        assert process.stdout is not None
        names = process.stdout.readline().split()
        process.send_signal(number)
        assert process.wait(30) in (128 + number, -number)
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    assert len(names) == 2
    assert not any(name in listed.stdout for name in names)


@pytest.mark.system
def test_each_way_sends_tensors_of_all_sizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = (1 << 10, 1 << 20)
    monkeypatch.setattr(link, "SIZES", sizes)
    monkeypatch.setattr(link, "_RAW_SECONDS", 1)
    file = tmp_path / "link.json"
    command = ["bench", "link", "--rounds", "1", "--seconds", "0", "--json", str(file)]
    done = CliRunner().invoke(main, command)
    assert done.exit_code == 0, done.output
    data = json.loads(file.read_text())
    found = {(row["way"], row["bytes"]) for row in data["tensors"]}
    assert found == {(way, size) for way in WAYS for size in sizes}, data["failures"]
    if shutil.which("iperf3"):
        assert len(data["raw"]) == 1
        assert data["failures"] == []
    else:
        assert data["failures"] == ["the raw link needs iperf3: apt-get install iperf3"]
