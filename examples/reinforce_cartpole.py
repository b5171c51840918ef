"""Reinforcement learning with one agent and many observers.

What it shows: RRefs to objects on other workers, methods called through them, and calls nested
in calls. The agent, rank 0, has the policy and asks every observer for an episode. An observer
has a gymnasium CartPole. Inside that call it calls the agent back twice a step: for an action,
and to report its reward. The agent learns by REINFORCE and stops when the running reward is above
475 of 500, at which the environment counts as solved.

It corresponds to "Getting Started with Distributed RPC Framework" in PyTorch's tutorials.

    pip install gymnasium rich
    zrpc launch --nprocs 4 examples/reinforce_cartpole.py

It runs with 2 or more workers, and with any launcher that sets RANK, WORLD_SIZE, MASTER_ADDR and
MASTER_PORT: ``torchrun --nproc-per-node 4 examples/reinforce_cartpole.py``.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn

import zrpc as rpc

try:
    import gymnasium as gym
except ImportError:
    sys.exit("This example needs gymnasium; install it with: pip install gymnasium rich")

ENVIRONMENT = "CartPole-v1"
LEARNING_RATE = 0.015
ENTROPY_WEIGHT = 0.01
# Returns are compared within an update, so an update needs a few episodes.
EPISODES_PER_UPDATE = 3
SMOOTHING = 0.05  # the weight of the latest episode in the running reward
EPISODES_PER_LINE = 15


class Observer:
    """An environment on its own worker.

    Args:
        index: the observer's index at the agent.
        seed: the seed of the environment.
    """

    def __init__(self, index: int, seed: int) -> None:
        self.index = index
        self.env = gym.make(ENVIRONMENT)
        self.env.reset(seed=seed)

    def run_episode(self, agent: rpc.RRef[Agent]) -> None:
        """Plays one episode, in which the agent chooses each action."""
        state, _ = self.env.reset()
        terminated = truncated = False
        while not (terminated or truncated):
            action = agent.rpc_sync().select_action(self.index, torch.from_numpy(state))
            state, reward, terminated, truncated, _ = self.env.step(action)
            cut_off = truncated and not terminated
            agent.rpc_sync().report_reward(self.index, float(reward), cut_off)


@dataclass
class Episode:
    """The agent's record of one episode."""

    states: list[torch.Tensor] = field(default_factory=list)
    actions: list[int] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    cut_off: bool = False  # by the time limit, with the pole still up

    def returns(self, gamma: float) -> torch.Tensor:
        """Returns the discounted sum of rewards from each step on."""
        # An episode that was cut off would have continued as before. Counting its end as a failure
        # would punish the last steps of a perfect episode.
        value = self.rewards[-1] / (1 - gamma) if self.cut_off else 0.0
        values = []
        for reward in reversed(self.rewards):
            value = reward + gamma * value
            values.append(value)
        return torch.tensor(values[::-1])


