"""All sockets of one worker."""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

import zmq

from zrpc.exhaustion import out_of_descriptors
from zrpc.transport.address import PrivateDirectory, supports_ipc
from zrpc.transport.curve import Curve, Gatekeeper
from zrpc.transport.direct import DirectMailbox, drain
from zrpc.transport.heartbeat import Heartbeats
from zrpc.transport.inbox import Inbox
from zrpc.transport.mailbox import Mailbox, size_of
from zrpc.transport.reserve import reserve

__all__ = ["BULK_LETTER", "Network", "bulk_identity"]

AnyMailbox = Mailbox | DirectMailbox
M = TypeVar("M", bound=AnyMailbox)

# Messages from this size on, in bytes, are large: they take longer than a call of a small one.
BULK = 1 << 18
# What the routing ids of mailboxes for them begin with.
BULK_LETTER = ord("b")


def bulk_identity(identity: bytes) -> bytes:
    """The routing id of the mailboxes for large messages of the worker with this one."""
    return bytes([BULK_LETTER]) + identity[1:]


class Network:
    """One inbox, and a mailbox for each peer that was ever sent to.

    Mailboxes open when first used, so that a mesh of 64 workers costs no 64 x 64 handshakes.
    Large messages go through a second one, so that no answer and no reference count has to wait
    until a large tensor has left. Hence messages to one peer may overtake each other.

    Args:
        identity: this worker's token, which its mailboxes show to the peers.
        rank: this worker's rank.
        peers: how many workers there are.
        ipc: whether to listen on a Unix socket.

    Attributes:
        directory: this worker's private one; None where the system has no Unix sockets.
        heartbeats: tell which peers live; for the thread that receives.

    `send` may be called from any thread, `receive` from one at a time.
    """

    def __init__(self, identity: bytes, rank: int, peers: int, ipc: bool) -> None:
        self._identity = identity
        self._rank = rank
        # First, since this may be refused, and there is nothing to close then.
        self.directory = PrivateDirectory() if supports_ipc() else None
        self._context: zmq.Context[Any] = zmq.Context()
        # Two mailboxes a peer, the inbox, the one that wakes this worker's own I/O thread, and
        # those of the heartbeats.
        self._context.set(zmq.MAX_SOCKETS, 3 * peers + 16)
        # Guards the opening of mailboxes.
        self._lock = threading.Lock()
        self._mailboxes: dict[int, AnyMailbox] = {}
        self._bulk: dict[int, AnyMailbox] = {}  # for large messages
        self._endpoints: dict[int, str] = {}
        self._closed = False
        self._hidden = False  # whether peers are not to find the Unix socket
        self._curve: Curve | None = None
        self._gatekeeper: Gatekeeper | None = None
        self._inbox = Inbox(self._context)
        # The next message; see there.
        self.receive = self._inbox.receive
        self.at_hand = self._inbox.at_hand
        self.heartbeats = Heartbeats(self._context, identity)
        # Under a name that nobody can guess: whoever connects with it would take its place.
        waker = b"w" + secrets.token_bytes(16)
        self._waker = Mailbox(self._context, waker, self._inbox.inproc)
        if ipc and self.directory is not None:
            self._inbox.bind_ipc(self.directory.socket_path)
        reserve.join()

    def listen_tcp(self, address: str, curve: Curve | None) -> str:
        """Listens on one interface as well; returns the endpoint.

        Args:
            address: the interface's, or its name.
            curve: for whom, and with which keys to connect to others by tcp; None for anybody.
        """
        self._curve = curve
        if curve is not None:
            self._gatekeeper = Gatekeeper(self._context, curve.members.values())
        return self._inbox.bind_tcp(address, curve)

    def connect(self, endpoints: Sequence[str]) -> None:
        """Tells where the peers can be reached that are there from the start, by rank."""
        self._endpoints = {**dict(enumerate(endpoints)), self._rank: self._inbox.inproc}

    def connect_itself(self, rank: int) -> None:
        """Tells the worker's number, where that was not known at first; nobody else is there."""
        self._rank = rank
        self.connect(())

    def introduce(self, rank: int, endpoint: str, key: str) -> None:
        """Tells where one more peer can be reached; it may connect here from now on.

        Args:
            rank: the peer's number.
            endpoint: its inbox.
            key: its public key; empty where it talks in the clear.
        """
        if self._curve is not None and key:
            self._curve.members[rank] = key
            if self._gatekeeper is not None:
                self._gatekeeper.admit(key)
        self._endpoints[rank] = endpoint

    def dismiss(self, rank: int) -> None:
        """A peer that is gone may not connect any more."""
        key = self._curve.members.get(rank) if self._curve is not None else None
        if key is not None and self._gatekeeper is not None:
            self._gatekeeper.dismiss(key)

    def send(
        self, rank: int, first: bytes, buffers: Sequence[Any] = (), counted: bool = True
    ) -> None:
        """Sends one message to a peer, or to this worker itself; see `Mailbox.send`.

        Raises:
            zmq.ZMQError: the network is closed, or there is no descriptor or memory left.
        """
        large = (buffers or len(first) >= BULK) and self._is_large(rank, first, buffers)
        mailboxes = self._bulk if large else self._mailboxes
        mailbox = mailboxes.get(rank) or self._open(rank, mailboxes)
        try:
            mailbox.send(first, buffers, counted)
        except ConnectionError:
            self._replace(rank, mailbox).send(first, buffers, counted)

    def send_each_way(self, rank: int, first: Callable[[int, int, int], bytes]) -> None:
        """Sends a message by each mailbox for a peer, so that it comes behind all that was sent.

        Args:
            rank: the peer's.
            first: makes the first frame, given 0 or, for the mailbox of large messages, 1; by how
                many it goes; and how many that count went before.

        Raises:
            zmq.ZMQError: as for `send`.
        """
        both = (self._mailboxes, self._bulk)
        ways = [boxes for boxes in both if rank in boxes] or [self._mailboxes]
        for boxes in ways:
            mailbox = boxes.get(rank) or self._open(rank, boxes)
            frame = first(int(boxes is self._bulk), len(ways), mailbox.sent)
            try:
                mailbox.send(frame, (), False)
            except ConnectionError:
                self._replace(rank, mailbox).send(frame, (), False)

    def _is_large(self, rank: int, first: bytes, buffers: Sequence[Any]) -> bool:
        """Whether a message goes through the mailbox for large ones; none to ourselves does.

        A frame costs some bytes even where it is empty.
        """
        return rank != self._rank and size_of(first, buffers) + 4 * len(buffers) >= BULK

    def knows(self, rank: int) -> bool:
        """Whether anything was ever sent to this peer."""
        return rank in self._mailboxes or rank in self._bulk

    def endpoint(self, rank: int) -> str:
        """Where a peer can be reached."""
        return self._endpoints[rank]

    def watch(self, rank: int) -> None:
        """Has the heartbeats ask a peer; see `Heartbeats.watch`."""
        self.heartbeats.watch(rank, self._endpoints[rank], self._guard(rank))

    def _guard(self, rank: int) -> Callable[[zmq.Socket[Any]], None] | None:
        """Makes a socket connect to a peer and to nobody else, where that takes keys."""
        if self._curve is None or not self._endpoints[rank].startswith("tcp://"):
            return None
        return partial(self._curve.guard_mailbox, rank=rank)

    def drop(self, rank: int) -> None:
        """Drops what is queued for a peer that is gone."""
        with self._lock:
            dropped = [boxes.pop(rank, None) for boxes in (self._mailboxes, self._bulk)]
        for mailbox in dropped:
            if mailbox is not None:
                mailbox.close(0)

    def look_after_descriptors(self) -> bool:
        """Keeps libzmq from accepting a connection that it has no descriptor for; see `reserve`.

        For the thread that receives, some times a second.

        Returns:
            Whether this worker is short of them.
        """
        short = not reserve.look()
        if not short:
            self._inbox.listen_again()
        if short != self._hidden and self.directory is not None:
            self._hidden = short
            self.directory.hide_socket(short)
        return short or reserve.given_up

    def wake(self) -> None:
        """Makes `receive` return at once, with a message from an unknown sender."""
        self._waker.send(b"")

    def sent(self, ranks: Iterable[int]) -> int:
        """How many counted messages were ever sent to these workers."""
        both = (self._mailboxes, self._bulk)
        return sum(boxes[rank].sent for rank in ranks for boxes in both if rank in boxes)

    def close(self, linger: float, lost: Collection[int]) -> None:
        """Closes all sockets and removes what lies in the file system. Idempotent.

        Args:
            linger: seconds that messages still queued have to leave.
            lost: workers that are gone, for which no message waits.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            # ZeroMQ's linger by themselves, so that all have the same time.
            direct = []
            for rank, mailbox in (*self._bulk.items(), *self._mailboxes.items()):
                if isinstance(mailbox, DirectMailbox) and rank not in lost:
                    direct.append(mailbox)
                else:
                    mailbox.close(0 if rank in lost else linger)
            drain(direct, linger)
            for mailbox in direct:
                mailbox.close(0)
        self.heartbeats.close()
        self._waker.close(0)
        self._inbox.close()
        if self._gatekeeper is not None:
            self._gatekeeper.close()
        self._context.term()
        reserve.leave()
        # Only now, when the last message has left: a peer takes a worker without its
        # directory for gone.
        if self.directory is not None:
            self.directory.remove()

    def _open(self, rank: int, mailboxes: dict[int, AnyMailbox]) -> AnyMailbox:
        with self._lock:
            if self._closed:
                raise zmq.ZMQError(zmq.ENOTSOCK)
            mailbox = mailboxes.get(rank)
            if mailbox is None:
                bulk = mailboxes is self._bulk
                mailbox = _with_reserve(partial(self._new_mailbox, rank, bulk))
                mailboxes[rank] = mailbox
            return mailbox

    def _new_mailbox(self, rank: int, bulk: bool) -> AnyMailbox:
        endpoint, poller = self._endpoints[rank], self._inbox.poller
        if endpoint.startswith("ipc://") and poller is not None and not bulk:
            try:
                on_broken = partial(self._pass_on, rank)
                return DirectMailbox(self._identity, endpoint, poller, on_broken)
            except zmq.ZMQError:
                raise
            except OSError:
                pass  # it is of a system that has none, or is gone
        identity = bulk_identity(self._identity) if bulk else self._identity
        return Mailbox(self._context, identity, endpoint, self._guard(rank))

    def _replace(self, rank: int, broken: AnyMailbox) -> AnyMailbox:
        """The mailbox in place of one whose direct connection has broken."""
        with self._lock:
            mailbox = self._mailboxes.get(rank)
            if mailbox is broken and isinstance(broken, DirectMailbox) and not self._closed:
                endpoint = self._endpoints[rank]
                mailbox = _with_reserve(partial(Mailbox, self._context, self._identity, endpoint))
                for first, buffers in broken.give_up():
                    if first is not None and buffers is not None:
                        mailbox.send(first, buffers, counted=False)
                mailbox.sent += broken.sent
                self._mailboxes[rank] = mailbox
        if mailbox is None or mailbox is broken:
            raise zmq.ZMQError(zmq.ENOTSOCK)
        return mailbox

    def _pass_on(self, rank: int, broken: DirectMailbox) -> None:
        """Sends by ZeroMQ what a broken direct connection still had to send."""
        # No descriptors: to be tried again with the next message.
        with contextlib.suppress(zmq.ZMQError, MemoryError):
            self._replace(rank, broken)


def _with_reserve(open_one: Callable[[], M]) -> M:
    """Opens a mailbox, with the reserve of descriptors if need be."""
    try:
        return open_one()
    except zmq.ZMQError as error:
        if not (out_of_descriptors(error) and reserve.release()):
            raise
        return open_one()
