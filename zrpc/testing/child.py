"""The worker's side of a mesh of processes: serves the requests from a socket, one by one.

The requests, and the replies in the order of the requests:

    ("start",)             join the mesh
    ("call", pickled)      call a function; pickled is (fn, args, kwargs)
    ("shutdown", graceful, search)
                           leave the mesh; if search is true, the value lists what is left
                           behind
    ("exit",)              exit; no reply

    (True, value)
    (False, error, traceback as text)
"""

from __future__ import annotations

import asyncio
import atexit
import copyreg
import faulthandler
import inspect
import os
import pickle
import signal
import sys
import threading
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from zrpc.errors import text_of
from zrpc.launch.child import keep_modules
from zrpc.testing.failure import WorkerFailed, traceback_of, without_frames
from zrpc.testing.leaks import Resources
from zrpc.testing.procfs import read_text
from zrpc.testing.served import serve
from zrpc.testing.spec import MeshSpec
from zrpc.wire.pickling import dumps

# Makes the process write the stacks of all threads, whatever they are doing.
STACKS_SIGNAL = signal.SIGUSR1
# Makes it interrupt the function whose number is in a file, if that still runs.
INTERRUPT_SIGNAL = signal.SIGUSR2
# pytest's exceptions that claim to be built in, so that no pickle finds them by their names.
_OUTCOMES = ("Skipped", "Failed")


@dataclass(frozen=True)
class WorkerSettings:
    """The settings of a worker process.

    Args:
        name: the worker's name.
        rank: the worker's rank.
        spec: the specification of its mesh.
        home: a directory that the mesh's workers share.
        socket: the descriptor of the socket for requests and replies.
        fake_device: whether it has the fake device.
    """

    name: str
    rank: int
    spec: MeshSpec
    home: Path
    socket: int = -1
    fake_device: bool = False

    @property
    def stacks_path(self) -> Path:
        """The file to which stacks are written on `STACKS_SIGNAL`."""
        return self.home / f"{self.name}.stacks"

    @property
    def interrupts_path(self) -> Path:
        """The file with the numbers of the functions to interrupt, a line each."""
        return self.home / f"{self.name}.interrupts"


def main(settings: WorkerSettings) -> NoReturn:
    """Runs a worker process, until the test is over or the test's process is dead."""
    serve(settings.socket, _WorkerProcess(settings).do)
    _exit()


def _exit() -> NoReturn:
    """Exits as multiprocessing's children do: without the interpreter's teardown.

    The teardown frees torch module by module, in memory shared with the server. That costs
    each worker 0.2 s of copying and tests nothing.
    """
    atexit.unregister(keep_modules)  # it hides them from a teardown that does not take place
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that aren't daemons
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _reduce_outcome(outcome: BaseException) -> tuple[Any, ...]:
    return _outcome, (type(outcome).__name__, outcome.args), vars(outcome)


def _outcome(name: str, args: tuple[Any, ...]) -> BaseException:
    outcome: BaseException = getattr(import_module("_pytest.outcomes"), name)(*args)
    return outcome


class _WorkerProcess:
    """One worker. All its methods run in the process's main thread."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        # After a crash the output shows where it happened.
        faulthandler.enable()
        stacks = os.open(settings.stacks_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        faulthandler.register(STACKS_SIGNAL, file=stacks, all_threads=True)
        signal.pthread_sigmask(
            signal.SIG_UNBLOCK, {STACKS_SIGNAL, INTERRUPT_SIGNAL}
        )  # may be blocked
        signal.signal(INTERRUPT_SIGNAL, self._on_interrupt)
        self._requests = 0  # that have been served
        self._calling = False  # whether a function runs
        self._before = Resources.now()

    def do(self, request: str, *args: Any) -> bytes:
        """Serves a request and returns the reply."""
        try:
            value = getattr(self, f"_{request}")(*args)
        except BaseException as error:  # SystemExit and pytest's outcomes too go to the test
            return _failure(error)
        finally:
            self._requests += 1
        try:
            data: bytes = dumps((True, value))
        except Exception as error:
            return _failure(WorkerFailed(f"the result can't be pickled: {value!r}: {error}"))
        return data

    def _start(self) -> None:
        from zrpc import api
        from zrpc.options import ZmqRpcBackendOptions

        settings, spec = self._settings, self._settings.spec
        if settings.fake_device:  # the options may name it
            import_module("zrpc.testing.device").fake_device()
        # A store that is a file needs no port and no server thread in the test's process, and it
        # survives the death of any worker.
        store = {"init_method": f"file://{settings.home}/store"}
        options = ZmqRpcBackendOptions(**{**store, **spec.options})
        api.init_rpc(
            settings.name,
            rank=settings.rank,
            world_size=None if spec.elastic else spec.workers,
            rpc_backend_options=options,
        )

    def _call(self, pickled: bytes) -> Any:
        fn, args, kwargs = pickle.loads(pickled)
        try:
            self._calling = True
            self._on_interrupt()  # the caller may have been interrupted before
            value = fn(*args, **kwargs)
            return asyncio.run(value) if inspect.iscoroutine(value) else value
        finally:
            self._calling = False

    def _on_interrupt(self, *_: object) -> None:
        """Runs in the main thread, between two instructions."""
        # The caller may have been too late: this or a later function may run by now.
        path = self._settings.interrupts_path
        if self._calling and str(self._requests) in read_text(path).split():
            self._calling = False  # once
            raise KeyboardInterrupt

    def _shutdown(self, graceful: bool, search: bool) -> list[str]:
        from zrpc import api

        api.shutdown(graceful=graceful)
        return self._before.left_behind() if search else []


def _failure(error: BaseException) -> bytes:
    text = traceback_of(without_frames(error, 2))
    if (outcomes := sys.modules.get("_pytest.outcomes")) is not None:
        for name in _OUTCOMES:
            copyreg.pickle(getattr(outcomes, name), _reduce_outcome)
    try:
        data: bytes = dumps((False, error, text))
        pickle.loads(data)  # many exceptions can be pickled, but not unpickled
    except Exception as reason:
        substitute = WorkerFailed(f"{text_of(error)} (it can't be sent: {reason})")
        data = dumps((False, substitute, text))
    return data
