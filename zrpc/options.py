"""The options of an agent, for `zrpc.init_rpc`."""

from __future__ import annotations

import operator
import os
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Generic, SupportsIndex, TypeVar

import torch

from zrpc import stand_in
from zrpc.constants import (
    DEFAULT_INIT_METHOD,
    DEFAULT_NUM_WORKER_THREADS,
    DEFAULT_RPC_TIMEOUT_SEC,
)
from zrpc.errors import OptionError

DEFAULT_MAX_BYTES_IN_FLIGHT = 1 << 26
DEFAULT_HEARTBEAT_TIMEOUT_SEC = 10.0
DEFAULT_WARN_AFTER_SEC = 30.0
DEFAULT_SWITCH_INTERVAL_SEC = 0.001

# In seconds (31 years). Longer timeouts count as this one, since the system's clocks overflow.
LONGEST_TIMEOUT = 1e9

# init_rpc's deadline if calls have no timeout: no wait is without a deadline.
_INIT_SECONDS_WITHOUT_RPC_TIMEOUT = 300.0

# The environment variables of options.
_RPC_TIMEOUT = "ZRPC_RPC_TIMEOUT"
_INIT_TIMEOUT = "ZRPC_INIT_TIMEOUT"
_PORT_RANGE = "ZRPC_PORT_RANGE"
_PORTS = re.compile(r"(\d{1,5})(?:\s*-\s*(\d{1,5}))?", re.ASCII)
_LAST_PORT = 65535

_Device = int | str | torch.device
_Given = TypeVar("_Given")
_Kept = TypeVar("_Kept")


def checked_timeout(name: str, seconds: Any) -> float:
    """Returns a number of seconds or a ``timedelta`` as a float, `LONGEST_TIMEOUT` at most.

    Raises:
        OptionError: it is negative, infinite or not a number.
        TypeError: it has another type, such as None or a string.
    """
    try:
        if 0 <= seconds < float("inf"):
            return float(min(seconds, LONGEST_TIMEOUT))
    except TypeError:
        if isinstance(seconds, timedelta):
            return checked_timeout(name, seconds.total_seconds())
        raise _wrong_type(name, "a number of seconds, 0 for no limit", seconds) from None
    raise OptionError(
        f"RPC Timeout must be non-negative: {name} must be a finite number of seconds, or 0 for "
        f"no limit, but got {seconds}"
    )


def _wrong_type(name: str, expected: str, value: object) -> TypeError:
    return TypeError(f"{name} must be {expected}, but got {value!r} of type {type(value).__name__}")


def _checked_url(name: str, url: str) -> str:
    if not isinstance(url, str):
        expected = "a URL as a str: 'env://' (the default), 'tcp://host:port' or 'file:///path'"
        raise _wrong_type(name, expected, url)
    return url


def _checked_bytes(name: str, number: int) -> int:
    try:
        if 0 <= number < float("inf"):
            return int(number)
    except TypeError:
        raise _wrong_type(name, "a number of bytes, 0 or more", number) from None
    raise OptionError(f"{name} must be a number of bytes, 0 or more, but got {number}")


def _checked_memory(name: str, number: int | None) -> int:
    """Returns a number of bytes; an eighth of the machine's memory for None."""
    if number is None:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 8
    return _checked_bytes(name, number)


def _checked_mapping(name: str, value: Any) -> Mapping[Any, Any]:
    if not isinstance(value, Mapping):
        raise _wrong_type(name, "a mapping, such as a dict", value)
    return value


def _one_of(*words: str) -> Callable[[str, str], str]:
    def check(name: str, word: str) -> str:
        if word not in words:
            *others, last = map(repr, words)
            raise OptionError(f"{name} must be {', '.join(others)} or {last}, but got {word!r}")
        return word

    return check


class _Option(Generic[_Given, _Kept]):
    """An attribute of options whose value is checked whenever it is set."""

    def __init__(self, check: Callable[[str, _Given], _Kept]) -> None:
        self._check = check

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, options: object, owner: type) -> _Kept:
        kept: _Kept = options.__dict__[self._name]
        return kept

    def __set__(self, options: object, value: _Given) -> None:
        options.__dict__[self._name] = self._check(self._name, value)


