"""How a worker sends messages to its peers, also where it has no descriptors left for that."""

from __future__ import annotations

import contextlib
import errno
import logging
from collections import deque
from collections.abc import Callable, Collection
from functools import partial

import zmq

from zrpc.exhaustion import advice, out_of_descriptors
from zrpc.interrupts import hold_interrupts, release_interrupts
from zrpc.membership import Membership
from zrpc.transport.network import Network
from zrpc.wire.header import Message

__all__ = ["Outbox"]

logger = logging.getLogger(__name__)

# To whom, what sends the message, and what is told where that fails.
_HandedOver = tuple[int, Callable[[], None], Callable[[Exception], None]]


class Outbox:
    """Sends the messages of one worker. All methods may be called from any thread.

    Args:
        network: the worker's.
        membership: the worker's.
        in_io_thread: has something done in the I/O thread soon.

    Attributes:
        carry: takes large buffers out of a message to a worker, to go another way than by frames;
            set by the layer of shared memory.
        to_return: not empty where there is something else for ``carry`` to add to a message.
        uncarry: undoes what ``carry`` did for a message to a worker, which can't be sent.
        closed: whether the worker has shut down, or is about to.
    """

    carry: Callable[[int, Message], None] | None = None
    to_return: Collection[object] = ()
    uncarry: Callable[[int, Message], None] | None = None

    def __init__(
        self,
        network: Network,
        membership: Membership,
        in_io_thread: Callable[[Callable[[], None]], None],
    ) -> None:
        self._network = network
        self._membership = membership
        self._in_io_thread = in_io_thread
        # What this worker had no descriptors to send: rank, message, whether it counts.
        self._unsent: deque[tuple[int, Message, bool]] = deque()
        # What threads that may be interrupted leave to the I/O thread.
        self._handed_over: deque[_HandedOver] = deque()
        self._short = False  # of descriptors
        self.closed = False

    def __len__(self) -> int:
        """How many messages are still to be sent."""
        return len(self._unsent) + len(self._handed_over)

    def send(self, rank: int, message: Message, failed: Callable[[Exception], None]) -> None:
        """Sends a message that has an answer.

        Args:
            rank: to whom.
            message: what.
            failed: called in the I/O thread with what is raised there, where that thread sends it.

        Raises:
            zmq.ZMQError: the peer or we are gone, or there is no descriptor or memory left.
        """
        if hold_interrupts():
            try:
                self._send_or_undo(rank, message, True)
            finally:
                release_interrupts()
        else:
            self._hand_over(rank, message, self._send_or_undo, True, failed)

    def _hand_over(
        self,
        rank: int,
        message: Message,
        send: Callable[[int, Message, bool], None],
        counted: bool,
        failed: Callable[[Exception], None],
    ) -> None:
        """Has the I/O thread send a message.

        Here a signal handler of the program's own may raise in the midst of it. The buffers are
        copied, since the caller may change its tensors as soon as the message is sent.
        """
        message.copy_buffers()
        self._handed_over.append((rank, partial(send, rank, message, counted), failed))
        self._in_io_thread(self.send_handed_over)

    def send_handed_over(self) -> None:
        """Sends what other threads could not. In the I/O thread, or once that has ended."""
        while self._handed_over:
            rank, send, failed = self._handed_over[0]
            try:
                if rank not in self._membership.lost:  # meanwhile; its calls have failed
                    send()
            except Exception as error:
                failed(error)
            finally:
                self._handed_over.popleft()  # now: it counts until it is sent

    def _send(self, rank: int, message: Message, counted: bool) -> None:
        """Not to be interrupted: what is lent of shared memory must leave with the message."""
        carry = self.carry
        if carry is not None and (message.buffers or self.to_return):
            carry(rank, message)
        self._network.send(rank, message.first_frame(), message.buffers, counted)
        self._drop_if_lost(rank)

    def _drop_if_lost(self, rank: int) -> None:
        """A peer may have been lost since it was last looked at, and its mailboxes dropped.

        Then one was opened once more, with a message in it that nobody would ever drop.
        """
        if rank in self._membership.lost:
            self._network.drop(rank)

    def _send_or_undo(self, rank: int, message: Message, counted: bool) -> None:
        try:
            self._send(rank, message, counted)
        except BaseException:
            self._undo(rank, message)
            raise

    def _undo(self, rank: int, message: Message) -> None:
        """A message is not sent, nor will be."""
        uncarry = self.uncarry  # which another thread takes away as the worker closes
        if message.extensions and uncarry is not None:
            uncarry(rank, message)

    def post(self, rank: int, message: Message, counted: bool = True) -> None:
        """Sends a message that has no answer; does nothing where the peer or we are gone.

        Where there is no file descriptor left for it, it is sent when there is.

        Raises:
            MemoryError: there is no memory for it; only where it is large.
        """
        if rank in self._membership.lost:
            return
        if hold_interrupts():
            try:
                self._post(rank, message, counted)
            finally:
                release_interrupts()
        else:
            with contextlib.suppress(zmq.ZMQError):  # closed
                self._hand_over(rank, message, self._post, counted, self._log_failure)

    def _post(self, rank: int, message: Message, counted: bool) -> None:
        try:
            self._send(rank, message, counted)
        except zmq.ZMQError as error:
            if out_of_descriptors(error) and not self.closed:
                self._unsent.append((rank, message, counted))
                return
            self._undo(rank, message)
            if error.errno == errno.ENOMEM:
                raise MemoryError("there is no memory to send a message") from error
            name = self._membership.info.name
            logger.debug("%s: nothing sent to %s: %s", name, rank, error)
        except BaseException:
            self._undo(rank, message)
            raise

    def post_each_way(self, rank: int, first: Callable[[int, int, int], bytes]) -> None:
        """Sends a message behind all others, see `Network.send_each_way`; not for the main thread.

        Nothing happens where the peer or we are gone, or there is no descriptor or memory left.
        """
        if rank not in self._membership.lost:
            with contextlib.suppress(zmq.ZMQError):
                self._network.send_each_way(rank, first)
                self._drop_if_lost(rank)

    def _log_failure(self, error: Exception) -> None:
        logger.error("%s: a message can't be sent: %s", self._membership.info, error)

    def send_again(self) -> None:
        """Sends what could not be sent when there were no descriptors left. In the I/O thread."""
        short = self._network.look_after_descriptors()
        if short and not self._short:
            hint = advice(OSError(errno.EMFILE, ""))
            logger.error("%s: %s", self._membership.info, hint)
        self._short = short
        for _ in range(len(self._unsent)):
            self.post(*self._unsent.popleft())

    def send_again_soon(self) -> None:
        """Has `send_again` done in the I/O thread, which looks for descriptors then."""
        self._in_io_thread(self.send_again)

    def close(self) -> None:
        """From now on, what can't be sent at once is not sent."""
        self.closed = True
