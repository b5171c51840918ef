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
from zrpc.wire.exceptions import dump_exception, load_exception


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


def test_advice_is_part_of_the_remote_error() -> None:
    sent = load_exception(dump_exception(MemoryError("big"), "worker1", True))
    assert type(sent) is MemoryError
    assert str(sent.__cause__).startswith("On worker1: the process has no memory left")
    sent = load_exception(dump_exception(KeyError("k"), "worker1", True))
    assert str(sent.__cause__).startswith("On worker1:\nKeyError")


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The soft and the hard limit of descriptors, as this process sees and sets them."""
    limits = [256, 1024]
    monkeypatch.setattr(resource, "getrlimit", lambda _: tuple(limits))
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: limits.__setitem__(slice(2), new))
    monkeypatch.setattr(os, "listdir", lambda _: ["0"] * 100)
    return limits


def test_the_soft_limit_of_descriptors_is_raised_up_to_the_hard_one(limits: list[int]) -> None:
    for more, soft in ((0, 256), (156, 256), (157, 257), (924, 1024)):
        assert allow_descriptors(more) is None
        assert limits == [soft, 1024]
        limits[0] = 256
    assert allow_descriptors(925) == (1025, 1024)
    assert limits == [256, 1024]
