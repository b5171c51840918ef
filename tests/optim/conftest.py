"""Has pytest explain the assertions of a module that tests share.

The first optimizer of a process imports torch's compiler, for seconds of processor time. On a busy
machine a handler would not have imported it before its call times out.
"""

from __future__ import annotations

import pytest
import torch._dynamo  # noqa: F401

pytest.register_assert_rewrite("tests.optim.twins")
