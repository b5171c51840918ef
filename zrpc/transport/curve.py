"""CURVE: between hosts, workers authenticate by their keys, and all traffic is encrypted.

Each worker makes a pair of keys when it starts, and puts the public key into its peer record, which
is signed with the cluster's secret. So a worker knows the keys of all peers before it listens, and
the keys of later ones before they connect. In ZMTP's handshake, before any message, a connection
proves that it holds the secret half of its key. Then ZeroMQ asks the `Gatekeeper` whether that key
belongs to a peer, and to which one. In the same handshake, each mailbox checks the key of the
inbox that it connects to.

ZeroMQ attaches the answer to each message of that connection, and the inbox takes the sender from
there, not from the routing id by which the connection names itself. So a member can't pose as
another. A part of each routing id is random, and only the two ends of the connection know it. So no
other member can take over the connection by its routing id, and the inbox needs to look up the
sender of each routing id only once.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import zmq
from zmq.utils import z85

from zrpc.transport.identity import sender_name

__all__ = ["Curve", "Gatekeeper", "KeyPair", "PeerKey", "supports_curve"]

logger = logging.getLogger(__name__)

# With this domain and ZAP_ENFORCE_DOMAIN, libzmq admits nobody while no gatekeeper answers.
# Without them it would then admit everybody.
_DOMAIN = "zrpc"
# A connection that takes longer to authenticate is closed.
_HANDSHAKE_MS = 10_000
# At which libzmq asks whether to admit a connection.
_ENDPOINT = "inproc://zeromq.zap.01"
_STOP = b"stop"
_MISSING = [b""] * 7  # in place of frames that a request lacks; there is no such request
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

    It answers the requests of ZeroMQ's authentication protocol (RFC 27, ZAP) in a thread, which
    `close` stops. It must be made before a socket is bound.

    It does little for each request. Each of N workers has up to 4 N of them when all begin to call
    each other at once, and meanwhile its peers wait. (The one of pyzmq has an event loop
    and takes five times as long.)

    Args:
        context: the context of all of the worker's sockets.
        peers: the keys of its peers.

    `admit` and `dismiss` may be called from any thread.
    """

    def __init__(self, context: zmq.Context[Any], peers: Iterable[PeerKey]) -> None:
        # The peers' names by their keys, as ZeroMQ sends these. Read in the gatekeeper's thread,
        # and replaced as a whole, under the lock.
        self._names = {_binary(peer): sender_name(peer.identity) for peer in peers}
        self._lock = threading.Lock()
        self._refused = 0
        self._next_warning = 0.0
        self._requests = context.socket(zmq.REP)
        self._stopper = context.socket(zmq.DEALER)
        self._requests.linger = self._stopper.linger = 0
        self._requests.bind(_ENDPOINT)
        self._stopper.connect(_ENDPOINT)
        self._thread = threading.Thread(target=self._serve, name="zrpc-gatekeeper", daemon=True)
        self._thread.start()

    def name_of(self, peer: PeerKey) -> str:
        """Returns the name of the peer with this key; empty if connections with it are refused."""
        return self._names.get(_binary(peer), "")

    def admit(self, peer: PeerKey) -> None:
        """Admits connections with this peer's key from now on."""
        with self._lock:
            self._names = {**self._names, _binary(peer): sender_name(peer.identity)}

    def dismiss(self, peer: PeerKey) -> None:
        """Admits no new connections with this peer's key; existing ones stay open."""
        with self._lock:
            dismissed = _binary(peer)
            self._names = {key: name for key, name in self._names.items() if key != dismissed}

    def close(self) -> None:
        """Stops the thread, and waits for it. Idempotent."""
        if self._thread.is_alive():
            self._stopper.send_multipart([b"", _STOP])
            self._thread.join()  # at once: it waits for nothing else
        self._stopper.close()
        self._requests.close()

    def _serve(self) -> None:
        """In the gatekeeper's thread: answers requests until there is a request to stop."""
        while (request := self._requests.recv_multipart()) != [_STOP]:
            self._requests.send_multipart(self._answer(request))

    def _answer(self, request: Sequence[bytes]) -> list[bytes]:
        """Returns the answer to a request: whether its key is a member's, and of which."""
        version, number, _, address, _, mechanism, key = (*request, *_MISSING)[:7]
        name = self._names.get(key, "") if mechanism == b"CURVE" else ""
        if name:
            return [version, number, b"200", b"OK", name.encode(), b""]
        self._refused += 1
        if time.monotonic() >= self._next_warning:
            logger.warning(
                "refused %d connection(s) with a key that is no member's, the last from %s",
                self._refused,
                address.decode(errors="replace"),
            )
            self._refused, self._next_warning = 0, time.monotonic() + _WARNING_SECONDS
        return [version, number, b"400", b"Unknown key", b"", b""]


def _binary(peer: PeerKey) -> bytes:
    return z85.decode(peer.public.encode())