class RpcBackendOptions:
    """The options that every back end has.

    Args:
        rpc_timeout: the default timeout of a call, in seconds or as a ``timedelta``; 0 means no
            limit. Default: the environment variable ``ZRPC_RPC_TIMEOUT``, or else 60.
        init_method: where the workers meet, as in ``torch.distributed.init_process_group``:
            ``env://``, ``tcp://host:port`` or ``file:///path``.

    Raises:
        OptionError: the timeout is negative or not a number. It is a ValueError too.
        TypeError: the timeout isn't of a number's type, or ``init_method`` isn't a str.
    """

    def __init__(
        self,
        rpc_timeout: float | timedelta = DEFAULT_RPC_TIMEOUT_SEC,
        init_method: str = DEFAULT_INIT_METHOD,
    ) -> None:
        try:
            if stand_in.is_active() and isinstance(rpc_timeout, timedelta):
                raise TypeError("rpc_timeout must be a number of seconds, as in torch since 1.6")
            found = None
            if rpc_timeout is DEFAULT_RPC_TIMEOUT_SEC:  # the very object: it was not given
                found = _seconds_in(_RPC_TIMEOUT)
            self.rpc_timeout = rpc_timeout if found is None else found
        except TypeError as error:
            raise TypeError(f"incompatible constructor arguments: {error}") from None
        self.init_method = init_method

    rpc_timeout: _Option[float | timedelta, float] = _Option(checked_timeout)
    init_method = _Option(_checked_url)


