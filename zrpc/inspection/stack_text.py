"""A stack as text."""

from __future__ import annotations

import traceback
from collections.abc import Iterable

__all__ = ["stack_text"]


def stack_text(title: str, frames: Iterable[tuple[str, int, str]]) -> str:
    """A stack as Python prints it, with the lines of its files, which are read here.

    Args:
        title: whose stack it is.
        frames: file, line and function of each, the innermost call last.
    """
    summaries = [traceback.FrameSummary(file, line, function) for file, line, function in frames]
    return f"{title}, most recent call last:\n" + "".join(traceback.format_list(summaries))
