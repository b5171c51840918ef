"""What a check of ``zrpc doctor`` has found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from zrpc.errors import RpcError

Verdict = Literal["ok", "warning", "failure"]


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        check: what was checked.
        verdict: ``failure`` if workers can't start here, ``warning`` if they may lack something.
        found: what there is.
        next_step: what to do; empty if nothing has to be done.
    """

    check: str
    verdict: Verdict
    found: str
    next_step: str = ""

    @classmethod
    def of_error(cls, check: str, error: RpcError) -> Finding:
        """Returns a failure with an error's text: what was expected and found, then what to do."""
        text = str(error)
        after = max(0, text.find(", found "))
        found, _, next_step = text[after:].partition(": ")
        return cls(check, "failure", text[:after] + found, next_step)
