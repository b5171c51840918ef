"""Inputs for the fuzz tests: a small corpus, and mutations of it."""

from __future__ import annotations

import os
import random
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

# The number of inputs of each fuzz test; a nightly run sets a million.
INPUTS = int(os.environ.get("ZRPC_FUZZ_INPUTS", "3000"))

HEADER = struct.Struct("<BBHIIfQQ")
# Edge cases for any field.
_NUMBERS = [0, 1, 2, 31, 32, 33, 127, 128, 255, 256, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1]


def corpus() -> list[bytes]:
    """Returns the first frames in ``corpus.txt``: each line is a name and hexadecimal digits."""
    lines = Path(__file__).with_name("corpus.txt").read_text().splitlines()
    return [bytes.fromhex("".join(line.split()[1:])) for line in lines if line.strip()]


def mutated(source: random.Random, seeds: Sequence[bytes]) -> bytes:
    """Returns one seed, changed up to four times."""
    data = bytearray(source.choice(seeds))
    for _ in range(source.randint(0, 4)):
        _MUTATIONS[source.randrange(len(_MUTATIONS))](source, data, seeds)
    return bytes(data)


def inputs(seed: int, count: int, seeds: Sequence[bytes]) -> Iterator[bytes]:
    """Yields inputs, the same ones for the same seed."""
    source = random.Random(seed)
    for _ in range(count):
        yield mutated(source, seeds)


def _flip(source: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    if data:
        data[source.randrange(len(data))] ^= 1 << source.randrange(8)


def _number(source: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    size = source.choice((1, 2, 4, 8))
    if len(data) >= size:
        at = source.randrange(len(data) - size + 1)
        data[at : at + size] = source.choice(_NUMBERS).to_bytes(8, "little")[:size]


def _cut(source: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    del data[source.randrange(len(data) + 1) :]


def _remove(source: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    at = source.randrange(len(data) + 1)
    del data[at : at + source.randint(1, 8)]


def _insert(source: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    at = source.randrange(len(data) + 1)
    data[at:at] = source.randbytes(source.randint(1, 16))


def _splice(source: random.Random, data: bytearray, seeds: Sequence[bytes]) -> None:
    other = source.choice(seeds)
    data[source.randrange(len(data) + 1) :] = other[source.randrange(len(other) + 1) :]


def _repeat(source: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    at = source.randrange(len(data) + 1)
    data[at:at] = data[at : at + 32] * source.randint(1, 20)


_MUTATIONS = (_flip, _number, _cut, _remove, _insert, _splice, _repeat)
