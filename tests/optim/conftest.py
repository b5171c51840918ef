"""Has pytest explain the assertions of a module that tests share."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("tests.optim.twins")
