"""Start, watch and stop workers on this machine.

`launch` runs a `Job`: N workers of one script. `ForkServer` and `SpawnServer` (each a `Starter`)
are the level below: they start single processes and report their exits.
"""

from .errors import LaunchError, ServerDied
from .launcher import Job, launch
from .method import make_starter, start_method
from .starter import Exit, Starter
from .task import Task

__all__ = [
    "Exit",
    "Job",
    "LaunchError",
    "ServerDied",
    "Starter",
    "Task",
    "launch",
    "make_starter",
    "start_method",
]
