"""`zrpc.trace`: one file with what all workers did."""

from __future__ import annotations

import json
import os
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import zrpc as rpc
import zrpc.autograd as dist_autograd
from tests.support.waiting import until
from zrpc.services.tracing.chrome import chrome_trace
from zrpc.services.tracing.service import TracingService
from zrpc.testing import Mesh, local_mesh
from zrpc.testing.plugin import MakeMesh

pytestmark = pytest.mark.zrpc(workers=3)
MIB = 1 << 20


class Trace:
    """A trace as a reader of the file sees it."""

    def __init__(self, path: Path) -> None:
        self.file = json.loads(path.read_text())
        self.events = self.file["traceEvents"]
        self.check_what_perfetto_needs()
        for each in self.events:
            each["pid"] -= 1  # the worker's rank
            if "id2" in each:
                each["id"] = each["id2"]["local"]
        self.slices = [each for each in self.events if each["ph"] == "X"]
        for each in self.slices:
            # As exact as the file is: a sum of its decimal fractions may differ in the last bit.
            each["end"] = round(each["ts"] + each["dur"], 3)
        self.processes = {
            each["pid"]: each["args"]["name"]
            for each in self.events
            if each["ph"] == "M" and each["name"] == "process_name"
        }

    def check_what_perfetto_needs(self) -> None:
        """Its JSON importer ignores, or puts elsewhere, what is different."""
        for each in self.events:
            # 0 is an idle process, or thread.
            assert each["pid"] > 0
            assert each["tid"] > 0
            if each["ph"] in "sf":
                assert type(each["id"]) is int  # it reads a text as a hexadecimal number
            if each["ph"] in "be":
                # With a global id, all slices of it are on the row of the process of the first.
                assert "id" not in each
                assert type(each["id2"]["local"]) is str

    def slice(self, name: str, pid: int | None = None) -> Any:
        """The only slice with this name."""
        (found,) = self.all(name, pid)
        return found

    def all(self, name: str, pid: int | None = None) -> list[Any]:
        return [s for s in self.slices if s["name"] == name and pid in (None, s["pid"])]

    def inside(self, outer: Any) -> set[str]:
        """The names of the slices within another one, of the same thread."""
        return {
            each["name"]
            for each in self.slices
            if each is not outer
            and (each["pid"], each["tid"]) == (outer["pid"], outer["tid"])
            and outer["ts"] <= each["ts"]
            and each["end"] <= outer["end"]
        }

    def long(self, name: str) -> list[tuple[Any, Any]]:
        """What overlaps: the beginnings with this name, with their ends."""
        ends = {
            (each["cat"], each["id"], each["pid"], each["name"]): each
            for each in self.events
            if each["ph"] == "e"
        }
        return [
            (each, ends[each["cat"], each["id"], each["pid"], each["name"]])
            for each in self.events
            if each["ph"] == "b" and each["name"] == name
        ]

    def arrows(self) -> list[tuple[Any, Any]]:
        """The arrows: the slices at which each begins and ends, the innermost ones."""
        begins = {each["id"]: each for each in self.events if each["ph"] == "s"}
        ends = {each["id"]: each for each in self.events if each["ph"] == "f"}
        assert begins.keys() == ends.keys()
        return [(self._at(begins[key]), self._at(ends[key])) for key in begins]

    def _at(self, point: Any) -> Any:
        found = [
            each
            for each in self.slices
            if (each["pid"], each["tid"]) == (point["pid"], point["tid"])
            and each["ts"] <= point["ts"] <= each["end"]
            # Those of zrpc's own parts of a call are inside of the call's.
            and each["name"] not in ("pack", "wait for room", "send", "wait", "take the answer")
        ]
        return min(found, key=lambda each: each["dur"])

    def check_nesting(self) -> None:
        """No two slices of a thread overlap in part."""
        rows = defaultdict(list)
        for each in self.slices:
            rows[each["pid"], each["tid"]].append(each)
        for row in rows.values():
            stack: list[Any] = []
            for each in sorted(row, key=lambda s: (s["ts"], -s["dur"])):
                # Times have three decimals, in microseconds.
                while stack and stack[-1]["end"] <= each["ts"] + 0.002:
                    stack.pop()
                assert not stack or each["end"] <= stack[-1]["end"] + 0.002, (stack[-1], each)
                stack.append(each)


def traced(mesh: Mesh, path: Path, program: Any, worker: int = 0, **options: Any) -> Trace:
    """Runs a program on a worker, in a trace."""

    def run() -> None:
        with rpc.trace(path, **options):
            program()

    mesh.run(worker, run)
    return Trace(path)


