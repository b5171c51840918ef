"""Calls that begin at the end: once all workers have called shutdown, or as one of them closes."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from functools import partial
from typing import Any

import pytest
import torch

import zrpc as rpc
from tests.support.gates import Gate
from tests.support.identity import emptied
from tests.support.steps import at_step
from tests.support.targets import echo
from tests.support.threads import start_all
from tests.support.waiting import SOON, pending, until
from zrpc.agent.agent import Agent
from zrpc.agent.current import current_agent
from zrpc.agent.shutdown import Phase, ShutdownTiming
from zrpc.testing import Mesh
from zrpc.testing.plugin import MakeMesh


def in_thread(mesh: Mesh, rank: int, job: Callable[[], Any]) -> Future[Any]:
    """Runs a job in a thread that belongs to no worker, with a worker's agent; its future."""
    agent, future = mesh.agent(rank), Future[Any]()

    def run() -> None:
        with agent.as_current():
            try:
                future.set_result(job())
            except BaseException as error:
                future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def until_refused(call: Callable[[], Any]) -> Exception:
    """Calls on and on; returns the error that ends it."""
    try:
        while True:
            call()
    except Exception as error:
        return error


async def call_on() -> None:
    while True:
        await rpc.rpc_async(1, echo, (1,))


def call_in_then() -> Callable[[], Any]:
    """Returns what calls in a callback of a future that is done: it runs at once."""
    done = rpc.rpc_async(1, echo, (1,))
    done.wait()
    return lambda: done.then(lambda _: rpc.rpc_sync(1, echo, (1,))).wait()


def complete_with_a_call() -> None:
    future: rpc.Future[int] = rpc.Future()
    called = future.then(lambda _: rpc.rpc_sync(1, echo, (1,)))
    future.set_result(1)
    called.wait()


CALLS: list[Callable[[], Callable[[], Any]]] = [
    lambda: lambda: rpc.rpc_sync(1, echo, (1,)),
    lambda: lambda: rpc.rpc_sync(0, echo, (1,)),
    lambda: lambda: rpc.rpc_async(1, echo, (1,)),
    lambda: lambda: rpc.remote(1, list),
    lambda: lambda: rpc.remote(0, list),
    lambda: rpc.remote(1, list).to_here,
    lambda: rpc.remote(1, list).rpc_sync().__len__,
    lambda: lambda: asyncio.run(call_on()),
    call_in_then,
    lambda: complete_with_a_call,
]


def test_threads_that_call_on_get_errors_and_all_leave_even_if_one_ignores_them(
    mesh: Mesh,
) -> None:
    begun, left = threading.Barrier(len(CALLS) + 1), threading.Event()

    def go_on(make: Callable[[], Callable[[], Any]]) -> Exception:
        call = make()
        begun.wait(SOON)
        error = until_refused(call)
        while make is CALLS[0] and not left.is_set():
            until_refused(call)
        return error

    ends = [in_thread(mesh, 0, partial(go_on, make)) for make in CALLS]
    begun.wait(SOON)
    mesh.shutdown()
    left.set()
    for each in ends:
        assert isinstance(each.result(SOON), rpc.NotInitializedError)


@pytest.mark.system
@pytest.mark.zrpc(elastic=True)
def test_a_thread_that_calls_on_keeps_no_worker_in_an_elastic_mesh(mesh: Mesh) -> None:
    end = in_thread(mesh, 0, lambda: until_refused(lambda: rpc.rpc_sync(1, echo, (1,))))
    mesh.submit(0, rpc.shutdown).result(SOON)
    assert isinstance(end.result(SOON), rpc.NotInitializedError)


@pytest.mark.zrpc(workers=3)
def test_threads_go_on_calling_until_the_last_worker_has_called_shutdown(mesh: Mesh) -> None:
    first = [mesh.submit(rank, rpc.shutdown) for rank in (0, 1)]
    until(lambda: all(mesh.agent(rank).graceful_shutdown.phase >= Phase.BEGUN for rank in (0, 1)))
    for to in range(3):
        call = in_thread(mesh, 0, lambda to=to: rpc.rpc_sync(to, echo, (to,)))  # type: ignore[misc]
        assert call.result(SOON) == to
    assert not any(each.done() for each in first)
    last = mesh.submit(2, rpc.shutdown)
    for each in [*first, last]:
        each.result(SOON)


@contextlib.contextmanager
def when_all_leave(mesh: Mesh, gate: Gate) -> Iterator[None]:
    """Runs the block when all workers know that all have called shutdown, as a handler holds them.

    Then it opens the handler's gate, and all leave.
    """
    gate.await_entry()
    ends = [mesh.submit(rank, rpc.shutdown) for rank in range(len(mesh))]
    callers = [mesh.agent(rank).caller for rank in range(len(mesh))]
    until(lambda: all(caller.last_calls is not None for caller in callers))
    yield
    gate.open()
    for each in ends:
        each.result(SOON)


