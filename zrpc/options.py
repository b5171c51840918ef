"""The options of an agent, for `zrpc.init_rpc`."""

from __future__ import annotations

import operator
import os
import re
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, SupportsIndex

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

    @property
    def rpc_timeout(self) -> float:
        """The default timeout of a call, in seconds; 0 means no limit."""
        return self._rpc_timeout

    @rpc_timeout.setter
    def rpc_timeout(self, seconds: float | timedelta) -> None:
        self._rpc_timeout = checked_timeout("rpc_timeout", seconds)

    @property
    def init_method(self) -> str:
        """The URL where the workers meet."""
        return self._init_method

    @init_method.setter
    def init_method(self, url: str) -> None:
        if not isinstance(url, str):
            raise TypeError(
                "init_method must be a URL as a str: 'env://' (the default), 'tcp://host:port' or "
                f"'file:///path', but got {url!r} of type {type(url).__name__}"
            )
        self._init_method = url


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
        TypeError: the number of threads isn't an int, a timeout isn't a number, or
            ``init_method`` or ``port_range`` isn't a str.

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
        init_timeout: float | None = None,
        transport: str = "auto",
        security: str = "auto",
        port_range: str | None = None,
        shared_memory: int | None = None,
        max_bytes_in_flight: int = DEFAULT_MAX_BYTES_IN_FLIGHT,
        heartbeat_timeout: float = DEFAULT_HEARTBEAT_TIMEOUT_SEC,
        warn_after: float | None = DEFAULT_WARN_AFTER_SEC,
        switch_interval: float = DEFAULT_SWITCH_INTERVAL_SEC,
        device_maps: Mapping[str, Mapping[_Device, _Device]] | None = None,
        devices: Sequence[_Device] | None = None,
        _transports: Sequence[str] | None = None,
        _channels: Sequence[str] | None = None,
        num_send_recv_threads: int | None = None,
    ) -> None:
        super().__init__(rpc_timeout, init_method)
        if transport not in ("auto", "ipc", "tcp"):
            raise OptionError(f"transport must be 'auto', 'ipc' or 'tcp', but got {transport!r}")
        if security not in ("auto", "required", "none"):
            raise OptionError(
                f"security must be 'auto', 'required' or 'none', but got {security!r}"
            )
        if shared_memory is not None and shared_memory < 0:
            raise OptionError(f"shared_memory must be 0 or more bytes, but got {shared_memory}")
        if max_bytes_in_flight < 0:
            raise OptionError(
                f"max_bytes_in_flight must be 0 (no limit) or more, but got {max_bytes_in_flight}"
            )
        self.max_bytes_in_flight = int(max_bytes_in_flight)
        self.num_worker_threads = num_worker_threads
        if num_send_recv_threads is not None:
            self.num_send_recv_threads = num_send_recv_threads
        self.shared_memory = _default_memory() if shared_memory is None else int(shared_memory)
        self.transport = transport
        self.security = security
        self._port_range = None if port_range is None else _ports("port_range", port_range)
        self.heartbeat_timeout = checked_timeout("heartbeat_timeout", heartbeat_timeout)
        self.warn_after = checked_timeout("warn_after", warn_after or 0)
        self.switch_interval = checked_timeout("switch_interval", switch_interval)
        self._init_timeout = (
            None if init_timeout is None else checked_timeout("init_timeout", init_timeout)
        )
        self.device_maps = device_maps or {}
        self.devices = devices or []

    @property
    def num_worker_threads(self) -> int:
        """The number of handlers that may run at once; also as ``num_send_recv_threads``."""
        return self._num_worker_threads

    @num_worker_threads.setter
    def num_worker_threads(self, count: int) -> None:
        if isinstance(count, bool) or not isinstance(count, SupportsIndex):
            raise TypeError(
                f"num_worker_threads must be an int, but got {count!r} of type "
                f"{type(count).__name__}"
            )
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
        for to, device_map in maps.items():
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

        Example:
            >>> options = ZmqRpcBackendOptions()
            >>> options.set_device_map("worker1", {"cuda:0": "cuda:1"})
            >>> options.device_maps["worker1"]
            {device(type='cuda', index=0): device(type='cuda', index=1)}
        """
        added: dict[torch.device, torch.device] = {}
        for source, target in device_map.items():
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


def checked_timeout(name: str, seconds: Any) -> float:
    """Returns a number of seconds or a ``timedelta`` as a float, `LONGEST_TIMEOUT` at most.

    Raises:
        OptionError: it is negative, infinite or not a number.
        TypeError: it has another type, such as None or a string.
    """
    try:
        if 0 <= seconds < float("inf"):
            return min(float(seconds), LONGEST_TIMEOUT)
    except TypeError:
        if isinstance(seconds, timedelta):
            return checked_timeout(name, seconds.total_seconds())
        raise TypeError(
            f"{name} must be a number of seconds, 0 for no limit, but got {seconds!r} of type "
            f"{type(seconds).__name__}"
        ) from None
    raise OptionError(
        f"RPC Timeout must be non-negative: {name} must be a finite number of seconds, or 0 for "
        f"no limit, but got {seconds}"
    )


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
        raise TypeError(
            f"{name} must be a str such as '20000-20100', but got {text!r} of type "
            f"{type(text).__name__}"
        )
    found = _PORTS.fullmatch(text.strip())
    first, last = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= first <= last <= _LAST_PORT:
        raise OptionError(
            f"{name} must be the first and the last TCP port, such as '20000-20100', from 1 to "
            f"{_LAST_PORT}, but got {text!r}"
        )
    return range(first, last + 1)


def _default_memory() -> int:
    """Returns an eighth of the machine's memory, in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 8


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
