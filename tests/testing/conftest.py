"""The fixture that runs tests inside tests."""

from __future__ import annotations

from collections.abc import Callable

import pytest


@pytest.fixture(scope="session", autouse=True)
def _imports() -> None:
    """Imports what pytester would forget after a run of its own: torch can't be imported twice.

    Not above: the process of pytest-xdist that runs no tests reads this file too.
    """
    import zrpc.api
    import zrpc.testing.processes
    import zrpc.testing.startup
    import zrpc.testing.threads  # noqa: F401


@pytest.fixture
def run_tests(pytester: pytest.Pytester) -> Callable[..., pytest.RunResult]:
    """Runs tests, given as the text of a module, and returns what pytest reports."""

    def run(text: str, *args: str) -> pytest.RunResult:
        head = "import os, signal, socket, subprocess, sys, threading, time\nimport pytest\n"
        pytester.makepyfile(head + text)
        # Loading hypothesis again for each run would take a second.
        without = ("-p", "no:cacheprovider", "-p", "no:hypothesispytest")
        return pytester.runpytest_inprocess(*without, *args)

    return run
