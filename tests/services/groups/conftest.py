"""What the tests of groups share."""

from __future__ import annotations

from tests.services.shm.conftest import _nothing_is_left  # noqa: F401
