"""Docstrings, comments, texts, pages and names of tests are in plain English."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, pages
from tests.docs.plain_english import hits_in_names, hits_in_page, hits_in_python

_CODE = [path for folder in ("zrpc", "cli", "examples") for path in (ROOT / folder).rglob("*.py")]
_TESTS = list((ROOT / "tests").rglob("test_*.py"))


@pytest.mark.system
@pytest.mark.parametrize(
    ("paths", "hits_in"),
    [(_CODE, hits_in_python), (pages(), hits_in_page), (_TESTS, hits_in_names)],
    ids=["code", "pages", "names of tests"],
)
def test_no_words_are_used_that_the_style_sheet_replaces(
    paths: list[Path], hits_in: Callable[[str, str], list[str]]
) -> None:
    hits = [hit for path in paths for hit in hits_in(str(path.relative_to(ROOT)), path.read_text())]
    assert len(paths) > 10
    assert "\n".join(hits) == ""


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


def test_docstrings_comments_texts_and_names_of_tests_are_searched() -> None:
    source = '''
def fail(error):
    """Returns the rest.

    It waits for
    ever.
    """
    # This is sent so
    # many times.
    raise ValueError(error, "closed where "
                     "there is none")
'''
    hits = hits_in_python("a.py", source)
    hits += hits_in_names("a.py", "\n\nasync def test_it_is_sent_anew(): pass")
    assert [hit.partition(": write ")[0] for hit in hits] == [
        "a.py:5: 'for ever'",
        "a.py:8: 'so many'",
        "a.py:10: 'where there'",
        "a.py:3: 'anew'",
    ]
