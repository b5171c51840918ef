"""What goes wrong with a launch itself."""

from __future__ import annotations


class LaunchError(RuntimeError):
    """Workers could not be started, watched or stopped.

    Not raised when a worker fails: its exit code is the result of the launch.
    """


class ServerDied(LaunchError):
    """The fork server exited while it was still needed, and its children with it."""
