"""``zrpc run`` runs a program as ``python`` does, and its children too."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.drop_in.conftest import Commands
from zrpc.launch.port import ReservedPort

Write = Callable[[str, str], Path]
RUN = ["-m", "zrpc.cli", "run"]

PROGRAM = """
    import sys
    print(__name__, __file__, sys.argv, sys.path)
    print(sys.stdin.read())
    if "fail" in sys.argv:
        raise KeyError("wrong")
    sys.exit(len(sys.argv))
"""


@pytest.mark.parametrize("arguments", ["a --module -m", "fail", "--help"])
@pytest.mark.parametrize("program", ["program.py", "-m program"])
def test_a_program_runs_as_under_python(
    write: Write, commands: Commands, program: str, arguments: str
) -> None:
    write("program.py", PROGRAM)
    command = [*program.split(), *arguments.split()]
    ours = commands(*RUN, *command, stdin="typed")
    theirs = commands(*command, stdin="typed")
    assert ours.stdout == theirs.stdout
    assert ours.stderr == theirs.stderr
    assert ours.returncode == theirs.returncode
    assert ours.returncode in (1, 2, 4)


def test_options_of_the_interpreter_are_passed_on(write: Write, commands: Commands) -> None:
    write("program.py", "import sys; print(sys.flags.optimize, __debug__)")
    assert commands("-OO", *RUN, "program.py").stdout == "2 False\n"
    ended = commands("-I", *RUN, "program.py")
    assert "expected a Python that reads PYTHONPATH" in ended.stderr
    assert ended.returncode == 2


CHILDREN = """
    import multiprocessing, subprocess, sys

    CODE = "import sys; print(['drop_in' in type(f).__module__ for f in sys.meta_path][0])"
    GRANDCHILD = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {CODE!r}])"

    def show():
        exec(CODE)
        sys.stdout.flush()

    if __name__ == "__main__":
        show()
        for method in ("fork", "spawn", "forkserver"):
            process = multiprocessing.get_context(method).Process(target=show)
            process.start()
            process.join()
        subprocess.run([sys.executable, "-c", CODE])
        subprocess.run([sys.executable, "-c", GRANDCHILD])
"""


def test_all_children_have_the_drop_in(write: Write, commands: Commands) -> None:
    write("program.py", CHILDREN)
    ended = commands(*RUN, "program.py")
    assert ended.stderr == ""
    assert ended.stdout.splitlines() == ["True"] * 6


FAILS = """
    import torch.distributed.rpc as rpc

    def fail():
        raise KeyError("for the caller")

    options = rpc.TensorPipeRpcBackendOptions(init_method="file://store")
    rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)
    try:
        rpc.rpc_sync("alone", fail)
    except KeyError as error:
        print("caught", error)
    rpc.shutdown()
"""


def test_a_callee_prints_the_errors_of_its_functions(
    write: Write, quick_commands: Commands, tmp_path: Path
) -> None:
    """As torch's callee does."""
    write("program.py", FAILS.replace("file://store", f"file://{tmp_path}/store"))
    ended = quick_commands(*RUN, "program.py")
    assert ended.stdout == "caught 'for the caller'\n", ended.stderr
    assert "a call of fail failed" in ended.stderr
    assert "KeyError: 'for the caller'" in ended.stderr


def test_the_users_own_sitecustomize_runs(write: Write, commands: Commands, tmp_path: Path) -> None:
    write("mine/sitecustomize.py", "print('mine', __file__.endswith('mine/sitecustomize.py'))")
    write("program.py", "import sitecustomize, sys; print(sitecustomize.__file__, sys.path)")
    own = {"PYTHONPATH": str(tmp_path / "mine"), "PYTHONUNBUFFERED": ""}
    ours = commands(*RUN, "program.py", **own)
    theirs = commands("program.py", **own)
    # The first line is from the interpreter that runs the command itself.
    assert ours.stdout == "mine True\n" + theirs.stdout
    assert ours.stderr == ""


def test_a_failing_sitecustomize_is_reported(
    write: Write, commands: Commands, tmp_path: Path
) -> None:
    write("mine/sitecustomize.py", "import no_such_module")
    write("program.py", "print('ran')")
    own = {"PYTHONPATH": str(tmp_path / "mine")}
    assert "no_such_module" in commands(*RUN, "program.py", **own).stderr


IMPORTS = """
    import sys

    def loaded(*packages):
        return sorted(name for name in sys.modules if name.split(".")[0] in packages)

    print(loaded("torch", "zmq", "click"))
    import torch, torch.nn.parallel, torch.distributed
    print(torch.distributed.rpc.is_available(), torch.distributed.rpc.constants.__name__)
    print(loaded("zmq", "zrpc"))
"""


def test_a_process_that_uses_no_rpc_loads_nothing(write: Write, commands: Commands) -> None:
    write("program.py", IMPORTS)
    ended = commands(*RUN, "program.py")
    lines = ended.stdout.splitlines()
    assert lines[:2] == ["[]", "True torch.distributed.rpc.constants"], ended.stderr
    loaded = set(ast.literal_eval(lines[2]))
    few = {"zrpc", "zrpc.errors", "zrpc.runtime", "zrpc.runtime.compiler", "zrpc.stand_in"}
    assert {name for name in loaded if "drop_in" not in name} == few


COMPILED = """
    import torch
    import torch.distributed.rpc as rpc
    from torch._dynamo.utils import counters

    class Doubler:
        def double(self, x):
            return x * 2

    rpc.init_rpc("alone", rank=0, world_size=1)
    rref = rpc.RRef(Doubler())

    @torch.compile(backend="eager")
    def step(x):
        y = rpc.rpc_sync("alone", torch.add, args=(x, 1))
        return y + rpc.rpc_async("alone", torch.add, args=(x, 1)).wait() + rref.rpc_sync().double(x)

    print(step(torch.ones(2)).tolist(), counters["frames"]["total"])
    rpc.shutdown()
"""


def test_compiled_code_calls_by_torchs_names(write: Write, quick_commands: Commands) -> None:
    write("program.py", COMPILED)
    with ReservedPort() as port:
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port.number)}
        ended = quick_commands(*RUN, "program.py", **where)
    assert ended.stdout == "[6.0, 6.0] 5\n", ended.stderr
