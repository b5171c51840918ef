"""The program of a worker that a driver has started: it serves calls until the driver leaves."""

from __future__ import annotations

import pickle


def main(place: bytes, name: str, rank: int, restarts: int) -> None:
    """Joins the mesh of a driver, and serves until all others want to leave.

    Args:
        place: a pickled `zrpc.driver.place.MeetingPlace`.
        name: this worker's name.
        rank: this worker's rank.
        restarts: how often it was started again.
    """
    agent = pickle.loads(place).join(name, rank, restarts)
    agent.shutdown()
