"""Any bytes are a message or a ProtocolError, and parsing allocates no more than their length."""

from __future__ import annotations

import logging
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz.mutation import INPUTS, corpus, inputs
from zrpc.errors import ProtocolError
from zrpc.wire.message import HEADER_SIZE, Message, parse

SEEDS = corpus()


def read(data: bytes) -> Message | None:
    """Returns the message in some bytes, or None if they are refused with a ProtocolError."""
    try:
        message = parse(memoryview(data), (), 0)
    except ProtocolError:
        return None
    extensions = sum(5 + len(content) for _, content in message.extensions)
    parts = HEADER_SIZE + extensions + len(message.table) + len(message.body)
    assert parts == len(data), "a byte was read twice, or not at all"
    assert message.deadline >= 0
    return message


def test_the_corpus_has_both_kinds() -> None:
    read_well = [data for data in SEEDS if read(data) is not None]
    assert 5 < len(read_well) < len(SEEDS) - 5


@pytest.mark.system
@settings(max_examples=max(200, INPUTS // 100))
@given(st.integers(0, 2**64 - 1))
def test_mutated_messages_are_read_or_refused(seed: int) -> None:
    data = b""
    try:
        for data in inputs(seed, 100, SEEDS):
            read(data)
    except Exception as error:
        raise AssertionError(f"{data.hex()} raised {error!r}") from error


@pytest.mark.system
@settings(max_examples=min(INPUTS, 100_000) // 3)
@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    read(data)


def test_false_lengths_allocate_nothing() -> None:
    for data in SEEDS:
        logging.disable()
        tracemalloc.start()
        try:
            read(data)
            assert tracemalloc.get_traced_memory()[1] < 100_000
        finally:
            tracemalloc.stop()
            logging.disable(logging.NOTSET)
