"""The first host of a list of hosts as Slurm writes it."""

from __future__ import annotations

import operator
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zrpc.membership.cluster_environment import first_host

LETTERS = string.ascii_lowercase
NAMES = st.builds(
    operator.add, st.sampled_from(LETTERS), st.text(LETTERS + string.digits + ".-", max_size=8)
)


@st.composite
def ranges(draw: st.DrawFn) -> tuple[str, str]:
    """A list of numbers in brackets, and its first number."""
    width = draw(st.integers(1, 4))
    firsts = draw(st.lists(st.integers(0, 9999), min_size=1, max_size=4))
    texts = []
    for first in firsts:
        last = first + draw(st.integers(1, 50))
        alone = draw(st.booleans())
        texts.append(f"{first:0{width}d}" + ("" if alone else f"-{last:0{width}d}"))
    return f"[{','.join(texts)}]", f"{firsts[0]:0{width}d}"


@st.composite
def entries(draw: st.DrawFn) -> tuple[str, str]:
    """An entry of a list, and its first host."""
    text = host = draw(NAMES)
    for brackets, number in draw(st.lists(ranges(), max_size=3)):
        rest = draw(st.sampled_from(["", "-", "node"]))
        text, host = text + brackets + rest, host + number + rest
    return text, host


@pytest.mark.system
@given(st.lists(entries(), min_size=1, max_size=5))
def test_the_first_host_of_any_list(all_entries: list[tuple[str, str]]) -> None:
    assert first_host(",".join(text for text, _ in all_entries)) == all_entries[0][1]


def test_lists_as_slurm_writes_them() -> None:
    for text, host in (
        ("vm", "vm"),
        ("n[1-2]", "n1"),
        ("gpu[003-005,9],login1", "gpu003"),
        ("rack[1-2]node[07,09]", "rack1node07"),
        ("a.cluster.example,b", "a.cluster.example"),
        (" n1\n", "n1"),
    ):
        assert first_host(text) == host
    for text in ("", ",n1", "n[", "n[]", "n[1-", "n[a]", "n[1-2]]", "(null)"):
        assert first_host(text) is None


@given(st.text(alphabet="n1[],- x\n", max_size=12))
def test_any_text_gives_a_host_name_or_nothing(text: str) -> None:
    host = first_host(text)
    assert host is None or (host and not set(host) & set("[], \n"))
