"""A device made in Python, to test device maps on a machine without one.

Its tensors are torch's own, on the devices ``fake:0`` and ``fake:1``: storages, views, Parameters,
modules and optimizers work. The CPU's operators do the work, at once, and every operator is a call
of Python. What the device does can be recorded, and allocations refused.

What it can't do:

- Backward passes on ``fake:1``: torch has one thread for devices of this kind. On ``fake:0`` they
  need a process that has made none before ``fake_device``, such as a new worker process: torch
  starts its threads before the first one. An exception in a hook or node there ends the process,
  in torch.
- Backward passes on a GPU beside it: torch takes a process to have devices of one type besides the
  CPU, and then fails an assertion of its own (``opt_ready_stream``).
- Sparse tensors on ``fake:1``, quantized and nested tensors, and pinned memory.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_map

from zrpc.runtime.forks import free_in_child
from zrpc.testing.device_memory import allocate, on_host
from zrpc.testing.device_module import COUNT, TYPE, FakeModule

_KEY = "PrivateUse1"  # torch's name for a device that others add

# Operators that only make another tensor for the same memory. The CPU's do that for any device.
_VIEWS = (
    "as_strided",
    "view",
    "unfold",
    "_reshape_alias",
    "view_as_real",
    "view_as_complex",
    "set_",
    "set_.source_Storage",
    "set_.source_Storage_storage_offset",
    "set_.source_Tensor",
)
# Operators that make or take apart a sparse tensor.
_SPARSE = (
    "_sparse_coo_tensor_with_dims_and_tensors",
    "_coalesced_",
    "is_coalesced",
    "_indices",
    "_values",
    "_nnz",
    "sparse_dim",
    "dense_dim",
)


@dataclass(frozen=True)
class Operation:
    """Something that the fake device did.

    Args:
        name: ``"allocate"``, ``"to_cpu"`` or ``"from_cpu"`` for a copy, ``"synchronize"``, or the
            name of an operator, like ``"aten::add.out"``. ``"aten::_copy_from"`` copies within the
            device.
        thread: the number of the thread that ran it, see ``threading.get_ident``.
        device: where: ``fake:0`` or ``fake:1``.
        stream: the number of the thread's stream there; 0 for the one that each thread begins with.
        nbytes: the bytes that were allocated or copied; 0 for other operators.
    """

    name: str
    thread: int
    device: torch.device
    stream: int
    nbytes: int = 0


class FakeDevice:
    """The fake device of this process; `fake_device` returns it.

    All methods may be called from any thread, and apply to all threads.
    """

    def __init__(self) -> None:
        self._module = FakeModule(self._note)
        # The lists that are being filled, and the sizes above which allocations are refused.
        # Changing and copying a list are atomic, so no lock is needed.
        self._records: list[list[Operation]] = []
        self._limits: list[int] = []

    @contextlib.contextmanager
    def record(self) -> Iterator[list[Operation]]:
        """Returns the list of what the device does within a ``with`` statement, in order.

        Example:
            >>> device = fake_device()
            >>> with device.record() as operations:
            ...     on_device = torch.ones(2).to("fake:1")
            >>> [each.name for each in operations], operations[1].nbytes
            (['allocate', 'from_cpu'], 8)
        """
        record: list[Operation] = []
        self._records.append(record)
        try:
            yield record
        finally:
            self._records[:] = [each for each in self._records if each is not record]

    @contextlib.contextmanager
    def out_of_memory(self, above: int = 0) -> Iterator[None]:
        """Lets allocations fail within a ``with`` statement.

        Args:
            above: the largest allocation that succeeds, in bytes.

        Example:
            >>> with fake_device().out_of_memory(above=8):
            ...     torch.ones(3, device="fake")
            Traceback (most recent call last):
            torch.OutOfMemoryError: fake:0 out of memory: tried to allocate 12 bytes
        """
        self._limits.append(above)
        try:
            yield
        finally:
            self._limits.remove(above)

    def _note(self, name: str, index: int, nbytes: int = 0) -> None:
        if self._records:
            stream = self._module.current_stream(index).stream_id
            thread, device = threading.get_ident(), torch.device(TYPE, index)
            operation = Operation(name, thread, device, stream, nbytes)
            for record in list(self._records):
                record.append(operation)

    def _allocate(
        self, size: Any, stride: Any, dtype: torch.dtype | None, index: int | None
    ) -> torch.Tensor:
        index = self._module.current_device() if index is None else index
        if not 0 <= index < COUNT:
            raise RuntimeError(f"expected fake:0 to fake:{COUNT - 1}, found fake:{index}")
        tensor = allocate(size, stride, dtype or torch.get_default_dtype(), index)
        nbytes = tensor.untyped_storage().nbytes()
        if any(nbytes > limit for limit in list(self._limits)):
            raise torch.OutOfMemoryError(
                f"fake:{index} out of memory: tried to allocate {nbytes} bytes"
            )
        self._note("allocate", index, nbytes)
        return tensor

    def _empty(
        self,
        size: Any,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
        memory_format: torch.memory_format | None = None,
        **others: Any,
    ) -> torch.Tensor:
        memory_format = memory_format or torch.contiguous_format
        shape = torch.empty(size, device="meta", memory_format=memory_format)
        return self._allocate(tuple(size), shape.stride(), dtype, _index_of(device))

    def _empty_strided(
        self,
        size: Any,
        stride: Any,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
        **others: Any,
    ) -> torch.Tensor:
        return self._allocate(tuple(size), tuple(stride), dtype, _index_of(device))

    def _copy(
        self, source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False
    ) -> torch.Tensor:
        here, there = _is_fake(source), _is_fake(target)
        name = "aten::_copy_from" if here and there else "to_cpu" if here else "from_cpu"
        self._note(name, (target if there else source).device.index, target.nbytes)
        (on_host(target) if there else target).copy_(on_host(source) if here else source)
        return target

    def _record_stream(self, tensor: torch.Tensor, stream: torch.Stream) -> None:
        self._note("aten::record_stream", stream.device_index)

    # torch knows no convolution of a device that others add.
    def _convolve(self, *args: Any) -> Any:
        return self._run(torch.ops.aten.convolution.default, *args)

    def _convolve_backward(self, gradient: Any, value: Any, weight: Any, *args: Any) -> Any:
        backward, bias = torch.ops.aten.convolution_backward.default, [gradient.shape[1]]
        return self._run(backward, gradient, value, weight, bias, *args)

    def _run(self, operator: Any, *args: Any, **kwargs: Any) -> Any:
        """Runs any other operator: by the CPU's, on the same memory."""
        taken: dict[int, torch.Tensor] = {}  # the tensor here for each one on the CPU
        hosts: list[torch.Tensor] = []
        results: list[tuple[torch.Tensor, torch.Tensor]] = []
        index = None

        def to_host(value: Any, is_result: bool = False) -> Any:
            nonlocal index
            if isinstance(value, torch.Tensor) and _is_fake(value):
                index = value.device.index
                if is_result:  # the operator may give it another size
                    host = torch.empty(0, dtype=value.dtype, device="cpu")
                    results.append((value, host))
                else:
                    host = on_host(value)
                hosts.append(host)
                taken[id(host)] = value
                return host
            if isinstance(value, torch.device) and value.type == TYPE:
                index = value.index
                return torch.device("cpu")
            return value

        def to_device(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            if id(value) in taken:
                return taken[id(value)]
            new = self._allocate(value.shape, value.stride(), value.dtype, index)
            on_host(new).copy_(value)
            return new

        is_result = {each.name: each.is_out for each in operator._schema.arguments}
        args = tree_map(to_host, args)
        for name, value in kwargs.items():
            kwargs[name] = tree_map(partial(to_host, is_result=is_result[name]), value)
        self._note(operator.name(), index or 0)
        returned = operator(*args, **kwargs)
        for tensor, host in results:
            if tensor.shape != host.shape:
                new = self._allocate(host.shape, host.stride(), host.dtype, index)
                torch.ops.aten.set_.source_Tensor(tensor, new)
            on_host(tensor).copy_(host)
        return tree_map(to_device, returned)


# The lock guards _made: torch takes one device of this kind in a process. Taken alone.
_lock = free_in_child(threading.Lock())
_made: list[tuple[FakeDevice, list[torch.library.Library]]] = []


def fake_device() -> FakeDevice:
    """Returns the fake device of this process, and adds it to torch at the first call.

    From then on, tensors can be on ``"fake:0"`` and ``"fake:1"``, ``torch.fake`` is the device's
    module, and ``torch.accelerator`` reports it. Each process that names such a device must call
    this first, before `zrpc.init_rpc`. The worker processes of a test do so if the test's process
    has called it before it starts their mesh. May be called from any thread.

    Raises:
        RuntimeError: torch is too old, or has an accelerator of its own here.

    Example:
        >>> device = fake_device()
        >>> options = ZmqRpcBackendOptions()
        >>> options.set_device_map("worker1", {"fake:0": "fake:1"})
        >>> (torch.ones(2, device="fake:0") + 1).cpu()
        tensor([2., 2.])
    """
    with _lock:
        if not _made:
            device = FakeDevice()
            _made.append((device, _add(device)))
        return _made[0][0]


def is_added() -> bool:
    """Returns whether this process has the fake device."""
    return bool(_made)


def _add(device: FakeDevice) -> list[torch.library.Library]:
    """Adds the device to torch; returns what keeps its operators."""
    from torch.utils import backend_registration

    setup = getattr(backend_registration, "_setup_privateuseone_for_python_backend", None)
    if setup is None:
        raise RuntimeError(
            "expected a torch in which devices can be made in Python, such as 2.13, found "
            f"{torch.__version__}"
        )
    setup(rename=TYPE, backend_module=device._module)
    torch.UntypedStorage.__new__ = _with_fake_storages(torch.UntypedStorage.__new__)  # type: ignore[method-assign]
    library: Any = torch.library.Library
    aten = library("aten", "IMPL")
    for key in ("Conjugate", "Negative"):  # `on_host` resolves these
        aten.impl("_copy_from", torch.library.fallthrough_kernel, key)
    aten.impl("empty.memory_format", device._empty, _KEY)
    aten.impl("empty_strided", device._empty_strided, _KEY)
    aten.impl("_copy_from", device._copy, _KEY)
    aten.impl("record_stream", device._record_stream, _KEY)
    aten.impl("convolution_overrideable", device._convolve, _KEY)
    aten.impl("convolution_backward_overrideable", device._convolve_backward, _KEY)
    for name in _VIEWS:
        aten.impl(name, _as_on("CPU", name), _KEY)
    for name in _SPARSE:
        aten.impl(name, _as_on("SparseCPU", name), f"Sparse{_KEY}")
    others = library("_", "IMPL")
    others.fallback(device._run, _KEY)
    # ``torch.autocast`` casts nothing there.
    others.fallback(torch.library.fallthrough_kernel, f"Autocast{_KEY}")
    return [aten, others]


def _as_on(key: str, name: str) -> Callable[..., Any]:
    """Returns an operator as it is for the dispatch key of another device."""
    packet, _, overload = name.partition(".")
    operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
    return lambda *args, **kwargs: operator.redispatch(keys, *args, **kwargs)


def _index_of(device: torch.device | None) -> int | None:
    return None if device is None else device.index


def _is_fake(tensor: torch.Tensor) -> bool:
    return tensor.device.type == TYPE


def _with_fake_storages(make: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a ``__new__`` of storages for which those of the fake device exist, too.

    torch would ask for an allocator in C++. It makes storages in Python to copy and load tensors.
    """

    def new(cls: type, *args: Any, device: Any = None, **kwargs: Any) -> Any:
        if device is None or torch.device(device).type != TYPE:
            return make(cls, *args, **(kwargs if device is None else {**kwargs, "device": device}))
        return torch.empty(*args, dtype=torch.uint8, device=device).untyped_storage()

    return new
