"""What a check of ``zrpc doctor`` has found; the checks of versions."""

from __future__ import annotations

import importlib
import platform
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from typing import Literal

from zrpc.errors import RpcError

_DISTRIBUTION = "torch-zrpc"
_LEAST = re.compile(r"([\w-]+)>=([\d.]+)$")  # the extras' requirements have conditions
_MODULES = {"pyzmq": "zmq"}  # if it isn't the distribution's name


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


def check_versions() -> Iterator[Finding]:
    """Yields a finding for Python, and for each requirement of zrpc."""
    try:
        package = metadata.metadata(_DISTRIBUTION)
    except metadata.PackageNotFoundError:
        step = "install zrpc by pip, so that its requirements are installed and can be checked"
        yield Finding("zrpc", "warning", "it runs from its source and isn't installed", step)
        return
    yield Finding("zrpc", "ok", package["Version"])
    needed = package["Requires-Python"].removeprefix(">=")
    yield _compare("python", platform.python_version(), needed, "use a newer Python")
    for requirement in metadata.requires(_DISTRIBUTION) or ():
        if found := _LEAST.match(requirement):
            yield _check_package(found[1], found[2])


def _check_package(name: str, needed: str) -> Finding:
    step = f"pip install '{name}>={needed}'"
    try:
        version = metadata.version(name)
        importlib.import_module(_MODULES.get(name, name))
    except metadata.PackageNotFoundError:
        return Finding(name, "failure", "not installed", step)
    except Exception as error:  # a package that is broken may raise anything
        found = f"{version}, but it can't be imported ({type(error).__name__}: {error})"
        return Finding(name, "failure", found, f"pip install --force-reinstall '{name}>={needed}'")
    return _compare(name, version, needed, step)


def _compare(name: str, version: str, needed: str, step: str) -> Finding:
    if _numbers(version) < _numbers(needed):
        return Finding(name, "failure", f"expected {needed} or newer, found {version}", step)
    return Finding(name, "ok", version)


def _numbers(version: str) -> list[int]:
    """Returns the numbers of a version, without those of a local build such as ``+cu128``."""
    return [int(number) for number in re.findall(r"\d+", version.partition("+")[0])]
