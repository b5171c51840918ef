"""The list of hosts that Slurm gives to a job, such as ``gpu[03-05,09],login1``."""

from __future__ import annotations

import re

__all__ = ["first_host"]

_NUMBERS = r"\[\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*\]"
_HOSTS = re.compile(rf"(?:[A-Za-z0-9_.-]|{_NUMBERS})+(?=,|$)", re.ASCII)
_FIRST_NUMBER = re.compile(r"\[(\d+)[^\]]*\]")


def first_host(node_list: str) -> str | None:
    """Returns the first host of a list; None if it isn't such a list.

    A name may have several ranges in brackets, and text after them. Leading zeros are kept.

    Example:
        >>> first_host("gpu[03-05,09],login1")
        'gpu03'
    """
    hosts = _HOSTS.match(node_list.strip())
    return None if hosts is None else _FIRST_NUMBER.sub(r"\1", hosts.group())
