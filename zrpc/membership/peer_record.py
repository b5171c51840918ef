"""What a worker publishes about itself when the workers meet."""

from __future__ import annotations

import base64
import functools
import json
import re
from dataclasses import dataclass, fields
from importlib.metadata import version

from zrpc.membership.device_settings import DeviceSettings
from zrpc.membership.worker_info import WorkerInfo
from zrpc.wire.member_id import MemberId, member_id_of

_TOKEN = re.compile("[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class PeerRecord:
    """What a worker publishes about itself."""

    name: str
    rank: int
    world_size: int  # how many workers it expects
    token: str  # 32 hexadecimal digits, drawn at each start: identifies this member
    host_key: str  # equal for workers that can use each other's Unix sockets
    # Holds the lock that shows that it is alive, and its Unix socket; empty if the system has
    # neither.
    directory: str
    main: str  # what its `__main__` is: the path of a script, or the name of a module
    ipc: bool = True  # whether it listens on that socket
    public_key: str = ""  # proves over tcp that it is this member; empty if it does not encrypt
    endpoint: str = ""  # where it listens on tcp, if it does before it meets the others
    restarts: int = 0  # how often it was restarted under its name and rank
    incarnation: int = 0  # how many members had its rank before; the others count them
    main_digest: str = ""  # of the text of its main script; empty if there is none
    network_key: str = ""  # equal for workers that can reach each other by loopback
    host: str = ""  # its host's name, for errors
    pid: int = 0  # its process there, for errors
    local_world_size: int = 0  # how many workers its host has; 0 if the engine doesn't say
    devices: str = ""  # its devices and device maps, see `DeviceSettings`; empty if it has none
    version: str = ""  # of zrpc
    heartbeat_timeout: float = 0.0  # see the options; the same for all workers of a mesh

    @classmethod
    def parse(cls, text: str) -> PeerRecord:
        """Reads a record that was written by `dump`.

        Raises:
            ValueError: it isn't a record of this version of zrpc.
        """
        try:
            values = json.loads(text)
        except RecursionError:
            values = None
        found = values.get("version") if isinstance(values, dict) else None
        if isinstance(found, str) and found not in ("", own_version()):
            raise ValueError(
                f"expected a peer record of zrpc {own_version()}, which this worker runs, found "
                f"one of {found}: install the same version on all hosts"
            )
        if not isinstance(values, dict) or values.keys() != _KINDS.keys():
            raise ValueError("expected a peer record of this version of zrpc, found another")
        if wrong := [name for name in _KINDS if type(values[name]).__name__ != _KINDS[name]]:
            raise ValueError(f"a peer record has a wrong {wrong[0]}: {values[wrong[0]]!r}")
        record = cls(**values)
        if not is_token(record.token):
            raise ValueError(f"a peer record has a wrong token: {record.token!r}")
        DeviceSettings.parse(record.devices)
        try:
            record.info  # noqa: B018  # it checks the name
        except RuntimeError as error:
            raise ValueError(f"a peer record has a wrong name: {error}") from error
        return record

    def dump(self) -> str:
        """Returns the record as text."""
        return json.dumps({name: getattr(self, name) for name in _KINDS})

    @property
    def info(self) -> WorkerInfo:
        """The worker's name and rank."""
        return WorkerInfo(self.name, self.rank, self.incarnation)

    @property
    def member_id(self) -> MemberId:
        """Which member of the mesh it is."""
        return member_id_of(self.rank, self.incarnation)

    def mismatch(self, other: PeerRecord) -> str | None:
        """Returns in which way the two expect different meshes; None if they don't."""
        if self.world_size == other.world_size:
            if self.heartbeat_timeout == other.heartbeat_timeout:
                return None
            return (
                f"worker {self.name} (rank {self.rank}) has heartbeat_timeout="
                f"{self.heartbeat_timeout:g}, but worker {other.name} (rank {other.rank}) "
                f"{other.heartbeat_timeout:g}: give all workers of the mesh the same"
            )
        if self.world_size and other.world_size:
            return (
                f"worker {self.name} (rank {self.rank}) expects a world of {self.world_size} "
                f"workers, but worker {other.name} (rank {other.rank}) one of {other.world_size}"
            )
        fixed, without = (self, other) if self.world_size else (other, self)
        return (
            f"RPC group mixes statically and dynamically: worker {fixed.name} (rank {fixed.rank}) "
            f"has a world size, {fixed.world_size}, and worker {without.name} (rank "
            f"{without.rank}) none"
        )

    def shares_host(self, other: PeerRecord) -> bool:
        """Whether the two workers can see each other's private directories."""
        return bool(self.directory and other.directory) and self.host_key == other.host_key

    def reaches_by_ipc(self, other: PeerRecord) -> bool:
        """Whether the two workers talk by Unix sockets."""
        return self.shares_host(other) and self.ipc and other.ipc

    def same_main(self, other: PeerRecord) -> bool:
        """Whether names in ``__main__`` mean the same to the two workers.

        This includes the same script in another place, as on another host.
        """
        same_text = bool(self.main_digest) and self.main_digest == other.main_digest
        return self.main == other.main or same_text

    @property
    def identity(self) -> bytes:
        """The token as ZeroMQ's routing id: ASCII, since `Inbox` may have to read it as text."""
        return self.identity_of(self.token)

    @staticmethod
    def identity_of(token: str) -> bytes:
        """Returns a token as ZeroMQ's routing id."""
        return b"z" + base64.urlsafe_b64encode(bytes.fromhex(token)).rstrip(b"=")


# The types of a record's fields, by name.
_KINDS = {field.name: field.type for field in fields(PeerRecord)}


@functools.cache
def own_version() -> str:
    """Returns the version of zrpc in this process."""
    return version("torch-zrpc")


def is_token(text: str) -> bool:
    """Whether a text has the form of a record's token."""
    return _TOKEN.fullmatch(text) is not None