class Agent:
    """Holds the policy and its optimizer, and trains it with the observers.

    Args:
        workers: the names of the observers' workers.
        gamma: the discount of a reward that comes one step later.
        seed: the seed of the policy, its choices, and the environments.
    """

    def __init__(self, workers: list[str], gamma: float, seed: int) -> None:
        torch.manual_seed(seed)
        last = nn.Linear(64, 2)
        nn.init.normal_(last.weight, std=0.001)  # so that it starts with almost no preference
        nn.init.zeros_(last.bias)
        self.policy = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), last)
        self.optimizer = torch.optim.Adam(self.policy.parameters(), LEARNING_RATE)
        self.gamma = gamma
        seeds = [1000 * seed + index for index in range(len(workers))]
        # Calls of different observers arrive in any order. With a generator for each observer,
        # a seed gives the same run every time.
        self.generators = [torch.Generator().manual_seed(each) for each in seeds]
        self.observers = [
            rpc.remote(worker, Observer, args=(index, seeds[index]))
            for index, worker in enumerate(workers)
        ]
        self.episodes: list[Episode] = []

    @torch.no_grad()
    def select_action(self, observer: int, state: torch.Tensor) -> int:
        """Chooses an action; several observers call this at the same time."""
        probabilities = self.policy(state).softmax(-1)
        action = int(torch.multinomial(probabilities, 1, generator=self.generators[observer]))
        self.episodes[observer].states.append(state)
        self.episodes[observer].actions.append(action)
        return action

    def report_reward(self, observer: int, reward: float, cut_off: bool) -> None:
        """Records the reward of the latest action; observers call this."""
        self.episodes[observer].rewards.append(reward)
        self.episodes[observer].cut_off = cut_off

    def run_episodes(self) -> list[Episode]:
        """Runs all observers at the same time, until there are enough episodes for an update."""
        played: list[Episode] = []
        myself = rpc.RRef(self)
        while len(played) < EPISODES_PER_UPDATE:
            self.episodes = [Episode() for _ in self.observers]
            futures = [each.rpc_async().run_episode(myself) for each in self.observers]
            for future in futures:
                future.wait()
            played += self.episodes
        return played

    def learn(self, episodes: list[Episode]) -> None:
        """Makes actions likelier that had a return above the average."""
        returns = torch.cat([each.returns(self.gamma) for each in episodes])
        advantages = (returns - returns.mean()) / (returns.std() + 0.01)
        states = torch.stack([state for each in episodes for state in each.states])
        actions = torch.tensor([action for each in episodes for action in each.actions])
        # The policy has not changed since the episodes, so one pass over all states gives the
        # same gradient as a graph kept from every step.
        logs = self.policy(states).log_softmax(-1)
        entropy = -(logs.exp() * logs).sum(-1)
        chosen = logs.gather(1, actions[:, None])[:, 0]
        loss = -(advantages * chosen + ENTROPY_WEIGHT * entropy).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


@contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """Provides a function that shows a line of text; on a terminal it replaces the last one."""
    if sys.stdout.isatty() and importlib.util.find_spec("rich"):
        from rich.console import Console

        with Console().status("starting") as status:
            yield status.update
    else:
        yield partial(print, flush=True)


def train(options: argparse.Namespace, workers: list[str]) -> str | None:
    """Trains until the running reward is above the threshold; returns why it isn't, if so."""
    threshold = options.threshold
    if threshold is None:
        threshold = gym.spec(ENVIRONMENT).reward_threshold
    agent = Agent(workers, options.gamma, options.seed)
    running, episodes, steps, shown = 0.0, 0, 0, 0
    began = time.monotonic()
    with progress() as show:
        while running <= threshold and episodes < options.max_episodes:
            played = agent.run_episodes()
            for reward in (sum(episode.rewards) for episode in played):
                episodes, steps = episodes + 1, steps + int(reward)
                running += (reward - running) * (SMOOTHING if episodes > 1 else 1)
            if episodes >= shown + EPISODES_PER_LINE:
                show(f"episode {episodes:5d}   steps {steps:7,d}   running reward {running:6.1f}")
                shown = episodes
            agent.learn(played)
    seconds = time.monotonic() - began
    what = f"{episodes} episodes ({steps:,} steps, {seconds:.1f} s)"
    if running <= threshold:
        return f"Not solved: the running reward is {running:.1f} of {threshold:g} after {what}."
    print(f"Solved: the running reward passed {threshold:g} after {what}.", flush=True)
    return None


def main() -> None:
    """Runs this worker: the agent if its rank is 0, otherwise an observer."""
    parser = argparse.ArgumentParser(description="REINFORCE on CartPole, with many observers.")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--gamma", type=float, default=0.99, help="discount, default: %(default)s")
    parser.add_argument("--threshold", type=float, help="default: the environment's, 475")
    parser.add_argument("--max-episodes", type=int, default=3000, help="default: %(default)s")
    options = parser.parse_args()
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world_size < 2:
        parser.error("expected at least 2 workers, an agent and an observer: use zrpc launch -n 4")
    torch.set_num_threads(1)  # the network is too small to share among processors
    names = ["agent", *(f"observer{index}" for index in range(1, world_size))]
    rpc.init_rpc(names[rank])
    failure = train(options, names[1:]) if rank == 0 else None
    rpc.shutdown()  # observers answer calls here until the agent is done
    sys.exit(failure)


if __name__ == "__main__":
    main()
