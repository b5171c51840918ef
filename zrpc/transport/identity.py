"""The identities of workers as senders, and the routing ids of their connections. No I/O.

An identity is a letter, which stands for a kind of connection, and the worker's token. A routing id
is what a connection shows to ZeroMQ. It is the identity, or the identity with a random part, which
makes it one that nobody else can show.
"""

from __future__ import annotations

import secrets

# The first byte of the identities of mailboxes for large messages, and of heartbeats.
BULK_LETTER = ord("b")
HEARTBEAT_LETTER = ord("h")
# In place of an identity: no worker has it.
NOBODY = b"?"

_RANDOM_BYTES = 16
_DOT = b"."  # not in a token


def bulk_identity(identity: bytes) -> bytes:
    """Returns the identity of the mailboxes for large messages of the worker with this one."""
    return bytes([BULK_LETTER]) + identity[1:]


def heartbeat_identity(identity: bytes) -> bytes:
    """Returns the identity of the heartbeats of the worker with this one."""
    return bytes([HEARTBEAT_LETTER]) + identity[1:]


def random_routing_id(identity: bytes) -> bytes:
    """Returns a new routing id for a connection of this identity."""
    return identity + _DOT + secrets.token_urlsafe(_RANDOM_BYTES).encode()


def identity_of(routing_id: bytes) -> bytes:
    """Returns the identity in a routing id.

    Example:
        >>> identity_of(random_routing_id(b"ztoken"))
        b'ztoken'
    """
    return routing_id.partition(_DOT)[0]


def sender_name(identity: bytes) -> str:
    """Returns an identity without its letter: what all identities of a worker have in common."""
    return identity[1:].decode()
