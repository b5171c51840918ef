"""Programs that run as ``zrpc run`` runs them."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from textwrap import dedent

import pytest

from tests.support.programs import Programs, run_python
from zrpc.testing.server import warm_server

_INSTALLED = """\
import torch
from torch.futures import wait_all

import zrpc.drop_in
zrpc.drop_in.install()
import torch.distributed.rpc as rpc

def error_of(function, *args, **kwargs):
    try:
        function(*args, **kwargs)
    except Exception as error:
        return error
"""
Succeed = Callable[[str], None]
Commands = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, str], Path]:
    """Writes a file of the program's directory."""

    def write(name: str, source: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(dedent(source))
        return path

    return write


@pytest.fixture
def commands(tmp_path: Path) -> Commands:
    """Runs a command with Python's options and arguments, in the program's directory."""
    return partial(run_python, cwd=tmp_path)


@pytest.fixture
def quick_commands(tmp_path: Path) -> Commands:
    """The same, forked from a process that has imported torch."""
    return partial(run_python, cwd=tmp_path, warm=True)


@pytest.fixture
def programs(tmp_path: Path, free_port: int) -> Iterator[Programs]:
    """Scripts that are forked from a process that has imported torch."""
    warm_server()
    running = Programs(tmp_path, free_port)
    yield running
    running.close()


@pytest.fixture
def succeed(programs: Programs) -> Succeed:
    """Runs a program in one process; it must end without an error."""

    def succeed(source: str) -> None:
        (ended,) = programs.run(source, 1)
        assert ended.code == 0, ended.output

    return succeed


@pytest.fixture
def installed(succeed: Succeed) -> Succeed:
    """Runs a program of torch's RPC that has imported torch, and then installed the drop-in."""
    return lambda source: succeed(_INSTALLED + dedent(source))
