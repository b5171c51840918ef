"""How a worker sends messages to its peers, also if it has no descriptors left for that."""

from __future__ import annotations

import contextlib
import errno
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import zmq

from zrpc.calls.message_hooks import MessageHooks, overriding
from zrpc.calls.recorder import Recorder
from zrpc.membership.view import Membership
from zrpc.runtime import interrupts
from zrpc.runtime.interrupts import hold_interrupts, release_interrupts
from zrpc.runtime.resource_limits import advice, out_of_descriptors
from zrpc.transport.network import Network
from zrpc.wire.kind import LATE, UNCOUNTED
from zrpc.wire.member_id import MemberId
from zrpc.wire.message import Message

logger = logging.getLogger(__name__)


class Shutdown(Protocol):
    """The end of the mesh; see `zrpc.agent.shutdown`."""

    done: bool  # whether the whole mesh has nothing left to do


@dataclass(eq=False)
class Outbox:
    """Sends the messages of one worker. Any thread may call its methods.

    Args:
        in_io_thread: has something done in the I/O thread soon.
        shutdown: knows whether the mesh has nothing left to do, and its workers leave.

    Attributes:
        closed: whether the worker has shut down, or is about to.
        recorder: records the messages that are posted while a trace is on; else None.
    """

    _network: Network
    _membership: Membership
    _in_io_thread: Callable[[Callable[[], None]], None]
    _shutdown: Shutdown

    def __post_init__(self) -> None:
        # Messages that this worker had no descriptors to send.
        self._unsent: deque[tuple[MemberId, Message]] = deque()
        self._short_of_descriptors = False
        self._carriers: Sequence[MessageHooks] = ()
        self.closed = False
        self.recorder: Recorder | None = None

    def use(self, hooks: Sequence[MessageHooks]) -> None:
        """Lets these hooks carry large buffers. Only before the agent serves."""
        self._carriers = overriding(MessageHooks, "carry", hooks)

    def __len__(self) -> int:
        """How many messages are still to be sent."""
        return len(self._unsent)

    def put(self, member: MemberId, message: Message) -> None:
        """Sends a message; if this raises, `undo` must be called, unless it is tried again.

        Not to be interrupted: what is lent of shared memory must leave with the message.

        Raises:
            zmq.ZMQError: the peer or we are gone, or there is no descriptor or memory left.
        """
        for hooks in self._carriers:
            if message.buffers or hooks.to_carry:
                hooks.carry(member, message)
        counted = message.kind not in UNCOUNTED
        self._network.send(member, message.first_frame(), message.buffers, counted)

    def undo(self, member: MemberId, message: Message) -> None:
        """Undoes what was done for a message that is not sent, nor will be."""
        if message.extensions:
            for hooks in self._carriers:
                hooks.undo_carry(member, message)

    def post(self, member: MemberId, message: Message) -> None:
        """Sends a message that is not answered.

        Does nothing if the peer or we are gone, or if all leave and the message is not `LATE`. If
        there is no file descriptor left for it, it is sent when there is.

        Raises:
            MemoryError: there is no memory for it; only if it is large.
        """
        if member in self._membership.lost:
            return
        if self._shutdown.done and message.kind not in LATE:
            # That a reference is no longer held, say. If the peer has left already, this worker's
            # end would wait in vain for the message to be sent.
            return
        if self.recorder is not None:
            self.recorder.on_message(message, member, out=True)
        in_main_thread = threading.get_ident() == interrupts.main_ident
        if in_main_thread:
            hold_interrupts()
        try:
            self.put(member, message)
        except zmq.ZMQError as error:
            if out_of_descriptors(error) and not self.closed:
                self._unsent.append((member, message))
                return
            self.undo(member, message)
            if error.errno == errno.ENOMEM:
                raise MemoryError("there is no memory to send a message") from error
            name = self._membership.info.name
            logger.debug("%s: nothing sent to %s: %s", name, self._membership.infos[member], error)
        except BaseException:
            self.undo(member, message)
            raise
        finally:
            if in_main_thread:
                release_interrupts()

    def post_each_way(self, member: MemberId, first: Callable[[int, int, int], bytes]) -> None:
        """Sends a message behind all others, see `Network.send_each_way`; not for the main thread.

        Nothing happens if the peer or we are gone, if all leave (see `post`), or if there is no
        descriptor or memory left.
        """
        if member not in self._membership.lost and not self._shutdown.done:
            with contextlib.suppress(zmq.ZMQError):
                self._network.send_each_way(member, first)

    # -- later -----------------------------------------------------------------------------

    def retry(self) -> None:
        """Sends what could not be sent when there were no descriptors left. In the I/O thread."""
        short = self._network.look_after_descriptors()
        if short and not self._short_of_descriptors:
            logger.error("%s: %s", self._membership.info, advice(OSError(errno.EMFILE, "")))
        self._short_of_descriptors = short
        for _ in range(len(self._unsent)):
            self.post(*self._unsent.popleft())

    def retry_soon(self) -> None:
        """Looks for descriptors in the I/O thread, and calls `retry`."""
        self._in_io_thread(self.retry)

    def close(self) -> None:
        """From now on, what can't be sent at once is not sent."""
        self.closed = True


def exhausted(error: Exception) -> Exception | None:
    """Returns the error for the caller if there was no descriptor or memory, None for others."""
    if (hint := advice(error)) is None:
        return None
    number = getattr(error, "errno", errno.ENOMEM)
    why = f"the call can't be sent: {hint}"
    return MemoryError(why) if number == errno.ENOMEM else OSError(number, why)
