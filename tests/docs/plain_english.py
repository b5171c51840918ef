"""Finds words that the style sheet in CONTRIBUTING.md replaces: in code, pages, names of tests."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

__all__ = ["Hit", "hits_in_names", "hits_in_page", "hits_in_python"]

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
    r"(?:\A|[.!?] )(?-i:Has) (?!(?:an effect|been|no|not)\b)(?![^.]*\?)[^.]{2,60}": (
        "the verb of the act: 'Sends …'"
    ),
    # A clause before the main one: "Where a worker fails, it is started again."
    r"(?:^|[.!?:*] )(?-i:Where) (?!and\b|you\b)[^.,:;?]{3,90}, "
    r"(?!(?:and|as|or|how|in|when|which|who)\b)": _IF,
}
# Between two words there may be the end of a line, but not of a paragraph.
_PATTERNS = [
    (re.compile(words.replace(" ", r"\s"), re.M | re.I), better) for words, better in _WORDS.items()
]
_LITERALS = {tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}
# Around the text of a string or a comment.
_PREFIX, _QUOTES = re.compile(r"^[A-Za-z]{0,2}(?=[\"'])"), "\"'"

# A piece of prose, and the number of its first line.
Prose = tuple[int, str]


@dataclass(frozen=True)
class Hit:
    """Words to replace, and where they are."""

    file: str
    line: int
    words: str
    better: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.words!r}: write {self.better}"


def hits_in_python(file: str, source: str) -> list[Hit]:
    """Searches the docstrings, comments and string literals of a module."""
    return _hits(file, _prose(source))


def hits_in_page(file: str, text: str) -> list[Hit]:
    """Searches a Markdown page, except its code."""
    bare = re.sub(r"^```.*?^```|`[^`]+`", _blank, text, flags=re.MULTILINE | re.DOTALL)
    return _hits(file, [(1, bare)])


def hits_in_names(file: str, source: str) -> list[Hit]:
    """Searches the names of the tests of a module."""
    tests = [
        (node.lineno, node.name[5:].replace("_", " "))
        for node in ast.walk(ast.parse(source))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name[:5] == "test_"
    ]
    return _hits(file, tests)


def _blank(code: re.Match[str]) -> str:
    """Returns a word in place of code, on as many lines."""
    return "code" + "\n" * code[0].count("\n")


def _prose(source: str) -> Iterator[Prose]:
    """Yields each string, with the ones that continue it, and each block of comments."""
    first, text, last, kind = 0, "", 0, None
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in (tokenize.NL, tokenize.INDENT, tokenize.DEDENT):
            continue
        own = token.type if token.type not in _LITERALS else tokenize.STRING
        if own != kind or token.start[0] > last + 1:
            yield first, text
            first, text = token.start[0], ""
        elif text:
            text += "\n" * (token.start[0] - last) or " "
        last, kind = token.end[0], own
        if own == tokenize.COMMENT:
            text += token.string.lstrip("# ")
        elif own == tokenize.STRING:
            text += _PREFIX.sub("", token.string).strip(_QUOTES)


def _hits(file: str, prose: Iterable[Prose]) -> list[Hit]:
    return [hit for first, text in prose for hit in _hits_in(file, first, text)]


def _hits_in(file: str, first: int, text: str) -> Iterator[Hit]:
    text = re.sub(r"[ \t]*\n[ \t]*", "\n", text)
    found = sorted(
        (match.start(), match.end(), match[0].lstrip(".!?:* \n"), better)
        for pattern, better in _PATTERNS
        for match in pattern.finditer(text)
    )
    reported = 0
    for start, end, words, better in found:
        if start >= reported:
            line = first + text.count("\n", 0, end - len(words))
            yield Hit(file, line, " ".join(words.split())[:40], better)
            reported = end
