"""Workers that are killed, frozen or started again at each step of a rendezvous.

All cases run at once, each with a store of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist

from tests.membership.test_rendezvous import QUICK, record
from tests.support.stores import RecordingStore
from zrpc.errors import RendezvousError
from zrpc.membership.peer_record import PeerRecord
from zrpc.membership.rendezvous import meet

pytestmark = pytest.mark.system

SIZE, STEPS = 3, 14
# Of the workers whose time may run out, and of those that must have enough.
SHORT, LONG = 2.0, 5.0


class Killed(BaseException):
    """Ends a worker, whatever it does."""


class FaultyStore(RecordingStore):
    """One worker's connection to a store; something happens before one of its requests."""

    def __init__(self, store: dist.Store, step: int = -1, fault: Callable[[], Any] = int) -> None:
        super().__init__(store)
        self._step, self._fault, self._steps = step, fault, 0

    def step(self) -> None:
        if self._steps == self._step:
            self._fault()
        self._steps += 1


def kill() -> None:
    raise Killed


def outcomes(
    victim: int, step: int, fault: Callable[[], Any], timeout: float, again: bool = False
) -> list[Any]:
    """Returns what a mesh's workers found, by rank; at last the victim, if it is started again."""
    store = dist.HashStore()

    def join(mine: PeerRecord, step: int = -1) -> Any:
        own_timeout = timeout if step < 0 else LONG  # it is the store that keeps it waiting
        try:
            return meet(FaultyStore(store, step, fault), mine, own_timeout, timing=QUICK)
        except (Killed, RendezvousError) as error:
            return error

    with ThreadPoolExecutor(SIZE) as pool:
        started = [
            pool.submit(join, record(rank, SIZE), step if rank == victim else -1)
            for rank in range(SIZE)
        ]
        killed = started[victim].result()
        if again and isinstance(killed, Killed):
            started.append(pool.submit(join, record(victim, SIZE)))
        return [each.result() for each in started]


def each_case(fault: Callable[[], Any], timeout: float, again: bool = False) -> Iterator[list[Any]]:
    cases = [(victim, step) for victim in (0, 1) for step in range(STEPS)]
    with ThreadPoolExecutor(len(cases)) as pool:
        run = partial(outcomes, fault=fault, timeout=timeout, again=again)
        yield from pool.map(run, *zip(*cases, strict=True))


def met(found: list[Any]) -> list[bool]:
    """Returns which workers have met, and checks that they have met the same ones."""
    meshes = [mesh for mesh in found if isinstance(mesh, list)]
    assert all(mesh == meshes[0] for mesh in meshes)
    return [isinstance(mesh, list) for mesh in found]


def test_all_go_on_or_none_whenever_one_is_frozen_until_the_time_of_the_others_is_over() -> None:
    """It has more time, and waits in vain if they have given up."""
    seen = {tuple(met(found)) for found in each_case(partial(time.sleep, 1.5 * SHORT), SHORT)}
    assert seen <= {(True,) * SIZE, (False,) * SIZE}


def test_all_go_on_if_one_is_frozen_for_a_while() -> None:
    seen = {tuple(met(found)) for found in each_case(partial(time.sleep, SHORT / 2), LONG)}
    assert seen == {(True,) * SIZE}


def test_the_others_go_on_all_or_none_whenever_one_is_killed() -> None:
    for found in each_case(kill, SHORT):
        others = [mesh for mesh in found if not isinstance(mesh, Killed)]
        assert len(set(met(others))) == 1
        for error in others:
            if isinstance(error, RendezvousError):
                [killed] = [rank for rank, each in enumerate(found) if isinstance(each, Killed)]
                # On a busy machine the store itself may be slow to answer; rank 0 is its host.
                texts = f"rank {killed} is missing", f"id={killed}", f"host, which is rank {killed}"
                assert any(text in str(error) for text in texts)


def test_whenever_one_is_killed_and_started_again_all_meet() -> None:
    """Unless they had met before it was killed: then the others go on with it."""
    for found in each_case(kill, 2.5 * SHORT, again=True):
        others = [mesh for mesh in found if not isinstance(mesh, Killed)]
        assert all(met(others[: SIZE - 1])), others
        if len(found) > SIZE and not isinstance(found[-1], list):
            assert "is that of another mesh" in str(found[-1]) or "left again" in str(found[-1])
