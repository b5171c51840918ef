"""Private directories: who has access to them, and whether their worker lives."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.forks import exit_code, fork
from tests.support.threads import start_all
from tests.support.waiting import SOON
from zrpc.errors import AuthenticationError, RpcError
from zrpc.transport import address
from zrpc.transport.address import (
    PrivateDirectory,
    host_key,
    interface_towards,
    is_alive,
)


@pytest.fixture
def parent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where private directories are made, by child processes too."""
    # pytest's own paths may be too long for a socket.
    with tempfile.TemporaryDirectory(prefix="zrpc-test-") as path:
        monkeypatch.setenv("ZRPC_RUNTIME_DIR", path)
        yield Path(path)


@pytest.fixture
def directory(parent: Path) -> Iterator[PrivateDirectory]:
    made = PrivateDirectory()
    yield made
    made.remove()


def test_only_the_owner_has_access_whatever_the_umask(parent: Path) -> None:
    for umask in (0, 0o077):
        before = os.umask(umask)
        try:
            made = PrivateDirectory()
        finally:
            os.umask(before)
        assert made.path.parent == parent
        assert stat.S_IMODE(made.path.stat().st_mode) == 0o700
        for path in made.path.iterdir():
            assert not stat.S_IMODE(path.stat().st_mode) & 0o077
        assert made.socket_path.parent == made.path
        made.remove()


@pytest.mark.usefixtures("no_leaks")
def test_a_directory_counts_as_alive_until_it_is_removed(
    directory: PrivateDirectory, tmp_path: Path
) -> None:
    for missing in (tmp_path, tmp_path / "missing"):
        assert not is_alive(missing)
    for _ in range(2):  # checking changes nothing
        assert is_alive(directory.path)
    directory.socket_path.write_text("as a socket")
    for _ in range(2):
        directory.remove()
        assert not is_alive(directory.path)
        assert not directory.path.exists()


def test_concurrent_workers_get_separate_directories(parent: Path) -> None:
    made = start_all([PrivateDirectory] * 8, SOON)()
    assert len({directory.path for directory in made}) == 8
    # Making one did not remove any other.
    assert all(is_alive(directory.path) for directory in made)
    for directory in made:
        directory.remove()


@pytest.mark.system
def test_a_child_process_does_not_keep_its_parent_alive(directory: PrivateDirectory) -> None:
    # The lock belongs to the open file, which a fork shares.
    forked, go = os.pipe(), os.pipe()

    def live() -> None:
        os.write(forked[1], b"x")
        os.read(go[0], 1)

    child = fork(live)
    try:
        os.read(forked[0], 1)  # the child runs its own code now
        directory.release()  # as if this process had been killed
        assert not is_alive(directory.path)
    finally:
        os.write(go[1], b"x")
        exit_code(child)
        for descriptor in (*forked, *go):
            os.close(descriptor)


@pytest.mark.system
def test_a_started_program_does_not_keep_its_parent_alive(directory: PrivateDirectory) -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, close_fds=False):  # until that is closed
        directory.release()
        assert not is_alive(directory.path)


def left_behind(parent: Path, name: str, age: float = 0.0, lock: bool = False) -> Path:
    path = parent / name
    path.mkdir()
    if lock:
        (path / "alive").touch()
    then = time.time() - age
    os.utime(path, (then, then))
    return path


def test_only_abandoned_directories_are_removed(parent: Path) -> None:
    dead = left_behind(parent, "zrpc-inbox-dead", lock=True)
    starting = left_behind(parent, "zrpc-inbox-starting")
    died_at_start = left_behind(parent, "zrpc-inbox-old", age=10_000)
    of_others = left_behind(parent, "not-ours", age=10_000, lock=True)
    for number in range(20):  # by anybody, as in /tmp; whatever the order of the names
        (parent / f"zrpc-inbox-link{number}").symlink_to("nowhere")
    living = PrivateDirectory()
    another = PrivateDirectory()
    assert not dead.exists()
    assert not died_at_start.exists()
    assert starting.exists()
    assert of_others.exists()
    assert is_alive(living.path)
    living.remove()
    another.remove()


@pytest.mark.skipif(os.getuid() != 0, reason="needs another user")
def test_directories_of_other_users_are_left_alone(parent: Path) -> None:
    path = left_behind(parent, "zrpc-inbox-other", age=10_000, lock=True)
    os.chown(path, 12345, 12345)
    PrivateDirectory().remove()
    assert path.exists()


@pytest.mark.skipif(os.getuid() != 0, reason="needs another user")
def test_a_parent_of_another_user_is_refused(parent: Path) -> None:
    """Even with the sticky bit, its owner can replace what is in it."""
    parent.chmod(0o1777)
    os.chown(parent, 12345, -1)
    with pytest.raises(AuthenticationError, match="user 12345 can replace what is in it"):
        PrivateDirectory()


