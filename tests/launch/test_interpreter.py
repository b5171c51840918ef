"""The options of the interpreter reach the interpreters that it starts."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.launch.conftest import DRIVER, Launched, Write
from tests.support.programs import run_python

SHOW = """
import _imp, json, sys
print(json.dumps([
    str(sys.flags), sys.warnoptions, dict(sorted(sys._xoptions.items())), sys.pycache_prefix,
    sys.stdout.write_through, _imp.check_hash_based_pycs, hash("a") == hash("b"),
]))
"""
OPTIONS = """
import json
from zrpc.launch.interpreter import interpreter_options
print(json.dumps(interpreter_options()))
"""
# In one line each, so that all are tried in two processes.
ALL = (
    *("-B", "-OO", "-s", "-P", "-v", "-u", "-Werror::UserWarning", "-W", "ignore::ImportWarning"),
    *("-X", "int_max_str_digits=0", "-X", "no_debug_ranges", "-X", "pycache_prefix=/tmp/a b"),
    *("-X", "warn_default_encoding", "-X", "utf8=0", "-X", "faulthandler", "-X", "tracemalloc=3"),
    *("-X", "mine", "-X", "a=b=c", "-X", "importtime", "--check-hash-based-pycs", "always"),
)


def output_of(*arguments: str) -> Any:
    done = run_python(*arguments)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.system
@pytest.mark.parametrize("given", [(), ALL, ("-I", "-X", "dev", "-bb"), ("-E", "-q", "-d")])
def test_an_interpreter_with_the_same_options_is_the_same(given: tuple[str, ...]) -> None:
    found = output_of(*given, "-c", OPTIONS)
    assert output_of(*found, "-c", SHOW) == output_of(*given, "-c", SHOW)


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.parametrize("hidden", [False, True], ids=["as usual", "with a hidden module"])
def test_workers_have_the_options_of_the_launcher(
    tmp_path: Path, write: Write, marked: Any, method: str, hidden: bool
) -> None:
    script = write("import sys; print(sys._xoptions, sys.get_int_max_str_digits())")
    if hidden:  # then the worker starts another interpreter in its place
        write("", "colorsys.py")
    job = json.dumps({"target": script, "start_method": method, "preload": ["colorsys"]})
    options = ["-X", "int_max_str_digits=9999", "-X", "no_debug_ranges"]
    code, out, err = Launched([sys.executable, *options, "-c", DRIVER, job], marked.env).finish()
    expected = "[0] {'int_max_str_digits': '9999', 'no_debug_ranges': True} 9999\n"
    assert (code, out) == (0, expected), err
