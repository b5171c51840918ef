"""CURVE: between hosts, workers prove who they are by their keys, and nobody else can listen.

Each worker makes a pair of keys when it starts, and puts the public one on its card, which is
signed with the cluster's secret. So a worker knows the keys of all members before it listens, and
of those that come later before they connect. A connection shows that it holds the secret half of
its key in ZMTP's handshake, before any message; then pyzmq's authenticator asks here whether that
key is a member's. Each mailbox checks the key of the inbox that it connects to in the same
handshake.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import zmq
from zmq.auth.thread import ThreadAuthenticator

__all__ = ["Curve", "Gatekeeper", "KeyPair", "supports_curve"]

logger = logging.getLogger(__name__)

# With a domain of its own and ZAP_ENFORCE_DOMAIN, libzmq admits nobody while no authenticator
# answers; without, it would then admit everybody.
_DOMAIN = "zrpc"
# How long a connection may take to say who it is, in milliseconds; then it is closed.
_HANDSHAKE_MS = 10_000
# Connections that are refused are told this often at most, in seconds.
_TELL_EVERY = 10.0


def supports_curve() -> bool:
    """Whether libzmq was built with CURVE; that of pyzmq's wheels is."""
    return bool(zmq.has("curve"))


@dataclass(frozen=True)
class KeyPair:
    """The keys of one worker, in ZeroMQ's notation of 40 characters."""

    public: str
    secret: bytes = field(repr=False)

    @classmethod
    def new(cls) -> KeyPair:
        """A new pair."""
        public, secret = zmq.curve_keypair()
        return cls(public.decode(), secret)


class Curve:
    """One worker's keys, and the public keys of all members.

    Args:
        keys: the worker's own.
        members: those that are there from the start, by rank.

    Attributes:
        members: all there are, by number (`zrpc.worker_info`).
    """

    def __init__(self, keys: KeyPair, members: Sequence[str]) -> None:
        self._keys = keys
        self.members = dict(enumerate(members))

    def guard_inbox(self, inbox: zmq.Socket[Any]) -> None:
        """Makes what the socket binds from now on accept members only."""
        inbox.curve_server = True
        inbox.curve_secretkey = self._keys.secret
        inbox.zap_domain = _DOMAIN.encode()
        inbox.set(zmq.ZAP_ENFORCE_DOMAIN, 1)
        inbox.handshake_ivl = _HANDSHAKE_MS

    def guard_mailbox(self, mailbox: zmq.Socket[Any], rank: int) -> None:
        """Makes the socket's next connection one to this member and to nobody else."""
        mailbox.curve_serverkey = self.members[rank].encode()
        mailbox.curve_publickey = self._keys.public.encode()
        mailbox.curve_secretkey = self._keys.secret


class Gatekeeper:
    """Admits connections with the keys of members to all sockets of one context.

    It has a thread, which `close` ends. It is to be made before a socket is bound.

    Args:
        context: the agent's.
        members: their public keys.

    `admit` and `dismiss` may be called from any thread.
    """

    def __init__(self, context: zmq.Context[Any], members: Iterable[str]) -> None:
        # Read in the authenticator's thread, and replaced as a whole, under the lock.
        self._members = frozenset(member.encode() for member in members)
        self._lock = threading.Lock()
        self._refused = 0
        self._next_telling = 0.0
        self._authenticator = _Authenticator(context)
        self._authenticator.configure_curve_callback(_DOMAIN, self)
        self._authenticator.start()
        self._authenticator.thread.name = "zrpc-gatekeeper"

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether a connection with this key is admitted. For the authenticator's thread."""
        if key in self._members:
            return True
        self._refused += 1
        if time.monotonic() >= self._next_telling:
            logger.warning(
                "refused %d connection(s) with a key that is no member's, the last from %s",
                self._refused,
                self._authenticator.address,
            )
            self._refused, self._next_telling = 0, time.monotonic() + _TELL_EVERY
        return False

    def admit(self, member: str) -> None:
        """Admits connections with this key from now on."""
        with self._lock:
            self._members |= {member.encode()}

    def dismiss(self, member: str) -> None:
        """Admits no more connections with this key; those that stand go on."""
        with self._lock:
            self._members -= {member.encode()}

    def close(self) -> None:
        """Ends the thread, and waits for its end."""
        authenticator = self._authenticator
        if not authenticator.is_alive() and authenticator.pipe is not None:
            # Nobody would take the request to stop, which would wait for that.
            authenticator.pipe.close()
            authenticator.pipe = None  # type: ignore[assignment]
        with contextlib.suppress(zmq.ZMQError):
            authenticator.stop()


class _Authenticator(ThreadAuthenticator):
    """pyzmq's, which also knows where the connection comes from that it is asked about."""

    address = "nowhere"

    async def handle_zap_message(self, msg: list[bytes]) -> None:
        self.address = msg[3].decode(errors="replace") if len(msg) > 3 else "nowhere"
        await super().handle_zap_message(msg)
