"""``torch.ops.qgemm.route``: registered properly, and with the gradients of the formula."""

import pytest
import torch

from qgemm.kernels import Routing
from qgemm.ops.router import route

KINDS = (Routing(3), Routing(3, normalized=False), Routing(3, in_float=True), Routing(3, "softmax_of_top_k"))
NAMES = ("top_k", "kind", "normalized", "in_float")


@pytest.mark.parametrize("routing", KINDS, ids=str)
def test_it_is_registered_properly(routing: Routing, device: torch.device) -> None:
    logits = torch.randn(4, 8, device=device).to(torch.bfloat16)
    torch.library.opcheck(torch.ops.qgemm.route.default, (logits, *(getattr(routing, name) for name in NAMES)))


@pytest.mark.parametrize("routing", KINDS, ids=str)
def test_gradients(routing: Routing, device: torch.device) -> None:
    logits, grad = torch.randn(4, 8, device=device, requires_grad=True), torch.randn(4, 3, device=device)
    expected = torch.autograd.grad(routing(logits)[0], logits, grad)
    weights, index = route(logits, routing)
    assert not index.requires_grad
    torch.testing.assert_close(torch.autograd.grad(weights, logits, grad), expected)
