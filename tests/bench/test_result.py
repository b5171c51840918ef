"""Tests of the ratios: median, minimum and maximum over the rounds, without processes."""

from __future__ import annotations

from zrpc.bench.result import Failure, RowResult, Spread
from zrpc.bench.row import Limit, Row, Unit
from zrpc.bench.sampling import Sample


def result(unit: Unit = Unit.SECONDS, **rounds: list[float | None]) -> RowResult:
    """Returns the result of a row; None in ``rounds`` is a failure."""
    above = unit is Unit.BYTES
    row = Row("row", "m:f", unit=unit, limit=Limit("l", "m:f"), above_limit=above)
    made = RowResult(row)
    for participant, values in rounds.items():
        for value in values:
            failed = value is None
            made.add(participant, Failure("died") if failed else Sample(value, value, 1))
    return made


def test_the_spread_of_no_values_is_none() -> None:
    assert Spread.of([]) is None
    assert Spread.of([3.0, 1.0, 10.0]) == Spread(3.0, 1.0, 10.0)


def test_less_time_is_faster() -> None:
    found = result(torch=[4.0, 6.0, 3.0], zrpc=[2.0, 2.0, 2.0]).times_faster("torch")
    assert found == Spread(2.0, 1.5, 3.0)


def test_ratios_are_computed_within_each_round_not_from_medians() -> None:
    found = result(torch=[1.0, 10.0, 100.0], zrpc=[1.0, 1.0, 200.0]).times_faster("torch")
    assert found == Spread(1.0, 0.5, 10.0)


def test_more_per_second_is_faster() -> None:
    found = result(Unit.RATE, torch=[10.0, 20.0], zrpc=[40.0, 40.0]).times_faster("torch")
    assert found == Spread(3.0, 2.0, 4.0)


def test_memory_is_compared_above_the_limit() -> None:
    found = result(Unit.BYTES, torch=[150.0], zrpc=[110.0], limit=[99.0, 100.0, 101.0])
    assert found.times_faster("torch") == Spread(5.0, 5.0, 5.0)


def test_memory_at_or_below_the_limit_is_not_compared() -> None:
    found = result(Unit.BYTES, torch=[150.0, 150.0], zrpc=[100.0, 90.0], limit=[100.0])
    assert found.times_faster("torch") is None
    assert result(Unit.BYTES, torch=[150.0], zrpc=[90.0]).times_faster("torch") is None


def test_rounds_in_which_a_participant_failed_do_not_count() -> None:
    cases: list[tuple[list[float | None], list[float | None], Spread | None]] = [
        ([None, 4.0], [1.0, 2.0], Spread(2.0, 2.0, 2.0)),
        ([9.0, 4.0], [None, 2.0], Spread(2.0, 2.0, 2.0)),
        ([None], [1.0], None),
        ([4.0, 4.0], [2.0], Spread(2.0, 2.0, 2.0)),  # interrupted in the second round
        ([], [], None),
    ]
    for torch, zrpc, expected in cases:
        assert result(torch=torch, zrpc=zrpc).times_faster("torch") == expected


def test_failures_are_recorded_and_a_final_one_is_found() -> None:
    found = result(torch=[1.0, None])
    assert found.failures("torch") == [Failure("died")]
    assert found.final_failure("torch") is None
    assert found.spread("torch") == Spread(1.0, 1.0, 1.0)
    found.add("torch", Failure("hung", final=True))
    assert found.final_failure("torch") == Failure("hung", final=True)
    assert found.final_failure("zrpc") is None
