"""Docstrings, comments, texts, pages and names of tests are in plain English."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, pages
from tests.docs.plain_english import Hit, hits_in_names, hits_in_page, hits_in_python

_CODE = ("zrpc", "cli", "examples")
_TESTS = sorted((ROOT / "tests").rglob("test_*.py"))


def search(paths: Iterable[Path], hits_in: Callable[[str, str], list[Hit]]) -> str:
    """The hits in some files, one a line."""
    hits = [hit for path in paths for hit in hits_in(str(path.relative_to(ROOT)), path.read_text())]
    return "\n".join(map(str, sorted(hits, key=lambda hit: (hit.file, hit.line))))


@pytest.mark.system
@pytest.mark.parametrize("folder", _CODE)
def test_code_is_in_plain_english(folder: str) -> None:
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    assert search(files, hits_in_python) == ""


@pytest.mark.system
def test_pages_are_in_plain_english() -> None:
    assert search(pages(), hits_in_page) == ""


@pytest.mark.system
def test_names_of_tests_are_in_plain_english() -> None:
    assert search(_TESTS, hits_in_names) == ""


@pytest.mark.parametrize(
    "text",
    [
        "It waits for so many answers.",
        "For so long it waits.",
        "The other one likewise.",
        "caller: as there.",
        "The message is sent anew.",
        "Tells whoever waits.",
        "That of which this thread runs the engine.",
        "A worker that was given up.",
        "It gave up.",
        "Calls under way fail.",
        "It would wait for ever.",
        "The same holds for all others.",
        "None where there is none.",
        "It is closed where it is not used any more.",
        "Also where a call fails.",
        "Only where it is not used.",
        "Where a worker fails, it is started again.",
        "Four workers, one of which leaves.",
        "The number by which it is found.",
        "It has waited for long.",
        "It has just now begun.",
        "It is sent all the same.",
        "Has gradients sent that are held back.",
    ],
)
def test_words_to_replace_are_found(text: str) -> None:
    assert len(hits_in_page("page.md", text)) == 1


@pytest.mark.parametrize(
    "text",
    [
        "So long as it runs, nothing is lost.",
        "It retries, as there may be room now.",
        "Where each worker can be reached, and which workers may connect.",
        "The value stays where it is. It goes on where they were, too.",
        "It shows where it is waiting, and for whom.",
        "The line where it is called.",
        "Where an error came from, as text.",
        "Where a segment is found, in the owner's process.",
        "descriptor: where it is found.\nplaces: of each buffer.",
        "The thread is free, so many calls can run.",
        "Answers are waited for ever longer.",
        "Where you would call one, call the other.",
        "Large tensors are sent from where they are, so changes arrive.",
        "Workers meet at the address where the store listens.",
        "It would forever give up the lead.",
        "It waits for longer. A place for long-lived values.",
        "Has no effect. Has an effect only once. It has gradients. Has it been sent?",
        "`likewise` is code, and so is\n\n```text\nso many\n```\n",
    ],
)
def test_other_uses_of_these_words_are_not_reported(text: str) -> None:
    assert hits_in_page("page.md", text) == []


def test_a_hit_names_the_file_the_line_and_the_word_to_use() -> None:
    text = "# Title\n\nThe first line.\nThe second one, which is sent\nanew.\n"
    assert [str(hit) for hit in hits_in_page("a.md", text)] == ["a.md:5: 'anew': write again"]


def test_docstrings_comments_and_texts_are_searched_and_names_of_variables_are_not() -> None:
    source = '''
def likewise(anew):
    """Returns the rest.

    It waits for
    ever.
    """
    # This is sent so
    # many times.
    raise ValueError(anew, "closed where "
                     "there is none")
'''
    found = [(hit.line, hit.words) for hit in hits_in_python("a.py", source)]
    assert found == [(5, "for ever"), (8, "so many"), (10, "where there")]


def test_names_of_tests_are_searched() -> None:
    source = "def test_it_is_sent_anew(): pass\n\n\nasync def test_a_call_under_way(): pass\n"
    found = [(hit.line, hit.words) for hit in hits_in_names("a.py", source)]
    assert found == [(1, "anew"), (4, "under way")]
