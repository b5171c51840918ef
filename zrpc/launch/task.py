"""The program of a new worker process: a script, a module, a function or another program."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal


@dataclass(frozen=True)
class Task:
    """One program for a new process, and the environment it runs in.

    Make one with `script`, `module`, `function` or `program`.

    Attributes:
        kind: What `target` names.
        target: Path of the script, name of the module, ``module:qualname``, or name of the program.
        argv: The program's own arguments, without its name.
        payload: Pickled ``(args, kwargs)`` of a function. Only the new process unpickles it.
        cwd: Working directory; None for the server's.
        env: The whole environment; None for the server's.
        sys_path: ``sys.path`` without the script's own entry; None for a fresh interpreter's.
        line_buffered: Whether standard output is flushed after each line, even if it isn't a
            terminal.
        on_error: ``module:function`` to call with an error that ends the program, after its
            traceback was shown; empty for none.
        relayed_input: Whether its standard input must be asked for; see `RelayedInput`.

    Example:
        >>> Task.script("train.py", ["--epochs", "3"]).argv
        ('--epochs', '3')
    """

    kind: Literal["script", "module", "function", "program"]
    target: str
    argv: tuple[str, ...] = ()
    payload: bytes = b""
    cwd: str | None = None
    env: Mapping[str, str] | None = None
    sys_path: Sequence[str] | None = None
    line_buffered: bool = False
    on_error: str = ""
    relayed_input: bool = False

    @classmethod
    def script(cls, path: str, argv: Sequence[str] = ()) -> Task:
        """Makes a task that runs the file `path` as ``python path argv…`` would."""
        return cls("script", path, tuple(argv))

    @classmethod
    def module(cls, name: str, argv: Sequence[str] = ()) -> Task:
        """Makes a task that runs the module `name` as ``python -m name argv…`` would."""
        return cls("module", name, tuple(argv))

    @classmethod
    def function(cls, target: str, *args: Any, **kwargs: Any) -> Task:
        """Makes a task that runs ``sys.exit(function(*args, **kwargs))``.

        Args:
            target: The function, as ``module:qualname``. It is sent by name, so that the server
                doesn't have to import it.
            *args: Its arguments, which must be picklable.
            **kwargs: Its keyword arguments, which must be picklable.

        Raises:
            ValueError: `target` is not of that form.
        """
        module, colon, name = target.partition(":")
        if not (module and colon and name):
            raise ValueError(f"expected 'module:qualname' for a function, but got {target!r}")
        return cls("function", target, payload=pickle.dumps((args, kwargs)))

    @classmethod
    def program(cls, name: str, argv: Sequence[str] = ()) -> Task:
        """Makes a task that runs another program than Python, found as a shell finds it."""
        return cls("program", name, tuple(argv))

    def within(self, **environment: Any) -> Task:
        """Returns the same program in another environment: with some of the other attributes."""
        return replace(self, **environment)
