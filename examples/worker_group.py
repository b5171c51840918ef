"""Groups of trainers and generators, called by one controller.

What it shows: the parts of a trainer for reinforcement learning of language models, as verl and
others build them, with nothing but calls of groups. Trainers have replicas of a policy, whose
gradients `torch.distributed` averages (gloo, DDP). Generators beside them answer questions with
the newest weights. A controller, which may run on any worker, directs all of them::

                 --(a part of the questions for each)--> generator0, generator1
    controller   --(a part of the answers for each)----> trainer0 <--(gloo)--> trainer1
                                                         trainer0 --(weights)--> generators

For each mode in which verl's single controller calls a group there is a line here:

    ONE_TO_ALL          trainers.rpc_sync().update(batch)
    DP_COMPUTE_PROTO    cat(generators.rpc_sync().generate(rpc.split(batch)))
    DP_COMPUTE_METRIC   sum(trainers.rpc_sync().update(rpc.split(batch)))
    ALL_TO_ALL          trainers.rpc_sync().update(rpc.each(batches))
    RANK_ZERO           trainers[0].rpc_sync().push()
    blocking=False      generators.rpc_async().generate(rpc.split(batch))

An actor runs one call at a time, in the order of its caller. So all trainers do their collectives
in the same order. The task is to add two digits; an answer is worth 1 if it is right.

    zrpc launch --nprocs 4 examples/worker_group.py
    zrpc launch --nprocs 4 examples/worker_group.py --controller generator1
"""

from __future__ import annotations

import argparse
import gc
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import zrpc as rpc

TRAINERS = 2
DIGITS = 5
QUESTIONS = 32
ANSWERS = 8  # to each question; their mean reward is the baseline
STEPS_PER_LINE = 50
WAIT_SECONDS = 30.0

Batch = dict[str, torch.Tensor]


def make_policy() -> nn.Module:
    """Returns a model from two digits to the logits of their sum."""
    hidden = nn.Sequential(nn.Embedding(DIGITS, 16), nn.Flatten(), nn.Linear(32, 64), nn.ReLU())
    return hidden.append(nn.Linear(64, 2 * DIGITS - 1))


@rpc.actor
class Trainer:
    """One replica of the policy."""

    def __init__(self, rank: int, size: int, seed: int) -> None:
        dist.init_process_group("gloo", rank=rank, world_size=size)
        torch.manual_seed(seed)
        self.model = DistributedDataParallel(make_policy())
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.002)

    def publish(self) -> None:
        """Offers the weights to the generators."""
        self.published = rpc.nn.publish("policy", self.model.module)

    def push(self) -> int:
        """Hands out the weights; returns their version."""
        return self.published.push()

    def update(self, batch: Batch) -> float:
        """Learns from a part of the answers; returns the sum of their rewards."""
        logs = self.model(batch["questions"]).log_softmax(1)
        loss = -(logs.gather(1, batch["answers"]).squeeze(1) * batch["advantages"]).mean()
        self.optimizer.zero_grad()
        loss.backward()  # DDP averages the gradients of all trainers
        self.optimizer.step()
        return float(batch["rewards"].sum())

    def checksum(self) -> float:
        """Returns a number that is the same on all trainers, if their weights are."""
        return sum(p.detach().double().sum().item() for p in self.model.parameters())

    def close(self) -> None:
        """Leaves the process group, when the actor is stopped."""
        del self.model  # first: torch 2.13 may hang if DDP is the last to hold the group
        gc.collect()  # DDP refers to itself
        dist.destroy_process_group()


@rpc.actor
class Generator:
    """Answers questions with a copy of the policy."""

    def __init__(self, seed: int) -> None:
        self.chance = torch.Generator().manual_seed(seed)
        self.model = make_policy()
        self.weights = rpc.nn.subscribe("policy")

    @torch.no_grad()
    def generate(self, questions: torch.Tensor, version: int) -> Batch:
        """Returns questions, answers and rewards, by weights of a version or a later one."""
        self.weights.load_into(self.model, at_least=version, timeout=WAIT_SECONDS)
        answers = self.model(questions).softmax(1).multinomial(1, generator=self.chance)
        rewards = (answers.squeeze(1) == questions.sum(1)).float()
        return {"questions": questions, "answers": answers, "rewards": rewards}


def cat(parts: list[Batch]) -> Batch:
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def control(steps: int, seed: int) -> float:
    """Trains; returns the mean reward at the end."""
    chance = torch.Generator().manual_seed(seed)
    workers = rpc.group("trainer*"), rpc.group("generator*")
    ranks, seeds = (rpc.each(range(len(group))) for group in workers)
    trainers = rpc.remote(workers[0], Trainer, args=(ranks, len(workers[0]), seed))
    generators = rpc.remote(workers[1], Generator, args=(seeds,))
    trainers[0].rpc_sync().publish()
    reward = 0.0
    for step in range(1, steps + 1):
        version = trainers[0].rpc_sync().push()
        questions = torch.randint(DIGITS, (QUESTIONS, 2), generator=chance)
        questions = questions.repeat_interleave(ANSWERS, dim=0)
        batch = cat(generators.rpc_sync().generate(rpc.split(questions), version))
        means = batch["rewards"].view(-1, ANSWERS).mean(1)
        batch["advantages"] = batch["rewards"] - means.repeat_interleave(ANSWERS)
        rewards = trainers.rpc_sync().update(rpc.split(batch))
        reward += (sum(rewards) / len(questions) - reward) / min(step, STEPS_PER_LINE)
        if step % STEPS_PER_LINE == 0:
            print(f"step {step:4d}   weights {version:4d}   reward {reward:.2f}", flush=True)
    sums = trainers.rpc_sync().checksum()
    print(f"all {len(sums)} trainers have the same weights: {len(set(sums)) == 1}", flush=True)
    for trainer in trainers:
        trainer.stop()
    return reward


def main() -> None:
    """Runs this worker; all but the controller only answer calls."""
    parser = argparse.ArgumentParser(description="Train by calls of groups of workers.")
    parser.add_argument("--steps", type=int, default=300, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--controller", default="trainer0", help="default: %(default)s")
    options = parser.parse_args()
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world_size <= TRAINERS:
        parser.error(f"expected at least {TRAINERS + 1} workers, got {world_size}: use zrpc launch")
    names = [f"trainer{rank}" for rank in range(TRAINERS)]
    names += [f"generator{index}" for index in range(world_size - TRAINERS)]
    if options.controller not in names:
        parser.error(f"expected one of {', '.join(names)}, but got {options.controller}")
    torch.set_num_threads(1)  # small models, and every worker has one
    failure = None
    with rpc.session(names[rank]):
        if names[rank] == options.controller:
            reward = control(options.steps, options.seed)
            if reward < 0.7:
                failure = f"Expected a reward of at least 0.7, but it is {reward:.2f}."
    sys.exit(failure)


if __name__ == "__main__":
    main()
