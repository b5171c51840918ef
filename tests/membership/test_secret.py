"""The cluster secret: where it is read from, and which files are refused."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from zrpc.errors import AuthenticationError
from zrpc.membership.secret import ClusterSecret, find_secret, new_secret, write_secret

TEXT = "s" * 40


def test_no_secret() -> None:
    assert find_secret({}) is None
    assert find_secret({"ZRPC_SECRET": "", "ZRPC_SECRET_FILE": ""}) is None


def test_the_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZRPC_SECRET", TEXT)
    monkeypatch.delenv("ZRPC_SECRET_FILE", raising=False)
    found = find_secret()
    assert found is not None
    assert found.signature("key", b"value") == ClusterSecret(TEXT).signature("key", b"value")


def test_a_file_is_equal_to_the_variable(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    write_secret(path, TEXT)
    found = find_secret({"ZRPC_SECRET_FILE": str(path)})
    assert found is not None
    assert found.signature("key", b"value") == ClusterSecret(TEXT).signature("key", b"value")


def test_a_variable_and_a_file_together_are_refused(tmp_path: Path) -> None:
    with pytest.raises(AuthenticationError, match="found both: unset one"):
        find_secret({"ZRPC_SECRET": TEXT, "ZRPC_SECRET_FILE": str(tmp_path)})


@pytest.mark.parametrize("umask", [0, 0o077, 0o777])
def test_a_written_secret_is_readable_by_the_owner_only(tmp_path: Path, umask: int) -> None:
    path = tmp_path / "secret"
    before = os.umask(umask)
    try:
        write_secret(path, TEXT)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.read_text() == TEXT + "\n"


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text("in use")
    with pytest.raises(FileExistsError):
        write_secret(path, TEXT)
    assert path.read_text() == "in use"
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FileExistsError):
        write_secret(link, TEXT)
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o666, 0o610])
def test_a_file_that_others_can_open_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "secret"
    write_secret(path, TEXT)
    path.chmod(mode)
    with pytest.raises(AuthenticationError, match=f"mode 0600, found {mode:04o}") as caught:
        find_secret({"ZRPC_SECRET_FILE": str(path)})
    assert TEXT not in str(caught.value)
    path.chmod(0o400)
    assert find_secret({"ZRPC_SECRET_FILE": str(path)})


@pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() != 0, reason="needs another user")
def test_a_file_of_another_user_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    write_secret(path, TEXT)
    os.chown(path, 12345, 12345)
    with pytest.raises(AuthenticationError, match="belongs to user 12345"):
        find_secret({"ZRPC_SECRET_FILE": str(path)})


def test_a_path_that_is_not_a_regular_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    for name, told in [
        ("missing", "can't be read"),
        (".", "expected a file"),
        ("pipe", "expected a file"),
    ]:
        with pytest.raises(AuthenticationError, match=told):
            find_secret({"ZRPC_SECRET_FILE": str(tmp_path / name)})


@pytest.mark.parametrize("content", [b"", b"\n", b"short", b" " * 100, b"\xff" * 64, b"x" * 10_000])
def test_a_file_without_a_secret(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "secret"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(AuthenticationError, match="holds no cluster secret"):
        find_secret({"ZRPC_SECRET_FILE": str(path)})


@pytest.mark.parametrize("text", ["short", "x" * 31, "x" * 5000, " " * 64])
def test_a_secret_that_can_be_guessed(text: str) -> None:
    with pytest.raises(AuthenticationError, match=r"32 to 4096 characters.*zrpc secret"):
        find_secret({"ZRPC_SECRET": text})


def test_new_secrets_differ_and_are_long_enough() -> None:
    assert new_secret() != new_secret()
    ClusterSecret(new_secret())


def test_a_secret_is_not_shown() -> None:
    secret = ClusterSecret(TEXT)
    assert TEXT not in repr(secret) + str(secret) + f"{secret}"


def test_a_signature_is_valid_for_one_key_value_and_secret() -> None:
    one, other = ClusterSecret("1" * 64), ClusterSecret("2" * 64)
    signature = one.signature("key", b"value")
    assert one.signed("key", b"value", signature)
    assert not other.signed("key", b"value", signature)
    assert not one.signed("keyv", b"alue", signature)
    assert not one.signed("key", b"valu", signature)
    assert not one.signed("key", b"value", signature[:-1])
    assert not one.signed("key", b"value", b"")
    assert len(signature) == 64
