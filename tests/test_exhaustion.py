"""Which errors mean that something has run out."""

from __future__ import annotations

import errno

import pytest
import torch
import zmq

from zrpc.errors import SerializationError
from zrpc.exhaustion import advice, out_of_descriptors
from zrpc.wire.exceptions import dump_exception, load_exception


def raised(function, *args):
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
def test_what_to_do(error, word):
    assert word in advice(error)


def test_an_error_of_torch():
    assert "no memory" in advice(raised(torch.empty, 1 << 50))


def test_what_an_error_was_raised_from_counts():
    error = SerializationError("can't be rebuilt")
    error.__cause__ = MemoryError()
    assert "no memory" in advice(error)
    error.__cause__.__cause__ = error  # a circle
    assert "no memory" in advice(error)


@pytest.mark.parametrize(
    "error", [ValueError("no memory"), OSError(errno.ENOENT, "no"), RuntimeError("x"), KeyError()]
)
def test_other_errors(error):
    assert advice(error) is None
    assert not out_of_descriptors(error)


def test_an_error_that_can_not_tell():
    class Mute(Exception):
        def __str__(self):
            raise ValueError("no text")

    assert advice(Mute()) is None


def test_it_travels_with_the_error():
    sent = load_exception(dump_exception(MemoryError("big"), "worker1", True))
    assert type(sent) is MemoryError
    assert str(sent.__cause__).startswith("On worker1: the process has no memory left")
    sent = load_exception(dump_exception(KeyError("k"), "worker1", True))
    assert str(sent.__cause__).startswith("On worker1:\nKeyError")
