"""``torch.ops.qgemm.route``: registered properly, and with the gradients of the formula."""

from dataclasses import astuple

import pytest
import torch

from qgemm.kernels import Routing
from qgemm.kernels.router.reference import router_logits_reference
from qgemm.ops.router import route, router_logits

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


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_product_is_registered_properly(dtype: torch.dtype, biased: bool, device: torch.device) -> None:
    x, weight = (torch.randn(size, 16, device=device).bfloat16().requires_grad_() for size in (3, 8))
    bias = torch.randn(8, device=device).bfloat16().requires_grad_() if biased else None
    torch.library.opcheck(torch.ops.qgemm.router_logits.default, (x, weight, bias, dtype))
    operands = [each for each in (x, weight, bias) if each is not None]
    along = torch.randn(3, 8, device=device).to(dtype)
    found, wanted = (
        product(x, weight, bias, dtype) for product in (torch.ops.qgemm.router_logits, router_logits_reference)
    )
    torch.testing.assert_close(found, wanted)
    grads, expected = (torch.autograd.grad(out, operands, along) for out in (found, wanted))
    torch.testing.assert_close(grads, expected)
    with torch.no_grad():
        assert torch.equal(router_logits(x, weight, bias, dtype), found)
