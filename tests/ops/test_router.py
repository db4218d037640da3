"""``torch.ops.qgemm.route``: registered properly, and with the gradients of the formula."""

from dataclasses import astuple

import pytest
import torch

from qgemm.kernels import Routing
from qgemm.ops.router import route

KINDS = (
    Routing(3),
    Routing(3, normalized=False),
    Routing(3, in_float=True),
    Routing(3, "softmax_of_top_k"),
    Routing(3, "sigmoid", in_float=True, scale=2.5, floor=1e-20, groups=4, kept_groups=2),
    Routing(3, "sigmoid", normalized=False),
)


@pytest.mark.parametrize("routing", KINDS, ids=str)
def test_it_is_registered_properly(routing: Routing, device: torch.device) -> None:
    logits = torch.randn(4, 8, device=device).to(torch.bfloat16)
    bias = None if routing.kind == "softmax_of_top_k" else torch.randn(8, device=device)
    torch.library.opcheck(torch.ops.qgemm.route.default, (logits, bias, *astuple(routing)))


@pytest.mark.parametrize("routing", KINDS, ids=str)
def test_gradients(routing: Routing, device: torch.device) -> None:
    logits = torch.randn(4, 8, device=device, requires_grad=True)
    of_experts = torch.randn(4, 8, device=device)  # the order of the chosen ones is open
    weights, index = routing(logits)
    expected = torch.autograd.grad(weights, logits, of_experts.gather(-1, index))
    weights, index = route(logits, routing)
    assert not index.requires_grad
    torch.testing.assert_close(torch.autograd.grad(weights, logits, of_experts.gather(-1, index)), expected)