def test_a_socket_can_be_bound_at_any_path_length(monkeypatch: pytest.MonkeyPatch) -> None:
    for length in (*range(56, 84), 200):
        with tempfile.TemporaryDirectory(prefix="zrpc-test-", dir="/tmp") as base:
            path = Path(base) / ("p" * (length - len(base) - 1))
            path.mkdir()
            monkeypatch.setenv("ZRPC_RUNTIME_DIR", str(path))
            directory = PrivateDirectory()
            assert directory.path.parent == (path if length <= 80 else Path("/tmp"))
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(str(directory.path / address.DIRECT))
            directory.remove()


def test_another_runtime_directory_means_another_host_key(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    keys = set()
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        monkeypatch.setenv("ZRPC_RUNTIME_DIR", str(tmp_path / name))
        keys.add(host_key())
        assert host_key() in keys
    assert len(keys) == 2
    assert len({key.split("/")[0] for key in keys}) == 1


def test_the_interface_towards_this_host_and_an_unknown_one_is_loopback() -> None:
    assert interface_towards("127.0.0.1") == "127.0.0.1"
    assert interface_towards("localhost") in ("127.0.0.1", "::1")
    assert interface_towards("host.that.is.invalid") == "127.0.0.1"


# -- directories of peers ------------------------------------------------------------------


def test_a_directory_open_to_others_and_a_link_are_refused(
    tmp_path: Path, directory: PrivateDirectory
) -> None:
    address.check_private(directory.path)
    address.check_private(tmp_path / "gone")
    for mode in (0o755, 0o750, 0o701, 0o777):
        tmp_path.chmod(mode)
        with pytest.raises(AuthenticationError, match=f"with mode {mode:04o}: start all workers"):
            address.check_private(tmp_path)
    link = tmp_path / "link"
    link.symlink_to(directory.path)
    with pytest.raises(AuthenticationError):
        address.check_private(link)


def test_a_parent_that_others_may_write_to_or_that_cannot_be_used_is_refused(
    monkeypatch: pytest.MonkeyPatch, parent: Path
) -> None:
    for mode in (0o777, 0o702, 0o770):
        parent.chmod(mode)
        with pytest.raises(AuthenticationError, match=f"{mode:04o}.: `chmod go-w {parent}"):
            PrivateDirectory()
        parent.chmod(mode | stat.S_ISVTX)  # like /tmp
        PrivateDirectory().remove()
    (parent / "a-file").touch()
    for name in ("not-there", "a-file"):
        monkeypatch.setenv("ZRPC_RUNTIME_DIR", str(parent / name))
        with pytest.raises(RpcError, match=rf"{name} \(No.*: make it one, .* in ZRPC_RUNTIME_DIR"):
            PrivateDirectory()


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], str], Path], None]:
    """Sets what finds the temporary directory, and the directory to use instead."""
    monkeypatch.delenv("ZRPC_RUNTIME_DIR", raising=False)

    def use(find: Callable[[], str], second: Path) -> None:
        monkeypatch.setattr(address.tempfile, "gettempdir", find)
        monkeypatch.setattr(address, "_SECOND_CHOICES", (second,))

    return use


def test_an_unsafe_temporary_directory_is_not_used(
    monkeypatch: pytest.MonkeyPatch,
    use: Callable[[Callable[[], str], Path], None],
    tmp_path: Path,
) -> None:
    volume, other = tmp_path / "volume", tmp_path / "other"
    volume.mkdir()
    other.mkdir()
    use(lambda: str(volume), other)
    monkeypatch.setattr(address, "_LONGEST_PATH", len(os.fsencode(tmp_path)) + 100)
    key = host_key()
    made = PrivateDirectory()
    assert made.path.parent == volume
    made.remove()
    volume.chmod(0o777)  # like an emptyDir of Kubernetes
    made = PrivateDirectory()
    assert made.path.parent == other
    assert host_key() != key
    made.remove()
    other.chmod(0o777)
    with pytest.raises(AuthenticationError, match=f"found {volume} .others .* its mode is 0777"):
        PrivateDirectory()


def test_without_a_temporary_directory_that_can_be_written_to(
    use: Callable[[Callable[[], str], Path], None],
) -> None:
    """As in a container whose root file system is read-only."""

    def none_usable() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp']")

    use(none_usable, Path("/missing"))
    with pytest.raises(RpcError, match=r"found /missing \(No such file.*ZRPC_RUNTIME_DIR"):
        PrivateDirectory()
    with tempfile.TemporaryDirectory(prefix="zrpc-test-", dir="/dev/shm") as shared_memory:
        use(none_usable, Path(shared_memory))
        made = PrivateDirectory()
        assert made.path.parent == Path(shared_memory)
        made.remove()
