"""What other services of an agent add to RRefs, as RRefs see it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from typing_extensions import Unpack

from zrpc.calls.call_options import CallOptions
from zrpc.constants import Seconds
from zrpc.membership.worker_info import WorkerInfo

# A function, its arguments and its keyword arguments; and what returns them.
Call = tuple[Any, Any, Any]
Resolve = Callable[[], Call]


class BackwardOfValue(ABC):
    """A service of the same agent that runs backward passes from the value of an RRef."""

    @abstractmethod
    def backward_of_value(
        self, owner: WorkerInfo, rref: Any, context_id: int, retain_graph: bool
    ) -> None:
        """Runs a backward pass from the value of an RRef; see `RRef.backward`."""


class MakesStreams(ABC):
    """A service of the same agent that makes streams."""

    @abstractmethod
    def open(
        self,
        to: WorkerInfo,
        body: Any,
        timeout: Seconds,
        prefetch: int,
        deadline: Seconds,
        plain: bool = False,
        **options: Unpack[CallOptions],
    ) -> Any:
        """Calls a generator, and returns its stream; see `zrpc.rpc_stream`.

        Args:
            to: the worker.
            body: the function or the method's name, args and kwargs.
            timeout: as for `zrpc.rpc_stream`.
            prefetch: the same.
            deadline: the same.
            plain: whether the function may also be no generator; then its value is the outcome.
            **options: see `CallOptions`.
        """
