"""``zrpc run`` runs a program as ``python`` does, and its children too."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from tests.drop_in.conftest import Commands
from tests.support.programs import run_python
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


@pytest.mark.parametrize("arguments", [["a", "--module", "-m"], ["fail"], ["--help"]])
@pytest.mark.parametrize("as_module", [False, True])
def test_a_program_runs_as_under_python(
    write: Write, commands: Commands, arguments: Any, as_module: bool
) -> None:
    write("program.py", PROGRAM)
    program = ["-m", "program"] if as_module else ["program.py"]
    ours = commands(*RUN, *program, *arguments, stdin="typed")
    theirs = commands(*program, *arguments, stdin="typed")
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


def test_a_callee_prints_the_errors_of_its_functions_as_that_of_torch_does(
    write: Write, commands: Commands, tmp_path: Path
) -> None:
    write("program.py", FAILS.replace("file://store", f"file://{tmp_path}/store"))
    ended = commands(*RUN, "program.py")
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


def test_a_failing_sitecustomize_is_reported_as_ever(
    write: Write, commands: Commands, tmp_path: Path
) -> None:
    write("mine/sitecustomize.py", "import no_such_module")
    write("program.py", "print('ran')")
    own = {"PYTHONPATH": str(tmp_path / "mine")}
    assert "no_such_module" in commands(*RUN, "program.py", **own).stderr


# What is loaded is printed first, before and after an import of torch.
TRAINING = """
    import sys

    def loaded(*packages):
        return sorted(name for name in sys.modules if name.split(".")[0] in packages)

    if __name__ == "__main__":
        print(loaded("torch", "zmq", "click"))
        import torch, torch.nn.parallel, torch.distributed
        print(torch.distributed.rpc.is_available(), torch.distributed.rpc.constants.__name__)
        print(loaded("zmq", "zrpc"), flush=True)

    import gc
    import os

    import torch
    import torch.distributed as dist
    import torch.distributed.autograd as dist_autograd
    import torch.distributed.rpc as rpc
    import torch.multiprocessing as mp
    from torch import nn
    from torch.distributed.nn import RemoteModule
    from torch.distributed.optim import DistributedOptimizer
    from torch.distributed.rpc import RRef, RpcBackendOptions, TensorPipeRpcBackendOptions
    from torch.nn.parallel import DistributedDataParallel

    def double(rref):
        return rref.to_here() * 2

    def train():
        torch.manual_seed(0)
        remote = RemoteModule("worker1/cpu", nn.Linear, args=(4, 4))
        local = nn.Linear(4, 1)
        optimizer = DistributedOptimizer(
            torch.optim.SGD,
            remote.remote_parameters() + [RRef(p) for p in local.parameters()],
            lr=0.1,
        )
        before = local.weight.detach().clone()
        with dist_autograd.context() as context_id:
            loss = local(remote(torch.ones(2, 4))).sum()
            dist_autograd.backward(context_id, [loss])
            optimizer.step(context_id)
        return not torch.equal(before, local.weight)

    def run(rank, size):
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[1])
        options = TensorPipeRpcBackendOptions(num_worker_threads=4, rpc_timeout=110)
        assert isinstance(options, RpcBackendOptions)
        rpc.init_rpc(f"worker{rank}", rank=rank, world_size=size, rpc_backend_options=options)
        dist.init_process_group("gloo", f"file://{sys.argv[2]}", rank=rank, world_size=size)
        model = DistributedDataParallel(nn.Linear(2, 1))
        model(torch.ones(1, 2) * rank).sum().backward()
        assert torch.equal(model.module.weight.grad, torch.full((1, 2), 0.5))
        if rank == 0:
            rref = rpc.remote("worker1", torch.add, args=(torch.ones(2), 1))
            assert isinstance(rref, RRef)
            future = rpc.rpc_async("worker1", double, args=(rref,))
            assert isinstance(future, rpc.Future)
            print(future.wait().tolist(), train(), type(rref).__module__.split(".")[0])
        rpc.shutdown()
        del model  # first: torch 2.13 may hang if DDP is the last to hold the group
        gc.collect()
        dist.destroy_process_group()

    if __name__ == "__main__":
        context = mp.spawn(run, args=(2,), nprocs=1, join=False, daemon=True)
        run(1, 2)
        while not context.join():
            pass
"""


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    """How the program ended; each of its processes takes seconds to import torch."""
    directory = tmp_path_factory.mktemp("training")
    (directory / "program.py").write_text(dedent(TRAINING))
    with ReservedPort() as port:
        arguments = (str(port.number), str(directory / "store"))
        return run_python(*RUN, "program.py", *arguments, cwd=directory)


def test_a_process_that_uses_no_rpc_loads_nothing(
    training: subprocess.CompletedProcess[str],
) -> None:
    lines = training.stdout.splitlines()
    assert lines[:2] == ["[]", "True torch.distributed.rpc.constants"], training.stderr
    loaded = set(ast.literal_eval(lines[2]))
    few = {"zrpc", "zrpc.errors", "zrpc.runtime", "zrpc.runtime.compiler", "zrpc.stand_in"}
    assert {name for name in loaded if "drop_in" not in name} == few


def test_an_unmodified_program_runs_on_zrpc(training: subprocess.CompletedProcess[str]) -> None:
    assert training.stdout.splitlines()[3:] == ["[4.0, 4.0] True zrpc"], training.stderr
    assert training.returncode == 0


def test_the_launcher_has_the_drop_in_too(
    write: Write, commands: Commands, quick_commands: Commands
) -> None:
    write(
        "program.py",
        """
        import os
        import torch.distributed.rpc as rpc

        rank = int(os.environ["RANK"])
        rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
        if rank == 0:
            info = rpc.rpc_sync("worker1", rpc.get_worker_info)
            print(info.name, type(info).__module__)
        rpc.shutdown()
        """,
    )
    launch = ["-m", "zrpc.cli", "launch", "--nprocs", "2"]
    ended = commands(*launch, "--drop-in", "program.py")
    assert ended.stdout == "[0] worker1 zrpc.membership.worker_info\n", ended.stderr
    plain = quick_commands(*launch, "program.py")
    assert plain.stdout == "[0] worker1 torch._C._distributed_rpc\n", plain.stderr


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
