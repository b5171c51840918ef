"""Tensors on devices: where they arrive, and what is refused."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import torch

import zrpc as rpc
from tests.support.agents import joined
from tests.support.targets import echo
from zrpc import stand_in
from zrpc.agent.agent import Agent
from zrpc.testing import fake_device, local_mesh

pytestmark = pytest.mark.usefixtures("agents")

SWAPPED = {"fake:0": "fake:1", "fake:1": "fake:0"}
DEVICES = ["fake:0", "fake:1"]
LARGE = 100_000
STEPS = 5


@pytest.fixture(scope="module")
def _agents() -> Iterator[list[Agent]]:
    """worker0 has a map for worker1, and worker1 one for all others; worker2 has none."""
    fake_device()
    zero = {"device_maps": {"worker1": SWAPPED}}
    one = {"device_maps": {"*": {"fake:0": "fake:0", "cpu": "fake:1"}}}
    with joined(zero, one, {}) as agents:
        yield agents


@pytest.fixture
def agents(_agents: list[Agent]) -> Iterator[list[Agent]]:
    """The test itself is worker0."""
    with _agents[0].as_current():
        yield _agents


def devices_of(*values: torch.Tensor, **named: torch.Tensor) -> list[str]:
    return [str(value.device) for value in (*values, *named.values())]


def current_device(*_: Any) -> int:
    return int(torch.fake.current_device())  # type: ignore[attr-defined]


def make(device: str, size: int = 3) -> torch.Tensor:
    return torch.arange(float(size), device="cpu").to(device)


def make_there(to: str, device: str) -> torch.Tensor:
    return rpc.rpc_sync(to, make, (device,))


def alike(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert type(found) is type(wanted)
    assert (found.device, found.dtype) == (wanted.device, wanted.dtype)
    assert found.requires_grad == wanted.requires_grad
    assert found.shape == wanted.shape
    assert found.detach().tolist() == wanted.detach().tolist()


# -- the way there and back ------------------------------------------------------------------


class TestMapped:
    def test_arguments_take_the_map_and_results_its_inverse(self) -> None:
        tensors = make("fake:0"), make("fake:1"), make("cpu")
        assert rpc.rpc_sync("worker1", devices_of, tensors) == ["fake:1", "fake:0", "cpu"]
        named = rpc.rpc_async("worker1", devices_of, kwargs={"x": make("fake:0")})
        assert named.wait() == ["fake:1"]
        for device, size in itertools.product(DEVICES, (3, LARGE)):
            result = rpc.rpc_sync("worker1", torch.mul, (make(device, size), 2))
            alike(result, make(device, size) * 2)
        assert str(rpc.rpc_sync("worker1", make, ("fake:0",)).device) == "fake:1"

    def test_values_of_rrefs_come_by_the_inverse_and_their_methods_take_the_map(self) -> None:
        rref = rpc.remote("worker1", torch.mul, (make("fake:0"), 2))
        alike(rref.to_here(), make("fake:0") * 2)
        alike(rref.rpc_sync().add(make("fake:0")), make("fake:0") * 3)
        rref = rref.remote().add(make("fake:0"))
        assert rpc.rpc_sync("worker1", lambda r: str(r.local_value().device), (rref,)) == "fake:1"

    def test_a_worker_without_a_map_fetches_no_value_from_a_device(self) -> None:
        rref = rpc.remote("worker1", make, ("fake:0",))
        with pytest.raises(rpc.SerializationError, match="Response device mapping is not"):
            rpc.rpc_sync("worker2", lambda r: r.to_here(), (rref,))

    def test_the_cpu_may_be_a_key_and_a_value(self) -> None:
        found = rpc.rpc_sync("worker1", _ask_worker0, (devices_of, [make("cpu"), make("fake:0")]))
        assert found == ["fake:1", "fake:0"]
        there = rpc.rpc_sync("worker1", _ask_worker0, (echo, [make("cpu", LARGE)]))
        alike(there, make("cpu", LARGE))

    def test_a_call_to_oneself_keeps_all_devices(self) -> None:
        tensors = make("fake:0"), make("fake:1", LARGE), make("cpu")
        assert rpc.rpc_sync("worker0", devices_of, tensors) == ["fake:0", "fake:1", "cpu"]
        copy = rpc.rpc_sync("worker0", echo, (tensors[0],))
        alike(copy, tensors[0])
        copy.zero_()
        assert tensors[0].sum() == 3

    def test_streams_and_queues_take_the_inverse(self) -> None:
        for number, item in enumerate(rpc.rpc_stream("worker1", several)):
            alike(item, make("fake:1", 3 + number * LARGE))
        queue = rpc.remote("worker1", rpc.Queue).rpc_sync()
        queue.put(make("fake:0"))
        alike(queue.get(), make("fake:0"))

    def test_what_a_handler_passes_on_takes_the_map_of_its_worker(self) -> None:
        with pytest.raises(rpc.SerializationError, match="worker2's device map for worker1"):
            rpc.rpc_sync("worker2", make_there, ("worker1", "fake:0"))


def _ask_worker0(function: Any, args: Any) -> Any:
    return rpc.rpc_sync("worker0", function, [_on(arg) for arg in args])


def _on(tensor: torch.Tensor) -> torch.Tensor:
    return make("cpu", tensor.numel()) if tensor.is_cpu else make("fake:0")


def several() -> Iterator[torch.Tensor]:
    for number in range(3):
        yield make("fake:0", 3 + number * LARGE)


# -- what arrives ----------------------------------------------------------------------------


# `tests/wire` draws views, and `tests/gpu` has others.
KINDS = [
    lambda: make("fake:0", 60_000).view(200, 300)[3:7, ::2],
    lambda: make("fake:0").expand(4, 3),
    lambda: torch.tensor(1.5).to("fake:0"),
    lambda: make("fake:0").requires_grad_(),
    lambda: torch.ones(2, dtype=torch.uint16).to("fake:0"),
    lambda: make("fake:0").to(torch.complex64)[::2],
    lambda: make("fake:0").to(torch.complex64).conj().imag,
    lambda: make("fake:0").as_subclass(Marked),
]


class TestArrival:
    def test_tensors_arrive_as_they_were(self) -> None:
        for make in KINDS:
            tensor: Any = make()
            tensor.scale = torch.ones(2).to("fake:1")
            found = rpc.rpc_sync("worker1", echo, (tensor,))
            alike(found.as_subclass(torch.Tensor), tensor.as_subclass(torch.Tensor))
            assert type(found) is type(tensor)
            assert (found.is_conj(), found.is_neg()) == (tensor.is_conj(), tensor.is_neg())
            alike(found.scale, tensor.scale)
            if not (found.is_conj() or found.is_neg() or type(found) is Marked):
                found.detach_()  # views refuse it
            assert found.untyped_storage().nbytes() <= tensor.nbytes

    @pytest.mark.parametrize("size", [64, LARGE])
    def test_tensors_that_share_memory_share_it_there(self, size: int) -> None:
        base = make("fake:0", size)
        parts = [base, base[10:20], base.view(2, -1).t(), base, torch.nn.Parameter(base[5:])]
        first, view, matrix, again, parameter = rpc.rpc_sync("worker1", echo, parts)
        assert again is first
        first[10] = -1
        assert view[0] == matrix.t().reshape(-1)[10] == parameter[5] == -1
        assert type(parameter) is torch.nn.Parameter
        assert first.untyped_storage().nbytes() == base.untyped_storage().nbytes()
        base = make("fake:0", size).to(torch.complex64)
        real, whole = rpc.rpc_sync("worker1", echo, (torch.view_as_real(base), base))
        real[0, 0] = 7
        assert whole[0] == 7


class Marked(torch.Tensor):
    pass


# -- the device of a handler -------------------------------------------------------------------


class TestCurrentDevice:
    def test_that_of_the_first_mapped_argument_is_current(self) -> None:
        owner = rpc.remote("worker1", Owner)
        for first, second, wanted in (("fake:0", "fake:1", 1), ("fake:1", "fake:0", 0)):
            args = make("cpu"), make(first), make(second)
            assert rpc.rpc_sync("worker1", current_device, args) == wanted
            assert rpc.remote("worker1", current_device, args).to_here() == wanted
            assert owner.rpc_sync().current(make(first)) == wanted
            assert rpc.rpc_sync("worker2", current_device) == 0  # the next handler has its own

    def test_without_one_it_is_the_one_of_the_map(self) -> None:
        # It names several, and worker0 has named none.
        assert rpc.rpc_sync("worker1", rpc.rpc_sync, ("worker0", current_device)) == 0

    def test_each_step_of_a_coroutine_and_of_a_generator_has_it(self) -> None:
        for function in (generate, generate_later):
            streams = [rpc.rpc_stream("worker1", function, (make(each),)) for each in DEVICES]
            assert [list(each) for each in streams] == [[1] * STEPS, [0] * STEPS]
        for device, wanted in zip(DEVICES, (1, 0), strict=True):
            assert rpc.rpc_sync("worker1", batch, (make(device),)) == wanted
        futures = [rpc.rpc_async("worker1", later, (make(each),)) for each in DEVICES]
        assert rpc.wait_all(futures) == [[1] * STEPS, [0] * STEPS]
        assert rpc.rpc_sync("worker2", current_device) == 0


@rpc.functions.batched
def batch(tensors: list[torch.Tensor]) -> list[int]:
    return [current_device()] * len(tensors)


async def later(_: torch.Tensor) -> list[int]:
    found = []
    for _step in range(STEPS):
        found.append(current_device())
        await asyncio.sleep(0)
    return found


def generate(_: torch.Tensor) -> Iterator[int]:
    for _step in range(STEPS):
        yield current_device()


async def generate_later(_: torch.Tensor) -> AsyncIterator[int]:
    for _step in range(STEPS):
        yield current_device()
        await asyncio.sleep(0)


class Owner:
    def current(self, _: torch.Tensor) -> int:
        return current_device()


# -- what is refused ---------------------------------------------------------------------------


class TestUnmapped:
    def test_the_error_names_the_argument_the_device_and_what_to_do(self) -> None:
        args, kwargs = (1, [make("fake:1")]), {"x": make("fake:1")}
        for how, name in (((args, {}), "1"), (((), kwargs), "'x'")):
            with pytest.raises(rpc.SerializationError) as caught:
                rpc.rpc_sync("worker2", echo, *how)
            for part in (
                f"argument {name} of echo: Request device mapping is not ",
                "a tensor on fake:1 of worker0",
                'options.set_device_map("worker2", {"fake:1": "fake:1"}) on worker0',
                "tensor.cpu()",
                'RemoteModule("worker2/fake:1", ...)',
            ):
                assert part in str(caught.value)

    def test_a_device_that_the_map_does_not_name_is_refused(self) -> None:
        with pytest.raises(rpc.SerializationError, match="on fake:1 of worker1"):
            rpc.rpc_sync("worker1", _refused)

    def test_a_result_is_refused_with_the_line_for_the_caller(self) -> None:
        for _ in range(20):
            with pytest.raises(rpc.SerializationError) as caught:
                rpc.rpc_sync("worker2", make, ("fake:0",))
        text = str(caught.value)
        assert "Response device mapping is not available for destination worker0" in text
        assert 'options.set_device_map("worker2", {"fake:0": "fake:0"}) on worker0' in text
        assert rpc.rpc_sync("worker2", echo, (1,)) == 1  # other calls go on

    def test_a_group_is_refused_for_the_member_without_a_map(self) -> None:
        with pytest.raises(rpc.SerializationError, match=r"^argument 0 of echo: .* worker2:"):
            rpc.rpc_sync(rpc.group(["worker1", "worker2"]), echo, (make("fake:0"),))


def text_in_a_program_for_torch() -> str:
    stand_in.begin()  # as `zrpc run` does
    try:
        rpc.rpc_sync("worker1", echo, (make("fake:0"),))
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.system
def test_a_program_for_torch_finds_torchs_text_first() -> None:
    fake_device()  # the processes have it as well
    with local_mesh(2, processes=True, timeout=60) as mesh:
        text = mesh.run(0, text_in_a_program_for_torch)
    assert "Request device mapping is not available for destination worker1" in text
    assert "TensorPipe RPC backend only supports CPU tensors by default, please move your " in text
    assert "or call `set_device_map` on `TensorPipeRpcBackendOptions` to explicitly " in text


def _refused() -> None:
    rpc.rpc_sync("worker0", echo, (make("fake:1"),))


class HasTensor(Exception):
    pass


def fail_with_tensor(kind: type[Exception]) -> None:
    raise kind("a reason", make("fake:0"), make("cpu"))


@pytest.mark.parametrize("scope", [contextlib.nullcontext, rpc.autograd.context])
def test_a_tensor_on_a_device_never_hides_an_exception(scope: Any) -> None:
    class Local(Exception):
        pass

    for to, kind in itertools.product(("worker1", "worker2"), (HasTensor, Local, ValueError)):
        with scope(), pytest.raises(Exception, match="a reason") as caught:
            rpc.rpc_sync(to, fail_with_tensor, (kind,))
        assert caught.type.__name__ == kind.__name__
        _, left_out, tensor = caught.value.args
        assert left_out.startswith("<left out: a tensor on fake:0 of shape (3,) and dtype torch.")
        assert torch.equal(tensor, make("cpu"))


# -- checks when workers meet --------------------------------------------------------------------


def test_all_workers_find_that_their_maps_do_not_fit() -> None:
    fake_device()
    bad = {"device_maps": {"worker1": {"fake:0": "fake:2"}}, "init_timeout": 20}
    wrong = pytest.raises(ValueError, match="Node worker0 has target devices with invalid")
    with wrong, joined(bad, {}):
        pass
