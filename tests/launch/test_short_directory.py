"""Where the launcher puts the sockets of its workers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.programs import run_python

# In a mount namespace of its own, in which the first words name what can only be read.
_READ_ONLY = """
for place in $READ_ONLY; do
    mount --bind $place $place && mount -o remount,bind,ro $place || exit 77
done
exec "$@"
"""
_MAKE = """
from zrpc.launch.short_directory import short_directory
try:
    print(short_directory())
except OSError as error:
    print(error)
"""


@pytest.fixture
def base() -> Iterator[Path]:
    """A directory outside of /tmp, with a short path."""
    path = tempfile.mkdtemp(prefix="z", dir="/var/tmp")
    yield Path(path)
    shutil.rmtree(path)


def made(temporary: Path, read_only: str, **env: str) -> str:
    """Returns what is made, or the error, if some places are read-only."""
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", _READ_ONLY, "sh", sys.executable, "-c", _MAKE],
        env={**os.environ, "READ_ONLY": read_only, "TMPDIR": str(temporary), **env},
        capture_output=True,
        text=True,
        timeout=60,
    )
    if done.returncode in (1, 77) and "Traceback" not in done.stderr:
        pytest.skip(f"no mount namespace: {done.stderr}")
    return done.stdout.strip()


@pytest.mark.system
@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare")
def test_the_first_directory_is_used_in_which_paths_of_sockets_fit(base: Path) -> None:
    short, long = [base / ("p" * (length - len(str(base)) - 1)) for length in (66, 67)]
    for directory in (short, long, base / "named"):
        directory.mkdir()
    path = made(short, "/tmp")
    assert path.startswith(f"{short}/zrpc-")
    assert len(f"{path}/zrpc-inbox-xxxxxxxx/direct") == 107
    path = made(long, "/tmp")
    assert path.startswith("/dev/shm/zrpc-")
    os.rmdir(path)
    named = {"ZRPC_RUNTIME_DIR": str(base / "named")}
    assert made(long, "/tmp /dev/shm", **named).startswith(f"{base}/named/zrpc-")
    assert made(long, "/tmp /dev/shm") == (
        "expected a directory in which the workers' sockets can be made, but tried "
        f"{long} (its path has 67 bytes, and 66 leave room for sockets), "
        "/tmp (Read-only file system), /dev/shm (Read-only file system): "
        "name another in ZRPC_RUNTIME_DIR"
    )


@pytest.mark.system
def test_directory_that_cannot_be_used_is_passed_over(base: Path) -> None:
    done = run_python("-c", _MAKE, ZRPC_RUNTIME_DIR=str(base / "missing"), TMPDIR=str(base))
    path = Path(done.stdout.strip())
    assert path.parent == base
    assert path.stat().st_mode & 0o777 == 0o700


@pytest.mark.system
@pytest.mark.parametrize("mode", [0o777, 0o2770, 0o1777])
def test_a_directory_in_which_others_can_replace_anything_is_passed_over(
    base: Path, mode: int
) -> None:
    (base / "open").mkdir()
    (base / "open").chmod(mode)
    done = run_python("-c", _MAKE, ZRPC_RUNTIME_DIR=str(base / "open"), TMPDIR=str(base))
    sticky = mode & 0o1000
    assert Path(done.stdout.strip()).parent == (base / "open" if sticky else base)
