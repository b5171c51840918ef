"""Examples of trainers that train a model of another worker."""

from __future__ import annotations

import re

from tests.examples.example_commands import Launch, losses, number_in


def test_asynchronous_updates_are_neither_lost_nor_repeated(launch: Launch) -> None:
    out = launch("async_parameter_server", 4, "--target", "0.006")
    values = [float(loss) for loss in re.findall(r"updates, loss ([\d.]+)", out)]
    assert values[0] > 2 * values[-1]
    assert values[-1] <= 0.006
    gradients = re.findall(r"^\[0\] trainer\d: (\d+) gradients", out, re.M)
    assert sum(map(int, gradients)) == number_in(r"^\[0\] Below 0.006 after (\d+) updates", out)
    assert len(gradients) == 3
    assert min(map(int, gradients)) > 0


def test_one_update_is_made_from_the_gradients_of_all_trainers(launch: Launch) -> None:
    trainers, steps = 3, 300
    out = launch("batch_rpc", trainers + 1, "--steps", str(steps))
    lines = [line.removeprefix("[0] ") for line in out.splitlines()]
    heads = [i for i, line in enumerate(lines) if line.startswith("batches")]
    runs = [lines[heads[0] : heads[1]], lines[heads[1] :]]
    for batch_size, (head, *rows, last) in zip((trainers, 1), runs, strict=True):
        assert head.startswith(f"batches of {batch_size}: {steps} gradients")
        values = [float(row.split()[1]) for row in rows]
        assert len(values) == 5
        assert values[-1] < 0.6 * values[0]
        updates = number_in(r"  (\d+) updates in [\d.]+ s, accuracy [\d.]+%", last)
        assert updates == steps * trainers // batch_size


def test_all_trainers_train_the_servers_model(launch: Launch) -> None:
    out = launch("parameter_server", 4, "--steps", "150")
    ends = re.findall(r"trainer\d+: the loss is ([\d.]+) at the end$", out, re.M)
    assert len(ends) == 3
    # That of the last one to end: the others may have ended before most of its updates.
    assert min(map(float, ends)) < 0.8
    found = re.search(r"right for ([\d.]+)% of unseen lines before, ([\d.]+)% after", out)
    assert found is not None, out
    assert float(found[2]) > max(70, 2 * float(found[1]))
    for rank in (1, 2, 3):
        values = losses(out, rank)
        assert len(values) == 3
        assert values[-1] < 0.6 * values[0]


def test_a_distributed_rnn_learns_what_one_process_would_learn(launch: Launch) -> None:
    out = launch("distributed_rnn", 2, "--check")
    values = losses(out)
    assert len(values) == 15
    assert values[-1] < 0.65 * values[0]
    assert number_in(r"largest difference of a loss to one process: (\S+)", out) < 1e-4
