import pytest

# pytester forgets the modules that were first imported in a run of its own, and torch can't be
# imported twice.
import zrpc.api
import zrpc.testing.processes
import zrpc.testing.startup
import zrpc.testing.threads  # noqa: F401


@pytest.fixture
def run_tests(pytester):
    """Runs tests, given as the text of a module, and returns what pytest reports."""

    def run(text, *args):
        head = "import os, signal, socket, subprocess, sys, threading, time\nimport pytest\n"
        pytester.makepyfile(head + text)
        # Loading hypothesis anew for each run would take a second.
        without = ("-p", "no:cacheprovider", "-p", "no:hypothesispytest")
        return pytester.runpytest_inprocess(*without, *args)

    return run
