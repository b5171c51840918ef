"""The state of an autograd context at one worker: what it has sent and received, its gradients."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from zrpc.errors import RpcError
from zrpc.runtime.interrupts import UninterruptedLock
from zrpc.runtime.thread_pool import pass_gate
from zrpc.services.autograd.dependencies import Origin, Sources, Tracer, graph_freed
from zrpc.services.autograd.nodes import new_start
from zrpc.wire.member_id import MemberId


class SentTensor(NamedTuple):
    """A tensor of the graph that this worker has sent.

    Attributes:
        to: the receiver.
        exit: the result of `Send` for the tensors of its message.
        reach: what it was computed from, as a set of the context's tracer.
    """

    to: MemberId
    exit: torch.Tensor
    reach: int


class ReceivedMessage(NamedTuple):
    """A message with tensors of the graph that this worker has received.

    Attributes:
        number: its id here. The messages that a worker has sent or received are numbered in order;
            the sender's own number for it is another one.
        sources: what it says about its tensors; None if a pass has gone over it.
    """

    number: int
    sources: Sources | None


# See `zrpc.runtime.thread_pool.pass_gate`.
ReceiveHere = Callable[[threading.Lock, float], None]


class Mailbox:
    """What arrives for a pass, and the error that it fails with. Any thread may use it.

    What arrives has the name of its sender and the number of the message whose gradients these
    are, or 0 if the sender has ended its part. One thread waits: the one that runs the engine.
    """

    def __init__(self) -> None:
        # Guards what follows; nothing else is locked under it.
        self._lock = UninterruptedLock()
        self._closed = False
        self._arrived: dict[Origin, Any] = {}
        self._failure: Callable[[], Exception] | None = None
        # What a thread waits for, at a gate that is released when it arrives or the pass fails.
        self._awaited: tuple[Origin, threading.Lock] | None = None

    def wait(self, origin: Origin, receive: ReceiveHere) -> Any:
        """Waits for something to arrive and takes it; raises if the pass fails meanwhile."""
        with self._lock:
            waits = origin not in self._arrived and self._failure is None
            if waits:
                gate = threading.Lock()
                gate.acquire()
                self._awaited = origin, gate
        if waits:
            pass_gate(gate, receive=receive)  # until `deliver`, or `fail`
        self.check()
        return self._arrived.pop(origin)

    def deliver(self, origin: Origin, content: Any) -> None:
        """Takes what has arrived, unless the part has ended here."""
        with self._lock:
            if not self._closed:
                self._arrived.setdefault(origin, content)
                if self._awaited is not None and self._awaited[0] == origin:
                    self._release()

    def fail(self, failure: Callable[[], Exception]) -> bool:
        """Fails the pass; returns False if it has failed already, or its part has ended here."""
        with self._lock:
            if self._failure is not None or self._closed:
                return False
            self._failure = failure
            self._release()
            return True

    def check(self) -> None:
        """Raises the error of the pass if it has failed."""
        failure = self._failure
        if failure is not None:
            raise failure()

    def close(self) -> None:
        """Ends this worker's part: what arrives from now on is dropped."""
        with self._lock:
            self._closed = True
            self._arrived.clear()
            # Its error refers to frames, and these to nodes of the graph whose hooks refer to the
            # part: a cycle through C++, which the collector does not see.
            self._failure = None

    def _release(self) -> None:
        """Lets the thread go on that waits, if one does; under the lock."""
        if self._awaited is not None:
            self._awaited[1].release()
            self._awaited = None


