"""A Sphinx extension that leads words to pages whose text has other words.

People search for what another library calls a thing. Each word becomes an entry of the index, and
the search of the site puts its page first.
"""

from __future__ import annotations

from sphinx.application import Sphinx

WORDS = {
    "examples": "language model, LLM, GRPO, PPO, reinforcement learning, RL, DQN",
    "explanation/objects-and-threads": "lock, race, GIL, thread safety",
    "explanation/performance": "benchmark, latency, throughput, speed",
    "explanation/security": "TLS, encryption, authentication, firewall",
    "how-to/actors": "actor, named, named actor, concurrency, restart an actor",
    "how-to/async-handlers": "asyncio, await, coroutine",
    "how-to/batching": "batch, dynamic batching",
    "how-to/cancel": "cancel, timeout, deadline, Ctrl-C, interrupt",
    "how-to/debug": "pdb, breakpoint",
    "how-to/driver": "jupyter, notebook, colab, IPython, start_mesh, spawn, fork, driver",
    "how-to/elastic": "autoscaling, join, scale up",
    "how-to/find-what-hangs": "deadlock, hang, stuck",
    "how-to/gpus": "GPU, CUDA, device, RDMA, NVLink",
    "how-to/groups": "broadcast, scatter, gather, map, all workers",
    "how-to/launch": "mpirun, multiprocessing, processes",
    "how-to/lost-workers": "retry, failure, fault tolerance, WorkerDied, crash",
    "how-to/migrate": "torch.distributed.rpc, TensorPipe, drop-in",
    "how-to/observe": "metrics, Prometheus, Grafana, OpenTelemetry, profiler, logs, dashboard",
    "how-to/queue": "queue, backpressure",
    "how-to/slurm": "sbatch, srun, HPC",
    "how-to/streams": "generator, stream, yield, iterator",
    "how-to/test": "pytest, fixture, coverage, pytest-asyncio",
    "how-to/weights": "publish, weight sync, state_dict, parameters",
    "recipes/checkpoint": "checkpoint, save, load, resume",
    "recipes/collectives": "NCCL, gloo, all_reduce, DDP",
    "recipes/pool": "pool, executor, worker pool",
    "recipes/parameter-server": "parameter server, stale gradients",
    "reference/stability": "semver, version, deprecation, API stability",
}


def setup(app: Sphinx) -> dict[str, bool]:
    """Registers the extension with Sphinx."""
    app.connect("source-read", _add)
    return {"parallel_read_safe": True}


def _add(app: Sphinx, page: str, source: list[str]) -> None:
    if page in WORDS:
        title, _, rest = source[0].partition("\n")
        entries = ", ".join(f"! {word.strip()}" for word in WORDS[page].split(","))
        source[0] = f"{title}\n\n```{{index}} {entries}\n```\n{rest}"