def test_a_backward_pass_of_a_thread_is_refused(caller: Mesh, gate: Gate) -> None:
    ready, go_on, weight = threading.Event(), threading.Event(), torch.ones(2, requires_grad=True)

    def train() -> None:
        with rpc.autograd.context() as context_id:
            loss = rpc.rpc_sync(1, torch.sum, (weight,))
            ready.set()
            assert go_on.wait(SOON)
            rpc.autograd.backward(context_id, [loss])

    rpc.rpc_async(1, gate.wait_inside)
    end = in_thread(caller, 0, train)
    assert ready.wait(SOON)
    with when_all_leave(caller, gate):
        go_on.set()
        text = r"all workers have called shutdown\(\)"
        with pytest.raises(rpc.NotInitializedError, match=text):
            end.result(SOON)


# -- what still may call ---------------------------------------------------------------------


def in_a_thread_of_its_own(gate: Gate) -> Any:
    """Is a handler that calls the others in threads of the program's own."""
    gate.wait_inside()
    agent = current_agent()

    def call() -> Any:
        with agent.as_current():
            return rpc.rpc_sync(0, echo, ("from a thread",))

    return start_all([call], SOON)()[0]


async def in_a_coroutine(gate: Gate) -> Any:
    await asyncio.to_thread(gate.wait_inside)
    with rpc.current_call().shield():
        return await rpc.rpc_async(0, echo, ("from a coroutine",))


def with_grad(gate: Gate) -> float:
    """Is a handler with an autograd context of its own."""
    gate.wait_inside()
    weight = torch.ones(3, requires_grad=True)
    with rpc.autograd.context() as context_id:
        loss = rpc.rpc_sync(0, torch.sum, (weight * 2,))
        rpc.autograd.backward(context_id, [loss])
        return rpc.autograd.get_gradients(context_id)[weight].sum().item()


def test_handlers_may_call(caller: Mesh, gate: Gate) -> None:
    handlers = (in_a_thread_of_its_own, in_a_coroutine, with_grad)
    calls = [rpc.rpc_async(1, handler, (gate,)) for handler in handlers]
    gate.await_entry(2)
    with when_all_leave(caller, gate):
        pass
    assert [call.wait() for call in calls] == ["from a thread", "from a coroutine", 6.0]


_tasks: list[asyncio.Task[None]] = []


async def leave_a_task() -> None:
    _tasks.append(asyncio.create_task(call_on()))


def test_a_task_that_a_handler_has_left_behind_gets_an_error(mesh: Mesh) -> None:
    mesh.run(0, rpc.rpc_sync, 1, leave_a_task)
    task = _tasks.pop()
    with Gate() as gate:
        with mesh.agent(1).as_current():
            rpc.rpc_async(0, gate.wait_inside)  # on the worker that has no task
        with when_all_leave(mesh, gate):  # the end of the mesh would cancel a task that waits
            until(task.done)
    assert isinstance(task.exception(), rpc.NotInitializedError)


_tidied: list[Any] = emptied([])


def calls_in_a_step(gate: Gate) -> Iterator[int]:
    """Calls in the step in which its reader leaves: the call is cancelled."""
    yield 0
    gate.wait_inside()
    rpc.rpc_sync(0, echo, (1,))


def calls_when_closed(gate: Gate) -> Iterator[int]:
    """Tidies up elsewhere, which nobody can cancel."""
    try:
        yield 0
        gate.wait_inside()
        yield 1
    finally:
        with rpc.current_call().shield():
            _tidied.append(rpc.rpc_sync(0, echo, (True,)))


async def calls_when_closed_by_await(gate: Gate) -> AsyncIterator[int]:
    """Does the same in the event loop."""
    try:
        yield 0
        gate.entered.release()
        await asyncio.Event().wait()  # its task is cancelled
    finally:
        with rpc.current_call().shield():
            await asyncio.to_thread(gate.wait_inside)
            _tidied.append(await rpc.rpc_async(0, echo, (True,)))


