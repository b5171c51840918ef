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
