"""Workers whose private directories have the longest path that leaves room for sockets."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from zrpc import local_mesh
from zrpc.services.inspection.discovery import ask, directories

_LONGEST = 80  # bytes, as 107 are what a path of a socket may have


@pytest.fixture
def parent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    base = Path(tempfile.mkdtemp(prefix="z", dir="/var/tmp"))
    path = base / ("p" * (_LONGEST - len(str(base)) - 1))
    path.mkdir()
    monkeypatch.setenv("ZRPC_RUNTIME_DIR", str(path))
    yield path
    shutil.rmtree(base)


def test_workers_answer_in_the_longest_directory(parent: Path) -> None:
    with local_mesh(2):
        paths = [path for path in directories() if path.parent == parent]
        answers = ask(paths, timeout=10.0)
        assert [answer.problem for answer in answers] == ["", ""]
