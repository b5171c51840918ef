"""The specification of a mesh, from the marker's arguments."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from zrpc import OptionError
from zrpc.testing import MeshSpec


def mark(*args: Any, **kwargs: Any) -> pytest.Mark:
    return pytest.mark.zrpc(*args, **kwargs).mark


def test_the_nearest_marker_wins_and_the_others_fill_in() -> None:
    near, far = mark(workers=4), mark(workers=3, timeout=5)
    spec = MeshSpec.from_marks([near, far])
    assert (spec.workers, spec.timeout) == (4, 5)


def test_a_timeout_may_be_a_timedelta_and_0_means_no_limit() -> None:
    assert MeshSpec.from_marks([mark(timeout=timedelta(minutes=1))]).timeout == 60
    assert MeshSpec.from_marks([mark(timeout=0)]).timeout > 1e7


def test_replace_merges_options() -> None:
    spec = MeshSpec(options={"rpc_timeout": 1, "num_worker_threads": 2})
    changed = spec.replace(workers=3, options={"rpc_timeout": 5})
    assert changed == MeshSpec(3, options={"rpc_timeout": 5, "num_worker_threads": 2})
    assert spec.workers == 2


def test_wrong_marks_are_refused() -> None:
    for wrong, error, match in (
        (mark(4), TypeError, r"keyword arguments only, but got \(4,\)"),
        (mark(worker=4), TypeError, "expected one of workers, processes, .* but got 'worker'"),
        (mark(workers="4"), TypeError, "workers must be an int, but got '4'"),
        (mark(workers=True), TypeError, "workers must be an int, but got True"),
        (mark(workers=0), ValueError, "at least 1, but got 0"),
        (mark(processes=1), TypeError, "processes must be a bool"),
        (mark(timeout="1"), TypeError, "timeout must be a number of seconds"),
        *(
            (mark(timeout=each), OptionError, r"timeout must be 0 \(no limit\) to")
            for each in (-1, timedelta(seconds=-1), float("nan"), float("inf"))
        ),
        (mark(options=[]), TypeError, "options must be a mapping"),
    ):
        with pytest.raises(error, match=match):
            MeshSpec.from_marks([wrong])
