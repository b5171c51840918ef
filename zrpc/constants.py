"""The defaults of calls and options, by the names that torch gives them; the type of timeouts."""

from __future__ import annotations

from datetime import timedelta

__all__ = [
    "DEFAULT_INIT_METHOD",
    "DEFAULT_NUM_WORKER_THREADS",
    "DEFAULT_PREFETCH",
    "DEFAULT_PROCESS_GROUP_TIMEOUT",
    "DEFAULT_RPC_TIMEOUT_SEC",
    "DEFAULT_SHUTDOWN_TIMEOUT",
    "UNSET_RPC_TIMEOUT",
]

# The type of all timeouts.
Seconds = float | timedelta

DEFAULT_INIT_METHOD = "env://"
DEFAULT_NUM_WORKER_THREADS = 16
# How many items the generator of a stream may be ahead of its reader.
DEFAULT_PREFETCH = 1024
DEFAULT_RPC_TIMEOUT_SEC = 60.0
DEFAULT_SHUTDOWN_TIMEOUT: float = 0
# Stands for the default timeout, in each function that takes the timeout of a call. Any other
# negative number is a deadline that has passed.
UNSET_RPC_TIMEOUT = -1.0
# torch's limit for a process group that it keeps; zrpc keeps none.
DEFAULT_PROCESS_GROUP_TIMEOUT = timedelta(milliseconds=2**31 - 1)
