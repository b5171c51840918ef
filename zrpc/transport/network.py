"""All sockets of one worker."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import zmq

from zrpc.runtime.interrupts import UninterruptedLock, uninterrupted
from zrpc.runtime.resource_limits import out_of_descriptors
from zrpc.transport.address import PrivateDirectory
from zrpc.transport.curve import Curve, PeerKey
from zrpc.transport.descriptors import DescriptorSocket
from zrpc.transport.fd_reserve import reserve
from zrpc.transport.heartbeat import Heartbeats
from zrpc.transport.identity import bulk_identity
from zrpc.transport.inbox import Inbox
from zrpc.transport.mailbox import Mailbox
from zrpc.transport.mailbox import size_of as size_of
from zrpc.transport.unix_stream import DirectMailbox, drain

AnyMailbox = Mailbox | DirectMailbox
M = TypeVar("M", bound=AnyMailbox)

# From this size on, messages are large: sending one takes longer than a call with a small one.
BULK_BYTES = 1 << 18
# What a peer on this host takes if large messages are exchanged both ways, measured: six sockets,
# an event descriptor, and some for segments of shared memory.
DESCRIPTORS_PER_PEER = 14


class Network:
    """One inbox, and a mailbox for each peer that was ever sent to.

    Mailboxes open when first used, so a mesh of 64 workers does not need 64 x 64 handshakes. Large
    messages have a second mailbox, so no answer and no reference count has to wait until a large
    tensor has been sent. Hence messages to one peer may overtake each other.

    Args:
        identity: this worker's identity, which its mailboxes show to the peers.
        own_id: this worker's own number as a peer, for messages to itself.
        peers: the number of workers.
        ipc: whether to listen on a Unix socket.
        parent: as for `PrivateDirectory`.

    Attributes:
        directory: this worker's private directory.
        tcp_endpoint: where this worker listens on tcp; empty if it does not.
        descriptors: sends and receives file descriptors on this host.
        reconnects: how often a broken direct connection was replaced.
        heartbeats: report which peers live; for the thread that receives.
        inbox: what this worker receives by.

    `send` may be called from any thread; `receive`, `mask` and `unmask` from one at a time: see
    `Inbox` and `Poller`.
    """

    def __init__(
        self, identity: bytes, own_id: int, peers: int, ipc: bool, parent: Path | None = None
    ) -> None:
        self._identity = identity
        self._own_id = own_id
        # First, since this may be refused, and nothing has to be closed yet.
        self.directory = PrivateDirectory(parent=parent)
        # Guards the opening and closing of mailboxes.
        self._lock = UninterruptedLock()
        self._sent_before: Counter[tuple[int, str]] = Counter()  # by mailboxes that are closed
        self.reconnects = 0
        self._mailboxes: dict[int, AnyMailbox] = {}
        self._bulk: dict[int, AnyMailbox] = {}  # for large messages
        self._both = self._mailboxes, self._bulk
        self._dropped: set[int] = set()  # peers that get no new mailbox
        self._endpoints: dict[int, str] = {}
        self.tcp_endpoint = ""
        self._closed = False
        self._hidden = False  # whether the Unix socket is hidden from new peers
        self._curve: Curve | None = None
        with contextlib.ExitStack() as undo:  # if there are no descriptors left, say
            undo.callback(self.directory.remove)
            self.descriptors = DescriptorSocket(self.directory.path)
            undo.callback(self.descriptors.close)
            self._context: zmq.Context[Any] = zmq.Context()
            undo.callback(self._context.destroy, linger=0)
            # Two mailboxes for each peer, the inbox, the waker, and the heartbeats' sockets.
            self._context.set(zmq.MAX_SOCKETS, 3 * peers + 16)
            self.inbox = Inbox(self._context)
            undo.callback(self.inbox.poller.close)
            # See `Inbox`; without the cost of another call.
            self.receive, poller = self.inbox.receive, self.inbox.poller
            self.wait, self.mask, self.unmask = poller.wait, poller.mask, poller.unmask
            self.strangers_left_memory = self.inbox.strangers_left_memory
            self.at_hand = self.inbox.at_hand
            self.heartbeats = Heartbeats(self._context, identity)
            self._waker = Mailbox(self._context, b"w", self.inbox.inproc)
            if ipc:
                self.inbox.bind_ipc(self.directory.socket_path)
            reserve.add_user()
            undo.pop_all()

    def listen_tcp(self, address: str, curve: Curve | None, ports: range | None = None) -> str:
        """Also listens on one interface; returns the endpoint. See `Inbox.bind_tcp`."""
        self._curve = curve
        if curve is not None:
            curve.open(self._context)
        try:
            self.tcp_endpoint = self.inbox.bind_tcp(address, curve, ports)
        except BaseException:  # it may be tried again, with other keys
            self._curve = None
            if curve is not None:
                curve.close()
            raise
        return self.tcp_endpoint

    def connect(self, endpoints: Sequence[str]) -> None:
        """Sets the endpoints of peers 0, 1, ... which are known from the start."""
        self._endpoints = {**dict(enumerate(endpoints)), self._own_id: self.inbox.inproc}

    def connect_itself(self, own_id: int) -> None:
        """Sets this worker's own number if it was not known at first. There are no peers yet."""
        self._own_id = own_id
        self.connect(())

    def introduce(self, peer: int, endpoint: str, key: PeerKey) -> None:
        """Adds a peer, which may connect from now on; the key is empty if it does not encrypt."""
        if self._curve is not None and key.public:
            self._curve.admit(peer, key)
        self._endpoints[peer] = endpoint

    def dismiss(self, peer: int) -> None:
        """Refuses new connections of a peer that has left."""
        if self._curve is not None:
            self._curve.dismiss(peer)

    def send(
        self, peer: int, first: bytes, buffers: Sequence[Any] = (), counted: bool = True
    ) -> None:
        """Sends one message to a peer, or to this worker itself; see `Mailbox.transmit`.

        Raises:
            zmq.ZMQError: the network is closed, the peer was dropped, or there is no descriptor or
                memory left.
        """
        large = (
            (buffers or len(first) >= BULK_BYTES)
            and peer != self._own_id
            # Even an empty frame costs some bytes.
            and size_of(first, buffers) + 4 * len(buffers) >= BULK_BYTES
        )
        mailboxes = self._bulk if large else self._mailboxes
        mailbox = mailboxes.get(peer) or self._open(peer, mailboxes)
        try:
            mailbox.transmit(first, buffers, counted)
        except ConnectionError:
            self._replace(peer, mailbox).transmit(first, buffers, counted)

    def send_each_way(self, peer: int, first: Callable[[int, int, int], bytes]) -> None:
        """Sends a message through each mailbox of a peer, so it arrives after all earlier ones.

        Args:
            peer: the peer.
            first: makes the first frame. Its arguments are 0, or 1 for the mailbox of large
                messages; the number of mailboxes; and the number of counted messages that were
                sent through this one.

        Raises:
            zmq.ZMQError: as for `send`.
        """
        ways = [boxes for boxes in self._both if peer in boxes] or [self._mailboxes]
        for boxes in ways:
            mailbox = boxes.get(peer) or self._open(peer, boxes)
            frame = first(int(boxes is self._bulk), len(ways), mailbox.sent)
            try:
                mailbox.transmit(frame, (), False)
            except ConnectionError:
                self._replace(peer, mailbox).transmit(frame, (), False)

    def knows(self, peer: int) -> bool:
        """Returns whether anything was ever sent to this peer."""
        return peer in self._mailboxes or peer in self._bulk

    def endpoint(self, peer: int) -> str:
        """Returns the endpoint of a peer's inbox."""
        return self._endpoints[peer]

    def answer_heartbeats(self, routing_id: bytes, first: bytes) -> None:
        """Answers the heartbeats with this routing id with a notice, if they still come.

        For the thread that receives. See `Heartbeats.notices`.
        """
        self.inbox.answer(routing_id, [routing_id, first])

    def watch(self, peer: int) -> None:
        """Begins to send heartbeats to a peer; see `Heartbeats.watch`."""
        self.heartbeats.watch(peer, self._endpoints[peer], self._guard(peer))

    def _guard(self, peer: int) -> Callable[[zmq.Socket[Any]], None] | None:
        """Returns what makes a socket connect to this peer only, or None if that needs no keys."""
        if self._curve is None or not self._endpoints[peer].startswith("tcp://"):
            return None
        return partial(self._curve.guard_mailbox, peer=peer)

    def notify(self, peer: int, first: bytes) -> None:
        """Sends a message to a peer that was dropped; `drop` must be called again."""
        with self._lock:
            self._dropped.discard(peer)
        self.send(peer, first, (), False)

    def drop(self, peer: int) -> None:
        """Closes the mailboxes of a peer that is lost or has left, with all queued messages."""
        with self._lock:
            self._dropped.add(peer)
            dropped = [boxes.pop(peer) for boxes in self._both if peer in boxes]
            for mailbox in dropped:
                self._sent_before[peer, mailbox.way] += mailbox.sent_bytes
        for mailbox in dropped:
            mailbox.close(0)

    def look_after_descriptors(self) -> bool:
        """Keeps libzmq from accepting connections without a descriptor; see `fd_reserve`.

        Must be called some times a second, by the thread that receives.

        Returns:
            Whether this worker is short of descriptors.
        """
        short = not reserve.refresh()
        if not short:
            self.inbox.listen_again()
        if short != self._hidden:
            self._hidden = short
            self.directory.hide_socket(short)
        return short or reserve.released

    def wake(self) -> None:
        """Makes `receive` return at once, with a message from an unknown sender."""
        with uninterrupted:
            self._waker.transmit(b"")

    def sent(self, peers: Iterable[int]) -> int:
        """Returns the number of counted messages that were ever sent to these peers."""
        return sum(boxes[peer].sent for peer in peers for boxes in self._both if peer in boxes)

    def sent_bytes(self) -> Counter[tuple[int, str]]:
        """Returns the bytes that were ever sent, by peer and way; see `Mailbox.way`."""
        with self._lock:
            sent = self._sent_before.copy()
            for boxes in self._both:
                for peer, mailbox in boxes.items():
                    sent[peer, mailbox.way] += mailbox.sent_bytes
        return sent

    @property
    def received_bytes(self) -> int:
        """Returns the bytes that ever came by ZeroMQ, and so not by direct connections."""
        return self.inbox.received_bytes

    def abandon(self) -> None:
        """Sends nothing more: in a forked child, since the sockets are its parent's."""
        self._lock = UninterruptedLock()  # a thread of the parent may have held the other
        self._closed = True
        self.descriptors.close()
        self._abandoned = self._both  # not freed: their sockets would be closed
        self._mailboxes, self._bulk = self._both = {}, {}

    def close(self, linger: float, lost: Collection[int]) -> None:
        """Closes all sockets and removes the private directory. Idempotent.

        Args:
            linger: seconds that queued messages have to be sent.
            lost: peers that no longer exist, whose messages are dropped.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            # ZeroMQ's mailboxes linger by themselves, so all have the same time.
            direct = {}
            for peer, mailbox in (*self._bulk.items(), *self._mailboxes.items()):
                if isinstance(mailbox, DirectMailbox) and peer not in lost:
                    direct[peer] = mailbox
                else:
                    mailbox.close(0 if peer in lost else linger)
            drain(direct.values(), linger)
            for peer, mailbox in direct.items():
                if mailbox.broken:
                    with contextlib.suppress(zmq.ZMQError, MemoryError):  # none are left
                        self._by_zeromq(peer, mailbox).close(linger)
                mailbox.close(0)
        self.heartbeats.close()
        self._waker.close(0)
        self.inbox.close()
        self.descriptors.close()
        if self._curve is not None:
            self._curve.close()
        self._context.term()
        reserve.remove_user()
        # Only now, when the last message has been sent: peers declare a worker without its
        # directory dead.
        self.directory.remove()

    def _open(self, peer: int, mailboxes: dict[int, AnyMailbox]) -> AnyMailbox:
        with self._lock:
            if self._closed or peer in self._dropped:
                raise zmq.ZMQError(zmq.ENOTSOCK)
            mailbox = mailboxes.get(peer)
            if mailbox is None:
                bulk = mailboxes is self._bulk
                mailbox = _with_reserve(partial(self._new_mailbox, peer, bulk))
                mailboxes[peer] = mailbox
            return mailbox

    def _new_mailbox(self, peer: int, bulk: bool) -> AnyMailbox:
        endpoint = self._endpoints[peer]
        if endpoint.startswith("ipc://") and not bulk:
            try:
                on_broken = partial(self._resend_queue, peer)
                return DirectMailbox(self._identity, endpoint, self.inbox.poller, on_broken)
            except zmq.ZMQError:
                raise
            except OSError:
                pass  # the peer has exited
        identity = bulk_identity(self._identity) if bulk else self._identity
        return Mailbox(self._context, identity, endpoint, self._guard(peer))

    def _replace(self, peer: int, broken: AnyMailbox) -> AnyMailbox:
        """Returns the mailbox that replaces one whose direct connection has broken."""
        with self._lock:
            mailbox = self._mailboxes.get(peer)
            if mailbox is broken and isinstance(broken, DirectMailbox) and not self._closed:
                mailbox = self._by_zeromq(peer, broken)
                mailbox.sent += broken.sent
                self._mailboxes[peer] = mailbox
                self._sent_before[peer, broken.way] += broken.sent_bytes
                self.reconnects += 1
        if mailbox is None or mailbox is broken:
            raise zmq.ZMQError(zmq.ENOTSOCK)
        return mailbox

    def _by_zeromq(self, peer: int, broken: DirectMailbox) -> Mailbox:
        """Returns a new mailbox, with the queued messages of a direct connection that has broken.

        The lock is held.
        """
        endpoint = self._endpoints[peer]
        mailbox = _with_reserve(partial(Mailbox, self._context, self._identity, endpoint))
        for first, buffers in broken.abandon():
            mailbox.transmit(first, buffers, counted=False)
        return mailbox

    def _resend_queue(self, peer: int, broken: DirectMailbox) -> None:
        """Sends the queued messages of a broken direct connection by ZeroMQ."""
        # If there are no descriptors, the next message tries again.
        with contextlib.suppress(zmq.ZMQError, MemoryError):
            self._replace(peer, broken)


def _with_reserve(open_mailbox: Callable[[], M]) -> M:
    """Opens a mailbox, with reserved descriptors if there are no others."""
    try:
        return open_mailbox()
    except zmq.ZMQError as error:
        if not (out_of_descriptors(error) and reserve.release()):
            raise
        return open_mailbox()
