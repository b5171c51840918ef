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


REPLACED = [
    *("It waits for so many answers.", "For so long it waits.", "The other one likewise."),
    *("caller: as there.", "Tells whoever waits.", "A worker that was given up.", "It gave up."),
    *("It would wait for ever.", "None where there is none.", "Also where a call fails."),
    *("It is closed where it is not used any more.", "Four workers, one of which leaves."),
    *("Where a worker fails, it is started again.", "Has gradients sent that are held back."),
]
OTHER_USES = [
    *("So long as it runs, nothing is lost.", "It retries, as there may be room now."),
    *("The value stays where it is. It goes on where they were, too.", "It waits for longer."),
    *("It shows where it is waiting, and for whom.", "Where an error came from, as text."),
    *("The thread is free, so many calls can run.", "Where you would call one, call the other."),
    *("Answers are waited for ever longer.", "Has no effect. It has gradients. Has it been sent?"),
    "`likewise` is code, and so is\n\n```text\nso many\n```\n",
]


def test_words_to_replace_are_found_and_other_uses_of_them_are_not() -> None:
    assert [text for text in REPLACED if len(hits_in_page("page.md", text)) != 1] == []
    assert [text for text in OTHER_USES if hits_in_page("page.md", text)] == []


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
