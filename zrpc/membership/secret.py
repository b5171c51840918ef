"""The cluster secret, which only the workers of one mesh know.

It signs what they write to the store. ``zrpc launch`` makes one for each run; for a run on several
hosts, ``zrpc secret`` makes one that is copied to all of them.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path

from zrpc.errors import AuthenticationError

VARIABLE = "ZRPC_SECRET"
FILE_VARIABLE = "ZRPC_SECRET_FILE"

# Anyone who can read the store can try secrets against a signature, so it must not be guessable.
_MIN_CHARACTERS = 32
_MAX_CHARACTERS = 4096
_ROOT = 0
# The mode of a mounted secret of Kubernetes in a pod with an fsGroup: its volume is read-only.
_GROUPS_COPY = 0o440
_PURPOSE = b"zrpc rendezvous entry 1"


class ClusterSecret:
    """A secret, for signing entries of a store.

    Args:
        text: at least 32 characters; surrounding white space doesn't count.

    Raises:
        AuthenticationError: it is too short, or too long, or not of UTF-8 text.
        TypeError: it is no str.
    """

    __slots__ = ("_key",)

    def __init__(self, text: str) -> None:
        if not isinstance(text, str):
            raise TypeError(f"expected a cluster secret as a str, but got {type(text).__name__}")
        text = text.strip()
        if not _MIN_CHARACTERS <= len(text) <= _MAX_CHARACTERS:
            raise AuthenticationError(
                f"expected a cluster secret of {_MIN_CHARACTERS} to {_MAX_CHARACTERS} characters, "
                f"found one of {len(text)}: make one with `zrpc secret`"
            )
        self._key = text.encode(errors="replace")  # an error would have the secret in it
        if self._key.decode() != text:
            raise AuthenticationError(
                "expected a cluster secret of UTF-8 text, found other bytes: make one with `zrpc "
                "secret`"
            )

    def __repr__(self) -> str:
        return "<ClusterSecret>"  # never the secret itself: this appears in logs

    def signature(self, key: str, value: bytes) -> bytes:
        """Returns the HMAC-SHA256 of the value under a key, as 64 hexadecimal digits.

        The key is signed too, so that no entry is valid in place of another.
        """
        name = key.encode()
        signed = b"".join((_PURPOSE, len(name).to_bytes(4, "big"), name, value))
        return hmac.new(self._key, signed, hashlib.sha256).hexdigest().encode()

    def signed(self, key: str, value: bytes, signature: bytes) -> bool:
        """Whether a signature is valid; takes the same time wherever a wrong one differs."""
        return hmac.compare_digest(self.signature(key, value), signature)


def new_secret() -> str:
    """Returns a new secret of 256 random bits, as 64 hexadecimal digits."""
    return secrets.token_hex(32)


def write_secret(path: Path, text: str) -> None:
    """Writes a secret to a new file that only its owner can read.

    Raises:
        FileExistsError: something has that name; it is left as it is.
        OSError: it can't be written.
    """
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "w") as file:
        os.fchmod(fd, 0o600)  # whatever the umask leaves
        file.write(f"{text}\n")


def find_secret(environment: Mapping[str, str] = os.environ) -> ClusterSecret | None:
    """Returns the secret that ``ZRPC_SECRET_FILE`` or ``ZRPC_SECRET`` names; None without either.

    The file must belong to this user or to root, and nobody else may read it. One exception is mode
    0440 and root as the owner, which is what Kubernetes gives to the secrets of a pod with a group.

    Raises:
        AuthenticationError: both are set; the file can't be read, belongs to another user, or can
            be read by others; the secret is too short.
    """
    text, file = environment.get(VARIABLE, ""), environment.get(FILE_VARIABLE, "")
    if text and file:
        raise AuthenticationError(
            f"expected {VARIABLE} or {FILE_VARIABLE}, found both: unset one of them"
        )
    if file:
        return _read(Path(file))
    if not text:
        return None
    try:
        return ClusterSecret(text)
    except AuthenticationError as error:
        raise AuthenticationError(f"{VARIABLE} holds no cluster secret: {error}") from error


def _read(path: Path) -> ClusterSecret:
    try:
        # O_NONBLOCK: does not wait for a writer if the path is that of a pipe.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise _unreadable(path, error) from error
    try:
        _check_file(path, os.fstat(fd))
        data = os.read(fd, _MAX_CHARACTERS + 2)
    except OSError as error:
        raise _unreadable(path, error) from error
    finally:
        os.close(fd)
    try:
        return ClusterSecret(data.decode())
    except (UnicodeDecodeError, AuthenticationError) as error:
        raise AuthenticationError(f"the file {path} holds no cluster secret: {error}") from error


def _unreadable(path: Path, error: OSError) -> AuthenticationError:
    advice = "make it with `zrpc secret FILE`, and copy it to each host"
    if os.path.islink(path) and not os.path.exists(path):  # unlike Path, for any path
        advice = f"it is a symbolic link to {path.readlink()}, and nothing is there"
    elif isinstance(error, PermissionError):
        advice = (
            f"give it to this user ({os.geteuid()}) by `chown`, and check the directories above "
            "it. In Kubernetes, set securityContext.fsGroup of the pod, so that its group can read "
            "it"
        )
        with contextlib.suppress(OSError):
            advice = f"it has {_rights(path.stat())}; {advice}"
    return AuthenticationError(
        f"expected {FILE_VARIABLE} to name a file that this user can read, found {path} "
        f"({error.strerror}): {advice}"
    )


def _check_file(path: Path, status: os.stat_result) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise AuthenticationError(
            f"expected a file with the cluster secret, found the directory {path}: name the file "
            "in it (in Kubernetes, its name is the key within the Secret)"
        )
    if not stat.S_ISREG(status.st_mode):
        raise AuthenticationError(
            f"expected a file with the cluster secret, found {path}, which is none: make one with "
            "`zrpc secret FILE`"
        )
    if status.st_uid not in (os.geteuid(), _ROOT):
        raise AuthenticationError(
            f"expected {path} to belong to this user ({os.geteuid()}) or to root, found "
            f"{_rights(status)}: its owner could change the cluster secret. Use a copy of your own"
        )
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o077 and not (status.st_uid == _ROOT and mode == _GROUPS_COPY):
        raise AuthenticationError(
            f"expected {path} to have mode 0600 (or 0440, if it is root's and its group may read "
            f"it), found {_rights(status)}: others could have read the cluster secret. Make a new "
            f"one with `zrpc secret`, or `chmod 600 {path}` if only trusted users can log in here. "
            "In Kubernetes, set defaultMode: 0400 for the volume"
        )


def _rights(status: os.stat_result) -> str:
    mode = stat.S_IMODE(status.st_mode)
    return f"mode {mode:04o}, user {status.st_uid} and group {status.st_gid}"
