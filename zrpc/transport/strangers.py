"""Connections that were closed before they had shown a key: they may leave memory behind.

ZeroMQ holds what a stranger's connection sends, up to one frame, until it is closed. Then the
memory is free, but malloc keeps it (see `zrpc.runtime.allocator`). So the worker counts these
connections, and gives free memory back to the system after many.
"""

from __future__ import annotations

from typing import Any

import zmq

# Some fail in a healthy mesh too. Each of them has left a megabyte at most.
_MANY = 16
# To give memory back costs time, and the first use of other memory afterwards, too.
_PAUSE_SECONDS = 10.0
_FAILURES = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class Strangers:
    """Counts the connections to an inbox whose handshake has failed. For one thread at a time.

    Args:
        context: of the inbox.
        inbox: a socket that is about to listen.
    """

    def __init__(self, context: zmq.Context[Any], inbox: zmq.Socket[Any]) -> None:
        self._inbox = inbox
        self._monitor: zmq.Socket[bytes] = context.socket(zmq.PAIR)
        address = f"inproc://zrpc-strangers-{id(self)}"
        inbox.monitor(address, _FAILURES)
        # No limit: otherwise libzmq's I/O thread would wait for room.
        self._monitor.rcvhwm = 0
        self._monitor.connect(address)
        self._left = 0
        self._next = 0.0

    def left_memory(self, now: float) -> bool:
        """Whether many have left since this last returned True; must be called often.

        Args:
            now: the time in seconds, on a clock that does not go back.
        """
        while True:
            try:
                self._monitor.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            self._left += 1
        if self._left < _MANY or now < self._next:
            return False
        self._left, self._next = 0, now + _PAUSE_SECONDS
        return True

    def close(self) -> None:
        """Counts no more."""
        self._inbox.disable_monitor()
        self._monitor.close(linger=0)
