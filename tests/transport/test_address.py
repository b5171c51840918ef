"""Private directories: who may look in, and whether their worker lives."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from zrpc.errors import AuthenticationError, RpcError
from zrpc.transport import address
from zrpc.transport.address import (
    PrivateDirectory,
    host_key,
    interface_towards,
    is_alive,
    supports_ipc,
)

SOON = 10.0


@pytest.fixture
def parent(tmp_path, monkeypatch):
    """Where private directories are made."""
    # pytest's own paths may be too long for a socket.
    monkeypatch.setattr(address, "_LONGEST_PATH", len(os.fsencode(tmp_path)) + 100)
    monkeypatch.setenv("ZRPC_RUNTIME_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def directory(parent):
    made = PrivateDirectory()
    yield made
    made.remove()


def test_nobody_else_may_look_in(directory, parent):
    assert directory.path.parent == parent
    assert stat.S_IMODE(directory.path.stat().st_mode) == 0o700
    for path in directory.path.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert directory.socket_path.parent == directory.path


def test_a_umask_changes_nothing(parent):
    before = os.umask(0)
    try:
        made = PrivateDirectory()
    finally:
        os.umask(before)
    try:
        assert stat.S_IMODE(made.path.stat().st_mode) == 0o700
    finally:
        made.remove()


def test_it_lives_until_it_is_removed(directory):
    assert is_alive(directory.path)
    assert is_alive(directory.path)  # asking changes nothing
    directory.remove()
    assert not is_alive(directory.path)
    assert not directory.path.exists()
    directory.remove()


def test_it_is_removed_with_all_that_is_in_it(directory):
    directory.socket_path.write_text("as a socket")
    directory.remove()
    assert not directory.path.exists()


def test_no_descriptor_is_left(parent):
    before = set(os.listdir("/proc/self/fd")) if os.path.exists("/proc/self/fd") else None
    for _ in range(5):
        made = PrivateDirectory()
        is_alive(made.path)
        made.remove()
        is_alive(made.path)
    if before is not None:
        assert set(os.listdir("/proc/self/fd")) == before


def test_nobody_lives_where_nothing_is(tmp_path):
    assert not is_alive(tmp_path)
    assert not is_alive(tmp_path / "missing")


def test_many_have_directories_of_their_own(parent):
    made, lock = [], threading.Lock()

    def make():
        directory = PrivateDirectory()
        with lock:
            made.append(directory)

    threads = [threading.Thread(target=make) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({directory.path for directory in made}) == 8
    # Making one has removed none of the others.
    assert all(is_alive(directory.path) for directory in made)
    for directory in made:
        directory.remove()


CHILD = """
import os, sys
from zrpc.transport.address import PrivateDirectory
directory = PrivateDirectory()
print(directory.path, flush=True)
sys.stdin.read()
if {remove}:
    directory.remove()
