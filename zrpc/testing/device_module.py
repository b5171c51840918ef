"""``torch.fake``: what torch and programs expect of the module of a device."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

TYPE = "fake"
COUNT = 2

_number = itertools.count(1)
# torch's number for a kind of device that others add.
_PRIVATE_USE = 20


class FakeModule:
    """The devices and streams of the fake device. All methods may be called from any thread.

    Args:
        note: gets the name of each thing that is done, and the index of the device.
    """

    def __init__(self, note: Callable[[str, int], None]) -> None:
        self._note = note
        self._local = threading.local()

    def is_initialized(self) -> bool:
        """Returns whether the device was used: always."""
        return True

    def is_available(self) -> bool:
        """Returns whether there is such a device: always."""
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        """Does nothing: random numbers are the CPU's."""

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        """Returns the state of the random numbers: they are the CPU's."""
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        """Does nothing, as `manual_seed_all`."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        """Returns the dtypes that ``torch.autocast`` may use."""
        return [torch.bfloat16, torch.float16]

    def device_count(self) -> int:
        """Returns the number of devices."""
        return COUNT

    def current_device(self) -> int:
        """Returns the index of this thread's device."""
        return getattr(self._local, "index", 0)

    def set_device(self, device: Any) -> None:
        """Sets this thread's device: an index or a device."""
        self._local.index = self._index_of(device)

    @contextlib.contextmanager
    def device(self, device: Any) -> Iterator[None]:
        """Sets this thread's device within a ``with`` statement."""
        before = self.current_device()
        self.set_device(device)
        try:
            yield
        finally:
            self.set_device(before)

    def Stream(self, device: Any = None, priority: int = 0) -> torch.Stream:
        """Returns a new stream. Its work is done at once, as that of all streams here."""
        return self._stream(next(_number), self._index_of(device))

    def current_stream(self, device: Any = None) -> torch.Stream:
        """Returns this thread's stream on a device, or on its current one."""
        index = self._index_of(device)
        return self._stream(self._streams().get(index, 0), index)

    @contextlib.contextmanager
    def stream(self, stream: torch.Stream) -> Iterator[None]:
        """Sets this thread's stream, and its device, within a ``with`` statement."""
        streams, index = self._streams(), stream.device_index
        before = streams.get(index, 0)
        streams[index] = stream.stream_id
        try:
            with self.device(index):
                yield
        finally:
            streams[index] = before

    def synchronize(self, device: Any = None) -> None:
        """Waits for all work of a device: there is none. It is recorded."""
        self._note("synchronize", self.current_stream(device).device_index)

    def _index_of(self, device: Any) -> int:
        index = device if device is None or isinstance(device, int) else torch.device(device).index
        return self.current_device() if index is None else index

    def _streams(self) -> dict[int, int]:
        """Returns the number of this thread's stream for each device; those not in it have 0."""
        streams: dict[int, int] = self._local.__dict__.setdefault("streams", {})
        return streams

    def _stream(self, number: int, index: int) -> torch.Stream:
        return torch.Stream(stream_id=number, device_index=index, device_type=_PRIVATE_USE)
