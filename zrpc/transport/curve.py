"""CURVE: between hosts, workers authenticate by their keys, and all traffic is encrypted.

Each worker makes a pair of keys when it starts, and puts the public key into its peer record, which
is signed with the cluster's secret. So a worker knows the keys of all peers before it listens, and
the keys of later ones before they connect. In ZMTP's handshake, before any message, a connection
proves that it holds the secret half of its key. Then pyzmq's authenticator asks here whether that
key belongs to a peer, and to which one. In the same handshake, each mailbox checks the key of the
inbox that it connects to.

ZeroMQ attaches the answer to each message of that connection, and the inbox takes the sender from
there, not from the routing id that the connection gives itself. So a member can't pose as
another. A part of each routing id is random, and only the two ends of the connection know it. So no
other member can take over the connection by its routing id, and the inbox needs to look up the
sender of each routing id only once.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

from zrpc.runtime.interrupts import UninterruptedLock
from zrpc.transport.identity import sender_name

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
    """One worker's keys, the public keys of its peers, and who may connect.

    `open` starts a thread, which `close` stops. Any thread may call `admit` and `dismiss`.

    Args:
        keys: the worker's own keys.
    """

    def __init__(self, keys: KeyPair) -> None:
        self._keys = keys
        # Guards the changes of both tables. Others only look up single keys.
        self._lock = UninterruptedLock()
        self._peers: dict[int, PeerKey] = {}
        # The names of admitted peers by their keys; read in the authenticator's thread.
        self._names: dict[bytes, str] = {}
        self._authenticator: _Authenticator | None = None
        self._refused = 0
        self._next_warning = 0.0

    def open(self, context: zmq.Context[Any]) -> None:
        """Admits connections of peers to all guarded sockets of a context; others wait for this."""
        self._authenticator = _Authenticator(context)
        self._authenticator.name_of = self.name_of
        self._authenticator.configure_curve_callback(_DOMAIN, self)
        self._authenticator.start()
        self._authenticator.thread.name = "zrpc-gatekeeper"

    def guard_inbox(self, inbox: zmq.Socket[Any]) -> None:
        """Makes the socket's further endpoints accept connections of peers only."""
        inbox.curve_server = True
        inbox.curve_secretkey = self._keys.secret
        inbox.zap_domain = _DOMAIN.encode()
        inbox.set(zmq.ZAP_ENFORCE_DOMAIN, 1)
        inbox.handshake_ivl = _HANDSHAKE_MS

    def guard_mailbox(self, mailbox: zmq.Socket[Any], peer: int) -> None:
        """Makes the socket's next connection succeed with this peer only."""
        mailbox.curve_serverkey = self._peers[peer].public.encode()
        mailbox.curve_publickey = self._keys.public.encode()
        mailbox.curve_secretkey = self._keys.secret

    def callback(self, domain: str, key: bytes) -> bool:
        """Returns whether to admit a connection with this key; for the authenticator's thread."""
        if key in self._names:
            return True
        self._refused += 1
        if time.monotonic() >= self._next_warning:
            logger.warning(
                "refused %d connection(s) with a key that is no member's, the last from %s",
                self._refused,
                self._authenticator and self._authenticator.address,
            )
            self._refused, self._next_warning = 0, time.monotonic() + _WARNING_SECONDS
        return False

    def name_of(self, key: bytes) -> str:
        """Returns the name of the peer with this key; empty if it was dismissed meanwhile."""
        return self._names.get(key, "")

    def admit(self, peer: int, key: PeerKey) -> None:
        """Adds a peer, and admits connections with its key from now on."""
        with self._lock:
            if peer in self._peers:  # its record was replaced
                self._names.pop(self._peers[peer].public.encode(), None)
            self._peers[peer] = key
            self._names[key.public.encode()] = sender_name(key.identity)

    def dismiss(self, peer: int) -> None:
        """Admits no new connections with a peer's key, if it has one; existing ones stay open."""
        with self._lock:
            if peer in self._peers:
                self._names.pop(self._peers[peer].public.encode(), None)

    def close(self) -> None:
        """Stops the thread, and waits for it."""
        authenticator = self._authenticator
        if authenticator is None:
            return
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

    def _send_zap_reply(
        self, request_id: bytes, status_code: bytes, status_text: bytes, user_id: str = ""
    ) -> None:
        # "Try again later": the worker may only not have heard of this member yet. After 400,
        # ZeroMQ ends the session of the connection, and to disconnect that later may end another
        # one: of another peer, if it has its memory by then.
        code = b"300" if status_code == b"400" else status_code
        super()._send_zap_reply(request_id, code, status_text, user_id)

    async def handle_zap_message(self, msg: list[bytes]) -> None:
        self.address = msg[3].decode(errors="replace") if len(msg) > 3 else "nowhere"
        await super().handle_zap_message(msg)