"""


def start_child(remove=False):
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD.format(remove=remove)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    return child, Path(child.stdout.readline().strip())


def test_the_killed_are_dead_and_what_they_left_is_removed(parent):
    child, path = start_child()
    with child:
        assert is_alive(path)
        child.send_signal(signal.SIGKILL)
        child.wait(SOON)
    assert path.exists()
    assert not is_alive(path)
    other = PrivateDirectory()
    assert not path.exists()
    other.remove()


def test_the_stopped_live(parent):
    child, path = start_child()
    with child:
        child.send_signal(signal.SIGSTOP)
        assert is_alive(path)
        PrivateDirectory().remove()
        assert is_alive(path)
        child.send_signal(signal.SIGCONT)
        child.stdin.close()
        child.wait(SOON)


def test_a_child_process_does_not_keep_its_parent_alive(directory):
    # The lock is of the open file, which a fork shares.
    forked, go = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(forked[1], b"x")
        os.read(go[0], 1)
        os._exit(0)
    try:
        os.read(forked[0], 1)  # the child has come as far as its own code
        directory._release()  # as if this process had been killed
        assert not is_alive(directory.path)
    finally:
        os.write(go[1], b"x")
        os.waitpid(pid, 0)
        for descriptor in (*forked, *go):
            os.close(descriptor)


def test_a_program_that_is_started_does_not_keep_it_alive(directory):
    with subprocess.Popen(
        [sys.executable, "-c", "import sys; print(1, flush=True); sys.stdin.read()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        close_fds=False,
    ) as child:
        child.stdout.readline()
        directory._release()
        assert not is_alive(directory.path)
        child.stdin.close()


def left_behind(parent, name, age=0.0, lock=False):
    path = parent / name
    path.mkdir()
    if lock:
        (path / "alive").touch()
    then = time.time() - age
    os.utime(path, (then, then))
    return path


def test_what_is_removed_and_what_is_not(parent):
    dead = left_behind(parent, f"{address._PREFIX}dead", lock=True)
    starting = left_behind(parent, f"{address._PREFIX}starting")
    died_at_start = left_behind(parent, f"{address._PREFIX}old", age=10_000)
    of_others = left_behind(parent, "not-ours", age=10_000, lock=True)
    living = PrivateDirectory()
    another = PrivateDirectory()
    assert not dead.exists()
    assert not died_at_start.exists()
    assert starting.exists()
    assert of_others.exists()
    assert is_alive(living.path)
    living.remove()
    another.remove()


@pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() != 0, reason="needs another user")
def test_directories_of_other_users_are_left_alone(parent):
    path = left_behind(parent, f"{address._PREFIX}other", age=10_000, lock=True)
    os.chown(path, 12345, 12345)
    PrivateDirectory().remove()
    assert path.exists()


def test_a_long_path_is_not_used(monkeypatch, tmp_path):
    deep = tmp_path / ("x" * 60) / ("y" * 60)
    deep.mkdir(parents=True)
    monkeypatch.setenv("ZRPC_RUNTIME_DIR", str(deep))
    directory = PrivateDirectory()
    try:
        assert directory.path.parent == Path("/tmp")
        assert len(os.fsencode(directory.socket_path)) < 104
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(directory.socket_path))
    finally:
        directory.remove()


@pytest.mark.parametrize("length", range(56, 84))
def test_whatever_the_length_a_socket_can_be_bound(monkeypatch, length):
    base = Path("/tmp/zrpc-test-length")
    path = base / ("p" * (length - len(str(base)) - 1))
    path.mkdir(parents=True, exist_ok=True)
    monkeypatch.setenv("ZRPC_RUNTIME_DIR", str(path))
    directory = PrivateDirectory()
    try:
        assert len(os.fsencode(directory.socket_path)) < 104
    finally:
        directory.remove()
        path.rmdir()
        base.rmdir()


def test_workers_with_another_directory_are_of_another_host(monkeypatch, tmp_path):
    keys = set()
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        monkeypatch.setattr(address, "_parent", lambda name=name: tmp_path / name)
        keys.add(host_key())
        assert host_key() in keys
    assert len(keys) == 2
    assert len({key.split("/")[0] for key in keys}) == 1


def test_this_system_has_unix_sockets():
    assert supports_ipc() is (sys.platform != "win32")


def test_the_interface_towards_this_host_is_loopback():
    assert interface_towards("127.0.0.1") == "127.0.0.1"
    assert interface_towards("localhost") in ("127.0.0.1", "::1")


def test_the_interface_towards_nowhere_is_loopback():
    assert interface_towards("host.that.is.invalid") == "127.0.0.1"


# -- directories of peers ------------------------------------------------------------------


def test_a_private_directory_of_ours_is_accepted(directory):
    address.check_private(directory.path)


def test_one_that_has_gone_is_left_to_others(tmp_path):
    address.check_private(tmp_path / "gone")


@pytest.mark.parametrize("mode", [0o755, 0o750, 0o701, 0o777])
def test_a_directory_that_is_open_to_others_is_refused(tmp_path, mode):
    tmp_path.chmod(mode)
    with pytest.raises(AuthenticationError, match=f"with mode {mode:04o}: start all workers as"):
        address.check_private(tmp_path)


def test_a_link_to_a_private_directory_is_refused(tmp_path, directory):
    link = tmp_path / "link"
    link.symlink_to(directory.path)
    with pytest.raises(AuthenticationError):
        address.check_private(link)


@pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() != 0, reason="needs another user")
def test_a_directory_of_another_user_is_refused(directory):
    os.chown(directory.path, 12345, 12345)
    with pytest.raises(AuthenticationError, match="found one of user 12345"):
        address.check_private(directory.path)


@pytest.mark.parametrize("mode", [0o777, 0o702])
def test_no_socket_is_put_where_others_can_replace_it(parent, mode):
    parent.chmod(mode)
    with pytest.raises(AuthenticationError, match=f"chmod o-w {parent}"):
        PrivateDirectory()
    parent.chmod(mode | stat.S_ISVTX)  # as /tmp is
    PrivateDirectory().remove()


@pytest.mark.parametrize("name", ["not-there", "a-file"])
def test_a_directory_for_sockets_that_is_none_is_named(monkeypatch, parent, name):
    (parent / "a-file").touch()
    monkeypatch.setenv("ZRPC_RUNTIME_DIR", str(parent / name))
    with pytest.raises(RpcError, match=rf"{name} \(No.*: make it one, .* in ZRPC_RUNTIME_DIR"):
        PrivateDirectory()


def test_a_temporary_directory_that_is_open_to_all_is_passed_over(monkeypatch, tmp_path):
    volume, other = tmp_path / "volume", tmp_path / "other"
    volume.mkdir()
    other.mkdir()
    monkeypatch.delenv("ZRPC_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(address.tempfile, "gettempdir", lambda: str(volume))
    monkeypatch.setattr(address, "_SECOND_CHOICE", other)
    monkeypatch.setattr(address, "_LONGEST_PATH", len(os.fsencode(tmp_path)) + 100)
    key = host_key()
    made = PrivateDirectory()
    assert made.path.parent == volume
    made.remove()
    volume.chmod(0o777)  # as an emptyDir of Kubernetes
    made = PrivateDirectory()
    assert made.path.parent == other
    assert host_key() != key
    made.remove()
    other.chmod(0o777)
    with pytest.raises(AuthenticationError, match=f"found {volume} with mode 0777"):
        PrivateDirectory()
