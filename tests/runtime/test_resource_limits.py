"""Which errors mean that a resource has run out."""

from __future__ import annotations

import errno
import os
import resource

import pytest
import torch
import zmq

from zrpc.errors import SerializationError
from zrpc.runtime.resource_limits import advice, allow_descriptors, out_of_descriptors


def test_advice_names_the_resource() -> None:
    with pytest.raises(RuntimeError) as of_torch:
        torch.empty(1 << 50)
    for error, word in (
        (OSError(errno.EMFILE, "Too many open files"), "ulimit -n"),
        (zmq.ZMQError(errno.EMFILE), "ulimit -n"),
        (OSError(errno.ENFILE, "Too many open files in system"), "fs.file-max"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "no memory"),
        (MemoryError(), "no memory"),
        (RuntimeError("can't start new thread"), "ulimit -u"),
        (of_torch.value, "no memory"),
    ):
        assert word in advice(error)


def test_advice_considers_the_causes_of_an_error() -> None:
    error = SerializationError("can't be rebuilt")
    error.__cause__ = MemoryError()
    assert "no memory" in advice(error)
    error.__cause__.__cause__ = error  # a circle
    assert "no memory" in advice(error)


def test_no_advice_for_other_errors() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise ValueError("no text")

    others = [ValueError("no memory"), OSError(errno.ENOENT, "no"), RuntimeError("x"), Mute()]
    for error in others:
        assert advice(error) is None
        assert not out_of_descriptors(error)


def test_the_soft_limit_of_descriptors_is_raised_up_to_the_hard_one() -> None:
    before, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    there = len(os.listdir("/proc/self/fd"))
    low = there + 100
    try:
        for more, soft in ((0, low), (100, low), (101, low + 1), (hard - there, hard)):
            resource.setrlimit(resource.RLIMIT_NOFILE, (low, hard))
            assert allow_descriptors(more) is None
            assert resource.getrlimit(resource.RLIMIT_NOFILE) == (soft, hard)
        assert allow_descriptors(hard - there + 1) == (hard + 1, hard)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before, hard))
