"""Collects batches with torchrl on two collectors, and gives these new weights in between."""

from __future__ import annotations

import sys

import torch
from tensordict.nn import TensorDictModule
from torchrl.collectors.distributed import RPCCollector
from torchrl.testing.mocking_classes import CountingEnv


class Step(torch.nn.Module):
    """A policy whose action is its weight, whatever it observes. The environment adds it up."""

    def __init__(self) -> None:
        super().__init__()
        self.size = torch.nn.Parameter(torch.ones(1))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return self.size.expand(observation.shape)


def main(port: str) -> None:
    policy = TensorDictModule(Step(), in_keys=["observation"], out_keys=["action"])
    collector = RPCCollector(
        [make_environment] * 2,
        policy,
        frames_per_batch=20,
        total_frames=60,
        sync=True,
        launcher="mp",
        tcp_port=port,
    )
    for number, batch in enumerate(collector):
        counts = batch["next", "observation"].flatten().tolist()
        print(tuple(batch.shape), counts, batch["action"].unique().tolist())
        with torch.no_grad():
            policy.module.size.fill_(number + 2)
        collector.update_policy_weights_()
    print(collector.collector_rrefs[0].is_owner(), collector.collector_rrefs[0].owner_name())
    collector.shutdown()
    print("used", torch.distributed.rpc.rpc_sync.__module__, file=sys.stderr)


def make_environment() -> CountingEnv:
    return CountingEnv(max_steps=1000)


if __name__ == "__main__":
    # Each spawned process would import torchrl again, which takes five seconds.
    torch.multiprocessing.set_start_method("fork", force=True)
    main(sys.argv[1])
