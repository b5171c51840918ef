"""The machine that a benchmark ran on."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from importlib.metadata import version

from zrpc.testing.procfs import read_text


@dataclass(frozen=True)
class Machine:
    """A machine and its software.

    Attributes:
        processor: its model.
        cores: the number of cores that this process may use.
        memory: bytes of memory.
        system: the operating system.
        versions: versions of the measured software, by name.
    """

    processor: str
    cores: int
    memory: int
    system: str
    versions: dict[str, str]

    @classmethod
    def this(cls) -> Machine:
        """Returns the machine that this process runs on."""
        import zmq

        model = read_field("/proc/cpuinfo", "model name")
        return cls(
            processor=model or platform.processor() or "unknown",
            cores=len(os.sched_getaffinity(0)),
            memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            system=f"{platform.system()} {platform.release()}",
            versions={
                "Python": platform.python_version(),
                "torch": version("torch"),
                "pyzmq": version("pyzmq"),
                "libzmq": zmq.zmq_version(),
                "zrpc": version("torch-zrpc"),
            },
        )

    def __str__(self) -> str:
        versions = ", ".join(f"{name} {number}" for name, number in self.versions.items())
        memory = f"{self.memory / 2**30:.0f} GiB"
        return f"{self.cores} cores of {self.processor}, {memory}, {self.system}\n{versions}"


def read_kib(path: str, *names: str) -> int:
    """Returns the sum of fields of a file of /proc, in bytes; the file has them in KiB."""
    fields = [read_field(path, name) for name in names]
    return sum(int(field.split()[0]) * 1024 for field in fields if field is not None)


def read_field(path: str, name: str) -> str | None:
    """Returns the first field of that name in a file of /proc, or None if there is none."""
    for line in read_text(path).splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return None
