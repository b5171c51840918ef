"""What README and the docs show as programs and sessions really runs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, Block, blocks, pages
from tests.support.warm import buffered, warm_commands
from zrpc.launch.port import ReservedPort

_TIMEOUT_SECONDS = 90.0
# What a page needs beside the extra `test`.
_NEEDS = {"ray.md": "ray"}
# In a command that runs torch's own RPC. Now and then that fails as it shuts down, since the worker
# with the store has left before the other one. So it may be tried three times.
_TORCH = "USE_TORCH_RPC"
# Pages whose commands run in interpreters of their own, which is what users have.
_COLD = {"README.md"}
_RUN = [
    page
    for page in pages()
    if any(block.language in ("python", "console") for block in blocks(page))
    and page.name != "examples.md"  # tests/examples run what it shows
]


@pytest.mark.parametrize("page", _RUN, ids=lambda page: str(page.relative_to(ROOT)))
def test_programs_and_sessions(page: Path, tmp_path: Path) -> None:
    if needed := _NEEDS.get(page.name):
        pytest.importorskip(needed, reason=f"needs {needed}: pip install -e '.[{needed}]'")
    _run_page(page, tmp_path)  # each of its commands has a deadline


def _run_page(page: Path, directory: Path) -> None:
    for block in _without_repeats(blocks(page)):
        where = f"{page.relative_to(ROOT)}:{block.line}"
        if block.file:
            block.save(directory)
        elif block.language == "python":
            script = directory / f"line{block.line}.py"
            script.write_text(block.text)
            # In a process that has imported torch already, which takes three seconds.
            _run(where, [warm_commands().python, str(script)], directory, forked=True)
        elif block.language == "console":
            _run_session(where, block, directory, forked=page.name not in _COLD)


def _without_repeats(shown: Sequence[Block]) -> list[Block]:
    """Merges the sessions of a growing file: its last run prints all that they show."""
    grown = {block.file for block in shown if block.continues}
    kept: list[Block] = []
    later: dict[str, Block] = {}  # sessions, by their commands
    for block in reversed(shown):
        key = "\n".join(block.commands)
        if block.language == "console" and any(str(file) in key for file in grown):
            if key in later:
                index = kept.index(later[key])
                lines = block.text.replace(f"$ {key}\n", "")
                later[key] = kept[index] = replace(later[key], text=later[key].text + lines)
                continue
            later[key] = block
        kept.append(block)
    return kept[::-1]


def _run_session(where: str, block: Block, directory: Path, forked: bool) -> None:
    with ReservedPort() as port:  # the one that the pages name may be taken on this machine
        commands = "\n".join(block.commands).replace("29500", str(port.number))
        if _TORCH in commands:
            commands = " || ".join([commands] * 3)
        output = _run(where, ["bash", "-c", commands], directory, forked)
    lines = output.splitlines()
    for pattern in block.expected:
        assert any(pattern.fullmatch(line.rstrip()) for line in lines), (
            f"{where}: no line {pattern.pattern!r} in the output:\n{output}"
        )


def _run(where: str, command: list[str], directory: Path, forked: bool) -> str:
    done = subprocess.run(
        command,
        cwd=directory,
        env=warm_commands().environment() if forked else _environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_TIMEOUT_SECONDS,
    )
    assert done.returncode == 0, f"{where} ended with {done.returncode}:\n{done.stdout}"
    return done.stdout


def _environment() -> dict[str, str]:
    scripts = os.path.dirname(sys.executable)
    return buffered({**os.environ, "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}"})
