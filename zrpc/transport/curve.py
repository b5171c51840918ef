"""CURVE: between hosts, workers authenticate by their keys, and all traffic is encrypted.

Each worker makes a pair of keys when it starts, and puts the public key into its peer record, which
is signed with the cluster's secret. So a worker knows the keys of all peers before it listens, and
the keys of later ones before they connect. In ZMTP's handshake, before any message, a connection
proves that it holds the secret half of its key. Then pyzmq's authenticator asks here whether that
key belongs to a peer, and to which one. In the same handshake, each mailbox checks the key of the
inbox that it connects to.

ZeroMQ attaches the answer to each message of that connection, and the inbox takes the sender from
there, not from the routing id by which the connection names itself. So a member can't pose as
another. A part of each routing id is random, and only the two ends of the connection know it. So no
other member can take over the connection by its routing id, and the inbox needs to look up the
sender of each routing id only once.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

from zrpc.runtime.interrupts import UninterruptedLock
from zrpc.transport.identity import sender_name

__all__ = ["Curve", "Gatekeeper", "KeyPair", "PeerKey", "supports_curve"]

logger = logging.getLogger(__name__)

# With this domain and ZAP_ENFORCE_DOMAIN, libzmq admits nobody while no authenticator answers.
# Without them it would then admit everybody.
_DOMAIN = "zrpc"
# A connection that takes longer to authenticate is closed.
_HANDSHAKE_MS = 10_000
# The minimum between two warnings about refused connections.
_WARNING_SECONDS = 10.0


def supports_curve() -> bool:
    """Returns whether libzmq was built with CURVE; the one in pyzmq's wheels was."""
    return bool(zmq.has("curve"))


@dataclass(frozen=True)
class KeyPair:
    """The keys of one worker, in ZeroMQ's encoding of 40 characters."""

    public: str
    secret: bytes = field(repr=False)

    @classmethod
    def new(cls) -> KeyPair:
        """Makes a new pair."""
        public, secret = zmq.curve_keypair()
        return cls(public.decode(), secret)


class PeerKey(NamedTuple):
    """The public key of a peer, and the identity to which it belongs."""

    public: str
    identity: bytes


class Curve:
    """One worker's keys, and the public keys of its peers.

    Args:
        keys: the worker's own keys.
        peers: the keys of peers 0, 1, ... which are known from the start.

    Attributes:
        peers: the keys of all peers.
    """

    def __init__(self, keys: KeyPair, peers: Sequence[PeerKey]) -> None:
        self._keys = keys
        self.peers = dict(enumerate(peers))

    def guard_inbox(self, inbox: zmq.Socket[Any]) -> None:
        """Makes the socket's further endpoints accept connections of peers only."""
        inbox.curve_server = True
        inbox.curve_secretkey = self._keys.secret
        inbox.zap_domain = _DOMAIN.encode()
        inbox.set(zmq.ZAP_ENFORCE_DOMAIN, 1)
        inbox.handshake_ivl = _HANDSHAKE_MS

    def guard_mailbox(self, mailbox: zmq.Socket[Any], peer: int) -> None:
        """Makes the socket's next connection succeed with this peer only."""
        mailbox.curve_serverkey = self.peers[peer].public.encode()
        mailbox.curve_publickey = self._keys.public.encode()
        mailbox.curve_secretkey = self._keys.secret


class Gatekeeper:
    """Admits connections with the keys of peers to all sockets of one context.

    It has a thread, which `close` stops. It must be made before a socket is bound.

    Args:
        context: the context of all of the worker's sockets.
        peers: the keys of its peers.

    `admit` and `dismiss` may be called from any thread.
    """

    def __init__(self, context: zmq.Context[Any], peers: Iterable[PeerKey]) -> None:
        # The peers' names by their keys. Read in the authenticator's thread, and replaced as a
        # whole, under the lock.
        self._names = {peer.public.encode(): sender_name(peer.identity) for peer in peers}
        self._lock = UninterruptedLock()
        self._refused = 0
        self._next_warning = 0.0
        self._authenticator = _Authenticator(context)
        self._authenticator.name_of = self.name_of
        self._authenticator.configure_curve_callback(_DOMAIN, self)
        self._authenticator.start()
        self._authenticator.thread.name = "zrpc-gatekeeper"

    def callback(self, domain: str, key: bytes) -> bool:
        """Returns whether to admit a connection with this key; for the authenticator's thread."""
        if key in self._names:
            return True
        self._refused += 1
        if time.monotonic() >= self._next_warning:
            logger.warning(
                "refused %d connection(s) with a key that is no member's, the last from %s",
                self._refused,
                self._authenticator.address,
            )
            self._refused, self._next_warning = 0, time.monotonic() + _WARNING_SECONDS
        return False

    def name_of(self, key: bytes) -> str:
        """Returns the name of the peer with this key; empty if it was dismissed meanwhile."""
        return self._names.get(key, "")

    def admit(self, peer: PeerKey) -> None:
        """Admits connections with this peer's key from now on."""
        with self._lock:
            name = sender_name(peer.identity)
            self._names = {**self._names, peer.public.encode(): name}

    def dismiss(self, peer: PeerKey) -> None:
        """Admits no new connections with this peer's key; existing ones stay open."""
        with self._lock:
            dismissed = peer.public.encode()
            self._names = {key: name for key, name in self._names.items() if key != dismissed}

    def close(self) -> None:
        """Stops the thread, and waits for it."""
        authenticator = self._authenticator
        if not authenticator.is_alive() and authenticator.pipe is not None:
            # Without its thread, stop() would wait without limit.
            authenticator.pipe.close()
            authenticator.pipe = None  # type: ignore[assignment]
        with contextlib.suppress(zmq.ZMQError):
            authenticator.stop()


class _Authenticator(ThreadAuthenticator):
    """pyzmq's authenticator, which also records the address of the current connection.

    It names the peer of each connection that it admits.
    """

    address = "nowhere"
    name_of: Callable[[bytes], str]

    def curve_user_id(self, client_public_key: bytes) -> str:
        return self.name_of(z85.encode(client_public_key))

    async def handle_zap_message(self, msg: list[bytes]) -> None:
        self.address = msg[3].decode(errors="replace") if len(msg) > 3 else "nowhere"
        await super().handle_zap_message(msg)
