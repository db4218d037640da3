"""``torch.ops.qgemm.add_norm`` and its relatives: gradients, and what a call past the dispatcher gives."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from qgemm.kernels.norms import MODULATED, NORMS, Norm
from qgemm.kernels.reference import add_norm_reference
from qgemm.ops import norms
from qgemm.ops.linear import multiply
from qgemm.ops.rows import activation_quantize

ops = torch.ops.qgemm


@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("adds", [True, False])
@pytest.mark.parametrize("branch", [True, False])
@pytest.mark.parametrize("size", [(40,), (2, 40)], ids=["one", "of samples"])
def test_gradients_are_those_of_the_formula(
    size: tuple[int, ...], kind: str, adds: bool, branch: bool, device: torch.device
) -> None:
    def leaf(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, requires_grad=True)

    x, residual = leaf(2, 3, 40), leaf(2, 3, 40) if adds else None
    vectors = (leaf(40) if branch else None, leaf(*size), leaf(*size) if Norm(kind).is_layer else None)
    leaves = [each for each in (x, residual, *vectors) if each is not None]
    norm = Norm(kind, 1e-3)
    total, normed = norms.add_norm(x, residual, *vectors, norm)
    wanted_total, wanted = add_norm_reference(x, residual, *vectors, norm)
    torch.testing.assert_close((total, normed), (wanted_total, wanted))
    weights = torch.randn(2, *total.shape, device=device)
    grads = torch.autograd.grad((total * weights[0] + normed * weights[1]).sum(), leaves)
    expected = torch.autograd.grad((wanted_total * weights[0] + wanted * weights[1]).sum(), leaves)
    torch.testing.assert_close(grads, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("quantizes", [False, True])
def test_gradients_behind_a_branch(kind: str, quantizes: bool, device: torch.device) -> None:
    x, residual, weight, bias = (
        torch.randn(*s, device=device, requires_grad=True) for s in ((3, 40), (3, 40), (40,), (40,))
    )
    vectors, norm = (weight, bias if Norm(kind).is_layer else None), Norm(kind, 1e-3)
    leaves = [x, residual, *(each for each in vectors if each is not None)]
    normed = norms.post_norm_quantize(x, residual, *vectors, norm)[0] if quantizes else None
    normed = norms.post_norm(x, residual, *vectors, norm) if normed is None else normed
    wanted = norm(residual + x, *vectors)
    torch.testing.assert_close(normed, wanted)
    along = torch.randn_like(wanted)
    grads, expected = (torch.autograd.grad((out * along).sum(), leaves) for out in (normed, wanted))
    torch.testing.assert_close(grads, expected, rtol=1e-4, atol=1e-5)


def test_gradients_through_a_gate(device: torch.device) -> None:
    x, residual, weight, gate = (
        torch.randn(*s, device=device, requires_grad=True) for s in ((2, 3, 40), (2, 3, 40), (2, 40), (2, 40))
    )
    out = norms.add_norm(x, residual, None, weight, None, Norm(), gate)
    wanted = add_norm_reference(x, residual, None, weight, None, Norm(), gate)
    torch.testing.assert_close(out, wanted)
    along = torch.randn(2, *x.shape, device=device)
    leaves = x, residual, weight, gate
    grads, expected = (
        torch.autograd.grad((each[0] * along[0] + each[1] * along[1]).sum(), leaves, retain_graph=True)
        for each in (out, wanted)
    )
    torch.testing.assert_close(grads, expected, rtol=1e-4, atol=1e-5)
    total = norms.add_norm_quantize(x, residual, None, weight, None, Norm(), gate=gate)[0]
    grads = torch.autograd.grad((total * along[0]).sum(), (x, gate))
    torch.testing.assert_close(grads, torch.autograd.grad((wanted[0] * along[0]).sum(), (x, gate)))


@pytest.mark.parametrize("behind", [True, False])
def test_gradients_through_numbers(behind: bool, device: torch.device) -> None:
    x, residual, weight, branch, of_total = (
        torch.randn(*s, device=device, requires_grad=True) for s in ((2, 3, 40), (2, 3, 40), (40,), (40,), (1,))
    )
    leaves = [x, residual, weight, of_total, *([branch] if behind else [])]
    given = x, residual, branch if behind else None, weight, None, Norm(eps=1e-3), None, 0.22, of_total
    out, wanted = norms.add_norm(*given), add_norm_reference(*given)
    torch.testing.assert_close(out, wanted)
    along = torch.randn(2, *x.shape, device=device)
    grads, expected = (
        torch.autograd.grad((each[0] * along[0] + each[1] * along[1]).sum(), leaves) for each in (out, wanted)
    )
    torch.testing.assert_close(grads, expected, rtol=1e-4, atol=1e-5)
    total = norms.add_norm_quantize(*given[:6], factor=0.22)[0]
    wanted_total = add_norm_reference(*given[:8])[0]
    leaves = [x, residual, *([branch] if behind else [])]
    grads, expected = (torch.autograd.grad((each * along[0]).sum(), leaves) for each in (total, wanted_total))
    torch.testing.assert_close(grads, expected, rtol=1e-4, atol=1e-5)


def test_gradients_of_float32_vectors(device: torch.device) -> None:
    x, residual = (torch.randn(2, 3, 40, device=device).bfloat16().requires_grad_() for _ in range(2))
    vectors = [torch.randn(2, 40, device=device, requires_grad=True) for _ in range(3)]
    weight, bias, gate = vectors
    norm, leaves = Norm(MODULATED, 1e-3), (x, residual, *vectors)
    out = norms.add_norm(x, residual, None, weight, bias, norm, gate)
    wanted = add_norm_reference(x, residual, None, weight, bias, norm, gate)
    assert torch.equal(out[0], wanted[0])
    torch.testing.assert_close(out[1], wanted[1], rtol=0.01, atol=0.01)
    grads, expected = (torch.autograd.grad((total + normed).square().sum(), leaves) for total, normed in (out, wanted))
    assert [grad.dtype for grad in grads] == [leaf.dtype for leaf in leaves]
    torch.testing.assert_close(grads, expected, rtol=0.03, atol=0.1)


def test_a_sum_without_a_norm_after_it_has_gradients(device: torch.device) -> None:
    x, residual, weight = (torch.randn(*s, device=device, requires_grad=True) for s in ((3, 40), (3, 40), (40,)))
    total, same = norms.add_norm(x, residual, weight, None, None, Norm())
    assert same is total
    grads = torch.autograd.grad(total.square().sum(), (x, residual, weight))
    wanted, _ = add_norm_reference(x, residual, weight, None, None, Norm())
    torch.testing.assert_close(grads, torch.autograd.grad(wanted.square().sum(), (x, residual, weight)))


def test_gradients_in_bfloat16(device: torch.device) -> None:
    x, residual = (torch.randn(3, 40, device=device).bfloat16().requires_grad_() for _ in range(2))
    weight = torch.rand(40, device=device).bfloat16().requires_grad_()
    total, _, _ = norms.add_norm_quantize(x, residual, weight, weight.detach(), None, Norm())
    total.float().square().sum().backward()
    exact = [each.detach().double().requires_grad_() for each in (x, residual, weight)]
    h = exact[0] / (exact[0].square().mean(-1, keepdim=True) + 1e-6).sqrt() * exact[2]
    (h + exact[1]).square().sum().backward()
    for ours, theirs in zip((x, residual, weight), exact, strict=True):
        assert ours.grad.dtype == torch.bfloat16
        torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=0.03, atol=0.06)


def test_quantized_rows_have_no_gradient(device: torch.device) -> None:
    x = torch.randn(3, 40, device=device, requires_grad=True)
    weight = torch.ones(40, device=device, requires_grad=True)
    for q, scale in (
        norms.norm_quantize(x, weight, None, Norm()),
        norms.add_norm_quantize(x, x, None, weight, None, Norm())[1:],
        norms.post_norm_quantize(x, x, weight, None, Norm())[1:],
        activation_quantize(x, "silu", True),
    ):
        assert not q.requires_grad
        assert not scale.requires_grad


def test_the_gradients_of_a_product_of_quantized_rows(device: torch.device) -> None:
    q, scale = ops.quantize_rows(torch.randn(2, 3, 40, device=device), None)
    weight, weight_scale = ops.quantize_rows(torch.randn(8, 40, device=device), None)
    bias, residual = torch.randn(8, device=device), torch.randn(2, 3, 8, device=device)
    bias, residual = bias.requires_grad_(), residual.requires_grad_()
    grad = torch.randn(2, 3, 8, device=device)
    multiply(q, scale, weight, weight_scale, bias, residual, torch.float32).backward(grad)
    assert torch.equal(residual.grad, grad)
    torch.testing.assert_close(bias.grad, grad.sum((0, 1)))
    with pytest.raises(RuntimeError, match="gradients for bias and residual only"):
        multiply(q, scale.requires_grad_(), weight, weight_scale, None, None, torch.float32).sum().backward()


CALLS: dict[str, Callable[[Tensor, Tensor], object]] = {
    "norm_quantize": lambda x, w: norms.norm_quantize(x, w, None, Norm()),
    "add_norm_quantize": lambda x, w: norms.add_norm_quantize(x, x, w, w, None, Norm()),
    "add_norm": lambda x, w: norms.add_norm(x, x, w, w, None, Norm()),
    "add_norm without a sum": lambda x, w: norms.add_norm(x, None, None, w, None, Norm()),
    "add_norm without a norm": lambda x, w: norms.add_norm(x, x, None, None, None, Norm()),
    "post_norm": lambda x, w: norms.post_norm(x, x, w, w, Norm("layer")),
    "post_norm_quantize": lambda x, w: norms.post_norm_quantize(x, x, w, w, Norm("layer")),
    "activation_quantize": lambda x, w: activation_quantize(x, "gelu", True),
    "multiply": lambda x, w: multiply(
        *ops.quantize_rows(x, None), *ops.quantize_rows(w.expand(8, -1), None), None, x[:, :8].contiguous(), x.dtype
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_past_the_dispatcher_and_through_it(name: str, device: torch.device) -> None:
    x, weight = torch.randn(5, 40, device=device), torch.randn(40, device=device)
    direct = CALLS[name](x, weight)
    x.requires_grad_()
    torch.testing.assert_close(CALLS[name](x, weight), direct, rtol=0, atol=0)
    torch._dynamo.reset()
    compiled = torch.compile(CALLS[name], fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x.detach(), weight), direct, rtol=0, atol=0)


def test_what_is_not_asked_for_is_not_copied(device: torch.device) -> None:
    x, weight = torch.randn(5, 40, device=device), torch.randn(40, device=device)
    for given in (x, x.clone().requires_grad_()):
        assert norms.add_norm(given, None, None, weight, None, Norm())[0] is given
        total, normed = norms.add_norm(given, x, None, None, None, Norm())
        assert normed is total
