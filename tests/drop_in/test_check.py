"""``zrpc run --check`` lists what a program uses."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent

import pytest

from tests.drop_in.conftest import Commands
from zrpc.drop_in.check import uses_in_program, uses_in_source

Write = Callable[[str, str], Path]
RPC = "torch.distributed.rpc"


@pytest.fixture(autouse=True)
def _own_search_path() -> Iterator[None]:
    """Lets a check add the program's directory."""
    before = list(sys.path)
    yield
    sys.path[:] = before


def test_names_are_found_by_what_a_file_calls_them() -> None:
    for source, names in (
        ("import torch.distributed.rpc as rpc\nrpc.rpc_sync", ["rpc.rpc_sync"]),
        ("import torch\ntorch.distributed.rpc.RRef(1).owner()", ["rpc.RRef"]),
        ("import torch.distributed as dist\ndist.rpc.api._all_gather(1)", ["rpc.api._all_gather"]),
        ("from torch.distributed import rpc as r\nr.init_rpc('a')", ["rpc.init_rpc"]),
        ("from torch.distributed.rpc import RRef as R\nR(1)", ["rpc.RRef"]),
        ("def f():\n    from torch.distributed.rpc.api import a, b", ["rpc.api.a", "rpc.api.b"]),
        ("from torch.distributed.nn import RemoteModule\nRemoteModule.x", ["nn.RemoteModule"]),
        ("import torch\ntorch._C._distributed_rpc.PyRRef", ["torch._C._distributed_rpc.PyRRef"]),
        ("import torch.distributed.autograd as grad\ngrad.context()", ["autograd.context"]),
        ("import torch.distributed as dist\ndist.init_process_group()", []),
        ("from torch.distributed.optim import ZeroRedundancyOptimizer", []),
        ("import torch.distributed.rpc", []),
        ("from torch.distributed.rpc import *", []),
    ):
        found = {use.name for use in uses_in_source(source, "a.py")}
        assert sorted(name.removeprefix("torch.distributed.") for name in found) == names


def test_imports_are_followed_without_running_anything(write: Write, tmp_path: Path) -> None:
    program = write("program.py", "import one, package.inner\nraise SystemExit")
    write("one.py", "from package import (\n    two,  # a comment, with a comma\n)")
    write("package/__init__.py", "raise SystemExit('was run')")
    write("package/two.py", "def f():\n    from . import three\nfrom .four import \\\n    x")
    write("package/three.py", "from torch.distributed.rpc import remote")
    write("package/four.py", "from torch.distributed.rpc import shutdown")
    write("package/inner.py", "import torch.distributed.rpc as rpc\n\nrpc.rpc_async")
    write("package/unused.py", "from torch.distributed.rpc import rpc_sync")
    uses, unread = uses_in_program(str(program))
    assert not unread
    assert [(use.name, Path(use.path).name, use.line) for use in uses] == [
        (f"{RPC}.remote", "three.py", 1),
        (f"{RPC}.rpc_async", "inner.py", 3),
        (f"{RPC}.shutdown", "four.py", 1),
    ]


BROKEN = "import torch.distributed.rpc as rpc\nrpc.init_rpc(:\n"


def test_an_import_that_cannot_be_read_is_named(write: Write) -> None:
    program = write("program.py", f"import broken, no_text\nfrom {RPC} import remote")
    broken, no_text = write("broken.py", BROKEN), write("no_text.py", "")
    no_text.write_bytes(b"# \xff")
    uses, unread = uses_in_program(str(program))
    assert [use.name for use in uses] == [f"{RPC}.remote"]
    assert [line.partition(":")[0] for line in unread] == [str(broken), str(no_text)]
    assert "line 2" in unread[0]


@pytest.mark.system
def test_the_command_lists_names_and_places(write: Write, quick_commands: Commands) -> None:
    write("package/__init__.py", "")
    write(
        "package/__main__.py",
        """
        import torch.distributed.rpc as rpc
        from torch.distributed.rpc import no_such_name
        rpc.init_rpc("a")
        rpc.RemoteProfilerManager
        rpc.constants.UNSET_RPC_TIMEOUT
        rpc.init_rpc("b")
        """,
    )
    ended = quick_commands("-m", "zrpc.cli", "run", "--check", "-m", "package")
    path = next(line for line in ended.stdout.splitlines() if line.endswith(":4")).strip()[:-2]
    assert ended.stdout == dedent(f"""\
        torch.distributed.rpc.RemoteProfilerManager: NOT SUPPORTED; zrpc can't profile what callees do: a trace shows it, torch.profiler this worker's
            {path}:5
        torch.distributed.rpc.constants.UNSET_RPC_TIMEOUT: supported
            {path}:6
        torch.distributed.rpc.init_rpc: supported
            {path}:4
            {path}:7
        torch.distributed.rpc.no_such_name: NOT SUPPORTED; this version of torch doesn't have it either
            {path}:3
        4 names of torch's RPC, 2 not supported
        """)  # noqa: E501
    assert ended.returncode == 1
    for missing in (["nothing.py"], ["-m", "no_such_module"]):
        ended = quick_commands("-m", "zrpc.cli", "run", "--check", *missing)
        assert f"there is no {'module' if '-m' in missing else 'script'} " in ended.stderr
        assert ended.returncode == 2
    write("broken.py", BROKEN)
    ended = quick_commands("-m", "zrpc.cli", "run", "--check", "broken.py")
    assert "'broken.py' is none: invalid syntax (broken.py, line 2)" in ended.stderr
    assert ended.returncode == 2
