"""The table of torch's own tests is what the runner reads and writes, and a sample of it holds.

``python -m tests.compatibility`` runs all of them.
"""

from __future__ import annotations

import pytest

from tests.compatibility import table
from tests.compatibility.__main__ import unexpected

PAGE = "# Page\n\n<!-- summary -->\n<!-- end of summary -->\n\n<!-- tables -->\n"
ROWS = {
    "One.test_a": "passes",
    "One.test_b": "private: `_name`",
    "Two.test_a": "nested calls don't deadlock",
}
SAMPLE = [
    "RpcTest.test_add",
    "RpcTest.test_nested_rref",
    "RpcTest.test_py_raise_in_user_func",
    "DistAutogradTest.test_nested_context",
    "DistOptimizerTest.test_dist_optim",
    "RemoteModuleTest.test_get_module_rref",
]


def test_rows_are_read_as_they_were_written() -> None:
    page = table.write(PAGE, ROWS)
    assert table.read(page) == ROWS
    assert table.write(page, ROWS) == page
    assert "## Two\n\n| Test | On zrpc |" in page


def test_the_summary_counts_the_rows() -> None:
    text = table.summary(ROWS).replace("\n", " ")
    assert text.startswith("Of 3 tests that torch passes, 1 fail")
    assert "Of the other 2, 1 pass, that is 50.0 %." in text


def test_the_page_is_as_the_runner_writes_it() -> None:
    page = table.PAGE.read_text()
    assert page == table.write(page, table.read(page))


def test_the_page_explains_all_rows_and_most_of_them_pass() -> None:
    rows = table.read(table.PAGE.read_text())
    assert len(rows) > 300
    assert [name for name, text in rows.items() if text.startswith(table.UNEXPLAINED)] == []
    public = [text for text in rows.values() if not text.startswith(table.PRIVATE)]
    assert public.count(table.PASSES) / len(public) >= 0.97


@pytest.mark.system
def test_a_sample_of_the_page_holds() -> None:
    assert unexpected(SAMPLE, jobs=1) == []


@pytest.mark.system
def test_a_row_that_does_not_hold_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {"RpcTest.test_add": "private: `_something`"}
    monkeypatch.setattr(table, "read", lambda page: rows)
    (problem,) = unexpected(list(rows), jobs=1)
    assert problem.startswith("RpcTest.test_add: expected 'private: `_something`', but it passes")
