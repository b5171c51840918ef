"""Large tensors between two network namespaces of this machine."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from zrpc.bench import link
from zrpc.bench.link import SIZES, WAYS, Speeds, as_text
from zrpc.bench.namespaces import NamespaceError, two_namespaces
from zrpc.cli import main


@pytest.mark.system
def test_each_way_sends_tensors_of_all_sizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        with two_namespaces():
            pass
    except NamespaceError as error:
        pytest.skip(str(error))
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


def test_the_table_shows_medians_and_what_keys_cost() -> None:
    speeds = Speeds(raw=[2e9], failures=["torch: it hung", "torch: it hung"])
    for size in SIZES:
        speeds.tensors["zrpc", size] = [8e8, 4e8, 6e8]
        speeds.tensors["zrpc with keys", size] = [3e8]
    lines = as_text(speeds).splitlines()
    assert lines[2].split("  ")[0] == "1 MiB"
    for text in ("failed", "600 (400 to 800)", "300 (300 to 300)", "2.00 times"):
        assert text in lines[2]
    assert lines[-2:] == ["raw TCP (iperf3): 2000 (2000 to 2000) MB/s", "* torch: it hung"]
