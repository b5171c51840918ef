"""The table of torch's own tests is what the runner reads and writes, and a sample of it holds.

``python -m tests.compatibility`` runs all of them.
"""

from __future__ import annotations

import pytest

from tests.compatibility import __main__ as runner
from tests.compatibility import table

PAGE = "# Page\n\n<!-- summary -->\n<!-- end of summary -->\n\n<!-- tables -->\n"
SAMPLE = [
    "RpcTest.test_add",
    "RpcTest.test_nested_rref",
    "RpcTest.test_py_raise_in_user_func",
    "DistAutogradTest.test_nested_context",
    "DistOptimizerTest.test_dist_optim",
    "RemoteModuleTest.test_get_module_rref",
    "DdpComparisonTest.test_ddp_dist_autograd_local_vs_remote",
]


def test_the_page_is_as_the_runner_writes_it() -> None:
    page = table.PAGE.read_text()
    assert page == table.write(page, table.read(page))


def test_the_page_explains_all_rows_and_most_of_them_pass() -> None:
    rows = table.read(table.PAGE.read_text())
    assert len(rows) > 300
    assert [name for name, row in rows.items() if row.result == table.UNEXPLAINED] == []
    assert table.share_of_public(rows) >= 0.97


@pytest.mark.system
def test_a_sample_of_the_page_holds() -> None:
    assert runner.unexpected(SAMPLE, jobs=1) == []
