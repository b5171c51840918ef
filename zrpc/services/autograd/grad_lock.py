"""Who uses ``.grad`` of a leaf: a process has one ``.grad`` for the gradients of all contexts.

A run of the engine puts a context's gradient there while a leaf's hooks run, or for as long as the
run lasts if DDP reduces the leaf. A step of an optimizer does so, too. Each has the leaf alone.

A step takes all its leaves at once, when none of them is in use. So it holds none while it waits,
and can't wait in a circle with a run that holds some leaves and reaches others. What begins later
waits behind it, so that the hooks of many passes can't keep it waiting without limit.
"""

from __future__ import annotations

import enum
import os
import threading
from collections.abc import Iterable

import torch

from zrpc.errors import RpcError
from zrpc.runtime.forks import free_in_child
from zrpc.runtime.interrupts import run_interruptibly, uninterrupted

# Guards what follows, and the attributes of all locks; notified of each change.
_changed = free_in_child(threading.Condition(threading.Lock()))
# The locks that are held, by the id of the leaf. A leaf lives as long as its lock.
_held: dict[int, GradLock] = {}
# The locks of steps that wait, the first one first.
waiting: list[GradLock] = []

# The threads that use leaves don't exist in a forked child.
os.register_at_fork(after_in_child=_held.clear)
os.register_at_fork(after_in_child=waiting.clear)


class Use(enum.Enum):
    """What ``.grad`` is used for."""

    HOOKS = enum.auto()
    RUN = enum.auto()
    STEP = enum.auto()


class GradLock:
    """Exclusive use of ``.grad`` of some leaves within a ``with`` statement, once.

    A hook may step an optimizer with the gradients of its own context. So a step does not wait for
    leaves that are in use by a pass of its context; they have the context's gradient already. Nor
    does a pass that a hook runs wait for the hook's own leaf.

    Args:
        leaves: the leaves.
        use: what they are used for.
        context_id: the context whose gradients these are, if any.

    Attributes:
        lent: leaves that a pass of the same context uses, while the lock is held.
    """

    def __init__(self, leaves: Iterable[torch.Tensor], use: Use, context_id: int | None) -> None:
        self.lent: list[torch.Tensor] = []
        self._leaves = {id(leaf): leaf for leaf in leaves}
        self._use = use
        self._context_id = context_id
        self._thread = threading.get_ident()
        # The locks of passes in whose hooks this one runs, and whose contexts are others.
        self._outer: dict[int, GradLock] = {}

    def __enter__(self) -> GradLock:
        """Waits until nothing else uses the leaves.

        Hooks, steps and other runs of the engine end that; none of them waits for this lock.
        Called by the thread that has made the lock.

        Raises:
            RpcError: to wait could be to wait in a circle.
        """
        with uninterrupted, _changed:
            if self._use is Use.STEP:
                waiting.append(self)
            try:
                run_interruptibly(_changed.wait_for, self._is_free)
                for key, leaf in self._leaves.items():
                    other = _held.get(key)
                    if other is not None and other._context_id == self._context_id:
                        self.lent.append(leaf)
                        continue
                    if other is not None:
                        self._outer[key] = other
                    _held[key] = self
            except BaseException:
                self._drop()
                raise
            finally:
                if self._use is Use.STEP:
                    waiting.remove(self)
                    _changed.notify_all()
        return self

    def __exit__(self, *_: object) -> None:
        with uninterrupted, _changed:
            self._drop()
            _changed.notify_all()

    # The rest is called under _changed.

    def _drop(self) -> None:
        for key in self._leaves:
            if _held.get(key) is self:
                del _held[key]
                if key in self._outer:
                    _held[key] = self._outer[key]

    def _is_free(self) -> bool:
        shared, users = self._others()
        in_pass = bool(users - {Use.STEP})
        if in_pass and self._use is Use.RUN:
            # A run over a DDP module ends only when other workers have done their parts.
            raise RpcError(
                "expected one backward pass at a time over the parameters of a "
                "DistributedDataParallel module, found two: run them one after the other, or "
                "give each its own module"
            )
        if in_pass and shared and self._use is Use.STEP:
            raise RpcError(
                "expected a hook that steps over its own parameter, found a step over others; a "
                "backward pass of another context uses one of them: that pass may wait for this "
                "hook's. Use an optimizer for each parameter"
            )
        return not users and not self._is_behind_a_step()

    def _others(self) -> tuple[list[GradLock], set[Use]]:
        """Returns who shares the leaves that this lock needs, and for what others use them."""
        locks = [lock for lock in map(_held.get, self._leaves) if lock is not None]
        shared = [lock for lock in locks if self._may_share(lock)]
        return shared, {lock._use for lock in locks if lock not in shared}

    def _may_share(self, other: GradLock) -> bool:
        if self._use is Use.HOOKS:
            return other._use is Use.HOOKS and other._thread == self._thread
        return self._use is Use.STEP and other._is_of_pass_in(self._context_id)

    def _is_of_pass_in(self, context_id: int | None) -> bool:
        return self._use is not Use.STEP and self._context_id == context_id is not None

    def _is_behind_a_step(self) -> bool:
        """Returns whether a step has waited longer for one of these leaves.

        A context or a thread that has some leaves goes first: the step may wait for them. And a
        step that waits for a run over a DDP module keeps nobody waiting, since that run needs other
        workers.
        """
        if self._use is Use.RUN or not waiting:
            return False
        if any(
            lock._is_of_pass_in(self._context_id) or lock._thread == self._thread
            for lock in _held.values()
        ):
            return False
        own = self._leaves.keys()
        for step in waiting:
            if step is self:
                return False
            if Use.RUN not in step._others()[1] and not own.isdisjoint(step._leaves):
                return True
        return False
