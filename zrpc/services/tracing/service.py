"""Plugs traces into an agent, and collects those of all workers of a mesh."""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from typing_extensions import override

from zrpc.agent.agent import Agent
from zrpc.agent.current import current_agent
from zrpc.agent.service import ExtensionReader, Service
from zrpc.calls.message_hooks import MessageHooks
from zrpc.calls.open_telemetry import HandlerSpans
from zrpc.calls.recorder import Recorder, Recording
from zrpc.errors import RpcError
from zrpc.membership.init_method import own_variable
from zrpc.runtime.interrupts import UninterruptedLock
from zrpc.services.autograd.contexts import PASS_LAYOUT, pass_name
from zrpc.services.tracing.chrome import chrome_trace
from zrpc.services.tracing.worker_trace import ENDED, RUNNING, PartWriter, WorkerTrace
from zrpc.wire.kind import Kind, Tag
from zrpc.wire.member_id import MemberId

logger = logging.getLogger(__name__)

# Some 30 MB at each worker.
DEFAULT_RECORDS = 65_536
# The variable with the directory for the traces of programs that don't ask for them.
DIRECTORY = "ZRPC_TRACE"
# The file there with the traces of all workers.
MERGED = "trace.json"
# How long other workers may take to begin, and to send what they have.
_ANSWER_SECONDS = 60.0
# A trace: the worker that has begun it, and what tells it from others.
Session = tuple[MemberId, str]