def leaf(tensor: torch.Tensor) -> torch.Tensor:
    with rpc.span("in the leaf"):
        return tensor + 1


def relay(tensor: torch.Tensor) -> torch.Tensor:
    return rpc.rpc_sync("worker2", leaf, (tensor,))


async def relay_later(tensor: torch.Tensor) -> torch.Tensor:
    return await rpc.rpc_async("worker2", leaf, (tensor,))


def fail() -> None:
    raise KeyError("on purpose")


def test_a_call_is_shown_at_both_ends_with_its_nested_call(mesh: Mesh, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    trace = traced(mesh, path, lambda: rpc.rpc_sync("worker1", relay, (torch.ones(2),)))
    assert [name.split()[0] for name in trace.processes.values()] == [
        "worker0",
        "worker1",
        "worker2",
    ]
    assert "(rank 1, " in trace.processes[1]
    outer, relayed = trace.slice("rpc_sync#relay(worker0 -> worker1)", 0), trace.slice("relay", 1)
    inner, leaves = trace.slice("rpc_sync#leaf(worker1 -> worker2)", 1), trace.slice("leaf", 2)
    parts = {"pack", "wait for room", "send", "wait", "take the answer"}
    assert trace.inside(outer) == trace.inside(inner) == parts
    assert trace.inside(relayed) == parts | {inner["name"]}
    assert trace.inside(leaves) == {"in the leaf"}
    # The nested call names the call whose handler has made it.
    assert outer["args"]["parent"] is None
    assert inner["args"]["parent"] == outer["args"]["call"] == relayed["args"]["call"]
    assert [(a["name"], b["name"]) for a, b in trace.arrows()] == [
        (outer["name"], "relay"),
        (inner["name"], "leaf"),
    ]
    check_causes(trace)
    trace.check_nesting()
    for name in ("on the wire", "in the queue", "answer"):
        spans = trace.long(name)
        assert {begin["id"] for begin, _ in spans} == {outer["args"]["call"], inner["args"]["call"]}
        assert all(begin["ts"] <= end["ts"] for begin, end in spans)
    assert trace.file["otherData"]["missing"] == []
    assert trace.file["otherData"]["dropped"] == {"worker0": 0, "worker1": 0, "worker2": 0}


def check_causes(trace: Trace) -> None:
    """Each part of the nested call lies within what has caused it, on all clocks."""
    chain = [
        trace.slice("rpc_sync#relay(worker0 -> worker1)", 0),
        trace.slice("relay", 1),
        trace.slice("rpc_sync#leaf(worker1 -> worker2)", 1),
        trace.slice("leaf", 2),
    ]
    for cause, effect in pairwise(chain):
        assert cause["ts"] <= effect["ts"]
        assert effect["end"] <= cause["end"]


def test_references_async_calls_and_coroutines_are_shown(mesh: Mesh, tmp_path: Path) -> None:
    def program() -> None:
        futures = [rpc.rpc_async("worker1", relay_later, (torch.ones(2),)) for _ in range(3)]
        rpc.wait_all(futures)
        rref = rpc.remote("worker1", max, (1, 2))
        assert rref.to_here() == 2
        assert rref.rpc_sync().bit_length() == 2
        del rref
        until(lambda: mesh.run(1, rpc.stats).rrefs_owned == 0, collect=True)

    trace = traced(mesh, tmp_path / "trace.json", program)
    name = "rpc_async#relay_later(worker0 -> worker1)"
    calls = trace.all(name, 0)
    assert len(calls) == len(trace.long(name)) == 3
    assert {each["args"]["call"] for each in calls} == {
        begin["id"] for begin, _ in trace.long("relay_later")
    }
    nested = trace.all("rpc_async#leaf(worker1 -> worker2)", 1)
    assert {each["args"]["parent"] for each in nested} == {each["args"]["call"] for each in calls}
    assert {
        (name, "begin relay_later"): 3,
        ("rpc_async#leaf(worker1 -> worker2)", "leaf"): 3,
        ("rpc_remote#max(worker0 -> worker1)", "max"): 1,
        ("to_here(worker0 -> worker1)", "FETCH"): 1,
        ("rref#bit_length(worker0 -> worker1)", "int.bit_length"): 1,
    }.items() <= Counter((a["name"], b["name"]) for a, b in trace.arrows()).items()
    assert trace.all("REFERENCE", 0)
    assert trace.all("REFERENCE", 1)
    trace.check_nesting()


def test_a_backward_pass_and_its_gradients_are_shown(mesh: Mesh, tmp_path: Path) -> None:
    def program() -> None:
        with dist_autograd.context() as context_id:
            tensor = torch.ones(2, requires_grad=True)
            loss = rpc.rpc_sync("worker1", relay, (tensor,)).sum()
            dist_autograd.backward(context_id, [loss])

    trace = traced(mesh, tmp_path / "trace.json", program)
    passes = [each for each in trace.slices if each["name"].startswith("backward pass 0.")]
    (own,) = [each for each in passes if each["pid"] == 0]
    name = own["name"].removeprefix("backward ")
    for worker in (1, 2):
        handler = trace.slice(f"BACKWARD ({name})", worker)
        assert f"backward {name}" in trace.inside(handler)
    gradient = f"GRADIENT ({name})"
    arrows = [(a["pid"], b["pid"]) for a, b in trace.arrows() if a["name"] == gradient]
    # Back through the call of worker1 to worker2, and through its answer.
    assert sorted(arrows) == [(1, 2), (2, 1)]
    # Those of the first call, which worker0 made, travel with BACKWARD and its answer.
    assert trace.slice(f"BACKWARD ({name})", 1)["args"]["gradients"]
    assert all(a["args"]["bytes"] > 0 for a, _ in trace.arrows() if a["name"] == gradient)


@pytest.mark.zrpc(workers=2, options={"transport": "ipc"})
def test_large_messages_show_their_size_and_shared_memory(mesh: Mesh, tmp_path: Path) -> None:
    tensor = torch.zeros(4 * MIB, dtype=torch.uint8)

    def send() -> None:
        rpc.rpc_sync("worker1", torch.add, (tensor, 1))

    until(lambda: mesh.run(0, send) or mesh.run(1, rpc.stats).traffic["shared_memory"].bytes_sent)
    trace = traced(mesh, tmp_path / "trace.json", send)
    args = trace.slice("rpc_sync#torch.add(worker0 -> worker1)")["args"]
    assert args["bytes"] >= 4 * MIB
    assert args["answer_bytes"] >= 4 * MIB
    assert args["shared_memory"]
    assert args["answer_shared_memory"]


def test_the_oldest_records_are_dropped_and_counted(mesh: Mesh, tmp_path: Path) -> None:
    def program() -> None:
        for number in range(50):
            rpc.rpc_sync("worker1", max, (number, 2))

    trace = traced(mesh, tmp_path / "trace.json", program, max_records=10)
    calls = trace.all("rpc_sync#max(worker0 -> worker1)")
    assert 0 < len(calls) <= 10
    assert trace.file["otherData"]["dropped"]["worker0"] >= 40
    assert trace.file["otherData"]["dropped"]["worker1"] >= 40


def test_two_traces_at_a_time_have_what_is_theirs(mesh: Mesh, tmp_path: Path) -> None:
    def program() -> None:
        rpc.rpc_sync("worker1", max, (1, 2))
        with rpc.trace(tmp_path / "inner.json"):
            rpc.rpc_sync("worker1", min, (1, 2))
        rpc.rpc_sync("worker1", abs, (1,))

    mesh.run(0, rpc.rpc_sync, "worker1", pow, args=(1, 2))
    outer = traced(mesh, tmp_path / "outer.json", program)
    inner = Trace(tmp_path / "inner.json")
    assert not (tmp_path / "inner.json").stat().st_mode & 0o077  # not for other users
    for name, in_outer, in_inner in (("pow", 0, 0), ("max", 1, 0), ("min", 1, 1), ("abs", 1, 0)):
        call = f"rpc_sync#{name}(worker0 -> worker1)"
        assert (len(outer.all(call)), len(inner.all(call))) == (in_outer, in_inner)
    assert all(mesh.agent(worker).recorder is None for worker in range(3))


def test_an_error_in_the_program_ends_the_trace_and_writes_it(mesh: Mesh, tmp_path: Path) -> None:
    """With the calls that failed, and the program's own spans on its thread."""

    def program() -> None:
        with rpc.span("step"), rpc.span("load"):
            rpc.rpc_sync("worker1", fail)

    with pytest.raises(KeyError):
        traced(mesh, tmp_path / "trace.json", program)
    trace = Trace(tmp_path / "trace.json")
    call = "rpc_sync#fail(worker0 -> worker1)"
    assert {"load", call} <= trace.inside(trace.slice("step", 0))
    assert trace.slice(call)["args"]["failed"]
    assert trace.slice("fail", 1)["args"]["failed"]
    assert all(mesh.agent(worker).recorder is None for worker in range(3))


def test_a_worker_that_leaves_in_a_trace_writes_what_it_has(mesh: Mesh, tmp_path: Path) -> None:
    def program() -> None:
        rpc.rpc_sync("worker1", max, (1, 2))
        mesh.agent(0).close()

    trace = traced(mesh, tmp_path / "trace.json", program)
    assert trace.slice("rpc_sync#max(worker0 -> worker1)", 0)
    assert [why.split()[0] for why in trace.file["otherData"]["missing"]] == ["worker1", "worker2"]


def test_a_trace_ends_with_the_worker_that_has_begun_it(mesh: Mesh, tmp_path: Path) -> None:
    def program() -> None:
        until(lambda: mesh.agent(1).recorder is not None, "it has begun")
        mesh.agent(0).close()
        until(lambda: mesh.agent(1).recorder is None, "it has ended")

    traced(mesh, tmp_path / "trace.json", program)


def test_a_file_that_cannot_be_written_is_known_at_once(mesh: Mesh, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        traced(mesh, tmp_path / "missing" / "trace.json", lambda: pytest.fail("it has begun"))
    assert all(mesh.agent(worker).recorder is None for worker in range(3))


@pytest.mark.parametrize("number", [-1, "5", None])
def test_a_number_of_records_that_is_not_possible_is_refused(
    mesh: Mesh, tmp_path: Path, number: Any
) -> None:
    path = tmp_path / "trace.json"
    with pytest.raises(
        ValueError, match=f"max_records of 0 or more, as an int, but got {number!r}"
    ):
        traced(mesh, path, lambda: pytest.fail("it has begun"), max_records=number)
    assert not path.exists()


def test_a_trace_can_be_written_to_a_descriptor(mesh: Mesh) -> None:
    reader, writer = os.pipe()

    def program() -> None:
        with rpc.trace(f"/dev/fd/{writer}"):
            pass

    mesh.run(0, program)
    os.close(writer)
    with open(reader, encoding="utf-8") as file:
        assert json.load(file)["traceEvents"]


def test_a_worker_that_is_lost_is_named_in_the_file(mesh: Mesh, tmp_path: Path) -> None:
    def program() -> None:
        rpc.rpc_sync("worker1", max, (1, 2))
        mesh.run(2, rpc.shutdown, graceful=False)
        until(lambda: len(rpc.get_worker_infos()) == 2)

    trace = traced(mesh, tmp_path / "trace.json", program)
    (why,) = trace.file["otherData"]["missing"]
    assert why.startswith("worker2 (rank 2): ")
    assert trace.slice("max", 1)
    assert trace.file["otherData"]["clock_offsets"]["worker1"]["seconds"] == 0  # one host


def test_workers_of_different_clocks_are_aligned(mesh: Mesh, tmp_path: Path) -> None:
    services = [mesh.agent(worker).service(TracingService) for worker in range(3)]
    for each in services:
        each.begin("own", 100)
    mesh.run(0, rpc.rpc_sync, "worker1", relay, (torch.ones(2),))
    traces = [each.end("own") for each in services]
    for trace, ahead in zip(traces, (0.0, 1000.0, -50.0), strict=True):
        trace.records = [shifted(record, ahead) for record in trace.records]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(chrome_trace(traces)))
    check_causes(Trace(path))


def shifted(record: Any, ahead: float) -> Any:
    """A record as a worker whose clock is ahead makes it."""
    times = {n: v + ahead for n, v in record._asdict().items() if type(v) is float and v}
    return record._replace(**times)


def test_a_trace_adds_nothing_to_the_wire(make_mesh: MakeMesh, tmp_path: Path) -> None:
    mesh = make_mesh(workers=2)

    def sent() -> Any:
        return mesh.agent(0).network.sent([1]), rpc.stats().peers["worker1"].bytes_sent

    def program() -> list[int]:
        rpc.rpc_sync("worker1", max, (1, 2))
        before = sent()
        rpc.rpc_sync("worker1", max, (1, 2))
        return [after - first for first, after in zip(before, sent(), strict=True)]

    def with_trace() -> list[int]:
        with rpc.trace(tmp_path / "trace.json"):
            return program()

    assert mesh.run(0, program) == mesh.run(0, with_trace)


def test_a_relative_path_is_of_the_directory_in_which_the_trace_or_the_worker_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ZRPC_TRACE", "traces")
    with local_mesh(1) as mesh, mesh.agent(0).as_current(), rpc.trace("trace.json"):
        rpc.rpc_sync("worker0", max, args=(1, 2))
        monkeypatch.chdir("elsewhere")
    Trace(tmp_path / "trace.json").slice("max")
    Trace(tmp_path / "traces" / "trace.json").slice("max")