class ContextState:
    """One context at one worker.

    Attributes:
        context_id: its id, unique in the mesh.
        lock: guards `gradients`, and is held while several entries of the tables change together.
            Single operations on a table are atomic and need no lock. A thread that adds up
            gradients may hold it for a while, so the I/O thread takes it only to end the context.
        start: the leaf at which the engine's runs over received tensors end.
        sends: the tensors sent that no pass has taken with it, by the number of their message and
            their place in it.
        receives: the messages received.
        tracer: finds what tensors were computed from.
        peers: all workers with which a message of this context was exchanged.
        incomplete: workers some of whose messages were lost; gradients of a pass that has not begun
            here may be among them.
        gradients: the gradients of the leaves at this worker.
        mailboxes: those of all backward passes, by id, including those that are done: a message
            about one may come late.
    """

    def __init__(self, context_id: int) -> None:
        self.context_id = context_id
        self.lock = UninterruptedLock()
        self.start = new_start()
        self.sends: dict[tuple[int, int], SentTensor] = {}
        self.receives: dict[Origin, ReceivedMessage] = {}
        self.tracer = Tracer(context_id)
        self.peers: set[MemberId] = set()
        self.incomplete: set[MemberId] = set()
        self.gradients: dict[torch.Tensor, torch.Tensor] = {}
        self.mailboxes: dict[int, Mailbox] = {}

    def clear(self) -> None:
        """Ends the context: drops its graph and its gradients, and fails its passes."""
        with self.lock:
            self.sends.clear()
            self.gradients.clear()
        # Not replaced: a thread that is sending has sets of it.
        self.tracer.forget()
        for mailbox in list(self.mailboxes.values()):
            mailbox.fail(lambda: RpcError("the autograd context ended during a backward pass"))

    def mailbox(self, pass_id: int) -> Mailbox:
        """Returns what arrives for a pass; makes it when the pass is first heard of."""
        mailbox = self.mailboxes.get(pass_id)
        return mailbox or self.mailboxes.setdefault(pass_id, Mailbox())

    def carried(self, origin: Origin) -> Sources | None:
        """Returns what a received message says about its tensors, or None if that is not known."""
        message = self.receives.get(origin)
        return None if message is None else message.sources

    def sources(self) -> Sources:
        """Returns what the tensors that were sent were computed from."""
        sends = list(self.sends.items())
        return self.tracer.sources({place: sent.reach for place, sent in sends})

    def take(
        self, used: Mapping[int, Sequence[int]], arrived: Iterable[Origin], retain_graph: bool
    ) -> dict[int, list[SentTensor]]:
        """Returns the used tensors for a pass, by their messages, in the order of sending.

        Unless the graph is retained, the pass takes these tensors with it. Those that it does not
        use stay for later passes. What ``arrived``, the received messages that it uses, say about
        their tensors is forgotten: a later pass that uses them too must ask what is left.

        Raises:
            RpcError: another pass has taken one of them.
        """
        places = [(number, place) for number in sorted(used) for place in sorted(used[number])]
        taken: dict[int, list[SentTensor]] = {}
        with self.lock:
            if not self.sends.keys() >= set(places):
                raise graph_freed()
            for number, place in places:
                taken.setdefault(number, []).append(self.sends[number, place])
            if not retain_graph:
                for each in places:
                    del self.sends[each]
                for origin in arrived:
                    self.receives[origin] = ReceivedMessage(self.receives[origin].number, None)
        return taken

    def add_gradients(self, found: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Adds to the gradients of leaves."""
        with self.lock:
            for leaf, gradient in found:
                before = self.gradients.setdefault(leaf, gradient)
                if before is not gradient:
                    # torch adds a sparse tensor to a dense one, not the other way round.
                    both = gradient + before if before.is_sparse else before + gradient
                    self.gradients[leaf] = both

    def copy_gradients(self) -> dict[torch.Tensor, torch.Tensor]:
        """Returns the gradients by leaf."""
        with self.lock:
            return dict(self.gradients)

    def scale_gradients(self, leaves: Iterable[torch.Tensor], factor: torch.Tensor) -> None:
        """Multiplies the gradients of some leaves."""
        with self.lock:
            for leaf in leaves:
                if leaf in self.gradients:
                    self.gradients[leaf] = self.gradients[leaf] * factor

    def set_gradient(self, leaf: torch.Tensor, gradient: torch.Tensor | None) -> None:
        """Replaces the gradient of a leaf; with None, the leaf has none any more."""
        with self.lock:
            if gradient is None:
                self.gradients.pop(leaf, None)
            else:
                self.gradients[leaf] = gradient
