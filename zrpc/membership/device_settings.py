"""What each worker publishes of its devices: how many it has, its maps, and which take part."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

ANY_WORKER = "*"  # in a map, in place of a callee's name
CPU = "cpu"

_DEVICE = re.compile(r"cpu|[a-z0-9_]+:\d{1,9}", re.ASCII)


@dataclass(frozen=True, slots=True)
class DeviceSettings:
    """What a worker says of its devices. All devices are texts: its peers may lack their types.

    Attributes:
        counts: how many devices it has, by their type.
        maps: for each callee's name, the device there for each device here.
        devices: those that take part, if it has said so.
    """

    counts: Mapping[str, int] = field(default_factory=dict)
    maps: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    devices: Sequence[str] = ()

    @classmethod
    def parse(cls, text: str) -> DeviceSettings:
        """Reads what `dump` has written.

        Raises:
            ValueError: it has another form.
        """
        try:
            counts, maps, devices = json.loads(text) if text else ({}, {}, [])
            return cls(
                {str(kind): int(count) for kind, count in counts.items()},
                {
                    str(to): {_device(ours): _device(theirs) for ours, theirs in entries.items()}
                    for to, entries in maps.items()
                },
                [*map(_device, devices)],
            )
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"a peer record has wrong devices: {error}") from None

    def dump(self) -> str:
        """Returns this as text; empty if there is nothing to say."""
        if not (self.counts or self.maps or self.devices):
            return ""
        return json.dumps([self.counts, self.maps, self.devices])

    def map_for(self, name: str) -> Mapping[str, str]:
        """Returns the device map for a callee; empty if there is none."""
        return self.maps.get(name, self.maps.get(ANY_WORKER, {}))

    def has(self, device: str) -> bool:
        """Returns whether the worker has a device."""
        kind, _, index = device.partition(":")
        return device == CPU or int(index) < self.counts.get(kind, 0)


def _device(text: str) -> str:
    if not _DEVICE.fullmatch(text):
        raise ValueError(f"no device: {text!r}")
    return text
