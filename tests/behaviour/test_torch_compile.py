"""Code that ``torch.compile`` compiles uses zrpc, in a process of its own.

Dynamo changes how a process runs all Python functions: other tests of the process would see it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.own_process import passes_in_its_own_process


@pytest.mark.system
def test_compiled_code_uses_zrpc_and_can_be_sent() -> None:
    passes_in_its_own_process(Path(__file__).with_name("torch_compile_cases.py"))
