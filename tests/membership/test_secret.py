"""The cluster secret: where it is read from, and which files are refused."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.forks import exit_code, fork
from zrpc.errors import AuthenticationError
from zrpc.membership.secret import ClusterSecret, find_secret, new_secret, write_secret

TEXT = "s" * 40

_needs_another_user = pytest.mark.skipif(
    not hasattr(os, "getuid") or os.getuid() != 0, reason="needs another user"
)


def test_a_secret_is_found_in_the_environment_and_in_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert find_secret({}) is find_secret({"ZRPC_SECRET": "", "ZRPC_SECRET_FILE": ""}) is None
    monkeypatch.setenv("ZRPC_SECRET", TEXT)
    monkeypatch.delenv("ZRPC_SECRET_FILE", raising=False)
    write_secret(tmp_path / "secret", TEXT)
    for found in (find_secret(), find_secret({"ZRPC_SECRET_FILE": str(tmp_path / "secret")})):
        assert found is not None
        assert found.signature("key", b"value") == ClusterSecret(TEXT).signature("key", b"value")


def test_a_variable_and_a_file_together_are_refused(tmp_path: Path) -> None:
    with pytest.raises(AuthenticationError, match="found both: unset one"):
        find_secret({"ZRPC_SECRET": TEXT, "ZRPC_SECRET_FILE": str(tmp_path)})


def test_a_written_secret_is_readable_by_the_owner_only(tmp_path: Path) -> None:
    for umask in (0, 0o077, 0o777):
        path = tmp_path / str(umask)
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


def test_a_file_that_others_can_open_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    write_secret(path, TEXT)
    for mode in (0o640, 0o604, 0o620, 0o666, 0o610):
        path.chmod(mode)
        with pytest.raises(
            AuthenticationError, match=f"have mode 0600 .*, found mode {mode:04o}, "
        ) as caught:
            find_secret({"ZRPC_SECRET_FILE": str(path)})
        assert TEXT not in str(caught.value)
    path.chmod(0o400)
    assert find_secret({"ZRPC_SECRET_FILE": str(path)})


def test_a_path_that_is_not_a_regular_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    (tmp_path / "link").symlink_to("..data/secret")
    for name, told in [
        ("missing", "No such file or directory.*: make it with `zrpc secret FILE`"),
        (".", "found the directory .*: name the file in it"),
        ("pipe", "expected a file with the cluster secret, found .*pipe, which is none: make one"),
        ("link", r"link to \.\.data/secret, and nothing is there"),
    ]:
        with pytest.raises(AuthenticationError, match=told):
            find_secret({"ZRPC_SECRET_FILE": str(tmp_path / name)})


# -- another user --------------------------------------------------------------------------

USER, GROUP = 12345, 23456


@pytest.fixture
def mounted() -> Iterator[Path]:
    """A secret as kubelet mounts it: links to a directory, which is replaced as a whole."""
    with tempfile.TemporaryDirectory() as name:
        volume = Path(name)
        volume.chmod(0o755)  # in place of a tmpfs: the pod's user can pass
        (volume / "..2026_11_22").mkdir(mode=0o755)
        (volume / "..2026_11_22" / "secret").write_text(TEXT)
        (volume / "..data").symlink_to("..2026_11_22")
        (volume / "secret").symlink_to("..data/secret")
        yield volume / "secret"


def read_as_user(path: Path, mode: int, owner: int = 0, group: int = GROUP) -> str:
    """Returns what a process of another user and of a group finds, or the error's text."""
    os.chown(path, owner, group)
    path.chmod(mode)
    found = path.parent / "found"

    def read() -> None:
        os.setgroups([GROUP])
        os.setgid(USER)
        os.setuid(USER)
        try:
            print(find_secret({"ZRPC_SECRET_FILE": str(path)}), file=out, flush=True)
        except AuthenticationError as error:
            print(error, file=out, flush=True)

    with found.open("w") as out:
        assert exit_code(fork(read)) == 0
    return found.read_text()


@pytest.mark.system
@_needs_another_user
def test_a_file_that_another_user_may_use(mounted: Path) -> None:
    """As its owner, or as Kubernetes mounts a secret for a group."""
    for mode, owner in ((0o440, 0), (0o400, USER), (0o600, USER)):
        assert read_as_user(mounted, mode, owner) == "<ClusterSecret>\n"


@pytest.mark.system
@_needs_another_user
def test_a_file_that_another_user_may_not_use(mounted: Path) -> None:
    readable = "others could have read the cluster secret"
    for mode, owner, group, told in (
        (0o444, 0, GROUP, readable),
        (0o644, 0, GROUP, "In Kubernetes, set defaultMode: 0400 for the volume"),
        (0o460, 0, GROUP, readable),
        (0o440, USER, GROUP, readable),
        (0o440, 777, GROUP, "(12345) or to root, found mode 0440, user 777 and group 23456: its"),
        (0o400, 0, 0, "has mode 0400, user 0 and group 0; give it to this user (12345) by `chown`"),
        (0o400, 0, 0, "In Kubernetes, set securityContext.fsGroup of the pod"),
    ):
        assert told in read_as_user(mounted, mode, owner, group)


def test_a_secret_that_can_be_guessed_or_none(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    for content in (b"", b"\n", b"short", b" " * 100, b"\xff" * 64, b"x" * 10_000):
        path.write_bytes(content)
        path.chmod(0o600)
        with pytest.raises(AuthenticationError, match="holds no cluster secret"):
            find_secret({"ZRPC_SECRET_FILE": str(path)})
    told = r"ZRPC_SECRET holds no.* 32 to 4096 characters, found one of \d+: make .*zrpc secret"
    for text in ("short", "x" * 31, "x" * 5000, " " * 64):
        with pytest.raises(AuthenticationError, match=told):
            find_secret({"ZRPC_SECRET": text})


def test_a_secret_that_is_no_text_is_not_shown(tmp_path: Path) -> None:
    other = "\udce9" * 40
    with pytest.raises(AuthenticationError, match="UTF-8 text") as found:
        find_secret({"ZRPC_SECRET": other})
    error: BaseException | None = found.value
    while error is not None:
        assert "udce9" not in repr(error)
        error = error.__cause__ or error.__context__
    with pytest.raises(TypeError, match="as a str, but got bytes"):
        ClusterSecret(TEXT.encode())  # type: ignore[arg-type]
    for path in (str(tmp_path / ("x" * 300)), "/proc/self/mem"):
        with pytest.raises(AuthenticationError, match="expected ZRPC_SECRET_FILE to name a file"):
            find_secret({"ZRPC_SECRET_FILE": path})


def test_new_secrets_differ_and_are_long_enough_and_not_shown() -> None:
    text = new_secret()
    assert text != new_secret()
    secret = ClusterSecret(text)
    assert text not in repr(secret) + str(secret) + f"{secret}"


def test_a_signature_is_valid_for_one_key_value_and_secret() -> None:
    one, other = ClusterSecret("1" * 64), ClusterSecret("2" * 64)
    signature = one.signature("key", b"value")
    assert len(signature) == 64
    assert one.signed("key", b"value", signature)
    assert not other.signed("key", b"value", signature)
    for key, value in (("keyv", b"alue"), ("key", b"valu")):
        assert not one.signed(key, value, signature)
    for wrong in (signature[:-1], b""):
        assert not one.signed("key", b"value", wrong)
