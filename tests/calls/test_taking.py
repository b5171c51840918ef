"""Whether the value of a call was taken, by a future or by tasks that await it."""

from __future__ import annotations

from typing import Any

import pytest

from zrpc.calls.taking import Taking


@pytest.mark.parametrize(
    ("steps", "taken"),
    [
        ("join ask end:None", True),
        ("join ask join end:None end:False", False),
        ("join ask join end:False end:None", False),  # before the future has the value
        ("join join ask end:None end:True", True),
        ("join join ask end:True end:None", True),
        ("join join join ask end:False end:None end:True", True),
        ("join join join end:False ask end:False end:None", False),
        ("join end:True ask", True),
    ],
)
def test_a_future_takes_the_value_unless_a_task_was_to_take_it(steps: str, taken: bool) -> None:
    taking, told = Taking(), list[bool]()
    for step in steps.split():
        what, _, how = step.partition(":")
        ended: dict[str, Any] = {"None": None, "True": True, "False": False}
        if what == "ask":
            taking.ask(told.append)
        elif what == "join":
            taking.join()
        else:
            taking.end(ended[how])
    assert told == [taken]
