"""What README and the docs show as programs and sessions really runs."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from pages import ROOT, Block, blocks, pages

_RUN = [page for page in pages() if any(b.language in ("python", "console") for b in blocks(page))]


@pytest.fixture(scope="module")
def outcomes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[Path, Future[None]]]:
    """The runs of all pages that are asked for, two at a time: they mostly import torch."""
    wanted = [
        item.callspec.params["page"]
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.function is test_programs_and_sessions
    ]
    threads = ThreadPoolExecutor(2)
    yield {
        page: threads.submit(_run_page, page, tmp_path_factory.mktemp("page")) for page in wanted
    }
    threads.shutdown(cancel_futures=True)


@pytest.mark.parametrize("page", _RUN, ids=lambda page: str(page.relative_to(ROOT)))
def test_programs_and_sessions(page: Path, outcomes: dict[Path, Future[None]]) -> None:
    outcomes[page].result()  # each of its commands has a deadline


def _run_page(page: Path, directory: Path) -> None:
    for block in blocks(page):
        where = f"{page.relative_to(ROOT)}:{block.line}"
        if block.file:
            (directory / block.file).write_text(block.text)
        elif block.language == "python":
            _run(where, [sys.executable, "-c", block.text], directory)
        elif block.language == "console":
            _run_session(where, block, directory)


def _run_session(where: str, block: Block, directory: Path) -> None:
    # The port that the pages name may be taken on this machine.
    commands = "\n".join(block.commands).replace("29500", str(_free_port()))
    output = _run(where, ["bash", "-c", commands], directory).splitlines()
    for pattern in block.expected:
        assert any(pattern.fullmatch(line.rstrip()) for line in output), (
            f"{where}: no line {pattern.pattern!r} in the output:\n" + "\n".join(output)
        )


def _run(where: str, command: list[str], directory: Path) -> str:
    scripts = os.path.dirname(sys.executable)
    env = {**os.environ, "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}"}
    # With it `print` writes the end of a line apart, and lines of two processes get mixed.
    env.pop("PYTHONUNBUFFERED", None)
    done = subprocess.run(
        command,
        cwd=directory,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=90,
    )
    assert done.returncode == 0, f"{where} ended with {done.returncode}:\n{done.stdout}"
    return done.stdout


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port
