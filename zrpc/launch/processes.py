"""Runs a function in several processes that are workers: `spawn`."""

from __future__ import annotations

import contextlib
import functools
import io
import multiprocessing
import os
import pickle
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any

from zrpc.launch.port import ReservedPort
from zrpc.launch.worker import SECRET, EnvironmentTemplate, base_environment, without_launcher

if TYPE_CHECKING:
    from torch.multiprocessing.spawn import ProcessContext

_HOST = "127.0.0.1"
_THREADS = "OMP_NUM_THREADS"
# The exit code of a process that has called `spawn` while it imported the main script.
_NO_GUARD = 78


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

    Without ``join``, this process may be one more worker of the mesh, if `zrpc.init_rpc` gets a
    ``world_size`` of ``nprocs + 1`` here and in ``fn``, and a rank for each. The processes meet at
    a free port; or at ``MASTER_ADDR`` and ``MASTER_PORT``, if this process is no worker and both
    are set.

    Args:
        fn: called with the worker's rank, from 0, and ``args``.
        args: its other arguments: all that a call can send, and the queues and locks of
            ``torch.multiprocessing``. Tensors share their memory with this process.
        nprocs: the number of processes.
        join: whether to wait until all of them have exited. `zrpc.start_mesh` waits until they can
            be called, and is simpler if this process calls them.
        daemon: whether they are stopped when this process exits.
        start_method: ``spawn``, ``fork`` or ``forkserver``. With ``spawn`` and ``forkserver`` the
            processes import the main script, so call this under ``if __name__ == "__main__":``. A
            script from standard input needs no guard.

    Returns:
        None, or without ``join`` a ``ProcessContext`` with a method ``join(timeout)``.

    Raises:
        ProcessRaisedException: ``fn`` has failed in a process, and the others were stopped. The
            message has its traceback. It is torch's, as is the next one.
        ProcessExitedException: a process has exited with another code than 0.
        RuntimeError: it was called without the guard that ``start_method`` needs.
            `zrpc.start_mesh` needs none.
        ValueError: ``nprocs`` is below 1.

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
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        # This process only imports the main script, to run a function of it. The server of
        # "forkserver" would take another exit for a failure of any kind.
        sys.stdout.flush()
        os._exit(_NO_GUARD)
    import torch.multiprocessing  # only now, since it is slow

    from zrpc.membership.cluster_environment import find_settings
    from zrpc.membership.launched import set_spawned

    if nprocs < 1:
        raise ValueError(f"nprocs must be at least 1, but got {nprocs}")
    port, env = ReservedPort(), without_launcher(os.environ)
    is_worker = "rank" in find_settings(env)  # then the variables speak of its own mesh
    host, number = env.get("MASTER_ADDR", ""), env.get("MASTER_PORT", "")
    if is_worker or not (host and number.isdecimal()):
        host, number = _HOST, str(port.number)
    template = EnvironmentTemplate(nprocs, "worker", host, int(number), None)
    base = base_environment(nprocs, {})
    environments = [template.for_worker(base, rank, 0) for rank in range(nprocs)]
    try:
        with _main_that_can_be_imported():
            context: ProcessContext = torch.multiprocessing.start_processes(  # type: ignore[no-untyped-call]
                _run, (_Work(fn, tuple(args)), environments), nprocs, False, daemon, start_method
            )
        weakref.finalize(context, port.close)
    except BaseException:
        port.close()
        raise
    names = ("MASTER_ADDR", "MASTER_PORT", SECRET)
    variables = {name: environments[0].get(name, "") for name in names}
    if not is_worker:
        set_spawned(variables)
    join_all = functools.partial(_join, context, context.join, variables)
    context.join = join_all  # type: ignore[method-assign]
    if not join:
        return context
    while not context.join():
        pass
    return None


def _join(
    context: ProcessContext,
    join: Callable[..., bool],
    variables: Mapping[str, str],
    *args: Any,
    **kwargs: Any,
) -> bool:
    """Does what ``ProcessContext.join`` does, and says what is wrong if a guard is missing."""
    from torch.multiprocessing import ProcessExitedException

    from zrpc.membership.launched import unset_spawned

    try:
        return join(*args, **kwargs)
    except ProcessExitedException as error:
        if error.exit_code != _NO_GUARD:
            raise
        raise RuntimeError(
            'expected zrpc.spawn to be called under `if __name__ == "__main__":`, since the new '
            "processes import the main script, but it was called while they did that; "
            "zrpc.start_mesh needs no guard"
        ) from None
    finally:
        if not any(process.is_alive() for process in context.processes):
            unset_spawned(variables)


@contextlib.contextmanager
def _main_that_can_be_imported() -> Iterator[None]:
    """Hides the main script from multiprocessing if it is no file, but comes from standard input.

    Its functions then travel by value.
    """
    main = sys.modules["__main__"]
    path = getattr(main, "__file__", None)
    if path is None or os.path.exists(path):
        yield
        return
    del main.__file__
    try:
        yield
    finally:
        main.__file__ = path


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

        def reduce_shared(value: Any) -> Any:
            return shared[type(value)](value) if type(value) in shared else NotImplemented

        pickled = dumps(self._fn_and_args, same_main, copies=True, first=reduce_shared)
        return _unpickled, (pickled,)


def _unpickled(pickled: bytes) -> _Work:
    return _Work(*pickle.loads(pickled))
