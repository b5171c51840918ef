"""The launcher's standard input: what the worker that gets it reads from."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from zrpc.launch.terminal import Terminal
from zrpc.launch.terminal_input import TerminalInput, may_read_directly, must_relay

_WAITING = "zrpc launch: a worker reads the terminal; it waits until you continue this by fg"


class Keyboard:
    """Gives one worker the standard input, which is relayed if it is this session's terminal.

    It is a context manager: leaving ends the relay.

    Args:
        terminal: Serves workers that are debugged, which get what is typed meanwhile; or None.
        notice: Shows a line of the launcher.

    Attributes:
        fd: The worker's standard input; None for the null device.
    """

    def __init__(self, terminal: Terminal | None, notice: Callable[[str], None]) -> None:
        self.fd: int | None = 0
        self._relay: TerminalInput | None = None
        if must_relay():
            with contextlib.suppress(OSError):  # without pseudo-terminals it reads directly
                self._relay = TerminalInput(
                    lambda: terminal is not None and terminal.is_busy(), lambda: notice(_WAITING)
                )
                self.fd = self._relay.fd
        elif not may_read_directly():
            self.fd = None

    @property
    def relays(self) -> bool:
        """Whether the launcher reads the terminal, and carries what was typed to the worker."""
        return self._relay is not None

    def serve(self, pid: int) -> None:
        """Begins to serve the worker with this process id, which has been given `fd`."""
        if self._relay is not None:
            self._relay.serve(pid)

    def on_exit(self, pid: int) -> None:
        """Ends the relay if the worker that exited had it."""
        if self._relay is not None and self._relay.pid == pid:
            self._relay.close()
            self._relay = None

    def resize(self) -> None:
        """Gives the worker's terminal the size of the launcher's."""
        if self._relay is not None:
            self._relay.resize()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leaves the terminal to the shell within the block, in the modes in which it was."""
        if self._relay is not None:
            with self._relay.paused():
                yield
        else:
            yield

    def __enter__(self) -> Keyboard:
        return self

    def __exit__(self, *error: object) -> None:
        if self._relay is not None:
            self._relay.close()
