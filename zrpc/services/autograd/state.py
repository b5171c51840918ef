"""The state of an autograd context at one worker: its chain of events, gradients and passes.

The *chain* is real autograd graph: an empty token tensor goes through one node for each
tensor-carrying message that this worker sends or receives within the context, in the order in
which that happened here. torch's engine runs the chain in exactly the reverse order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from zrpc.errors import RpcError
from zrpc.runtime.thread_pool import acquire
from zrpc.wire.member_id import MemberId

__all__ = ["ContextState", "Events", "Pass", "empty_token"]


def empty_token(requires_grad: bool = False) -> torch.Tensor:
    """Returns a token of the chain, or its gradient; the thread's defaults don't matter."""
    return torch.empty(0, dtype=torch.float32, device="cpu", requires_grad=requires_grad)


class ContextState:
    """One context at one worker.

    Attributes:
        context_id: its id, unique in the mesh.
        lock: guards all that follows; held while an event is appended to the chain, so that
            the chain has the order of the events.
        start: the token that the chain begins with.
        token: the token that the chain ends with now.
        sends: the receiver of each tensor-carrying message that this worker sent, by its id.
        receives: the sender of each tensor-carrying message received, and its id there.
        taken: the received messages that a pass has taken with it.
        peers: all workers with which a message of this context was exchanged.
        gradients: the gradients of the leaves at this worker.
        passes: backward passes, including those that are done: a message about one may come
            late. Not guarded, because the I/O thread reads it, and a thread that adds up
            gradients holds the lock for long; single operations on the dict are atomic.
    """

    def __init__(self, context_id: int) -> None:
        self.context_id = context_id
        self.lock = threading.Lock()
        self.start = empty_token(requires_grad=True)
        self.token = self.start
        self.sends: dict[int, MemberId] = {}
        self.receives: set[tuple[MemberId, int]] = set()
        self.taken: set[tuple[MemberId, int]] = set()
        self.peers: set[MemberId] = set()
        self.gradients: dict[torch.Tensor, torch.Tensor] = {}
        self.passes: dict[int, Pass] = {}

    def clear(self) -> None:
        """Ends the context: drops its graph and its gradients, and fails its passes."""
        with self.lock:
            self.token = self.start
            self.gradients.clear()
            passes = list(self.passes.values())
        for pass_ in passes:
            pass_.fail(lambda: RpcError("the autograd context ended during a backward pass"))

    def find_pass(self, pass_id: int) -> Pass:
        """Returns a pass, and makes it when it is first heard of."""
        return self.passes.setdefault(pass_id, Pass(pass_id))

    def engage(self, pass_: Pass, retain_graph: bool) -> bool:
        """Begins this worker's part of a pass; returns False if it has begun already.

        The pass goes over the events so far. Messages that are sent or received later are not
        part of it. Unless the graph is retained, the pass takes the events with it, and a new
        chain begins.
        """
        with self.lock:
            if pass_.events is not None:
                return False
            sends, receives = dict(self.sends), frozenset(self.receives)
            pass_.events = Events(self.start, self.token, sends, receives)
            if not retain_graph:
                self.start = self.token = empty_token(requires_grad=True)
                self.sends.clear()
                self.taken |= self.receives
                self.receives.clear()
            return True

    def add_gradient(self, leaf: torch.Tensor, gradient: torch.Tensor) -> None:
        """Adds to the gradient of a leaf."""
        with self.lock:
            before = self.gradients.get(leaf)
            self.gradients[leaf] = gradient if before is None else before + gradient

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


@dataclass(frozen=True, slots=True)
class Events:
    """The events that a pass goes over at one worker; see `ContextState`."""

    start: torch.Tensor
    token: torch.Tensor
    sends: dict[int, MemberId]
    receives: frozenset[tuple[MemberId, int]]

    @property
    def linked(self) -> set[MemberId]:
        """The workers with which tensors of the graph were exchanged."""
        return {*self.sends.values(), *(sender for sender, _ in self.receives)}

    def with_peer(self, peer: MemberId) -> tuple[list[int], list[int]]:
        """Returns the ids of the messages sent to a peer, and of those received from it."""
        sends = [send_id for send_id, to in self.sends.items() if to == peer]
        receives = [send_id for sender, send_id in self.receives if sender == peer]
        return sends, receives


class Pass:
    """One backward pass at one worker: the gradients that arrive for the tensors it has sent.

    All methods may be called from any thread.

    Attributes:
        pass_id: its id, unique in the mesh.
        events: the events that it goes over here; None until this worker's part begins.
    """

    def __init__(self, pass_id: int) -> None:
        self.pass_id = pass_id
        self.events: Events | None = None
        # Guards what follows.
        self._lock = threading.Lock()
        self._done = False
        self._arrived: dict[int, Any] = {}
        self._gates: dict[int, threading.Lock] = {}
        self._failure: Callable[[], Exception] | None = None

    def finish(self) -> None:
        """Ends this worker's part: what arrives from now on is dropped."""
        with self._lock:
            self._done = True
            self._arrived.clear()
        if self.events is not None:
            # Frees the graph; the messages sent and received no longer matter either.
            self.events = Events(empty_token(), empty_token(), {}, frozenset())

    def deliver(self, send_id: int, gradients: Any) -> None:
        """Takes the answer to a send: a message with gradients, or a mark for "unused"."""
        with self._lock:
            if self._done:
                return
            self._arrived.setdefault(send_id, gradients)
            gate = self._gates.get(send_id)
            if gate is not None and gate.locked():
                gate.release()

    def fail(self, failure: Callable[[], Exception]) -> bool:
        """Fails the pass; returns False if it has failed already, or is done here."""
        with self._lock:
            if self._failure is not None or self._done:
                return False
            self._failure = failure
            for gate in self._gates.values():
                if gate.locked():
                    gate.release()
            return True

    def check(self) -> None:
        """Raises the error of the pass if it has failed."""
        failure = self._failure
        if failure is not None:
            raise failure()

    def wait(self, send_id: int, receive: Callable[[threading.Lock, float], None]) -> Any:
        """Waits for the answer to a send and returns it; raises if the pass fails meanwhile.

        For ``receive`` see `zrpc.runtime.thread_pool.acquire`.
        """
        with self._lock:
            gate = self._gates[send_id] = threading.Lock()
            if send_id not in self._arrived and self._failure is None:
                gate.acquire()
        acquire(gate, receive=receive)
        self.check()
        with self._lock:
            del self._gates[send_id]
            return self._arrived.pop(send_id)
