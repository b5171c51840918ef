"""The times and sizes of an elastic mesh."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ElasticLimits:
    """The times and sizes of one worker of an elastic mesh."""

    # How often the log is read, and how often for some time after a worker was introduced.
    poll_seconds: float = 0.2
    awaiting_poll_seconds: float = 0.05
    awaiting_seconds: float = 10.0
    # The pauses of a worker that is joining grow from the first to the second.
    pause_seconds: tuple[float, float] = (0.002, 0.05)
    # How long such a worker waits for others before it checks whether they are alive, and for
    # workers to come back that left while it was restarted.
    check_after_seconds: float = 1.0
    return_seconds: float = 5.0
    # How long other members have to report the loss of a worker whose name or rank is asked for,
    # and how long a TCP connection to such a worker may take to be refused.
    death_report_seconds: float = 2.0
    refused_seconds: float = 0.5
    # How long the last messages of a worker that has left may take.
    last_message_seconds: float = 2.0
    # How long a worker takes at most to announce that it leaves, and then waits for the others.
    leave_seconds: float = 2.0
    # After how many events a snapshot is written: at least, and how many more for each member.
    snapshot_events: int = 32
    snapshot_events_per_member: int = 2
    # How many lost workers, and how many refused ones, are remembered.
    remembered: int = 16


DEFAULT_LIMITS = ElasticLimits()
