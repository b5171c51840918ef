"""What mypy and pyright find in programs. Nothing here runs.

`assert_type` says what a call gives. A line with two comments that ignore errors must be an error
in both: the checkers report comments that nothing needs.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Iterator
from datetime import timedelta
from typing import Any, Generic, TypeVar, assert_type

import torch

import zrpc
from zrpc import Future, Queue, RRef, Stream
from zrpc.nn import RemoteModule
from zrpc.services.groups.future import GroupFuture
from zrpc.services.groups.group import RRefGroup, WorkerGroup
from zrpc.testing import Mesh
from zrpc.testing.plugin import MakeMesh, MeshFactory

T = TypeVar("T")


def length(text: str) -> int:
    return len(text)


async def length_later(text: str) -> int:
    return len(text)


@zrpc.functions.async_execution
def length_elsewhere(text: str) -> Future[int]:
    return zrpc.rpc_async("worker2", length, (text,))


def letters(text: str) -> Iterator[str]:
    yield from text


async def letters_later(text: str) -> AsyncIterator[str]:
    for letter in text:
        yield letter


def untyped(x):  # type: ignore[no-untyped-def]
    return x


def options() -> None:
    made = zrpc.ZmqRpcBackendOptions(init_timeout=timedelta(minutes=1), warn_after=None)
    made.heartbeat_timeout = made.switch_interval = timedelta(seconds=1)
    assert_type(made.heartbeat_timeout, float)
    made.transport = 5  # type: ignore[assignment]  # pyright: ignore[reportAttributeAccessIssue]


def verbs() -> None:
    assert_type(zrpc.rpc_sync("worker1", length, args=("a",)), int)
    assert_type(zrpc.rpc_sync(1, length_later, args=["a"], timeout=1), int)
    assert_type(zrpc.rpc_sync("worker1", length_elsewhere, kwargs={"text": "a"}), int)
    assert_type(zrpc.rpc_sync("worker1", lambda: 1), int)
    assert_type(zrpc.rpc_sync("worker1", untyped, ("a",)), Any)
    assert_type(zrpc.rpc_sync("worker1", torch.add, (torch.ones(1), 1)), torch.Tensor)
    zrpc.rpc_sync("worker1", length).upper()  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
    zrpc.rpc_sync("worker1", "length")  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue, reportArgumentType]
    zrpc.rpc_sync(1.5, length)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue, reportArgumentType]

    assert_type(zrpc.rpc_async("worker1", length, args=("a",)), Future[int])
    assert_type(zrpc.rpc_async("worker1", length_later, args=("a",)), Future[int])
    assert_type(zrpc.rpc_async("worker1", length_elsewhere, args=("a",)), Future[int])

    assert_type(zrpc.remote("worker1", length, args=("a",)), RRef[int])
    assert_type(zrpc.remote("worker1", length_later, args=("a",)), RRef[int])
    assert_type(zrpc.remote("worker1", length_elsewhere, args=("a",)), RRef[int])
    assert_type(zrpc.remote("worker1", Counter, name="counter", exist_ok=True), RRef[Counter])

    assert_type(zrpc.rpc_stream("worker1", letters, args=("a",)), Stream[str])
    assert_type(zrpc.rpc_stream("worker1", letters_later, args=("a",), prefetch=2), Stream[str])
    zrpc.rpc_stream("worker1", length)  # type: ignore[arg-type]  # pyright: ignore[reportCallIssue, reportArgumentType]


async def futures_and_streams(future: Future[int], stream: Stream[str]) -> None:
    assert_type(future.wait(), int)
    assert_type(await future, int)
    assert_type(future.value(), int)
    assert_type(future.then(lambda done: str(done.wait())), Future[str])
    assert_type(future.then(lambda done: done.wait()), Future[int])
    future.then(length)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    future.add_done_callback(lambda done: assert_type(done, Future[int]))
    assert_type(zrpc.wait_all([future, future], timeout=1), list[int])
    for done in zrpc.as_completed([future]):
        assert_type(done, Future[int])
        assert_type(done.wait(), int)
    of_torch: torch.futures.Future[str] = torch.futures.Future()
    assert_type(list(zrpc.as_completed([of_torch])), list[torch.futures.Future[str]])
    assert_type(zrpc.collect_all([future, future]), Future[list[Future[int]]])
    assert_type(zrpc.collect_all([future]).then(lambda done: done.wait()[0].wait()).wait(), int)
    # Futures of several types.
    texts = zrpc.rpc_async("worker1", str, (1,))
    assert len(zrpc.wait_all([future, texts], timeout=1)) == 2
    for each in zrpc.as_completed((future, texts, of_torch)):
        each.wait()
    zrpc.collect_all([future, texts]).then(lambda done: [each.wait() for each in done.wait()])
    zrpc.as_completed([1])  # type: ignore[type-var]  # pyright: ignore[reportCallIssue, reportArgumentType]
    zrpc.collect_all(future)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue, reportArgumentType]
    zrpc.wait_all([future])[0].upper()  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
    for letter in stream:
        assert_type(letter, str)
    async for letter in stream:
        assert_type(letter, str)
    with stream as opened:
        assert_type(next(opened), str)
    async with stream as opened:
        assert_type(await anext(opened), str)


def all_workers(worker: zrpc.WorkerInfo) -> None:
    assert_type(zrpc.all_gather(1, timeout=5), dict[str, int])
    assert_type(zrpc.all_gather(torch.ones(1), ["worker1"])["worker1"], torch.Tensor)
    zrpc.all_gather(1)["worker1"].upper()  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
    zrpc.barrier([worker, 1, "worker2"])
    zrpc.all_gather(1, 3)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    zrpc.on_worker_lost(lambda lost: assert_type(lost, zrpc.WorkerInfo))
    with zrpc.session() as me:
        assert_type(me, zrpc.WorkerInfo)


def timeouts(limit: timedelta, rref: RRef[str], queue: RRef[Queue[int]]) -> None:
    workers = zrpc.group("rollout*", timeout=limit)
    assert_type(zrpc.rpc_sync("worker1", length, ("a",), timeout=limit), int)
    assert_type(zrpc.rpc_sync(workers, length, ("a",), timeout=limit), list[int])
    assert_type(zrpc.rpc_async("worker1", length, ("a",), timeout=limit), Future[int])
    assert_type(zrpc.remote("worker1", length, ("a",), timeout=limit), RRef[int])
    assert_type(zrpc.rpc_stream(1, letters, timeout=limit, deadline=limit), Stream[str])
    assert_type(rref.to_here(limit), str)
    assert_type(rref.rpc_sync(limit).upper(), str)
    assert_type(zrpc.wait_all([rref.rpc_async(limit).upper()], limit), list[Any])
    assert_type(queue.rpc_sync().get(limit), int)
    assert_type(zrpc.all_gather(1, timeout=limit), dict[str, int])
    assert_type(zrpc.get_actor("counter", limit), RRef[Any])
    assert_type(zrpc.current_call().wait_cancelled(limit), bool)
    zrpc.barrier(timeout=limit)
    zrpc.set_rpc_timeout(limit)
    zrpc.batched(max_wait=limit)
    with zrpc.session(shutdown_timeout=limit), zrpc.local_mesh(timeout=limit):
        zrpc.shutdown(timeout=limit)


def checked_arguments() -> None:
    # Those of a partial are checked. Those in `args` are not: see docs/explanation/references.md.
    assert_type(zrpc.rpc_sync("worker1", functools.partial(length, "a")), int)
    zrpc.rpc_sync("worker1", functools.partial(length, 1))  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    zrpc.rpc_sync("worker1", length, args=1)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue, reportArgumentType]
    zrpc.rpc_sync("worker1", length, kwargs=["a"])  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue, reportArgumentType]
    zrpc.rpc_async("worker1", length, timeout="1")  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue, reportArgumentType]
    zrpc.remote("worker1", Counter, name=1)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue, reportArgumentType]


@zrpc.actor
class Counter:
    def __init__(self, start: int = 0) -> None:
        self.count = start

    def add(self, number: int) -> int:
        self.count += number
        return self.count

    @zrpc.concurrent
    def size(self) -> int:
        return self.count

    @zrpc.concurrent(4)
    def text(self, base: int) -> str:
        return str(self.count)

    def numbers(self) -> Iterator[int]:
        yield self.count

    @zrpc.batched
    async def triples(self, numbers: list[int]) -> list[int]:
        return [3 * number for number in numbers]

    @zrpc.batched(max_size=8)
    def doubles(self, numbers: list[int]) -> list[int]:
        return [2 * number for number in numbers]


@zrpc.actor(concurrency=8, restart=True)
class Server(Generic[T]):
    def __init__(self, value: T) -> None:
        self.value = value

    def get(self) -> T:
        return self.value

    async def get_later(self) -> T:
        return self.value


class Tokenizer:
    def words(self, text: str) -> list[str]:
        return text.split()


def decorated_classes() -> None:
    assert_type(Counter(1), Counter)
    assert_type(Counter(1).add(2), int)
    assert_type(Counter(1).text(2), str)
    assert_type(Counter(1).doubles(2), int)
    Counter("a")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    Counter().text("a")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    assert_type(Server(1), Server[int])
    assert_type(Server[str]("a").get(), str)

    class Derived(Counter):
        def take(self) -> float:
            return 1.0

    assert_type(zrpc.remote("worker1", Derived).rpc_sync().take(), float)
    assert_type(zrpc.remote("worker1", Derived).rpc_sync().size(), int)
    zrpc.actor(restart=1)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
    zrpc.actor(concurrency="2")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
    zrpc.actor(length)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]


def references() -> None:
    counter = zrpc.remote("worker1", Counter, args=(1,))
    assert_type(counter, RRef[Counter])
    assert_type(counter.rpc_sync(timeout=1), Counter)
    assert_type(counter.rpc_sync().add(1), int)
    assert_type(counter.rpc_sync().size(), int)
    assert_type(counter.rpc_sync().text(10), str)
    assert_type(counter.rpc_sync().doubles(1), int)
    counter.rpc_sync().add("a")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    counter.rpc_sync().dad(1)  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
    counter.rpc_async().triples(1)
    # What is said in docs/explanation/references.md: a coroutine method.
    server = zrpc.remote("worker1", Server[int], args=(1,))
    server.rpc_sync().get_later() + 1  # type: ignore[operator]  # pyright: ignore[reportOperatorIssue]
    assert_type(server.rpc_async().get_later().wait(), Any)
    assert_type(counter.rpc_async().add(1), Future[Any])
    assert_type(counter.remote().add(1), RRef[Any])
    assert_type(counter.rpc_stream().numbers(), Stream[Any])
    total: Future[int] = counter.rpc_async().add(1)
    assert_type(total.wait(), int)
    counter.rpc_async().add(1).upper()  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
    assert_type(counter.to_here(), Counter)
    assert_type(counter.local_value().count, int)

    pool = zrpc.remote("worker1", zrpc.actor(Tokenizer, concurrency=4))
    assert_type(pool, RRef[Tokenizer])
    assert_type(pool.rpc_sync().words("a b"), list[str])
    assert_type(zrpc.remote("worker1", zrpc.actor(Tokenizer)), RRef[Tokenizer])
    assert_type(zrpc.remote("worker1", Server[int], args=(1,)).rpc_sync().get(), int)

    module = zrpc.remote("worker1", torch.nn.Linear, args=(2, 2))
    assert_type(module, RRef[torch.nn.Linear])
    assert_type(module.rpc_sync().forward(torch.ones(2)), torch.Tensor)
    module.rpc_sync()(torch.ones(2))
    assert_type(RRef(1), RRef[int])
    assert_type(RRef(length).rpc_sync()("a"), int)

    found: RRef[Counter] = zrpc.get_actor("counter", timeout=10)
    assert_type(found.rpc_sync().add(1), int)
    assert_type(zrpc.get_actor("counter"), RRef[Any])


@zrpc.batched
def policy(observations: list[torch.Tensor]) -> list[int]:
    return [0 for _ in observations]


@zrpc.batched(max_size=32, max_wait=0.002)
async def policy_later(observations: list[torch.Tensor]) -> list[int]:
    return [0 for _ in observations]


@zrpc.functions.batched(max_size=32, stack=True)
def policy_of_tensor(observations: torch.Tensor) -> torch.Tensor:
    return observations


@zrpc.batched  # type: ignore[arg-type]  # pyright: ignore[reportCallIssue, reportArgumentType]
def no_list(observations: list[torch.Tensor]) -> int:
    return len(observations)


def batches() -> None:
    assert_type(policy(torch.ones(1)), int)
    assert_type(zrpc.rpc_sync("worker1", policy, args=(torch.ones(1),)), int)
    assert_type(zrpc.rpc_async("worker1", policy_later, args=(torch.ones(1),)), Future[int])
    assert_type(zrpc.rpc_sync("worker1", policy_of_tensor, args=(torch.ones(1),)), Any)


def groups(actions: torch.Tensor) -> None:
    workers = zrpc.group("rollout*", size=2, timeout=60)
    assert_type(workers, WorkerGroup)
    assert_type(workers[1:], WorkerGroup)
    assert_type(zrpc.group(["worker1", 2], live=False), WorkerGroup)
    assert_type(zrpc.rpc_sync(workers, length, args=("a",)), list[int])
    assert_type(zrpc.rpc_sync(workers[1:], length_later, args=("a",)), list[int])
    future = zrpc.rpc_async(workers, length, args=("a",))
    assert_type(future, GroupFuture[int])
    assert_type(future.wait(), list[int])
    assert_type(future.parts, tuple[Future[int], ...])
    for done in zrpc.as_completed(future.parts):
        assert_type(done, Future[int])

    counters = zrpc.remote(workers, Counter, args=(zrpc.each([1, 2]),))
    assert_type(counters, RRefGroup[Counter])
    assert_type(counters[0], RRef[Counter])
    assert_type(counters[0].rpc_sync().add(1), int)
    assert_type(counters[1:], RRefGroup[Counter])
    for counter in counters:
        assert_type(counter, RRef[Counter])
    assert_type(zrpc.group([counters[0], counters[1]]), RRefGroup[Counter])
    assert_type(counters.rpc_sync().add(zrpc.split(actions)), list[Any])
    assert_type(counters[1:].rpc_async().add(zrpc.share([1, 2])), GroupFuture[Any])
    assert_type(counters.remote().add(1), RRefGroup[Any])
    sums: list[int] = counters.rpc_sync().add(1)
    assert_type(sums, list[int])
    assert_type(zrpc.rpc_stream(workers, letters, args=("a",)), Stream[tuple[int, str]])
    assert_type(zrpc.rpc_stream(workers, letters_later, args=("a",)), Stream[tuple[int, str]])
    assert_type(counters.rpc_stream().numbers(), Stream[Any])
    workers.add(1)  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
    length(zrpc.each(["a", "b"]))
    length(zrpc.split("ab"))
    length(zrpc.share(["a", "b"]))


def queues() -> None:
    queue: RRef[Queue[int]] = zrpc.remote("learner", Queue, args=(100,))
    assert_type(zrpc.remote("learner", Queue[int], args=(100,)), RRef[Queue[int]])
    assert_type(queue.rpc_sync().get(), int)
    assert_type(queue.rpc_sync().get(timeout=1), int)
    assert_type(queue.rpc_sync().get_batch(32), list[int])
    assert_type(queue.rpc_sync().get_nowait(), int)
    queue.rpc_sync().put("a")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def weights(model: torch.nn.Module) -> None:
    with zrpc.nn.publish("policy", model) as published:
        assert_type(published.push(), int)
    with zrpc.nn.subscribe("policy") as policy:
        assert_type(policy.load_into(model, at_least=3, timeout=60), int)
    policy.load_into(3)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def modules() -> None:
    module = RemoteModule("worker1/cpu", torch.nn.Linear, args=(2, 2))
    module(torch.ones(2))
    assert_type(module.get_module_rref(), RRef[torch.nn.Module])
    module.forward_async(torch.ones(2)).wait()
    RemoteModule("worker1", 3)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def fixtures(mesh: Mesh, make_mesh: MakeMesh, mesh_factory: MeshFactory) -> None:
    assert_type(mesh.run(0, length, "a"), int)
    assert_type(mesh.run_all(length, "a"), list[int])
    assert_type(mesh.run(0, length_later, "a"), int)
    assert_type(mesh.run_all(length_later, "a"), list[int])
    assert_type(mesh.submit(0, length_later, "a").result(), int)
    assert_type(mesh_factory(3, processes=True), Mesh)
    mesh.run(0, length, 1)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue, reportArgumentType]
    assert_type(make_mesh(3, processes=True), Mesh)
    with zrpc.local_mesh(2) as local:
        assert_type(local, Mesh)