class TracingService(Service):
    """Keeps records while a trace is on. Any thread may call its methods."""

    def __init__(self, agent: Agent) -> None:
        super().__init__(agent)
        self._handler_spans = HandlerSpans(agent.membership)
        # Guards what follows.
        self._lock = UninterruptedLock()
        self._recordings: dict[Session, Recording] = {}  # of the traces that are on
        # The names of threads that were seen, by their idents; those that have ended keep them.
        self._threads: dict[int, str] = {}
        self._writer: PartWriter | None = None
        if directory := own_variable(DIRECTORY, agent.membership.own_record):
            recording = self.begin((agent.membership.own_id, ""), DEFAULT_RECORDS)
            with self._errors_logged():
                # The program may change its working directory.
                self._directory = Path(directory).absolute()
                parts = self._directory, recording, DEFAULT_RECORDS, self._worker
                self._writer = PartWriter(*parts)

    @contextmanager
    def _errors_logged(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as error:
            logger.error("%s: no trace is written: %s", self.agent.worker_info, error)

    @override
    def extension_readers(self) -> Mapping[Tag, ExtensionReader]:
        return {Tag.TRACE_CONTEXT: self._handler_spans.read}

    @override
    def message_hooks(self) -> MessageHooks:
        return self._handler_spans

    def begin(self, session: Session, capacity: int) -> Recording:
        """Records from now on, for one more trace."""
        with self._lock:
            recording = self._recordings[session] = Recording(capacity)
            self._record()
        return recording

    def end(self, session: Session) -> WorkerTrace:
        """Ends the recording for a trace, and returns it."""
        with self._lock:
            recording = self._recordings.pop(session)
            self._record()
        trace = self._worker()
        trace.records, trace.dropped = recording.take(), recording.dropped
        return trace

    @override
    def on_member_lost(self, member: MemberId) -> None:
        with self._lock:
            ended = [each for each in self._recordings if each[0] == member]
            for session in ended:
                del self._recordings[session]
            if ended:
                self._record()

    def _record(self) -> None:
        recordings = self._recordings.values()
        self.agent.record(Recorder(recordings, _describe) if recordings else None)

    def _worker(self) -> WorkerTrace:
        info, infos = self.agent.worker_info, self.agent.membership.infos.copy()
        return WorkerTrace(
            member=info.member_id,
            name=info.name,
            rank=info.rank,
            host=socket.gethostname(),
            pid=os.getpid(),
            names={member: each.name for member, each in infos.items()},
            threads=self._seen_threads(),
        )

    def _seen_threads(self) -> dict[int, str]:
        found = {each.ident: each.name for each in threading.enumerate() if each.ident}
        self._threads = {**self._threads, **found}
        return self._threads

    @override
    def tick(self) -> None:
        """Notes the names of threads, which may end before a trace does."""
        if self._recordings:
            self._seen_threads()

    @override
    def close(self) -> None:
        if self._writer is None:
            return
        membership = self.agent.membership
        directory = self._directory
        with self._errors_logged():
            self._writer.close()
            # An elastic mesh has no size: each worker that leaves it may be the last.
            size = membership.own_record.world_size - len(membership.lost)
            if len(list(directory.glob(f"*{ENDED}"))) >= size:
                merge(directory, directory / MERGED)


def _describe(extension: bytes) -> str:
    """Returns which pass, and which message of it, an extension is about."""
    context_id, pass_id, send_id = PASS_LAYOUT.unpack(extension)
    return pass_name(context_id, pass_id) + (f" #{send_id}" if send_id else "")


@contextmanager
def trace_mesh(agent: Agent, path: str | os.PathLike[str], capacity: int) -> Iterator[None]:
    """Records on all workers while a ``with`` statement runs, and writes one file at its end."""
    if not isinstance(capacity, int) or capacity < 0:
        raise ValueError(f"expected max_records of 0 or more, as an int, but got {capacity!r}")
    path = Path(path).absolute()
    path.write_text("")  # if that is not possible, it is better known now
    session = agent.membership.own_id, secrets.token_hex(8)
    own = agent.service(TracingService)
    others = [info for info in agent.get_worker_infos() if info != agent.worker_info]
    missing: list[str] = []

    def ask(function: Any, *args: Any) -> list[Any]:
        body: Any = (function, (session, *args), {})
        call = partial(agent.caller.call_async, kind=Kind.CALL, obj=body, timeout=_ANSWER_SECONDS)
        asked = [_outcome(partial(call, each)) for each in others]
        outcomes = [each if isinstance(each, RpcError) else _outcome(each.wait) for each in asked]
        for info, error in list(zip(others, outcomes, strict=True)):
            if isinstance(error, RpcError):
                missing.append(f"{info.name} (rank {info.rank}): {error}")
                others.remove(info)
        return [each for each in outcomes if not isinstance(each, RpcError)]

    ask(_begin, capacity)
    own.begin(session, capacity)
    try:
        yield
    finally:
        trace = own.end(session)
        _write(path, [trace, *ask(_end)], missing)


def _outcome(step: Callable[[], Any]) -> Any:
    """Returns what a step of a call returns, or its error: a worker may be gone, or this one."""
    try:
        return step()
    except RpcError as error:
        return error


def _begin(session: Session, capacity: int) -> None:
    current_agent().service(TracingService).begin(session, capacity)


def _end(session: Session) -> WorkerTrace:
    return current_agent().service(TracingService).end(session)


def merge(directory: Path, path: Path) -> tuple[int, list[str]]:
    """Writes the traces that workers left in a directory as one file.

    Returns:
        The number of workers, and which of the traces are not whole, and why. A worker that was
        restarted has left several.

    Raises:
        OSError: a file can't be read or written.
        ValueError: one of them holds something else.
    """
    found: dict[Path, WorkerTrace] = {}
    for suffix in (ENDED, RUNNING):
        for each in directory.glob(f"*{suffix}"):
            with suppress(FileNotFoundError):  # its worker is renaming it
                found[each] = WorkerTrace.read(each)
    cut = [
        f"{trace.name} (rank {trace.rank}): it was killed, or runs on; what it did last is missing"
        for each, trace in found.items()
        if each.suffix == RUNNING
    ]
    _write(path, sorted(found.values(), key=lambda trace: trace.member), cut)
    return len({trace.rank for trace in found.values()}), cut


def _write(path: Path, traces: list[WorkerTrace], missing: Sequence[str]) -> None:
    content = json.dumps(chrome_trace(traces, missing))
    if path.exists() and not path.is_file():  # such as /dev/stdout, which a file must not replace
        path.write_text(content)
        return
    # Several workers may do this at once.
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        part.touch(0o600)
        part.write_text(content)
        part.replace(path)
    except OSError:  # a full disk, say
        part.unlink(missing_ok=True)
        raise
