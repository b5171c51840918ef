"""Start, watch and stop workers on this machine."""

from .errors import LaunchError, ServerDied
from .starter import Exit, Starter
from .task import Task

__all__ = ["Exit", "LaunchError", "ServerDied", "Starter", "Task"]
