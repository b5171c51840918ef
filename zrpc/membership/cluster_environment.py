"""What the engine that started a worker says in environment variables about its place in the mesh.

`ENGINES` is the table: for each engine and each setting, the variables that give it. torch's
variables come first, one by one. For a setting that they don't give, one other engine is asked: the
first of the table that has started this process. Two engines are never mixed, except that torch's
variables can complete another's.

- If ``RANK`` is set, the other engine is asked for the master only. A worker of an elastic mesh has
  a rank and no world size, also within a job of Slurm.
- If ``WORLD_SIZE`` is set and empty, the mesh is elastic, whatever the engine says.
- mpirun comes before Slurm: within a job of Slurm its processes inherit the variables of mpirun's
  daemons, which are other tasks.
- Slurm's batch script has ``SLURM_PROCID`` too, but is not a worker: only a step that ``srun`` has
  started counts.

No I/O.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

SETTINGS = ("rank", "world_size", "local_rank", "master_addr", "master_port")
# Not a variable: the caller adds this host's name with its domain to the variables under this key.
FULL_HOST_NAME = "the full host name"

_NUMBERS = ("rank", "world_size", "local_rank")
_LOOPBACK = "127.0.0.1"
# torchrun's own. A pod has all its ports to itself.
_DEFAULT_PORT = "29500"
# Below those that Linux gives to sockets that ask for any port.
_FIRST_PORT, _PORTS = 20_000, 12_000
# How far the ports of two consecutive jobs are apart, so that they have room for steps. Shares no
# factor with the number of ports.
_PORTS_BETWEEN_JOBS = 97
# A list of hosts as Slurm writes it, such as ``gpu[03-05,09],login1``.
_RANGES = r"\[\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*\]"
_HOSTS = re.compile(rf"(?:[A-Za-z0-9_.-]|{_RANGES})+(?=,|$)", re.ASCII)
_FIRST_NUMBER = re.compile(r"\[(\d+)[^\]]*\]")


class Setting(NamedTuple):
    """A setting, and the variables that it was taken from."""

    value: str
    source: str


class Source(NamedTuple):
    """Variables that give a setting if all of them are set, and how."""

    variables: tuple[str, ...]
    # Gets their values; returns None if they don't give the setting after all.
    derive: Callable[..., str | None] = lambda text: text


@dataclass(frozen=True)
class Engine:
    """A program that starts workers, and where it says what.

    Attributes:
        name: as users know it.
        settings: for each setting its sources; the first one that gives it counts.
        marks: the variables that are set in a process that it has started.
        started: decides, if the marks are set, whether the process is a worker.
    """

    name: str
    settings: Mapping[str, tuple[Source, ...]]
    marks: tuple[str, ...] = ()
    started: Callable[[Mapping[str, str]], bool] = lambda variables: True

    def has_started(self, variables: Mapping[str, str]) -> bool:
        """Returns whether this engine has started the process with these variables."""
        return all(variables.get(mark) for mark in self.marks) and self.started(variables)

    def find(self, variables: Mapping[str, str], setting: str) -> Setting | None:
        """Returns what the variables say of one setting; None if they say nothing."""
        for source in self.settings.get(setting, ()):
            values = [variables.get(name, "").strip() for name in source.variables]
            if all(values) and (value := source.derive(*values)) is not None:
                return Setting(value, " and ".join(source.variables))
        return None


def _port_of_step(job: str, step: str = "0") -> str | None:
    if not (job.isdecimal() and step.isdecimal()):
        return None
    return str(_FIRST_PORT + (int(job) * _PORTS_BETWEEN_JOBS + int(step)) % _PORTS)


def _port_of_name(name: str) -> str:
    return str(_FIRST_PORT + zlib.crc32(name.encode()) % _PORTS)


def _loopback_if_all_are_here(local_size: str, size: str) -> str | None:
    return _LOOPBACK if local_size == size else None


def _host_of_index_0(index: str, name: str) -> str | None:
    """Returns the name of the first pod: that of an indexed Job is ``JOB-INDEX.SERVICE...``."""
    host, _, domain = name.partition(".")
    if not domain or not host.endswith(f"-{index}"):
        return None
    return f"{host.removesuffix(index)}0.{domain}"


def _same_size_as_pmi(variables: Mapping[str, str]) -> bool:
    """Whether a step of Slurm is the workers, and not the daemons that MPICH's mpiexec started."""
    size = variables.get("PMI_SIZE")
    return not size or size in (
        variables.get("SLURM_STEP_NUM_TASKS"),
        variables.get("SLURM_NTASKS"),
    )


def first_host(node_list: str) -> str | None:
    """Returns the first host of a list of Slurm's; None if it isn't such a list.

    A name may have several ranges in brackets, and text after them. Leading zeros are kept.

    Example:
        >>> first_host("gpu[03-05,09],login1")
        'gpu03'
    """
    hosts = _HOSTS.match(node_list.strip())
    return None if hosts is None else _FIRST_NUMBER.sub(r"\1", hosts.group())


