"""Which errors mean that a resource has run out."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Callable
from typing import Any

import pytest
import torch
import zmq

from zrpc.errors import SerializationError
from zrpc.runtime.resource_limits import advice, allow_descriptors, out_of_descriptors
from zrpc.wire.exceptions import dump_exception, load_exception


def raised(function: Callable[..., Any], *args: Any) -> BaseException:
    with pytest.raises(Exception) as info:  # noqa: PT011
        function(*args)
    return info.value


@pytest.mark.parametrize(
    ("error", "word"),
    [
        (OSError(errno.EMFILE, "Too many open files"), "ulimit -n"),
        (zmq.ZMQError(errno.EMFILE), "ulimit -n"),
        (OSError(errno.ENFILE, "Too many open files in system"), "fs.file-max"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "no memory"),
        (MemoryError(), "no memory"),
        (RuntimeError("can't start new thread"), "ulimit -u"),
    ],
)
def test_advice_names_the_resource(error: BaseException, word: str) -> None:
    assert word in advice(error)


def test_advice_for_an_allocation_error_of_torch() -> None:
    assert "no memory" in advice(raised(torch.empty, 1 << 50))


def test_advice_considers_the_causes_of_an_error() -> None:
    error = SerializationError("can't be rebuilt")
    error.__cause__ = MemoryError()
    assert "no memory" in advice(error)
    error.__cause__.__cause__ = error  # a circle
    assert "no memory" in advice(error)


@pytest.mark.parametrize(
    "error", [ValueError("no memory"), OSError(errno.ENOENT, "no"), RuntimeError("x"), KeyError()]
)
def test_no_advice_for_other_errors(error: BaseException) -> None:
    assert advice(error) is None
    assert not out_of_descriptors(error)


def test_no_advice_for_an_error_whose_str_fails() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise ValueError("no text")

    assert advice(Mute()) is None


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


@pytest.mark.parametrize(
    ("more", "soft", "short"),
    [
        (0, 256, None),
        (156, 256, None),
        (157, 257, None),
        (924, 1024, None),
        (925, 256, (1025, 1024)),
    ],
)
def test_the_soft_limit_of_descriptors_is_raised_up_to_the_hard_one(
    limits: list[int], more: int, soft: int, short: Any
) -> None:
    assert allow_descriptors(more) == short
    assert limits == [soft, 1024]
