"""Workloads: whole programs, smaller than those in ``examples`` but with the same calls."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from typing_extensions import override

from zrpc.bench import library
from zrpc.bench.calls import check
from zrpc.bench.session import PEER, Sample, Session

_LEARNING_RATE = 0.01
_UPDATES_PER_TRAINER = 10
_PLAYED_STEPS = 20

_WORDS, _WIDTH, _LENGTH, _SEQUENCES = 64, 48, 24, 16

_PIECES, _PIECE, _PIXELS, _DIRECTIONS = 4, 16, 8, 4

_STATE, _ACTIONS = 4, 2


def parameter_server(session: Session) -> Sample:
    """Trains a network on all other workers at once, as ``examples/async_parameter_server.py``."""
    return _rate_of_others(session, _train, _ParameterServer(), _UPDATES_PER_TRAINER)


def rnn(session: Session) -> Sample:
    """Trains an LSTM between two tables on the peer, as ``examples/distributed_rnn.py``."""
    rpc = session.rpc
    lstm = nn.LSTM(_WIDTH, _WIDTH)
    embed, decode = (rpc.remote(PEER, _Table, args=(name,)) for name in ("embed", "decode"))
    parameters = [rpc.RRef(each) for each in lstm.parameters()]
    for table in (embed, decode):
        parameters += table.rpc_sync().parameters()
    words = torch.randint(_WORDS, (_LENGTH + 1, _SEQUENCES))

    def loss() -> torch.Tensor:
        output, _ = lstm(embed.rpc_sync().forward(words[:-1]))
        scores = decode.rpc_sync().forward(output)
        return functional.cross_entropy(scores.flatten(0, 1), words[1:].flatten())

    return _time_steps(session, parameters, loss)


def pipeline(session: Session) -> Sample:
    """Trains a network in stages, in four pieces, as ``examples/pipeline_parallel.py``."""
    rpc = session.rpc
    stages = [
        rpc.remote(other, _Stage, args=(rank, session.workers - 1))
        for rank, other in enumerate(session.others, 1)
    ]
    parameters = [each for stage in stages for each in stage.rpc_sync().parameters()]
    images = torch.randn(_PIECES * _PIECE, 1, _PIXELS, _PIXELS)
    labels = torch.randint(_DIRECTIONS, (len(images),))

    def loss() -> torch.Tensor:
        scores = []
        for piece in images.chunk(_PIECES):
            output = rpc.RRef(piece)
            for stage in stages[:-1]:
                output = stage.remote().forward(output)
            scores.append(stages[-1].rpc_async().forward(output))
        return functional.cross_entropy(torch.cat([each.wait() for each in scores]), labels)

    return _time_steps(session, parameters, loss)


def reinforcement(session: Session) -> Sample:
    """Plays episodes on all other workers, which ask the agent for each action.

    ``examples/reinforce_cartpole.py`` does the same.
    """
    return _rate_of_others(session, _play, _Agent(), _PLAYED_STEPS)


def _rate_of_others(
    session: Session, work: Callable[[Any, int], None], owner: _ParameterServer | _Agent, each: int
) -> Sample:
    """Measures how often all other workers get something done at an object of this one."""
    reference, each = session.rpc.RRef(owner), session.sampling.scaled(each)
    count = each * (session.workers - 1)

    def batch() -> None:
        expected = owner.done + count
        session.call_others(work, (reference, each))
        check("the number of what was done", owner.done, expected)

    return session.sampling.rate(batch, count)


def _time_steps(
    session: Session, parameters: list[Any], loss: Callable[[], torch.Tensor]
) -> Sample:
    """Measures training steps, each with a context, a backward pass and an optimizer."""
    optimizer = session.library.optim.DistributedOptimizer(
        torch.optim.SGD, parameters, lr=_LEARNING_RATE
    )

    def step() -> float:
        with session.library.autograd.context() as context_id:
            value = loss()
            session.library.autograd.backward(context_id, [value])
            optimizer.step(context_id)
        return value.item()

    first = step()
    check("the loss to fall", step() < first, True)
    return session.sampling.time(step)


def _network() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)
    )


class _ParameterServer:
    def __init__(self) -> None:
        self.done = 0
        # Guards the parameters and `done`.
        self._lock = threading.Lock()
        self._parameters = list(_network().parameters())
        self._optimizer = torch.optim.Adagrad(self._parameters, _LEARNING_RATE)

    def pull(self) -> list[torch.Tensor]:
        with self._lock:
            return [parameter.detach().clone() for parameter in self._parameters]

    def push(self, gradients: list[torch.Tensor]) -> None:
        with self._lock:
            for parameter, gradient in zip(self._parameters, gradients, strict=True):
                parameter.grad = gradient
            self._optimizer.step()
            self.done += 1


def _train(server: Any, updates: int) -> None:
    """Pulls parameters and pushes gradients, on a trainer."""
    network = _network()
    parameters = list(network.parameters())
    for _ in range(updates):
        with torch.no_grad():
            for parameter, value in zip(parameters, server.rpc_sync().pull(), strict=True):
                parameter.copy_(value)
        points = torch.rand(64, 2)
        loss = functional.mse_loss(network(points), points.sum(1, keepdim=True).sin())
        server.rpc_sync().push(list(torch.autograd.grad(loss, parameters)))


class _Owned:
    """A module on the worker that owns it."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def parameters(self) -> list[Any]:
        return [library.current().rpc.RRef(each) for each in self._module.parameters()]

    def forward(self, values: Any) -> torch.Tensor:
        return self._module(values)  # type: ignore[no-any-return]


class _Table(_Owned):
    def __init__(self, name: str) -> None:
        embed = name == "embed"
        super().__init__(nn.Embedding(_WORDS, _WIDTH) if embed else nn.Linear(_WIDTH, _WORDS))


class _Stage(_Owned):
    def __init__(self, number: int, last: int) -> None:
        first = nn.Conv2d(1 if number == 1 else 16, 16, 3, padding=1)
        layers = [first, nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU()]
        if number == last:
            layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, _DIRECTIONS)]
        super().__init__(nn.Sequential(*layers))
        # Computing the pieces one after the other is faster than all at once.
        self._lock = threading.Lock()

    @override
    def forward(self, values: Any) -> torch.Tensor:
        images = values.to_here()
        with self._lock:
            return super().forward(images)


class _Agent:
    def __init__(self) -> None:
        self.done = 0
        # Guards `done`.
        self._lock = threading.Lock()
        self._policy = nn.Sequential(nn.Linear(_STATE, 64), nn.Tanh(), nn.Linear(64, _ACTIONS))

    @torch.no_grad()
    def select_action(self, state: torch.Tensor) -> int:
        return int(torch.multinomial(self._policy(state).softmax(-1), 1))

    def report_reward(self, reward: float) -> None:
        with self._lock:
            self.done += 1


def _play(agent: Any, steps: int) -> None:
    """Plays an episode in which the agent chooses each action, on an observer."""
    state = torch.zeros(_STATE)
    for _ in range(steps):
        action = agent.rpc_sync().select_action(state)
        state = (state + action - 0.5).sin()
        agent.rpc_sync().report_reward(float(state.sum()))
