"""What one worker knows of an autograd context: its chain of events, gradients, passes.

The *chain* is real autograd graph: an empty token tensor goes through one node for each
tensor-carrying message that this worker sends or receives within the context, in the order in
which that happened here. torch's engine runs the chain in exactly the reverse order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from zrpc.pool import acquire

__all__ = ["ContextState", "Pass"]


class ContextState:
    """One context at one worker.

    Attributes:
        context_id: its id, unique in the mesh.
        lock: guards all that follows; held while an event is appended to the chain, so that
            the chain has the order of the events.
        start: the token that the chain begins with.
        token: the token that it ends with now.
        sends: for each tensor-carrying message that this worker sent: to whom.
        receives: for each that it received: the sender, and the number it has there.
        peers: all workers with which a message of this context was exchanged.
        gradients: of the leaves at this worker.
        passes: backward passes under way.
    """

    def __init__(self, context_id: int) -> None:
        self.context_id = context_id
        self.lock = threading.Lock()
        self.start = torch.empty(0, requires_grad=True)
        self.token = self.start
        self.sends: dict[int, int] = {}
        self.receives: set[tuple[int, int]] = set()
        self.peers: set[int] = set()
        self.gradients: dict[torch.Tensor, torch.Tensor] = {}
        self.passes: dict[int, Pass] = {}

    @property
    def linked(self) -> set[int]:
        """The workers with which tensors of the graph were exchanged; the lock is held."""
        return {*self.sends.values(), *(sender for sender, _ in self.receives)}

    def clear(self) -> None:
        """The context has ended: lets go of its graph and its gradients."""
        with self.lock:
            self.token = self.start
            self.gradients.clear()

    def find_pass(self, pass_id: int) -> Pass:
        """A pass, made where it is first heard of."""
        with self.lock:
            return self.passes.setdefault(pass_id, Pass(pass_id))

    def add_gradient(self, leaf: torch.Tensor, gradient: torch.Tensor) -> None:
        """Adds to the gradient of a leaf."""
        with self.lock:
            before = self.gradients.get(leaf)
            self.gradients[leaf] = gradient if before is None else before + gradient


class Pass:
    """One backward pass at one worker: the gradients that arrive for what it has sent.

    All methods may be called from any thread.
    """

    def __init__(self, pass_id: int) -> None:
        self.pass_id = pass_id
        # Guards what follows.
        self._lock = threading.Lock()
        self._engaged = False
        self._arrived: dict[int, Any] = {}
        self._gates: dict[int, threading.Lock] = {}
        self._failure: Callable[[], Exception] | None = None

    def engage(self) -> bool:
        """True for the first that asks: it has to run this worker's part."""
        with self._lock:
            first, self._engaged = not self._engaged, True
            return first

    def deliver(self, send_id: int, gradients: Any) -> None:
        """The answer to a send has come: a message with gradients, or None for "unused"."""
        with self._lock:
            self._arrived.setdefault(send_id, gradients)
            gate = self._gates.get(send_id)
            if gate is not None and gate.locked():
                gate.release()

    def fail(self, failure: Callable[[], Exception]) -> bool:
        """The pass has failed somewhere; False where that was known."""
        with self._lock:
            if self._failure is not None:
                return False
            self._failure = failure
            for gate in self._gates.values():
                if gate.locked():
                    gate.release()
            return True

    def check(self) -> None:
        """Raises where the pass has failed."""
        failure = self._failure
        if failure is not None:
            raise failure()

    def wait(self, send_id: int) -> Any:
        """Waits for the answer to a send; raises where the pass fails meanwhile."""
        with self._lock:
            gate = self._gates[send_id] = threading.Lock()
            if send_id not in self._arrived and self._failure is None:
                gate.acquire()
        acquire(gate)
        self.check()
        with self._lock:
            del self._gates[send_id]
            return self._arrived.pop(send_id)
