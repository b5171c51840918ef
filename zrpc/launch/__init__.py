"""Starts, watches and stops workers on this machine. Imports nothing of the rest of zrpc.

`launch` runs a `Job`: N workers of one script. `Starter` is the level below: it starts single
processes and reports their exits.
"""

from zrpc.launch.errors import LaunchError, ServerDied
from zrpc.launch.launcher import Job, launch
from zrpc.launch.starter import Exit, Starter
from zrpc.launch.task import Task

__all__ = ["Exit", "Job", "LaunchError", "ServerDied", "Starter", "Task", "launch"]
