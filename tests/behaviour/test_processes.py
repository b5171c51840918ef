"""What only real processes show: main scripts that differ, and what is printed."""

from __future__ import annotations

from tests.support.programs import Programs

HEAD = """
import os, sys
import zrpc as rpc

rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
other = f"w{1 - rank}"
state = [rank]

def double(x):
    return 2 * x

def whose():
    return state[0]

async def triple(x):
    return 3 * x

class Model:
    def __init__(self, n):
        self.n = n
    def times(self, x):
        return self.n * x

class Mistake(Exception):
    pass

def fail(kind, *args):
    raise kind(*args)

rpc.init_rpc(f"w{rank}")

"""


def test_different_main_scripts(programs: Programs) -> None:
    """By value, where the other's main script is another one."""
    body = """
assert rpc.rpc_sync(other, double, (4,)) == 8
assert rpc.rpc_sync(other, Model(5).times, (2,)) == 10
assert rpc.rpc_sync(other, triple, (4,)) == 12
try:
    rpc.rpc_sync(other, fail, (Mistake, "text"))
except RuntimeError as error:
    assert "Mistake" in str(error) and "text" in str(error)
except Mistake as error:
    assert error.args == ("text",)
else:
    sys.exit("nothing was raised")
rpc.shutdown()
"""
    plain = "import os, zrpc as rpc\nrpc.init_rpc('w1')\nrpc.shutdown()\n"
    pids = [programs.start(HEAD + body, 0, 2), programs.start(plain, 1, 2)]
    ended = [programs.wait(pid, rank) for rank, pid in enumerate(pids)]
    assert [e.code for e in ended] == [0, 0], ended


def test_a_function_of_the_main_script_means_that_of_the_callee_only_if_the_scripts_are_equal(
    programs: Programs,
) -> None:
    """An equal script may lie at two places, as on two hosts."""
    equal = HEAD + "assert rpc.rpc_sync(other, whose) == 1 - rank\nrpc.shutdown()\n"
    one = HEAD + "assert rpc.rpc_sync(other, whose) == 0\nrpc.shutdown()\n"
    another = one.replace("whose) == 0", "whose) == 1").replace("return state[0]", "return 1")
    for scripts in ((equal, equal), (one, another)):
        pids = [programs.start(script, rank, 2) for rank, script in enumerate(scripts)]
        ended = [programs.wait(pid, rank) for rank, pid in enumerate(pids)]
        assert [e.code for e in ended] == [0, 0], ended


def test_a_failure_is_printed_by_a_caller_that_has_not_waited(programs: Programs) -> None:
    """Without logging set up. The callee prints nothing, and no error that the caller gets."""
    ended = programs.run(
        HEAD
        + """
if rank == 0:
    try:
        rpc.rpc_sync(other, fail, (ValueError, "caught" + " error"))
    except ValueError:
        pass
    rpc.rpc_async(other, fail, (ValueError, "lost" + " error"))
rpc.shutdown()
"""
    )
    assert [e.code for e in ended] == [0, 0], ended
    assert "caught error" not in ended[0].output + ended[1].output
    assert ended[0].output.count("nobody waited for it") == 1
    assert "ValueError: lost error" in ended[0].output
    assert "Traceback (most recent call last)" in ended[0].output
    assert "WorkerInfo(id=1, name=w1)" in ended[0].output