# mpirun within a job of Slurm has workers on all of the job's hosts.
_SLURM_JOB_HOST = Source(("SLURM_JOB_NODELIST",), first_host)
_SLURM_JOB_PORT = Source(("SLURM_JOB_ID",), _port_of_step)

_TORCH = Engine("torch", {name: (Source((name.upper(),)),) for name in SETTINGS})

ENGINES: tuple[Engine, ...] = (
    _TORCH,
    Engine(
        "Open MPI",
        {
            "rank": (Source(("OMPI_COMM_WORLD_RANK",)),),
            "world_size": (Source(("OMPI_COMM_WORLD_SIZE",)),),
            "local_rank": (Source(("OMPI_COMM_WORLD_LOCAL_RANK",)),),
            "master_addr": (
                Source(
                    ("OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_SIZE"),
                    _loopback_if_all_are_here,
                ),
                _SLURM_JOB_HOST,
            ),
            "master_port": (Source(("PMIX_NAMESPACE",), _port_of_name), _SLURM_JOB_PORT),
        },
        marks=("OMPI_COMM_WORLD_RANK",),
    ),
    Engine(
        "Slurm",
        {
            "rank": (Source(("SLURM_PROCID",)),),
            "world_size": (Source(("SLURM_STEP_NUM_TASKS",)), Source(("SLURM_NTASKS",))),
            "local_rank": (Source(("SLURM_LOCALID",)),),
            "master_addr": (Source(("SLURM_STEP_NODELIST",), first_host), _SLURM_JOB_HOST),
            "master_port": (Source(("SLURM_JOB_ID", "SLURM_STEP_ID"), _port_of_step),),
        },
        marks=("SLURM_PROCID", "SLURM_STEP_ID"),
        started=_same_size_as_pmi,
    ),
    Engine(
        "PMI",
        {
            "rank": (Source(("PMI_RANK",)),),
            "world_size": (Source(("PMI_SIZE",)),),
            "local_rank": (Source(("MPI_LOCALRANKID",)), Source(("PMI_LOCAL_RANK",))),
            "master_addr": (
                Source(("MPI_LOCALNRANKS", "PMI_SIZE"), _loopback_if_all_are_here),
                Source(("PMI_LOCAL_SIZE", "PMI_SIZE"), _loopback_if_all_are_here),
                _SLURM_JOB_HOST,
            ),
            "master_port": (_SLURM_JOB_PORT,),
        },
        marks=("PMI_RANK",),
    ),
    Engine(
        "a Kubernetes indexed Job",
        {
            "rank": (Source(("JOB_COMPLETION_INDEX",)),),
            "master_addr": (Source(("JOB_COMPLETION_INDEX", FULL_HOST_NAME), _host_of_index_0),),
            "master_port": (Source(("JOB_COMPLETION_INDEX",), lambda _: _DEFAULT_PORT),),
        },
        marks=("JOB_COMPLETION_INDEX",),
    ),
)


def find_settings(variables: Mapping[str, str]) -> dict[str, Setting]:
    """Returns the settings that these variables give; those that they don't give are left out.

    Args:
        variables: the environment, and the host's name under `FULL_HOST_NAME` if it is known.

    Example:
        >>> find_settings({"RANK": "1", "SLURM_PROCID": "0", "SLURM_STEP_ID": "0"})
        {'rank': Setting(value='1', source='RANK')}
    """
    found = {}
    engine = next((e for e in ENGINES if e is not _TORCH and e.has_started(variables)), None)
    ranked = bool(variables.get("RANK", "").strip())
    elastic = variables.get("WORLD_SIZE", "unset").strip() == ""
    for name in SETTINGS:
        setting = _TORCH.find(variables, name)
        is_torchs = (ranked and name in _NUMBERS) or (elastic and name == "world_size")
        if setting is None and engine is not None and not is_torchs:
            setting = engine.find(variables, name)
        if setting is not None:
            found[name] = setting
    return found


def looked_for(variables: Mapping[str, str], *settings: str) -> str:
    """Returns which variables give these settings, and which variables of the table are set."""
    names = _variables(settings)
    found = [f"{n}={variables[n]!r}" for n in _variables(SETTINGS) if variables.get(n)]
    return f"looked for {', '.join(names)}; found {', '.join(found) or 'none of these variables'}"


def _variables(settings: tuple[str, ...]) -> list[str]:
    """Returns the variables of all engines for these settings, and the marks; each once."""
    names: dict[str, None] = {}
    for engine in ENGINES:
        sources = [source for name in settings for source in engine.settings.get(name, ())]
        names |= dict.fromkeys(variable for source in sources for variable in source.variables)
        names |= dict.fromkeys(engine.marks)
    return list(names)
