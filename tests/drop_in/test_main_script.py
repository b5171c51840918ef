"""What only one worker's main script defines, in programs that were written for torch."""

from __future__ import annotations

import pytest

from tests.support.programs import Programs

SOURCE = """
import os, sys, threading
from contextlib import nullcontext
import zrpc.drop_in
zrpc.drop_in.install()
import torch.distributed.autograd as autograd
import torch.distributed.rpc as rpc

rank = int(os.environ["RANK"])

class Shared: pass

class OfBoth:
    rank = rank
    def __init__(self): self.made_on = rank
    def name(self): return self.made_on, self.rank

def is_shared(value):
    return type(value) is Shared

if rank == 0:
    lock = threading.Lock()
    of_both = OfBoth()
    name = of_both.name
    def only_here(x=1):
        return x + 1, is_shared(Shared())
    def locked():
        return lock
    class OnlyHere:
        def __init__(self, x): self.x = x
else:
    class OnlyThere:
        def __init__(self, x): self.x = x
    def made():
        return OnlyThere(3), Shared()
    class Failed(ValueError): pass
    def fail():
        raise Failed(OnlyThere(3), Shared())

def check(value):
    return value.x

def call_made():
    return made()

def call_fail():
    fail()

rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
if rank == 0:
    assert rpc.rpc_sync("worker1", only_here, args=(2,)) == (3, True)
    assert rpc.rpc_async("worker1", lambda: only_here()).wait() == (2, True)
    assert rpc.rpc_sync("worker1", check, args=(OnlyHere(5),)) == 5
    assert rpc.rpc_sync("worker1", is_shared, args=(Shared(),))
    assert rpc.rpc_sync("worker1", lambda x: is_shared(x), args=(Shared(),))
    found, shared = rpc.rpc_sync("worker1", call_made)
    assert found.x == 3 and is_shared(shared)
    assert rpc.rpc_sync("worker1", name) == (0, 1)
    assert rpc.rpc_sync("worker1", lambda: name()) == (0, 1)
    for scope in (nullcontext, autograd.context):
        with scope():
            try:
                rpc.rpc_sync("worker1", call_fail)
                sys.exit("it has failed")
            except ValueError as error:
                found, shared = error.args
                assert found.x == 3 and is_shared(shared)
    try:
        rpc.rpc_sync("worker1", locked)
        sys.exit("it has no copy")
    except RuntimeError as error:
        assert "'locked'" in str(error) and "RPC pickler does not serialize" in str(error)
rpc.shutdown()
"""


@pytest.mark.system
def test_the_receiver_asks_for_what_it_lacks(programs: Programs) -> None:
    for ended in programs.run(SOURCE):
        assert ended.code == 0, ended.output


TWO_SCRIPTS = """
import os, sys

HEAD = '''
import os
import zrpc.drop_in
zrpc.drop_in.install()
import torch.distributed.rpc as rpc

rank = int(os.environ["RANK"])
'''
ACTOR = HEAD + '''
def stop_received(): return unknown

def only_here(): return "the actor's"

rpc.init_rpc("actor", rank=rank, world_size=2)
assert rpc.rpc_sync("learner", stop_received) == "the learner's"
assert rpc.rpc_sync("learner", only_here) == "the actor's"
rpc.shutdown()
'''
LEARNER = HEAD + '''
OWN = "the learner's"

def stop_received(): return OWN

rpc.init_rpc("learner", rank=rank, world_size=2)
rpc.shutdown()
'''
path = f"{os.path.dirname(sys.argv[0])}/{os.environ['RANK']}.py"
with open(path, "w") as file:
    file.write((ACTOR, LEARNER)[int(os.environ["RANK"])])
os.execv(sys.executable, [sys.executable, path])
"""


@pytest.mark.system
@pytest.mark.parametrize("learner", ["with the drop-in", "without it"])
def test_two_scripts_may_have_different_functions_of_one_name(
    programs: Programs, learner: str
) -> None:
    """As in torch, the callee runs its own, and asks for what it lacks."""
    own = "import os, zrpc as rpc\nrank = int(os.environ['RANK'])"
    source = TWO_SCRIPTS
    if learner == "without it":
        source = source.replace("LEARNER = HEAD + '''", f"LEARNER = '''{own}")
    for ended in programs.run(source):
        assert ended.code == 0, ended.output
