"""Asynchronous reinforcement learning of a language model, in miniature and for real.

What it shows: an actor whose batched method is an inference server, generators that are streamed,
a queue, weights that are published at each step, and workers that may be killed. A transformer of
100,000 parameters learns to add two digits, only from rewards. *rollout* workers ask questions, and
stream the answers token by token. *server* chooses the tokens for all of them at once, with the
newest weights. *learner* improves the policy by REINFORCE, with a baseline for each question.

    pip install rich
    zrpc launch --nprocs 4 --max-restarts 3 examples/async_rl.py
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from threading import Thread

import torch
from rich.progress import BarColumn, Progress, TextColumn
from torch import Tensor, nn

import zrpc

LETTERS = "0123456789+="
PROMPT, ANSWER = 4, 2  # letters, as in "3+8=" and "11"
QUESTIONS, ANSWERS = 8, 16  # that a rollout worker has at once; answers to each question
BATCH, MAX_AGE = 16, 8  # questions for a step; steps, after which answers are dropped
CLIP, ENTROPY_WEIGHT, LEARNING_RATE, SMOOTHING = 0.2, 0.05, 1e-3, 0.05  # the last: of what is shown


class Policy(nn.Module):
    """A causal transformer: tokens [n, length] to logits [n, length, letters]."""

    def __init__(self) -> None:
        super().__init__()
        self.letters = nn.Embedding(len(LETTERS), 64)
        self.places = nn.Embedding(PROMPT + ANSWER, 64)
        layer = nn.TransformerEncoderLayer(64, 4, 256, 0, norm_first=True, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.logits = nn.Linear(64, len(LETTERS))

    def forward(self, texts: Tensor) -> Tensor:
        hidden = self.letters(texts) + self.places.weight[: texts.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(texts.shape[1])
        return self.logits(self.layers(hidden, mask, is_causal=True))


@zrpc.actor(restart=True)
class Server:
    """Chooses the next tokens."""

    def __init__(self) -> None:
        self.policy = Policy()
        self.weights = zrpc.nn.subscribe("policy")

    @zrpc.batched(max_size=64, stack=True)
    @torch.no_grad()
    def choose(self, texts: Tensor) -> tuple[Tensor, Tensor, list[int]]:
        """Takes texts [calls, answers, length]; returns tokens, log-probabilities, versions."""
        version = self.weights.load_into(self.policy)
        logs = self.policy(texts.flatten(0, 1))[:, -1].log_softmax(-1)
        tokens = torch.multinomial(logs.exp(), 1)
        shape = texts.shape[:2]
        return tokens.view(shape), logs.gather(1, tokens).view(shape), [version] * len(texts)


def generate(server: zrpc.RRef[Server]) -> Iterator[Sequence[object]]:
    """Yields some questions, then the first tokens of all answers, and so on, without end."""
    while True:
        texts = [torch.randint(10, (1, PROMPT)).repeat(ANSWERS, 1) for _ in range(QUESTIONS)]
        for text in texts:
            text[:, 1], text[:, 3] = LETTERS.index("+"), LETTERS.index("=")
        yield texts
        for _ in range(ANSWER):
            chosen = zrpc.wait_all([server.rpc_async().choose(text) for text in texts])
            yield chosen
            texts = [torch.cat((a, b[0][:, None]), 1) for a, b in zip(texts, chosen, strict=True)]


@dataclass
class Group:
    """The answers to one question."""

    texts: Tensor  # [ANSWERS, PROMPT + ANSWER]
    logs: Tensor  # [ANSWERS, ANSWER] log-probabilities of the answers' tokens
    rewards: Tensor  # [ANSWERS] from 0 to 1
    version: int  # of the weights that chose the first token


def grade(question: Tensor, steps: Sequence[tuple[Tensor, Tensor, int]]) -> Group:
    """Rewards what the server has chosen after a question: each digit, and the whole."""
    tokens, logs, versions = zip(*steps, strict=True)
    answers = torch.stack(tokens, 1)
    hits = answers == torch.tensor(divmod(int(question[0, 0] + question[0, 2]), 10))
    rewards = hits.float() @ torch.tensor([0.2, 0.3]) + 0.5 * hits.all(1)
    return Group(torch.cat((question, answers), 1), torch.stack(logs, 1), rewards, versions[0])


def collect(name: str, server: zrpc.RRef[Server], queue: zrpc.Queue[Group]) -> None:
    """Puts the answers of one rollout worker into the queue, until that is closed."""
    while True:
        zrpc.group(name, size=1, timeout=60)  # waits until it is there, also after a restart
        zrpc.group("server", size=1, timeout=60)
        try:
            server.ready(timeout=60)
            with zrpc.rpc_stream(name, generate, args=(server,)) as stream:
                for questions in stream:
                    steps = [next(stream) for _ in range(ANSWER)]
                    for question, *chosen in zip(questions, *steps, strict=True):
                        queue.put(grade(question, chosen))
        except zrpc.QueueClosed:
            return
        except zrpc.RpcError as error:
            print(f"lost {name}: {error}", flush=True)


def next_batch(queue: zrpc.Queue[Group], version: int) -> tuple[list[Group], int]:
    """Waits for enough answers that are new enough; returns also how many others there were."""
    batch, dropped = list[Group](), 0
    while len(batch) < BATCH:
        groups = queue.get_batch(BATCH - len(batch), timeout=60)
        fresh = [each for each in groups if version - each.version <= MAX_AGE]
        dropped += len(groups) - len(fresh)
        batch += fresh
    return batch, dropped


def loss_of(policy: Policy, batch: list[Group]) -> Tensor:
    """Returns a loss that makes answers likelier if they were better than others of their group."""
    texts = torch.cat([each.texts for each in batch])
    rewards = torch.stack([each.rewards for each in batch])
    gains = (rewards - rewards.mean(1, keepdim=True)).view(-1, 1)
    logs = policy(texts[:, :-1])[:, PROMPT - 1 :].log_softmax(-1)
    chosen = logs.gather(2, texts[:, PROMPT:, None])[:, :, 0]
    ratio = (chosen - torch.cat([each.logs for each in batch])).exp()  # to the older weights
    gain = torch.minimum(ratio * gains, ratio.clamp(1 - CLIP, 1 + CLIP) * gains)
    return -(gain - ENTROPY_WEIGHT * (logs.exp() * logs).sum(-1)).mean()


def train(rollouts: list[str], goal: float, max_steps: int) -> None:
    """Trains until enough answers are right."""
    policy, queue = Policy(), zrpc.Queue[Group](4 * BATCH)
    optimizer = torch.optim.Adam(policy.parameters(), LEARNING_RATE)
    published = zrpc.nn.publish("policy", policy)
    server = zrpc.remote("server", Server)
    collectors = [Thread(target=collect, args=(name, server, queue)) for name in rollouts]
    for collector in collectors:
        collector.start()
    reward = right = age = dropped = 0.0
    version, began = published.push(), time.monotonic()
    bar = Progress(TextColumn("{task.description}"), BarColumn(), disable=not sys.stdout.isatty())
    shown = bar.add_task("", total=goal)
    with closing(queue), bar:  # the collectors end as soon as the queue is closed
        while right < goal and version <= max_steps:
            batch, late = next_batch(queue, version)
            optimizer.zero_grad()
            loss_of(policy, batch).backward()
            nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()
            rewards = torch.stack([each.rewards for each in batch])
            reward += SMOOTHING * (rewards.mean().item() - reward)
            right += SMOOTHING * ((rewards == 1).float().mean().item() - right)
            age += SMOOTHING * (sum(version - each.version for each in batch) / BATCH - age)
            dropped, version = dropped + late, published.push()
            rate = version * rewards.numel() * ANSWER / (time.monotonic() - began)
            line = f"step {version:4}   reward {reward:.2f}   right {right:3.0%}   "
            line += f"{rate:,.0f} tokens/s   {age:.1f} steps old, {dropped:.0f} dropped"
            bar.update(shown, completed=right, description=line)
            if bar.disable and version % 25 == 0:
                print(line, flush=True)
    for collector in collectors:
        collector.join()
    outcome = "Learned" if right >= goal else "Not learned"
    print(f"{outcome}: {right:.0%} of the answers are right after {version} steps.", flush=True)


def main() -> None:
    """Runs this worker, as what its rank says."""
    parser = argparse.ArgumentParser(description="A language model learns to add, from rewards.")
    parser.add_argument("--goal", type=float, default=0.8, help="default: %(default)s")
    parser.add_argument("--max-steps", type=int, default=2000, help="default: %(default)s")
    options = parser.parse_args()
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world_size < 3:
        parser.error("expected at least a learner, a server and a rollout worker: use zrpc launch")
    torch.set_num_threads(1)  # the model is too small to share among processors
    names = ["learner", "server", *(f"rollout{index}" for index in range(2, world_size))]
    with zrpc.session(names[rank]):
        if rank == 0:
            train(names[2:], options.goal, options.max_steps)


if __name__ == "__main__":
    main()
