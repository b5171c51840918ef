"""Large tensors between two network namespaces of this machine."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from zrpc.bench import link
from zrpc.bench.link import WAYS
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