@pytest.mark.parametrize(
    ("generator", "tidied"),
    [
        (calls_in_a_step, []),
        (calls_when_closed, [True]),
        (calls_when_closed_by_await, [True]),
    ],
)
def test_generators_whose_reader_has_left_may_call(
    mesh: Mesh, generator: Any, tidied: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    with Gate() as gate:
        with mesh.agent(0).as_current():
            stream = rpc.rpc_stream(1, generator, args=(gate,))
            assert next(stream) == 0
            gate.await_entry()
            stream.close()
        gate.entered.release()
        with when_all_leave(mesh, gate):
            pass
    assert _tidied == tidied
    assert caplog.records == []  # no handler has failed


def chain(steps: int, join: Callable[[Any], Any], noted: list[int], gate: Gate) -> None:
    """Calls, and calls again in a callback, and so on."""

    def go_on(left: int) -> None:
        noted.append(left)
        if left:
            made = join(rpc.rpc_async(1, echo, (1,)))
            made.then(lambda _: go_on(left - 1))

    rpc.rpc_async(1, gate.wait_inside).then(lambda _: go_on(steps))


def test_chains_of_callbacks_that_end_may_call(mesh: Mesh, gate: Gate) -> None:
    noted: list[list[int]] = [[], []]
    mesh.run(0, chain, 50, lambda future: future, noted[0], gate)
    mesh.run(0, chain, 50, lambda future: torch.futures.collect_all([future]), noted[1], gate)
    gate.await_entry()
    with when_all_leave(mesh, gate):
        pass
    assert noted == [list(range(50, -1, -1))] * 2


class Slow:
    """Takes long to be read."""

    def __init__(self, gate: Gate) -> None:
        self.gate = gate

    def __reduce__(self) -> Any:
        return self.gate.wait_inside, ()


def test_an_answer_that_a_waiting_thread_still_reads_is_waited_for(mesh: Mesh, gate: Gate) -> None:
    """Its callbacks may call."""

    def wait() -> Any:
        call = rpc.rpc_async(1, Slow, (gate,))
        chained = torch.futures.collect_all([call]).then(lambda _: rpc.rpc_sync(1, echo, (7,)))
        call.wait()
        return chained.wait()

    waiting = in_thread(mesh, 0, wait)
    gate.await_entry()
    ends = [mesh.submit(rank, rpc.shutdown) for rank in range(2)]
    assert pending(ends[0], 0.3)
    gate.open()
    assert waiting.result(SOON) == 7
    for end in ends:
        end.result(SOON)


@pytest.mark.system
def test_a_chain_of_callbacks_without_an_end_ends_with_an_error(mesh: Mesh) -> None:
    mesh.agent(0).graceful_shutdown.timing = ShutdownTiming(chains=0.2)
    ended: Future[Exception] = Future()

    def call_again(_: Any = None) -> None:
        try:
            rpc.rpc_async(1, echo, (1,)).then(call_again)
        except Exception as error:
            ended.set_result(error)

    mesh.run(0, call_again)
    mesh.shutdown()
    with pytest.raises(rpc.RpcError, match="expected callbacks that end, found a chain"):
        raise ended.result(SOON)


# -- at whichever step of the end of one worker --------------------------------------------------


def call_without_limit(agent: Agent) -> None:
    with agent.as_current():
        assert rpc.rpc_sync(1, echo, (1,), timeout=0) == 1


@pytest.mark.system
@pytest.mark.parametrize(
    "begin", [call_without_limit, Agent.shutdown], ids=["a call", "a shutdown"]
)
def test_what_begins_as_the_agent_closes_ends(make_mesh: MakeMesh, begin: Any) -> None:
    """At whichever step of it the agent is closed."""

    def run(number: int) -> None:
        mesh = make_mesh(workers=2)
        agent = mesh.agent(0)
        closing = threading.Thread(target=agent.close)

        def close() -> None:
            closing.start()
            closing.join(0.05)  # it may wait for this thread

        with at_step(number, close), contextlib.suppress(rpc.NotInitializedError):
            begin(agent)
        agent.close()
        if closing.ident:
            closing.join(SOON)
        mesh.shutdown(graceful=False)

    for number in range(1, 60, 3):
        run(number)


def wait_then_call_back(gate: Gate) -> Any:
    gate.wait_inside()
    return rpc.rpc_sync(0, echo, (1,), timeout=SOON)


@pytest.mark.system
def test_a_handler_that_calls_as_its_worker_leaves_has_no_error(make_mesh: MakeMesh) -> None:
    """At whichever step of the end: its caller learns that the worker has left."""

    def run(number: int) -> None:
        mesh = make_mesh(workers=2)
        agent = mesh.agent(1)
        with Gate() as gate:
            with mesh.agent(0).as_current():
                future = rpc.rpc_async(1, wait_then_call_back, (gate,))
            gate.await_entry()

            def go_on() -> None:
                gate.open()
                until(lambda: not agent.callee.requests)

            with at_step(number, go_on):
                agent.close()
            with contextlib.suppress(rpc.WorkerDied):
                assert future.wait() == 1
        mesh.shutdown(graceful=False)

    for number in range(1, 120, 4):
        run(number)
