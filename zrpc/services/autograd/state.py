"""The state of an autograd context at one worker: what it has sent and received, its gradients."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from operator import or_
from typing import Any

import torch

from zrpc.errors import RpcError
from zrpc.runtime.interrupts import UninterruptedLock
from zrpc.runtime.thread_pool import pass_gate
from zrpc.services.autograd.dependencies import (
    Dependencies,
    Reach,
    Sources,
    Tracer,
    graph_freed,
    read_sources,
)
from zrpc.services.autograd.last_gradients import LastGradients
from zrpc.services.autograd.nodes import new_token
from zrpc.wire.member_id import MemberId

__all__ = ["ContextState", "Pass", "Receive", "SentMessage"]

# See `zrpc.runtime.thread_pool.pass_gate`.
Receive = Callable[[threading.Lock, float], None]

# In place of the id of a send: a wait for the parts of other workers.
_PARTS = 0


@dataclass(frozen=True, slots=True)
class SentMessage:
    """A message with tensors of the graph that this worker has sent.

    Attributes:
        send_id: its id, unique at this worker.
        to: the receiver.
        position: where it is in the order in which this worker sent and received messages.
        exits: the results of `Send`, by the index of the tensor in the message.
        reach: what each of these tensors was computed from, by the same index.
    """

    send_id: int
    to: MemberId
    position: int
    exits: Mapping[int, torch.Tensor]
    reach: Mapping[int, Reach]

    @property
    def leaves(self) -> int:
        """The AccumulateGrad nodes that its tensors lead to, as a set."""
        return reduce(or_, (reach.leaves for reach in self.reach.values()), 0)

    def only(self, indices: Iterable[int]) -> SentMessage:
        """Returns the message with some of its tensors; itself if these are all."""
        indices = list(indices)
        if self.exits.keys() == set(indices):
            return self
        return replace(
            self,
            exits={index: self.exits[index] for index in indices},
            reach={index: self.reach[index] for index in indices},
        )


class ContextState:
    """One context at one worker.

    Attributes:
        context_id: its id, unique in the mesh.
        lock: guards all that follows, but for what says otherwise.
        start: the leaf at which the engine's runs over received tensors end; never replaced.
        sends: the messages sent, by id, without the tensors that a pass has taken with it.
        receives: the position of each message received, by sender and id.
        sources: what messages received say about their tensors, packed, by sender and id; without
            those that a pass has gone over.
        positions: draws positions; needs no lock.
        tracer: finds what tensors were computed from; needs no lock.
        peers: all workers with which a message of this context was exchanged.
        incomplete: workers of which messages were lost; gradients of a pass that has not begun here
            may be among them. Single operations on the set are atomic.
        gradients: the gradients of the leaves at this worker.
        passes: backward passes, including those that are done: a message about one may come
            late. Not guarded, because the I/O thread reads it, and a thread that adds up
            gradients holds the lock for long; single operations on the dict are atomic.
    """

    def __init__(self, context_id: int) -> None:
        self.context_id = context_id
        self.lock = UninterruptedLock()
        self.start = new_token(requires_grad=True)
        self.sends: dict[int, SentMessage] = {}
        self.receives: dict[tuple[MemberId, int], int] = {}
        self.sources: dict[tuple[MemberId, int], bytes] = {}
        self.positions = itertools.count()
        self.tracer = Tracer(context_id)
        self.peers: set[MemberId] = set()
        self.incomplete: set[MemberId] = set()
        self.gradients: dict[torch.Tensor, torch.Tensor] = {}
        self.passes: dict[int, Pass] = {}

    def clear(self) -> None:
        """Ends the context: drops its graph and its gradients, and fails its passes."""
        with self.lock:
            self.sends.clear()
            self.gradients.clear()
            # Not replaced: a thread that sends just now has sets of it.
            self.tracer.forget()
            passes = list(self.passes.values())
        for pass_ in passes:
            pass_.fail(lambda: RpcError("the autograd context ended during a backward pass"))

    def find_pass(self, pass_id: int) -> Pass:
        """Returns a pass, and makes it when it is first heard of."""
        return self.passes.setdefault(pass_id, Pass(pass_id))

    def linked(self) -> set[MemberId]:
        """Returns the workers with which tensors of the graph were exchanged."""
        with self.lock:
            senders = {sender for sender, _ in self.receives}
            return senders.union(message.to for message in self.sends.values())

    def dependencies(self) -> Dependencies:
        """Returns which received tensors those that were sent were computed from."""
        with self.lock:
            messages = list(self.sends.values())
        sent = {
            (message.send_id, index): reach.arrived
            for message in messages
            for index, reach in message.reach.items()
        }
        return Dependencies(list(self.tracer.arrived), sent)

    def carried(self, sender: MemberId, send_id: int) -> Sources | None:
        """Returns what a received message says about its tensors, or None if that is not known.

        Raises:
            ProtocolError: that can't be read.
        """
        with self.lock:
            data = self.sources.get((sender, send_id))
        return None if data is None else read_sources(data)

    def take(
        self,
        used: Mapping[int, Iterable[int]],
        arrived: Iterable[tuple[MemberId, int]],
        retain_graph: bool,
    ) -> list[SentMessage]:
        """Returns the messages with their used tensors, for a pass, in the order of positions.

        Unless the graph is retained, the pass takes these tensors with it. Those that it does not
        use stay for later passes. What ``arrived``, the received messages that it uses, say about
        their tensors is forgotten: a later pass that uses them too must ask what is left.

        Raises:
            RpcError: another pass has taken one of them.
        """
        taken = []
        with self.lock:
            for send_id, indices in used.items():
                message = self.sends.get(send_id)
                if message is None or not message.exits.keys() >= set(indices):
                    raise graph_freed()
                taken.append(message.only(indices))
            if not retain_graph:
                for message in taken:
                    self._drop(message)
                for origin in arrived:
                    self.sources.pop(origin, None)
        return sorted(taken, key=lambda message: message.position)

    def _drop(self, used: SentMessage) -> None:
        message = self.sends.pop(used.send_id)
        rest = message.exits.keys() - used.exits.keys()
        if rest:
            self.sends[used.send_id] = message.only(sorted(rest))

    def add_gradient(self, leaf: torch.Tensor, gradient: torch.Tensor) -> None:
        """Adds to the gradient of a leaf."""
        with self.lock:
            before = self.gradients.get(leaf)
            if before is not None:
                # torch adds a sparse tensor to a dense one, not the other way round.
                gradient = gradient + before if before.is_sparse else before + gradient
            self.gradients[leaf] = gradient

    def gradient_of(self, leaf: torch.Tensor) -> torch.Tensor | None:
        """Returns the gradient of a leaf, or None if it has none."""
        with self.lock:
            return self.gradients.get(leaf)

    def set_gradient(self, leaf: torch.Tensor, gradient: torch.Tensor | None) -> None:
        """Replaces the gradient of a leaf; with None, the leaf has none any more."""
        with self.lock:
            if gradient is None:
                self.gradients.pop(leaf, None)
            else:
                self.gradients[leaf] = gradient


class Pass:
    """One backward pass at one worker: the gradients that arrive for the tensors it has sent.

    All methods may be called from any thread, but for those that say otherwise.

    Attributes:
        pass_id: its id, unique in the mesh.
        linked: the workers that it waits for, or that wait for it, while it runs here.
        openings: the parts of other workers that begin with the gradients of a received message.
        last: what this worker's part computes last; None where the pass has begun.
    """

    def __init__(self, pass_id: int) -> None:
        self.pass_id = pass_id
        self.linked: frozenset[MemberId] = frozenset()
        self.openings: dict[tuple[MemberId, int], Any] = {}
        self.last: LastGradients | None = None
        # Guards what follows.
        self._lock = UninterruptedLock()
        self._done = False
        self._arrived: dict[int, Any] = {}
        self._gates: dict[int, threading.Lock] = {}
        self._failure: Callable[[], Exception] | None = None
        self._parts: set[MemberId] = set()
        # The next three are used by the thread that runs the engine only.
        self._gradients: dict[tuple[int, int], torch.Tensor | None] = {}
        self._unanswered: dict[tuple[MemberId, int], int] = {}
        self._awaited = 0

    def begin(
        self,
        linked: Iterable[MemberId],
        received: Mapping[tuple[MemberId, int], int],
        awaited: int,
        parts: Iterable[MemberId],
    ) -> None:
        """Begins this worker's part: it will send the gradients of some received messages.

        Args:
            linked: see the attribute.
            received: the positions of these messages.
            awaited: for how many messages it will wait.
            parts: the workers whose parts end before the pass does.
        """
        self.linked = frozenset(linked)
        self._unanswered = dict(received)
        self._awaited = awaited
        with self._lock:
            self._parts = set(parts)

    def finish(self) -> None:
        """Ends this worker's part: what arrives from now on is dropped."""
        with self._lock:
            self._done = True
            self._arrived.clear()
        self.linked = frozenset()
        self._gradients.clear()
        self.openings.clear()
        self.last = None

    # -- for the thread that runs the engine -----------------------------------------------

    def answered(self, sender: MemberId, send_id: int) -> None:
        """Notes that the gradients of a received message have been computed."""
        self._unanswered.pop((sender, send_id), None)

    def must_answer_after(self, position: int) -> bool:
        """Returns whether messages received after a position are not answered yet."""
        return any(each > position for each in self._unanswered.values())

    @property
    def complete(self) -> bool:
        """Whether all gradients have arrived that it waits for, and all others are computed."""
        return not self._awaited and not self._unanswered

    def store(self, send_id: int, gradients: Iterable[torch.Tensor | None]) -> None:
        """Keeps the gradients of a message's tensors until their `Send` nodes run."""
        for index, gradient in enumerate(gradients):
            self._gradients[send_id, index] = gradient

    def gradient_of(self, send_id: int, index: int) -> torch.Tensor | None:
        """Returns the gradient of a sent tensor, and forgets it."""
        return self._gradients.pop((send_id, index), None)

    def wait(self, send_id: int, receive: Receive) -> Any:
        """Waits for the answer to a send and returns it; raises if the pass fails meanwhile."""
        self._wait(send_id, lambda: send_id not in self._arrived, receive)
        self._awaited -= 1
        with self._lock:
            return self._arrived.pop(send_id)

    def wait_for_parts(self, receive: Receive) -> None:
        """Waits until the parts of other workers have ended; raises if the pass fails meanwhile."""
        self._wait(_PARTS, lambda: bool(self._parts), receive)

    def parts_asked(self) -> int:
        """Returns how many workers were asked for their parts, and have not ended them."""
        return len(self._parts) - len(self.openings)

    def _wait(self, key: int, missing: Callable[[], bool], receive: Receive) -> None:
        gate = threading.Lock()
        with self._lock:
            if missing() and self._failure is None:
                gate.acquire()
                self._gates[key] = gate
        pass_gate(gate, receive=receive)  # until `_open`, or `fail`
        self.check()

    # -- for the threads that receive ------------------------------------------------------

    def deliver(self, send_id: int, gradients: Any) -> None:
        """Takes the answer to a send: its gradients, or a message with them."""
        with self._lock:
            if not self._done:
                self._arrived.setdefault(send_id, gradients)
                self._open(send_id)

    def end_part(self, member: MemberId) -> None:
        """Notes that a worker's part has ended."""
        with self._lock:
            self._parts.discard(member)
            if not self._parts:
                self._open(_PARTS)

    def _open(self, key: int) -> None:
        gate = self._gates.pop(key, None)
        if gate is not None:
            gate.release()

    def fail(self, failure: Callable[[], Exception]) -> bool:
        """Fails the pass; returns False if it has failed already, or is done here."""
        with self._lock:
            if self._failure is not None or self._done:
                return False
            self._failure = failure
            for key in list(self._gates):
                self._open(key)
            return True

    def check(self) -> None:
        """Raises the error of the pass if it has failed."""
        failure = self._failure
        if failure is not None:
            raise failure()