class ZmqRpcBackendOptions(RpcBackendOptions):
    """The options of zrpc's agent.

    Args:
        num_worker_threads: the number of handlers that may run at once on this worker. A
            handler does not count while it waits for another call.
        rpc_timeout: the default timeout of a call, in seconds; 0 means no limit. Default: the
            environment variable ``ZRPC_RPC_TIMEOUT``, or else 60. This and all other timeouts may
            be a ``timedelta``. Longer ones than 1e9 seconds (31 years) count as 1e9.
        init_method: where the workers meet: ``env://``, ``tcp://host:port``,
            ``file:///path``.
        init_timeout: how long `zrpc.init_rpc` waits for the other workers, in seconds. Default:
            the environment variable ``ZRPC_INIT_TIMEOUT``, or else ``rpc_timeout``, or 300 if that
            is 0.
        transport: ``"auto"``: Unix sockets between workers on the same host, tcp between hosts.
            ``"ipc"`` or ``"tcp"``: only that.
        security: ``"auto"``: Unix sockets in private directories on one host; over tcp, only
            CURVE between members that share a cluster secret. ``"required"``: a secret even if
            all workers share a host. ``"none"``: tcp without encryption, open to anyone who can
            reach it. All workers of a mesh must agree on ``"none"``.
        port_range: the TCP ports that this worker may listen on, such as ``"20000-20100"`` or
            ``"20000"``. It takes the first one that is free. Default: the environment variable
            ``ZRPC_PORT_RANGE``, or else any free port.
        shared_memory: the maximum number of bytes of shared memory that this worker uses to send
            large tensors to workers on the same host. 0 sends them through sockets. Default: an
            eighth of the machine's memory.
        max_bytes_in_flight: the maximum number of bytes of unanswered calls to one worker. A
            further call blocks before it is sent, within its timeout. A call in an event loop
            returns at once instead, and is sent when there is room. Each call counts 2 KiB
            beside its message, which bounds the number of calls. 0 means no limit.
        heartbeat_timeout: seconds without a heartbeat after which a worker is declared dead: its
            process is stopped, or its network is cut. Calls to it then fail with `WorkerDied`.
            All workers of a mesh must have the same.
            Heartbeats are sent even while its Python code can't run. A worker that was never
            reached is waited for longer while others that were asked at the same time still
            answer for the first time. The exit of a process is noticed sooner, without heartbeats.
            0 means never: a call then waits for its timeout if the network loses it or its answer,
            and without limit if that is 0, too.
        warn_after: seconds after which a waiting call is named once in a warning in the log, with
            the line at which it waits and the worker it waits for. 0 or None means never.
        switch_interval: the longest time, in seconds, that a thread of this process keeps the
            interpreter's lock while another waits for it; see ``sys.setswitchinterval``. A call
            waits that long if another handler computes in Python. Python's default is 0.005.
            Applies to the process while an agent is running (the smallest value if there are
            several), and never raises Python's setting. 0 leaves it unchanged.
        device_maps: for each callee's name, the device there on which tensors of calls arrive, for
            each device here; see `set_device_map`. Results come back by the inverse. All workers
            check the maps of all in `zrpc.init_rpc`.
        devices: the devices of this worker that take part. Default: those in the maps.
        num_send_recv_threads: another name of ``num_worker_threads``, which it replaces if it is
            set; for scripts that were written for torch 1.7 or older.

    Raises:
        OptionError: the number of threads is below 1; a timeout, an interval or a number of bytes
            is negative; the transport or security is unknown; or the range has another form. It is
            a ValueError too.
        TypeError: the number of threads isn't an int, a timeout or a number of bytes isn't a
            number, ``init_method`` or ``port_range`` isn't a str, or device maps aren't mappings.

    An attribute can be set, too: its value is checked in the same way.

    Example:
        >>> options = ZmqRpcBackendOptions(num_worker_threads=4, rpc_timeout=10)
        >>> options.rpc_timeout
        10.0

    See also ``torch.distributed.rpc.TensorPipeRpcBackendOptions``, whose arguments are
    accepted. ``_transports`` and ``_channels``, which name parts of TensorPipe, are ignored.
    """

    def __init__(
        self,
        *,
        num_worker_threads: int = DEFAULT_NUM_WORKER_THREADS,
        rpc_timeout: float | timedelta = DEFAULT_RPC_TIMEOUT_SEC,
        init_method: str = DEFAULT_INIT_METHOD,
        init_timeout: float | timedelta | None = None,
        transport: str = "auto",
        security: str = "auto",
        port_range: str | None = None,
        shared_memory: int | None = None,
        max_bytes_in_flight: int = DEFAULT_MAX_BYTES_IN_FLIGHT,
        heartbeat_timeout: float | timedelta = DEFAULT_HEARTBEAT_TIMEOUT_SEC,
        warn_after: float | timedelta | None = DEFAULT_WARN_AFTER_SEC,
        switch_interval: float | timedelta = DEFAULT_SWITCH_INTERVAL_SEC,
        device_maps: Mapping[str, Mapping[_Device, _Device]] | None = None,
        devices: Sequence[_Device] | None = None,
        _transports: Sequence[str] | None = None,
        _channels: Sequence[str] | None = None,
        num_send_recv_threads: int | None = None,
    ) -> None:
        super().__init__(rpc_timeout, init_method)
        self.num_worker_threads = num_worker_threads
        if num_send_recv_threads is not None:
            self.num_send_recv_threads = num_send_recv_threads
        self.shared_memory = shared_memory
        self.max_bytes_in_flight = max_bytes_in_flight
        self.transport = transport
        self.security = security
        self._port_range = None if port_range is None else _ports("port_range", port_range)
        self.heartbeat_timeout = heartbeat_timeout
        self.warn_after = warn_after
        self.switch_interval = switch_interval
        self._init_timeout = checked_timeout("init_timeout", init_timeout or 0)
        self.device_maps = device_maps or {}
        self.devices = devices or []

    transport = _Option(_one_of("auto", "ipc", "tcp"))
    security = _Option(_one_of("auto", "required", "none"))
    shared_memory = _Option(_checked_memory)
    max_bytes_in_flight = _Option(_checked_bytes)
    heartbeat_timeout: _Option[float | timedelta, float] = _Option(checked_timeout)
    warn_after: _Option[float | timedelta | None, float] = _Option(
        lambda name, seconds: checked_timeout(name, seconds or 0)
    )
    switch_interval: _Option[float | timedelta, float] = _Option(checked_timeout)

    @property
    def num_worker_threads(self) -> int:
        """The number of handlers that may run at once; also as ``num_send_recv_threads``."""
        return self._num_worker_threads

    @num_worker_threads.setter
    def num_worker_threads(self, count: int) -> None:
        if isinstance(count, bool) or not isinstance(count, SupportsIndex):
            raise _wrong_type("num_worker_threads", "an int", count)
        number = operator.index(count)
        if number < 1:
            raise OptionError(f"num_worker_threads must be positive, got {number}")
        self._num_worker_threads = number

    num_send_recv_threads = num_worker_threads

    @property
    def init_timeout(self) -> float:
        """How long `zrpc.init_rpc` waits for the other workers, in seconds."""
        if seconds := self._init_timeout or _seconds_in(_INIT_TIMEOUT):
            return seconds
        return self.rpc_timeout or _INIT_SECONDS_WITHOUT_RPC_TIMEOUT

    @property
    def port_range(self) -> range | None:
        """The TCP ports that this worker may listen on; None for any free one."""
        text = os.environ.get(_PORT_RANGE, "").strip()
        return self._port_range or (_ports(_PORT_RANGE, text) if text else None)

    @property
    def device_maps(self) -> dict[str, dict[torch.device, torch.device]]:
        """For each callee's name, its device for each device of this worker."""
        return self._device_maps

    @device_maps.setter
    def device_maps(self, maps: Mapping[str, Mapping[_Device, _Device]]) -> None:
        self._device_maps: dict[str, dict[torch.device, torch.device]] = {}
        for to, device_map in _checked_mapping("device_maps", maps).items():
            self.set_device_map(to, device_map)

    @property
    def devices(self) -> list[torch.device]:
        """The devices of this worker that take part."""
        return self._devices

    @devices.setter
    def devices(self, devices: Sequence[_Device]) -> None:
        found = [_to_device(device) for device in devices]
        if torch.device("cpu") in found:
            raise ValueError(
                "`set_devices` expect a list of devices such as GPUs, but got device type cpu: it "
                "always takes part"
            )
        self._devices = found

    def set_device_map(self, to: str, device_map: Mapping[_Device, _Device]) -> None:
        """Adds entries to the device map for the callee ``to``, or for all others by ``"*"``.

        Args:
            to: a worker's name; ``"*"`` stands for all other workers that have no map of their own.
            device_map: for each device here the one there, such as ``{"cuda:0": "cuda:1"}``. A
                number stands for an accelerator. ``"cpu"`` may be either of them.

        Raises:
            ValueError: two devices would map to the same one, or one of them to two.
            RuntimeError: torch knows no such device here.
            TypeError: ``device_map`` isn't a mapping.

        Example:
            >>> options = ZmqRpcBackendOptions()
            >>> options.set_device_map("worker1", {"cuda:0": "cuda:1"})
            >>> options.device_maps["worker1"]
            {device(type='cuda', index=0): device(type='cuda', index=1)}
        """
        added: dict[torch.device, torch.device] = {}
        for source, target in _checked_mapping("device_map", device_map).items():
            source, target = _to_device(source), _to_device(target)
            if target in added.values():
                raise ValueError(
                    "`device_map` only supports 1-to-1 mapping, trying to map two devices to "
                    f"{target}: {device_map}"
                )
            added[source] = target
        before = self._device_maps.setdefault(to, {})
        for source, target in added.items():
            if before.get(source, target) != target:
                raise ValueError(
                    "`set_device_map` only supports 1-to-1 mapping, trying to map "
                    f"{source} to {target} and {before[source]}"
                )
        before.update(added)

    def set_devices(self, devices: Sequence[_Device]) -> None:
        """Sets the devices of this worker that take part."""
        self.devices = devices


