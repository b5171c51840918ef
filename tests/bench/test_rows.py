"""Tests of the list of rows; runs each workload once, with zrpc."""

from __future__ import annotations

import importlib

import pytest

from zrpc.bench.mesh import Mesh
from zrpc.bench.row import Limit, Row
from zrpc.bench.rows import GROUPS, all_rows, select
from zrpc.bench.session import Sampling
from zrpc.launch import Starter

MEASURED = [group for group in GROUPS if group.forms_mesh]
ALL_LIMITS = [each for row in all_rows() for each in (row.limit, row.tcp_limit) if each]
# One of those that differ only in a size: the first, which is the smallest.
LIMITS = {(each.workload, len(each.arguments)): each for each in reversed(ALL_LIMITS)}


def test_workloads_exist_and_names_are_unique() -> None:
    names = [row.name for row in all_rows()]
    assert len(set(names)) == len(names)
    for measured in [*all_rows(), *ALL_LIMITS]:
        module, _, name = measured.workload.partition(":")
        assert callable(getattr(importlib.import_module(f"zrpc.bench.{module}"), name))


def test_rows_are_selected_by_a_part_of_their_name_or_those_that_start_few_workers() -> None:
    names = [row.name for group in select() for row in group.rows]
    assert "empty call" in names
    assert not [name for name in names if "start and stop" in name or "launch" in name]
    for patterns, expected in (
        (["EMPTY call|32 workers"], [["empty call"], ["start and stop of 32 workers"]]),
        (["nested", "^rref method$", "nested calls"], [["nested calls, 8 hops"], ["RRef method"]]),
    ):
        found = [[row.name for row in group.rows] for group in select(patterns)]
        assert found == expected


def measure(mesh: Mesh, each: Row | Limit, tiny: Sampling) -> None:
    sample = mesh.measure(each.workload, each.arguments, tiny, 60)
    assert sample.value > 0, each.name
    assert sample.repeats >= 1, each.name


def test_rows_can_be_measured(starter: Starter, tiny: Sampling) -> None:
    for workers in sorted({group.workers for group in MEASURED}):
        with Mesh(starter, "zrpc", workers) as mesh:
            for group in MEASURED:
                for row in group.rows if group.workers == workers else ():
                    measure(mesh, row, tiny)
        assert mesh.shutdown_errors == []


def test_messages_are_counted_for_both_workers(starter: Starter) -> None:
    """A call is two: the request and the answer. A step also has its end, and four gradients."""
    sampling = Sampling(seconds=0.0, min_repeats=3)
    with Mesh(starter, "zrpc", 2) as mesh:
        assert mesh.measure("costs:messages", (0,), sampling, 60.0).value == 2
        step = mesh.measure("costs:messages", (16,), sampling, 60.0).value
        assert step == pytest.approx(9, abs=0.05)


def test_torch_runs_the_same_programs_and_over_tcp_the_same_workloads(
    starter: Starter, tiny: Sampling
) -> None:
    (programs,) = (group for group in GROUPS if group.name == "programs")
    with Mesh(starter, "torch", programs.workers) as mesh:
        for row in programs.rows:
            measure(mesh, row, tiny)
    for library in ("torch", "zrpc"):
        with Mesh(starter, library, 2, tcp=True) as mesh:
            for row in (Row("small", "calls:small_tensor"), Row("echo", "tensors:echo", (65536,))):
                measure(mesh, row, tiny)


def test_limits_and_starts_can_be_measured(starter: Starter, tiny: Sampling) -> None:
    for tcp in (False, True):
        with Mesh(starter, "limit", 2, tcp=tcp) as mesh:
            for limit in LIMITS.values():
                measure(mesh, limit, tiny)
    with Mesh(starter, "zrpc", 1, forms_mesh=False) as mesh:
        measure(mesh, Row("start", "startup:start_and_stop", (2,)), tiny)
