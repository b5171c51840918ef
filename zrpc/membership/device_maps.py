"""The device maps of a mesh, and what the workers must agree on.

The checks are those of torch, with its texts, for devices of any type.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from zrpc.errors import OptionError
from zrpc.membership.device_settings import ANY_WORKER, CPU, DeviceSettings
from zrpc.membership.peer_record import PeerRecord
from zrpc.options import ZmqRpcBackendOptions
from zrpc.wire.devices import KEEP, DeviceMap


def own_settings(options: ZmqRpcBackendOptions) -> DeviceSettings:
    """Returns the settings of this process."""
    maps = {
        to: {str(ours): str(theirs) for ours, theirs in entries.items()}
        for to, entries in options.device_maps.items()
    }
    types = {device.type for device in options.devices}
    types.update(device.type for entries in options.device_maps.values() for device in entries)
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None:
        types.add(accelerator.type)
    counts = {kind: _count(kind) for kind in sorted(types - {CPU})}
    counts = {kind: count for kind, count in counts.items() if count}
    return DeviceSettings(counts, maps, [str(device) for device in options.devices])


def _count(kind: str) -> int:
    """Returns how many devices of a type this process has, without using them."""
    try:
        return int(torch.get_device_module(kind).device_count())
    except (RuntimeError, AttributeError):
        return 0


def maps_between(own: PeerRecord, peer: PeerRecord) -> tuple[DeviceMap, DeviceMap] | None:
    """Returns the device maps of this worker's requests to a peer, and of its answers to it.

    Returns None if neither of them has a device or a map.
    """
    if not (own.devices or peer.devices):
        return None
    ours, theirs = DeviceSettings.parse(own.devices), DeviceSettings.parse(peer.devices)
    if own.token == peer.token and own.name not in ours.maps:
        keep = DeviceMap(own.name, own.name, others=KEEP)
        return keep, keep
    out, back = ours.map_for(peer.name), theirs.map_for(own.name)
    inverse = {there: here for here, there in back.items()}
    return (
        DeviceMap(own.name, peer.name, out, current=_current(out, theirs)),
        DeviceMap(own.name, peer.name, inverse, answers=True),
    )


def _current(entries: Mapping[str, str], callee: DeviceSettings) -> str:
    targets = sorted({device for device in entries.values() if device != CPU})
    if len(targets) < 2:
        return "".join(targets)
    return next(iter(callee.devices), targets[0])


def check_device_maps(records: Iterable[PeerRecord], complete: bool = True) -> None:
    """Checks the devices and the device maps of workers.

    Args:
        records: of the workers.
        complete: whether these are all, so that maps may name no others.

    Raises:
        OptionError: one doesn't fit. It is a ValueError too.
    """
    settings = {record.name: DeviceSettings.parse(record.devices) for record in records}
    if not any(each.maps or each.devices for each in settings.values()):
        return
    for name, each in settings.items():
        _check_devices(name, each)
    for name, each in settings.items():
        unknown = each.maps.keys() - settings.keys() - {ANY_WORKER}
        if complete and unknown:
            raise OptionError(
                f"Node {name} has invalid target node names in its device maps\n"
                f"device maps = {list(each.maps)}\nnode names = {list(settings)}"
            )
        for to, entries in each.maps.items():
            if to != ANY_WORKER:
                _check_map(name, each, to, entries, settings.get(to))
        if ANY_WORKER in each.maps:
            # In a large mesh most are alike.
            others = {str(there): to for to, there in settings.items() if to not in each.maps}
            for to in others.values():
                if to != name:
                    _check_map(name, each, to, each.maps[ANY_WORKER], settings[to])


def _check_devices(name: str, settings: DeviceSettings) -> None:
    devices = settings.devices
    if len(set(devices)) != len(devices):
        raise OptionError(f"Node {name} has duplicated devices\ndevices = {list(devices)}")
    if not all(map(settings.has, devices)):
        raise OptionError(
            f"Node {name} has devices with invalid indices\ndevices = {list(devices)}\n"
            f"device count = {dict(settings.counts)}"
        )


def _check_map(
    name: str,
    here: DeviceSettings,
    to: str,
    entries: Mapping[str, str],
    there: DeviceSettings | None,
) -> None:
    """Checks one map; ``there`` is None if the callee isn't known yet."""
    about = f"in its device map for {to}\ndevice map = {dict(entries)}"
    if len(set(entries.values())) != len(entries):
        raise OptionError(f"Node {name} has duplicated target devices {about}")
    sides = [("source", here, [*entries])]
    if there is not None:
        sides.append(("target", there, [*entries.values()]))
    for side, settings, devices in sides:
        chosen = settings.devices
        if chosen and not set(devices).issubset({*chosen, CPU}):
            raise OptionError(
                f"Node {name} has unexpected {side} devices {about}\ndevices = {list(chosen)}"
            )
        if not all(map(settings.has, devices)):
            raise OptionError(
                f"Node {name} has {side} devices with invalid indices {about}\n"
                f"device count = {dict(settings.counts)}"
            )