# Existing scripts name one of torch's back ends; their options mean the same here.
TensorPipeRpcBackendOptions = ZmqRpcBackendOptions
ProcessGroupRpcBackendOptions = ZmqRpcBackendOptions  # of torch 1.4 to 1.7


def _to_device(device: _Device) -> torch.device:
    if isinstance(device, int):
        # torch.device(0) raises an error on a machine without a GPU, but scripts for GPUs run
        # there.
        accelerator = torch.accelerator.current_accelerator()
        return torch.device("cuda" if accelerator is None else accelerator.type, device)
    found = torch.device(device)
    if found.type == "cpu":
        return torch.device("cpu")
    return found if found.index is not None else torch.device(found.type, 0)


def call_timeout(seconds: Any, name: str = "timeout") -> float:
    """Returns the timeout of a call as `checked_timeout` does; below 0 if its deadline has passed.

    That is what ``deadline - time.monotonic()`` gives then.
    """
    if isinstance(seconds, timedelta):
        seconds = seconds.total_seconds()
    try:
        if seconds < 0:
            return float(seconds)
    except TypeError:  # `checked_timeout` says what it must be
        pass
    return checked_timeout(name, seconds)


def _seconds_in(variable: str) -> float | None:
    """Returns the seconds in an environment variable; None if it is not set, or empty."""
    text = os.environ.get(variable, "").strip()
    if not text:
        return None
    try:
        seconds = float(text)
    except ValueError:
        raise OptionError(f"expected a number of seconds in {variable}, found {text!r}") from None
    return checked_timeout(variable, seconds)


def _ports(name: str, text: Any) -> range:
    """Returns the ports that an option or a variable names.

    Raises:
        OptionError: the text has another form, or names no ports.
        TypeError: it isn't a str.
    """
    if not isinstance(text, str):
        raise _wrong_type(name, "a str such as '20000-20100'", text)
    found = _PORTS.fullmatch(text.strip())
    first, last = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= first <= last <= _LAST_PORT:
        raise OptionError(
            f"{name} must be the first and the last TCP port, such as '20000-20100', from 1 to "
            f"{_LAST_PORT}, but got {text!r}"
        )
    return range(first, last + 1)


def checked_options(options: object | None) -> ZmqRpcBackendOptions:
    """Returns the options, or the default ones; raises TypeError, with torch's text, for others."""
    if options is None:
        return ZmqRpcBackendOptions()
    if not isinstance(options, RpcBackendOptions):
        raise TypeError(
            "Argument rpc_backend_options must be an instance of RpcBackendOptions, but got "
            f"{options!r}"
        )
    if not isinstance(options, ZmqRpcBackendOptions):
        raise TypeError(
            f"Could not infer backend for options {options!r}: `rpc_backend_options` must be a "
            "`TensorPipeRpcBackendOptions`, which is another name of `ZmqRpcBackendOptions`"
        )
    return options
