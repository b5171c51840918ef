"""Runs a function in several processes that are workers: `spawn`."""

from __future__ import annotations

import io
import os
import pickle
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any

from zrpc.launch.interpreter import check_not_imported
from zrpc.launch.port import ReservedPort
from zrpc.launch.worker import EnvironmentTemplate, base_environment

if TYPE_CHECKING:
    from torch.multiprocessing.spawn import ProcessContext

__all__ = ["spawn"]

_HOST = "127.0.0.1"
_THREADS = "OMP_NUM_THREADS"


def spawn(
    fn: Callable[..., object],
    args: Sequence[Any] = (),
    nprocs: int = 1,
    join: bool = True,
    daemon: bool = False,
    start_method: str = "spawn",
) -> ProcessContext | None:
    """Runs ``fn(rank, *args)`` in ``nprocs`` new processes on this machine.

    It is ``torch.multiprocessing.spawn`` with what workers need: each process has the environment
    variables that ``zrpc launch`` sets, so that `zrpc.session` and `zrpc.init_rpc` need no
    arguments in ``fn``. It also runs functions that can't be imported, such as those of notebooks.

    Args:
        fn: called with the worker's rank, from 0, and ``args``.
        args: its other arguments: all that a call can send, and the queues and locks of
            ``torch.multiprocessing``. Tensors share their memory with this process.
        nprocs: the number of processes.
        join: whether to wait until all of them have exited.
        daemon: whether they are stopped when this process exits.
        start_method: ``spawn``, ``fork`` or ``forkserver``. With ``spawn`` and ``forkserver`` the
            processes import the main script, so call this under ``if __name__ == "__main__":``.

    Returns:
        None, or without ``join`` a ``ProcessContext`` with a method ``join(timeout)``.

    Raises:
        ProcessRaisedException: ``fn`` has failed in a process, and the others were stopped. The
            message has its traceback. It is torch's, as is the next one.
        ProcessExitedException: a process has exited with another code than 0.
        ValueError: ``nprocs`` is below 1.
        RuntimeError: the processes would call this again as they import the main script, or can't
            import it, since it is read from standard input. `zrpc.start_mesh` needs no import.

    Call it in the main thread. With more than one process, each has one thread for torch's
    operators, unless ``OMP_NUM_THREADS`` is set.

    Example:
        >>> import zrpc
        >>> def work(rank, text):
        ...     with zrpc.session():
        ...         if rank == 0:
        ...             print(zrpc.rpc_sync("worker1", str.upper, args=(text,)))
        >>> zrpc.spawn(work, args=("hello",), nprocs=2)  # doctest: +SKIP
        HELLO

    See also ``torch.multiprocessing.spawn``.
    """
    import torch.multiprocessing  # only now, since it is slow

    if nprocs < 1:
        raise ValueError(f"nprocs must be at least 1, but got {nprocs}")
    if start_method != "fork":
        _check_main()
    port = ReservedPort()
    template = EnvironmentTemplate(nprocs, "worker", _HOST, port.number, None)
    base = base_environment(nprocs, {})
    environments = [template.for_worker(base, rank, 0) for rank in range(nprocs)]
    try:
        context: ProcessContext = torch.multiprocessing.start_processes(  # type: ignore[no-untyped-call]
            _run, (_Work(fn, tuple(args)), environments), nprocs, False, daemon, start_method
        )
        weakref.finalize(context, port.close)
    except BaseException:
        port.close()
        raise
    if not join:
        return context
    while not context.join():
        pass
    return None


def _check_main() -> None:
    """Raises a RuntimeError if new processes can't import the main script, or are doing so."""
    check_not_imported("zrpc.spawn")
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    if file and getattr(main, "__spec__", None) is None and not os.path.exists(file):
        raise RuntimeError(
            f"the processes of zrpc.spawn import the main script, but {file} is no file: put the "
            "script in one, or use start_method='fork' or zrpc.start_mesh"
        )


def _run(
    rank: int, work: Callable[[int], object], environments: Sequence[Mapping[str, str]]
) -> None:
    """Runs the function; in the new process."""
    import torch

    if _THREADS in environments[rank] and _THREADS not in os.environ:
        torch.set_num_threads(int(environments[rank][_THREADS]))  # it is imported already
    os.environ.clear()
    os.environ.update(environments[rank])
    work(rank)


class _Work:
    """A function and its arguments, pickled as in a call, except for what processes can share."""

    def __init__(self, fn: Callable[..., object], args: tuple[Any, ...]) -> None:
        self._fn_and_args = fn, args

    def __call__(self, rank: int) -> None:
        fn, args = self._fn_and_args
        fn(rank, *args)

    def __reduce__(self) -> Any:
        # Called while a process starts: only then can the queues of multiprocessing be pickled.
        from zrpc.wire.pickling import dumps

        main = sys.modules["__main__"]  # which the process imports if it has a name or a file
        same_main = hasattr(main, "__file__") or getattr(main, "__spec__", None) is not None
        shared = ForkingPickler(io.BytesIO()).dispatch_table
        pickled = dumps(self._fn_and_args, same_main, copies=True, reducers=shared)
        return _unpickled, (pickled,)


def _unpickled(pickled: bytes) -> _Work:
    return _Work(*pickle.loads(pickled))
