"""Torch's own tests of its RPC, as its wheel contains them, with workers that are forked.

The suites of CUDA have workers that are spawned, and are apart: most need several GPUs. Not among
them are the suites of TorchScript's calls, which zrpc doesn't have, and those that inject faults
into torch's own agent.
"""

from __future__ import annotations

import gc
import json
import sys
import unittest

import torch.multiprocessing
from torch.testing._internal import common_distributed
from torch.testing._internal.distributed import ddp_under_dist_autograd_test as ddp
from torch.testing._internal.distributed.nn.api import remote_module_test as remote_module
from torch.testing._internal.distributed.rpc import (
    dist_autograd_test,
    dist_optimizer_test,
    rpc_test,
    tensorpipe_rpc_agent_test_fixture,
)
from torch.testing._internal.distributed.rpc.examples import (
    parameter_server_test,
    reinforcement_learning_rpc_test,
)

from tests.compatibility.private_names import private_names

_CLASSES = (
    *(rpc_test.RpcTest, rpc_test.TensorPipeAgentRpcTest),
    *(dist_autograd_test.DistAutogradTest, dist_autograd_test.TensorPipeAgentDistAutogradTest),
    dist_optimizer_test.DistOptimizerTest,
    *(remote_module.RemoteModuleTest, remote_module.ThreeWorkersRemoteModuleTest),
    *(ddp.DdpUnderDistAutogradTest, ddp.DdpComparisonTest),
    parameter_server_test.ParameterServerTest,
    reinforcement_learning_rpc_test.ReinforcementLearningRpcTest,
)
_CUDA_CLASSES = (
    *(rpc_test.CudaRpcTest, rpc_test.TensorPipeAgentCudaRpcTest),
    *(dist_autograd_test.CudaDistAutogradTest, dist_autograd_test.TensorPipeCudaDistAutogradTest),
    *(remote_module.CudaRemoteModuleTest, ddp.CudaDdpComparisonTest),
)
_Fixture = tensorpipe_rpc_agent_test_fixture.TensorPipeRpcAgentTestFixture
_TEST_SECONDS = 60  # more than torch's tests take on a busy machine


class _ForkedWorkers(common_distributed.MultiProcessTestCase):
    """Torch spawns its workers, so that each of them takes seconds to import torch."""

    def setUp(self) -> None:
        super().setUp()
        self._start_processes(torch.multiprocessing.get_context("fork").Process)


class _SpawnedWorkers(common_distributed.MultiProcessTestCase):
    """Workers that use CUDA, which a forked process couldn't if this one has asked for it."""

    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()


SUITES = {cls.__name__: type(cls.__name__, (cls, _Fixture, _ForkedWorkers), {}) for cls in _CLASSES}
CUDA_SUITES = {
    cls.__name__: type(cls.__name__, (cls, _Fixture, _SpawnedWorkers), {}) for cls in _CUDA_CLASSES
}
for _name, _suite in (SUITES | CUDA_SUITES).items():
    _suite.__module__ = __name__
    globals()[_name] = _suite  # a test sends a method of its own
common_distributed.TIMEOUT_DEFAULT = _TEST_SECONDS


def names(suites: dict[str, type] = SUITES) -> list[str]:
    """Returns the tests, as ``Suite.test``. Those of a base class are listed only there."""
    found: dict[str, list[str]] = {}
    for suite, cls in suites.items():
        loaded = unittest.defaultTestLoader.getTestCaseNames(cls)
        listed = {name for names in found.values() for name in names}
        found[suite] = [name for name in loaded if name not in listed]
    return [f"{suite}.{name}" for suite, names in found.items() for name in names]


def run(name: str) -> tuple[str, str]:
    """Runs one test; returns "passes", "skipped" or "fails", and the reason or traceback."""
    suite, _, method = name.partition(".")
    result = unittest.TestResult()
    (SUITES | CUDA_SUITES)[suite](method).run(result)
    if result.skipped:
        return "skipped", result.skipped[0][1]
    problems = [trace for _, trace in result.errors + result.failures]
    return ("fails", problems[0]) if problems else ("passes", "")


def main() -> None:
    """Runs the tests that the arguments name, and writes each result as a line of the first."""
    gc.collect()
    gc.freeze()  # a collection in a forked worker passes by what torch has made
    with open(sys.argv[1], "a") as results:
        for name in sys.argv[2:] or names():
            outcome, reason = run(name)
            suite, _, method = name.partition(".")
            private = private_names((SUITES | CUDA_SUITES)[suite], method)
            result = {"name": name, "outcome": outcome, "reason": reason, "private": private}
            results.write(json.dumps(result) + "\n")
            results.flush()


if __name__ == "__main__":
    main()
