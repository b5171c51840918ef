"""Finds words that the style sheet in CONTRIBUTING.md replaces: in code, pages, names of tests."""

from __future__ import annotations

import re

__all__ = ["hits_in_names", "hits_in_page", "hits_in_python"]

_IF = "if, or when"
_NOUN = "a noun, such as 'a worker that'"
_VERB = r"(?:is|are|was|were|has|have|had|can|could|do|does|did|may|must)(?:n't|'t|not)?"
# After these words, `where` asks for a place: "shows where no thread waits", "path: where it is".
_BEFORE_PLACES = (
    "about and from of to know knows say says see show shows "
    "address directory file host line place point position worker"
)
_NO_PLACE = r"(?<!: )" + "".join(rf"(?<!\b{word} )" for word in _BEFORE_PLACES.split())
# The words, as regular expressions, and what to write instead.
_WORDS = {
    r"(?<!, )\bso many\b": "the name of the number",
    r"\bso long\b(?! as\b)": "the time, with its unit",
    r"\blikewise\b": "also",
    r"\bas there\b(?! (?:is|are|was|were|may|can|must|will|would|should)\b)": "the fact itself",
    r"\banew\b": "again",
    r"\bwho(?:m|se)?(?:so)?ever\b": _NOUN,
    r"\bth(?:at|ose) of which\b": _NOUN,
    r"\bg(?:iven|ave) up\b": "declared dead, dropped, or abandoned",
    r"\bunder way\b": "in progress, in flight, or outstanding",
    r"\bfor ever\b(?! longer)": "forever, or without limit",
    r"\bthe same holds\b": "the fact itself",
    rf"{_NO_PLACE}\bwhere (?:there|nobody|none|nothing|no|not)\b": _IF,
    # "stays where it is" asks for a place, and ends there.
    rf"{_NO_PLACE}\bwhere (?:it|they|this|that|one) {_VERB}\b(?= \w)": _IF,
    r"\b(?:also|even|only) where\b": _IF,
    r"\b(?:of|by) which\b": "a sentence of its own",
    r"\bfor long\b(?!-)": "how long, or until what",
    r"\bjust now\b": "at this moment, or nothing",
    r"\ball the same\b": "still, or anyway",
    # "Has gradients sent that are held back." Questions and "Has no effect" are not meant.
    r'(?:\A|"""|[.!?] )(?-i:Has) (?!(?:an effect|been|no|not)\b)(?![^.]*\?)[^.]{2,60}': (
        "the verb of the act: 'Sends …'"
    ),
    # A clause before the main one: "Where a worker fails, it is started again."
    r'(?:^|"|[.!?:*] )(?-i:Where) (?!and\b|you\b)[^.,:;?]{3,90}, '
    r"(?!(?:and|as|or|how|in|when|which|who)\b)": _IF,
}
# Between two words there may be the end of a line, but not of a paragraph.
_PATTERNS = [
    (re.compile(words.replace(" ", r"\s"), re.M | re.I), better) for words, better in _WORDS.items()
]
# The end of a line, and what begins the next one: of a comment, or of a string that goes on.
_BREAK = re.compile(r"[\"']?[ \t]*\n[ \t]*(?:#\ ?|[a-zA-Z]{0,2}[\"'](?![\"']))?")
_TEST = re.compile(r"\s*(?:async )?def test_(\w+)")


def hits_in_python(file: str, source: str) -> list[str]:
    """Searches a module: what it says in docstrings, comments and strings, mostly."""
    return _hits(file, _BREAK.sub("\n", source))


def hits_in_page(file: str, text: str) -> list[str]:
    """Searches a Markdown page, except its code."""
    return _hits(file, re.sub(r"^```.*?^```|`[^`]+`", _blank, text, flags=re.MULTILINE | re.DOTALL))


def hits_in_names(file: str, source: str) -> list[str]:
    """Searches the names of the tests of a module."""
    found = [_TEST.match(line) for line in source.splitlines()]
    return _hits(file, "\n".join(test[1].replace("_", " ") if test else "" for test in found))


def _blank(code: re.Match[str]) -> str:
    """Returns a word in place of code, on as many lines."""
    return "code" + "\n" * code[0].count("\n")


def _hits(file: str, text: str) -> list[str]:
    """Returns the words to replace, each with its place and what to write instead."""
    text = re.sub(r"[ \t]*\n[ \t]*", "\n", text)
    found = sorted(
        (match.start(), match.end(), match[0].lstrip(".!?:* \n"), better)
        for pattern, better in _PATTERNS
        for match in pattern.finditer(text)
    )
    hits = []
    reported = 0
    for start, end, words, better in found:
        if start >= reported:
            line = 1 + text.count("\n", 0, end - len(words))
            hits.append(f"{file}:{line}: {' '.join(words.split())[:40]!r}: write {better}")
            reported = end
    return hits
