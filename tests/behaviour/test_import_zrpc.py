"""What `import zrpc` imports, and what zrpc never does."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import zrpc as rpc


@pytest.mark.system
@pytest.mark.parametrize("also", ["", "; rpc.ProtocolError; rpc.RpcError", "; dir(rpc)"])
def test_import_zrpc_imports_neither_torch_nor_zmq(also: str) -> None:
    code = (
        f"import sys; import zrpc as rpc{also}; "
        "sys.exit(str(sorted({'torch', 'zmq', 'numpy', 'cloudpickle'} & set(sys.modules))))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False
    )
    assert done.stderr.strip() == "[]"


def _imports(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


@pytest.mark.system
def test_zrpc_never_imports_torchs_rpc() -> None:
    sources = sorted(Path(rpc.__file__).parent.rglob("*.py"))
    assert len(sources) > 20
    for path in sources:
        found = [name for name in _imports(path) if name.startswith("torch.distributed.rpc")]
        # It is what the benchmarks compare with.
        assert not found or "bench" in path.parts, path


MODULES = "zrpc.api, zrpc.autograd, zrpc.nn, zrpc.optim, zrpc.testing.threads"
COMPILED = """
import sys
import {}
import zrpc
from zrpc.testing import local_mesh

def call():
    return zrpc.rpc_sync("worker1", abs, args=(-2,))

with local_mesh(2) as mesh:
    before = "torch._dynamo" in sys.modules
    import torch
    compiled = torch.compile(call, backend="eager")
    assert mesh.run(0, compiled) == 2
from torch._dynamo.utils import counters
print(before, counters["frames"]["total"])
"""


@pytest.mark.system
@pytest.mark.parametrize(("first", "printed"), [(MODULES, "False 1"), ("torch._dynamo", "True 1")])
def test_calls_do_not_import_the_compiler_and_it_compiles_nothing_of_zrpc_whichever_is_first(
    first: str, printed: str, tmp_path: Path
) -> None:
    (tmp_path / "program.py").write_text(COMPILED.format(first))
    program = [sys.executable, str(tmp_path / "program.py")]
    done = subprocess.run(program, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.strip() == printed, done.stderr
