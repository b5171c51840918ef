"""What can go wrong, as one tree of exceptions.

::

    RuntimeError
    └── RpcError                      anything that zrpc raises for itself
        ├── NotInitializedError       a call before init_rpc, or after shutdown
        ├── AuthenticationError       a peer can't prove that it belongs to the mesh
        ├── RendezvousError           the workers did not find each other
        ├── RpcTimeoutError           a deadline passed (also a TimeoutError)
        ├── RpcCancelledError         the call was cancelled (also a CancelledError of futures)
        ├── SerializationError        a value can't travel, or can't be rebuilt
        ├── ProtocolError             a peer sent what it must not send
        ├── RemoteError               the callee failed, told as text
        ├── BackwardError             a worker's part of a backward pass failed
        └── WorkerDied                the peer is gone (also a ConnectionError)
            └── OwnerDied             the peer that owned an RRef's value is gone

The root is a ``RuntimeError`` because ``torch.distributed.rpc`` raises that, so that
``except RuntimeError`` in existing programs goes on to work. What a *callee's* function
raises is not in this tree: it arrives at the caller as its own type, with a `RemoteError`
that holds the remote traceback as its ``__cause__``.
"""

from __future__ import annotations

from concurrent.futures import CancelledError

__all__ = [
    "AuthenticationError",
    "BackwardError",
    "NotInitializedError",
    "OwnerDied",
    "ProtocolError",
    "RemoteError",
    "RendezvousError",
    "RpcCancelledError",
    "RpcError",
    "RpcTimeoutError",
    "SerializationError",
    "WorkerDied",
]


class RpcError(RuntimeError):
    """The root of all errors that zrpc raises for itself."""


class NotInitializedError(RpcError):
    """There is no agent to work with: call `zrpc.init_rpc` first."""


class RendezvousError(RpcError):
    """The workers did not find each other: a master that can't be reached, missing ranks,
    two workers of one name, or worlds of different size.
    """


class AuthenticationError(RpcError):
    """A peer, or what claims to be from one, can't prove that it belongs to the mesh.

    Or this worker can't: the workers have different cluster secrets, or none where they need
    one; a file with the secret can be read by others; an entry of the store is forged.
    """


class RpcTimeoutError(RpcError, TimeoutError):
    """A call, a fetch or a shutdown took longer than its timeout.

    The callee may still be running, or may have run: what it did is not undone.
    """


class SerializationError(RpcError):
    """A value can't be pickled for the wire, or can't be rebuilt where it arrived."""


class RpcCancelledError(RpcError, CancelledError):
    """A call was cancelled: by ``cancel()`` on its future, or with the call that it is part of.

    It is also a ``concurrent.futures.CancelledError``, but not asyncio's, which would end the task
    that awaits the future. The callee may still be running, or may have run.
    """


class ProtocolError(RpcError):
    """A peer sent bytes that are no message, or a message that has no place here."""


class RemoteError(RpcError):
    """A failure on another worker, told as text.

    It is what a call raises where the callee's own exception can't travel (it can't be
    pickled, or would end the caller, as ``SystemExit`` would), and it is the ``__cause__``
    of every exception that did travel, since a traceback can't be sent as an object.
    """


class BackwardError(RpcError):
    """A worker's part of a backward pass failed; the message says which worker's, and how."""


class WorkerDied(RpcError, ConnectionError):
    """The peer is gone: its process ended or was stopped, the network to it is cut, or it left
    the mesh without an answer. The message says which, and when it was last heard.
    """


class OwnerDied(WorkerDied):
    """The worker that owned an RRef's value is gone, and the value with it."""
