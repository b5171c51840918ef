"""Two hosts with a bad network between them: lossy, slow, and interrupted."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.transport.two_hosts import SOON, Cable, Host, bad_cable, namespaces
from zrpc.membership.secret import new_secret

GOOD = (0.0, 0.0)
# The share of packets lost at each end, and the delay in seconds each way.
BAD = (0.05, 0.05)
CUT = (1.0, 0.0)

LIMIT = 1.5  # heartbeat_timeout
# Allowance for checks that happen only periodically, on a busy machine.
SLACK = 4.0

# What all programs begin with. They report progress by files, and wait for the test's files.
BEGIN = """
import json, os, time
import torch, zrpc

rank = int(os.environ["RANK"])
peer = f"w{1 - rank}"

def tell(what):
    open(f"{what}{rank}.new", "w").close()
    os.rename(f"{what}{rank}.new", f"{what}{rank}")

def await_word(what):
    end = time.monotonic() + 30
    while not os.path.exists(what):
        assert time.monotonic() < end, what
        time.sleep(0.01)

zrpc.init_rpc(f"w{rank}", rpc_backend_options=zrpc.ZmqRpcBackendOptions(
    init_timeout=15, rpc_timeout=25, heartbeat_timeout=float(os.environ["LIMIT"])))
assert zrpc.rpc_sync(peer, max, (1, 2)) == 2
assert zrpc.agent.current.current_agent().membership.records[rank].public_key  # CURVE
tell("ready")
"""

CALLS = """
await_word("bad")
tensor = torch.arange(6_000, dtype=torch.int32) + rank
futures = [zrpc.rpc_async(peer, torch.add, (i, torch.tensor(i * rank))) for i in range(30)]
large = zrpc.rpc_async(peer, torch.mul, (tensor, 3))
for i in range(3):
    assert zrpc.rpc_sync(peer, int, (str(i),)) == i
assert [future.wait().item() for future in futures] == [i + i * rank for i in range(30)]
assert torch.equal(large.wait(), tensor * 3)
kept = zrpc.remote(peer, torch.add, (tensor[:9], 1))
assert torch.equal(kept.to_here(), tensor[:9] + 1)
tell("done")
zrpc.shutdown()
"""

SHORT_CUT = """
ran = []

def note(i):
    import __main__
    __main__.ran.append(i)
    return -i

await_word("cut")
futures = [zrpc.rpc_async(peer, note, (i,)) for i in range(200)]
tell("sent")
first = futures[0].wait()
tell("answered")
assert [first, *(future.wait() for future in futures[1:])] == [-i for i in range(200)]
zrpc.shutdown()
assert sorted(ran) == list(range(200)), ran  # once each
"""

LONG_CUT = """
lost = []
zrpc.on_worker_lost(lambda worker: lost.append((worker.name, time.monotonic())))
future = zrpc.rpc_async(peer, time.sleep, (20,), timeout=0)
value = zrpc.remote(peer, time.sleep, (20,), timeout=0)
# Before its first heartbeat is answered, a lost worker is one that could not be reached.
liveness = zrpc.agent.current.current_agent().liveness
end = time.monotonic() + 15
while liveness.silence(1 - rank) != 0.0:
    assert time.monotonic() < end
    time.sleep(0.01)
tell("waits")
errors = []
for wait in (future.wait, value.to_here):
    try:
        wait()
    except zrpc.WorkerDied as error:
        errors.append((type(error).__name__, str(error), time.monotonic()))
end = time.monotonic() + 10
while not lost and time.monotonic() < end:
    time.sleep(0.01)
print(json.dumps([errors, lost]))
zrpc.shutdown(graceful=False)
os._exit(0)
"""


@pytest.fixture(scope="module")
def network(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[list[Host], Cable]]:
    with namespaces() as names, bad_cable(names) as cable:
        yield [Host(name, tmp_path_factory.mktemp("host")) for name in names], cable


@pytest.fixture
def cable(network: tuple[list[Host], Cable]) -> Iterator[Cable]:
    yield network[1]
    network[1].set(*GOOD)


@pytest.fixture
def workers(
    network: tuple[list[Host], Cable], cable: Cable, start_workers: Callable[..., Any]
) -> Callable[..., Any]:
    """Returns a function that starts a program on both hosts."""

    def start(program: str, limit: float = LIMIT) -> Any:
        variables = {"ZRPC_SECRET": new_secret(), "LIMIT": str(limit)}
        return start_workers(network[0], BEGIN + program, variables, variables)

    return start


@pytest.fixture
def await_both(tmp_path: Path) -> Callable[[str], None]:
    def wait(what: str) -> None:
        end = time.monotonic() + SOON
        while not all((tmp_path / f"{what}{rank}").exists() for rank in range(2)):
            outputs = [path.read_text() for path in sorted(tmp_path.glob("output*"))]
            assert time.monotonic() < end, "\n".join(outputs)
            time.sleep(0.01)

    return wait


def assert_well(outcomes: list[tuple[int, str]]) -> None:
    for code, output in outcomes:
        assert code == 0, output


def test_calls_succeed_despite_lost_and_late_packets(
    workers: Callable[..., Any], cable: Cable, await_both: Callable[[str], None], tmp_path: Path
) -> None:
    started = workers(CALLS, limit=10.0)
    await_both("ready")
    cable.set(*BAD)
    began = time.monotonic()
    (tmp_path / "bad").touch()
    await_both("done")
    # Four calls in a row: the network was bad.
    assert time.monotonic() - began > 4 * 2 * BAD[1]
    cable.set(*GOOD)
    assert_well(started.outcomes())


def test_a_short_interruption_loses_nothing(
    workers: Callable[..., Any], cable: Cable, await_both: Callable[[str], None], tmp_path: Path
) -> None:
    started = workers(SHORT_CUT, limit=10.0)
    await_both("ready")
    cable.set(*CUT)
    (tmp_path / "cut").touch()
    await_both("sent")
    time.sleep(1.0)  # how long the interruption takes
    assert not list(tmp_path.glob("answered*"))
    cable.set(*GOOD)
    assert_well(started.outcomes())


def test_a_long_interruption_is_noticed_at_both_ends(
    workers: Callable[..., Any], cable: Cable, await_both: Callable[[str], None]
) -> None:
    started = workers(LONG_CUT)
    await_both("waits")
    cut = time.monotonic()
    cable.set(*CUT)
    outcomes = started.outcomes()
    assert_well(outcomes)
    for rank, (_, output) in enumerate(outcomes):
        [line] = [line for line in output.splitlines() if line.startswith("[[")]
        errors, lost = json.loads(line)
        assert [kind for kind, _, _ in errors] == ["WorkerDied", "OwnerDied"]
        [(name, told)] = lost
        assert name == f"w{1 - rank}"
        for _, text, when in errors:
            assert f"worker w{1 - rank} (rank {1 - rank}) is gone: it no longer answers" in text
            assert 0.5 * LIMIT < when - cut < LIMIT + SLACK
        assert 0.5 * LIMIT < told - cut < LIMIT + SLACK
