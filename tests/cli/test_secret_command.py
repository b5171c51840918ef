"""zrpc secret: files that only their owner can read."""

from __future__ import annotations

import stat

import pytest
from click.testing import CliRunner
from zrpc.cli import main

from zrpc.secret import find_secret


def run(*args):
    return CliRunner().invoke(main, ["secret", *map(str, args)])


def test_it_is_printed():
    outcomes = [run() for _ in range(2)]
    assert [outcome.exit_code for outcome in outcomes] == [0, 0]
    assert outcomes[0].output != outcomes[1].output
    assert find_secret({"ZRPC_SECRET": outcomes[0].output.strip()})


def test_it_is_written(tmp_path):
    path = tmp_path / "secret"
    done = run(path)
    assert done.exit_code == 0
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert find_secret({"ZRPC_SECRET_FILE": str(path)})
    assert path.read_text().strip() not in done.output
    assert f"ZRPC_SECRET_FILE={path}" in done.output


@pytest.mark.parametrize(("name", "code", "told"), [("there", 2, "already"), ("no/file", 1, "No")])
def test_what_can_not_be_written(tmp_path, name, code, told):
    (tmp_path / "there").write_text("in use")
    done = run(tmp_path / name)
    assert done.exit_code == code
    assert told in done.output
    assert (tmp_path / "there").read_text() == "in use"
