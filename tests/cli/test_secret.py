"""zrpc secret writes files that only their owner can read."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from zrpc.cli import main
from zrpc.membership.secret import find_secret


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["secret", *arguments])


def test_secret_is_printed() -> None:
    outcomes = [run() for _ in range(2)]
    assert [outcome.exit_code for outcome in outcomes] == [0, 0]
    assert outcomes[0].output != outcomes[1].output
    assert find_secret({"ZRPC_SECRET": outcomes[0].output.strip()})


def test_secret_is_written_to_a_file(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    done = run(str(path))
    assert done.exit_code == 0
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert find_secret({"ZRPC_SECRET_FILE": str(path)})
    assert path.read_text().strip() not in done.output
    assert f"ZRPC_SECRET_FILE={path}" in done.output


@pytest.mark.parametrize(("name", "code", "words"), [("used", 2, "already"), ("no/file", 1, "No")])
def test_file_that_cannot_be_written_is_explained(
    tmp_path: Path, name: str, code: int, words: str
) -> None:
    (tmp_path / "used").write_text("in use")
    done = run(str(tmp_path / name))
    assert done.exit_code == code
    assert words in done.output
    assert (tmp_path / "used").read_text() == "in use"
