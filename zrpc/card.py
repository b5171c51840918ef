"""What a worker tells all others about itself when they meet."""

from __future__ import annotations

import base64
import json
import re
from dataclasses import asdict, dataclass, fields

from zrpc.worker_info import WorkerInfo, number_of

__all__ = ["Card", "claimed_token"]

_TOKEN = re.compile("[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class Card:
    """What a worker tells all others about itself.

    Attributes:
        name: the worker's name.
        rank: its rank.
        world_size: how many workers it expects.
        token: 32 hexadecimal digits, drawn anew for each start: names this very member.
        host_key: equal for workers that can use each other's Unix sockets.
        directory: with the lock that says it lives, and its Unix socket; empty where the
            system has no such things.
        main: what its ``__main__`` is: the path of a script, or the name of a module.
        ipc: whether it listens on that socket.
        public_key: by which it proves over tcp that it is this member; empty where it talks
            in the clear.
        endpoint: where it listens on tcp, where it does before it meets the others.
        restarts: how often it was started again under its name and rank.
        incarnation: how many members have had its rank before; the others know that.
        main_digest: of the text of its main script; empty where there is none.
    """

    name: str
    rank: int
    world_size: int
    token: str
    host_key: str
    directory: str
    main: str
    ipc: bool = True
    public_key: str = ""
    endpoint: str = ""
    restarts: int = 0
    incarnation: int = 0
    main_digest: str = ""

    @classmethod
    def parse(cls, text: str) -> Card:
        """Reads a card that was written by `dump`.

        Raises:
            ValueError: it is none, or one of another version of zrpc.
        """
        try:
            values = json.loads(text)
        except RecursionError:
            values = None
        kinds = {field.name: field.type for field in fields(cls)}
        if not isinstance(values, dict) or values.keys() != kinds.keys():
            raise ValueError("expected a worker's card of this version of zrpc, found another")
        if wrong := [name for name in kinds if type(values[name]).__name__ != kinds[name]]:
            raise ValueError(f"a worker's card has a wrong {wrong[0]}: {values[wrong[0]]!r}")
        card = cls(**values)
        if not _TOKEN.fullmatch(card.token):
            raise ValueError(f"a worker's card has a wrong token: {card.token!r}")
        try:
            card.info  # noqa: B018  # it checks the name
        except RuntimeError as error:
            raise ValueError(f"a worker's card has a wrong name: {error}") from error
        return card

    def dump(self) -> str:
        """The card as text."""
        return json.dumps(asdict(self))

    @property
    def info(self) -> WorkerInfo:
        """The worker's name and rank."""
        return WorkerInfo(self.name, self.rank, self.incarnation)

    @property
    def number(self) -> int:
        """Which member of the mesh it is; see `zrpc.worker_info`."""
        return number_of(self.rank, self.incarnation)

    def shares_host(self, other: Card) -> bool:
        """Whether the two workers can see each other's private directories."""
        return bool(self.directory and other.directory) and self.host_key == other.host_key

    def reaches_by_ipc(self, other: Card) -> bool:
        """Whether the two workers talk by Unix sockets."""
        return self.shares_host(other) and self.ipc and other.ipc

    def same_main(self, other: Card) -> bool:
        """Whether names in ``__main__`` mean the same to the two workers.

        Also where the same script lies at another place, as it may on another host.
        """
        same_text = bool(self.main_digest) and self.main_digest == other.main_digest
        return self.main == other.main or same_text

    @property
    def identity(self) -> bytes:
        """The token as ZeroMQ's routing id: ASCII, since `Inbox` may have to ask for it as text."""
        return self.identity_of(self.token)

    @staticmethod
    def identity_of(token: str) -> bytes:
        """A token as ZeroMQ's routing id."""
        return b"z" + base64.urlsafe_b64encode(bytes.fromhex(token)).rstrip(b"=")


def claimed_token(entry: bytes) -> str:
    """The token in a card that nobody vouches for; empty where there is none."""
    try:
        token = str(json.loads(entry.partition(b" ")[2])["token"])
    except (ValueError, TypeError, KeyError, RecursionError):
        return ""
    return token if _TOKEN.fullmatch(token) else ""
