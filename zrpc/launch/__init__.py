"""Starts, watches and stops workers on this machine. Imports nothing of the rest of zrpc.

`launch` runs a `Job`: N workers of one script. `ForkServer` and `SpawnServer` (each a `Starter`)
are the level below: they start single processes and report their exits.
"""

from zrpc.launch.launcher import Job, launch
from zrpc.launch.starter import Exit, LaunchError, ServerDied, Starter, make_starter, start_method
from zrpc.launch.task import Task

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
