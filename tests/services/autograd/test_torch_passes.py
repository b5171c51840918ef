"""torch's own passes for some inputs: right, or refused if gradients go through other workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import zrpc
import zrpc.autograd as dist_autograd
from tests.services.autograd.split_models import W, X, call, layer
from zrpc.testing import Mesh

pytestmark = pytest.mark.zrpc(workers=3, timeout=60)


def there(x: Any) -> Any:
    return call("worker1", layer, 1, x)


def by_another(x: Any) -> Any:
    return call("worker1", call, "worker2", layer, 2, x)


def grad(f: Callable[[Any], Any], x: Any) -> Any:
    return torch.autograd.grad((f(x) * x).sum(), x)


def grad_of_inner(f: Callable[[Any], Any], x: Any) -> Any:
    y = x.sin()
    return torch.autograd.grad((f(y) + y).sum(), y)


def backward(f: Callable[[Any], Any], x: Any) -> Any:
    (f(x) + x).sum().backward(inputs=[x])


def jacobian(f: Callable[[Any], Any], x: Any) -> Any:
    return torch.autograd.functional.jacobian(f, x)


@pytest.mark.parametrize("f", [there, by_another])
@pytest.mark.parametrize("ask", [grad, grad_of_inner, backward, jacobian])
def test_a_gradient_that_goes_through_another_worker_is_refused(
    caller: Mesh, ask: Callable[..., Any], f: Callable[[Any], Any]
) -> None:
    error = r"expected zrpc.autograd.backward\(context_id, roots\), found torch.autograd.grad"
    with dist_autograd.context(), pytest.raises(zrpc.RpcError, match=error):
        ask(f, X)
    assert X.grad is None


def own_gradients(x: Any) -> Any:
    """What a handler may ask for: its own parameters, what it has received, what is in between."""
    inner = layer(1, x)
    loss = (inner.sin() * x).sum()
    found = torch.autograd.grad(loss, [W[1], x, inner], retain_graph=True)
    return loss, [each.detach() for each in found]


def test_gradients_that_go_through_no_other_worker(mesh: Mesh) -> None:
    """Also after this worker has sent and received others."""

    def run() -> Any:
        _, first = call("worker1", own_gradients, X)
        y = there(X)  # it depends on X, but not on W[0]
        return [*first, *torch.autograd.grad((layer(0, X) * y).sum(), [W[0], y])]

    def within() -> Any:
        with dist_autograd.context():
            return run()

    torch.testing.assert_close(mesh.run(0, within), run())
