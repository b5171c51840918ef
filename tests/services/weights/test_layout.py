"""What lies where in a version, and how a model differs from that."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.masked import masked_tensor

from zrpc.nn import RemoteModule, publish
from zrpc.services.weights.layout import Layout, tensors_of
from zrpc.testing import Mesh

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64)


class Mixed(torch.nn.Module):
    """A module with tied parameters, buffers of both kinds, and an empty parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(5, 3)
        self.head = torch.nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.norm = torch.nn.BatchNorm1d(3)
        self.nothing = torch.nn.Parameter(torch.empty(0, 4))
        self.register_buffer("cache", torch.ones(7), persistent=False)


def packed(tensors: dict[str, torch.Tensor]) -> tuple[Layout, torch.Tensor]:
    """Copies tensors into a flat buffer."""
    layout = Layout(tensors)
    flat = torch.zeros(layout.size, dtype=torch.uint8)
    for name, view in layout.views(flat).items():
        view.copy_(tensors[name])
    return layout, flat


def test_tied_parameters_lie_in_one_place() -> None:
    for tied in (tensors_of(Mixed()), Mixed().state_dict()):
        layout = Layout(tied)
        views = layout.views(torch.zeros(layout.size, dtype=torch.uint8))
        views["head.weight"].fill_(3)
        assert bool((views["embed.weight"] == 3).all())
        assert layout.size == 64 + 64 + 64  # 15 + 4 * 3 floats, and a count


@settings(max_examples=30)
@given(st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=3))))
def test_what_is_written_to_a_view_is_read_from_it(shapes: Any) -> None:
    tensors = {
        f"t{i}": torch.randn(shape).mul(9).to(dtype) for i, (dtype, shape) in enumerate(shapes)
    }
    read = Layout(tensors).views(packed(tensors)[1])
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(read[name], tensor)
        assert read[name].dtype == tensor.dtype


def test_differences_are_listed() -> None:
    layout = Layout({"a": torch.zeros(2), "b": torch.zeros(3), "c": torch.zeros(4)})
    found = {"b": torch.zeros(5), "c": torch.zeros(4, dtype=torch.int64), "d": torch.zeros(1)}
    with pytest.raises(ValueError, match=r"the tensors of 'p', found missing: a; unexpected: d; "):
        layout.check(found, "'p'")
    expected = r"shape: b \(5,\) instead of \(3,\); dtype: c torch.int64 instead of torch.float32"
    with pytest.raises(ValueError, match=expected):
        layout.check(found, "'p'")
    with pytest.raises(ValueError, match=r"missing: t0, t1, t2, t3, t4, t5, t6, t7 and 2 more$"):
        Layout({f"t{i}": torch.zeros(1) for i in range(10)}).check({}, "'p'")


def test_tensors_that_share_memory_and_differ_have_places_of_their_own() -> None:
    number = torch.tensor([1 + 2j])
    tensors = {
        "a": number,
        "conjugate": number.conj(),
        "imaginary": number.imag,
        "real": number.real,
    }
    layout, flat = packed(tensors)
    found = {name: view.item() for name, view in layout.views(flat).items()}
    assert found == {"a": 1 + 2j, "conjugate": 1 - 2j, "real": 1.0, "imaginary": 2.0}


def test_parameters_that_are_tied_no_longer_are_refused() -> None:
    shared = torch.ones(3)
    layout = Layout({"a": shared, "b": shared, "c": torch.ones(3)})
    layout.check_ties({"a": shared, "b": shared.view(3), "c": shared})
    with pytest.raises(
        ValueError, match="expected tied tensors, as at first, found them apart: a and b"
    ):
        layout.check_ties({"a": shared, "b": torch.ones(3), "c": shared})


@pytest.mark.filterwarnings("ignore:.*(prototype|deprecated)")
def test_what_is_no_model_is_refused() -> None:
    pair = torch.arange(2.0)
    quantized = torch.quantize_per_tensor(pair, 1.0, 0, torch.qint8)
    wrong: dict[str, Any] = {
        "nn.Module or a mapping of names to tensors": 7,
        "expected a tensor as a": {"a": 3},
        r"a dense tensor as a, .*torch.sparse_coo: .*to_dense\(\)": {"a": torch.eye(3).to_sparse()},
        r"a dense tensor as a, .*quantized one: .*dequantize\(\)": {"a": quantized},
        "a plain tensor as a, found a MaskedTensor": {"a": masked_tensor(pair, pair > 1)},
        "a to have memory": {"a": torch.zeros(2, device="meta")},
        "weight to be initialized": torch.nn.LazyLinear(3),
    }
    for words, model in wrong.items():
        with pytest.raises(TypeError, match=words):
            tensors_of(model)


class Sharded(torch.Tensor):
    """A tensor of which this process has a part, as a DTensor."""

    @classmethod
    def __torch_dispatch__(cls, function: Any, *_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"{function} of a part")

    def full_tensor(self) -> torch.Tensor:
        return torch.ones(4)


def test_a_distributed_tensor_is_refused_as_it_is_published(mesh: Mesh) -> None:
    weight = torch.ones(2).as_subclass(Sharded)
    with pytest.raises(TypeError, match=r"found a Sharded, .* full_tensor\(\)"):
        mesh.run(0, publish, "m", {"a": weight})
    published = mesh.run(0, publish, "m", {"a": weight.full_tensor()})
    assert published.push() == 1


@pytest.mark.zrpc(workers=2)
def test_the_parameters_of_a_remote_module_are_not_this_models(mesh: Mesh) -> None:
    def names() -> list[str]:
        remote = RemoteModule("worker1", torch.nn.Linear, (2, 2))
        return list(tensors_of(torch.nn.Sequential(remote, torch.nn.Linear(2, 2))))

    assert mesh.run(0, names) == ["1.weight", "1.bias"]
