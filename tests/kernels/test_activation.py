"""``activation_quantize``: the kernel against ``reference.py``."""

import dataclasses

import pytest
import torch
from torch import Tensor

from qgemm.kernels import dispatch
from qgemm.kernels.activation import launcher as activation_launch
from qgemm.kernels.activations import ACTIVATIONS, GPT_OSS, GatedActivation, activated
from qgemm.kernels.launch.plans import PlanCache
from qgemm.kernels.reference import activation_quantize_reference, quantize_rows_reference
from qgemm.numerics.formats import FP8

DTYPES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
GATED = pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
# Exact on every device: no rounding of the function itself is in the way.
EXACT = ("relu", "relu2")


def assert_as_the_reference(x: Tensor, name: str, gated: bool, scale: Tensor | None = None) -> None:
    q, row_scale = activation_launch.activation_quantize(x, name, gated, scale)
    wanted_q, wanted_scale = activation_quantize_reference(x, name, gated, scale)
    assert q.dtype == torch.int8
    assert row_scale.dtype == torch.float32
    assert q.shape == wanted_q.shape
    assert row_scale.shape == wanted_scale.shape
    assert torch.equal(row_scale.isnan(), wanted_scale.isnan())
    if name in EXACT:
        assert torch.equal(q, wanted_q)
        assert torch.equal(row_scale.nan_to_num(), wanted_scale.nan_to_num())
        return
    # A function that is rounded the other way may change a value, or a row's scale, by the last bit of the dtype.
    eps = 2 * torch.finfo(x.dtype).eps
    torch.testing.assert_close(row_scale.nan_to_num(), wanted_scale.nan_to_num(), rtol=eps, atol=1e-7)
    if q.numel():
        assert (q.int() - wanted_q.int()).abs().max() <= 1
        assert (q != wanted_q).float().mean() <= 0.02


@GATED
@DTYPES
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(name: str, dtype: torch.dtype, gated: bool, device: torch.device) -> None:
    x = (3 * torch.randn(6, 600, device=device)).to(dtype)
    assert_as_the_reference(x, name, gated)
    assert_as_the_reference(x, name, gated, torch.tensor(0.05, device=device))


@GATED
@DTYPES
@pytest.mark.parametrize("name", EXACT)
def test_rows_of_fp8(name: str, dtype: torch.dtype, gated: bool, device: torch.device) -> None:
    x = (3 * torch.randn(6, 600, device=device)).to(dtype)
    x[4, 7], x[5] = torch.nan, 0
    for scale in (None, torch.tensor(0.02, device=device)):
        q, row_scale = activation_launch.activation_quantize(x, name, gated, scale, FP8.storage)
        wanted, wanted_scale = activation_quantize_reference(x, name, gated, scale, FP8.storage)
        assert q.dtype == wanted.dtype == FP8.storage
        assert torch.equal(q.float(), wanted.float())  # whatever a zero's sign
        assert torch.equal(row_scale.nan_to_num(nan=77), wanted_scale.nan_to_num(nan=77))


def test_the_gate_is_rounded_before_the_product(device: torch.device) -> None:
    x = (3 * torch.randn(6, 600, device=device)).bfloat16()
    q, scale = activation_launch.activation_quantize(x, "relu2", True)
    gate, up = x.float().chunk(2, dim=-1)
    once_q, once_scale = quantize_rows_reference((gate.relu().square() * up).bfloat16())
    assert (q != once_q).any()
    assert (scale != once_scale).any()
    assert torch.equal(q, quantize_rows_reference(activated(x, "relu2", True))[0])


@GATED
@pytest.mark.parametrize("shape", [(0, 64), (5, 0), (70,), (2, 3, 70), (1, 2), (3, 4102)])
def test_shapes(shape: tuple[int, ...], gated: bool, device: torch.device) -> None:
    assert_as_the_reference(torch.randn(shape, device=device).bfloat16(), "relu2", gated)


@pytest.mark.parametrize("limit", [2**15, 100])  # of rows that a program holds
@pytest.mark.parametrize(("first", "gated"), [(1, False), (48, True), (600, False), (600, True)])
def test_values_in_front(
    first: int, gated: bool, limit: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(activation_launch, "MAX_ROW_BYTES", limit)
    monkeypatch.setattr(activation_launch, "plans", PlanCache())
    x, others = (3 * torch.randn(2, 3, 300, device=device)).bfloat16(), torch.randn(2, 3, 2 * first, device=device)
    prefix = others.bfloat16()[..., ::2]
    prefix[0, 1, 0], x[1, 2, 7] = torch.nan, torch.inf
    for scale in (None, torch.tensor(0.02, device=device)):
        for form in (torch.int8, FP8.storage):
            q, row_scale = activation_launch.activation_quantize(x, "relu2", gated, scale, form, prefix)
            wanted, wanted_scale = activation_quantize_reference(x, "relu2", gated, scale, form, prefix)
            assert torch.equal(q.float(), wanted.float())
            assert torch.equal(row_scale.nan_to_num(nan=77), wanted_scale.nan_to_num(nan=77))


@pytest.mark.parametrize("first", [0, 48])
def test_ups_before_gates(first: int, device: torch.device) -> None:
    x = (3 * torch.randn(6, 600, device=device)).bfloat16()
    turned, prefix = x.roll(300, dims=1), x[:, :first] if first else None
    for form in (torch.int8, FP8.storage):
        wanted = activation_quantize_reference(x, "relu2", True, None, form, prefix)
        for function in (
            activation_launch.activation_quantize,
            activation_quantize_reference,
            dispatch.activation_quantize,
        ):
            found = function(turned, "relu2", True, None, form, prefix, up_first=True)
            assert torch.equal(found[0].float(), wanted[0].float())
            assert torch.equal(found[1], wanted[1])
    for activate in (activation_launch.activate, activated, dispatch.activate):
        assert torch.equal(activate(turned, "relu2", True, up_first=True), activated(x, "relu2", True))


@GATED
def test_strides(gated: bool, device: torch.device) -> None:
    x = torch.randn(6, 140, device=device)
    assert_as_the_reference(x[::2], "relu", gated)
    assert_as_the_reference(x[:, ::2], "relu", gated)
    assert_as_the_reference(x[:, 3:103], "relu", gated)
    assert_as_the_reference(x.view(2, 3, 140).transpose(0, 1), "relu", gated)
    assert_as_the_reference(x[:1].expand(4, 140), "relu", gated)


@GATED
@pytest.mark.parametrize("name", ["silu", "gelu", "relu2"])
def test_what_is_not_finite(name: str, gated: bool, device: torch.device) -> None:
    x = torch.randn(5, 100, device=device).bfloat16()
    x[1, 3], x[2, 40], x[3] = torch.nan, torch.inf, 0
    assert_as_the_reference(x, name, gated)
    _, scale = activation_launch.activation_quantize(x, name, gated)
    assert scale.isnan().tolist() == [False, True, True, False, False]


@GATED
@DTYPES
@pytest.mark.parametrize("K", [100, 128, 300])
def test_a_long_row_is_computed_twice(
    K: int, dtype: torch.dtype, gated: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(activation_launch, "MAX_ROW_BYTES", 64)
    monkeypatch.setattr(activation_launch, "LONG_ROW_BLOCK", 128)
    monkeypatch.setattr(activation_launch, "plans", PlanCache())
    x = torch.randn(3, 2 * K, device=device).to(dtype)
    x[1, -1], x[2, K - 1] = 50, torch.nan
    assert_as_the_reference(x, "relu", gated)


@GATED
@DTYPES
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_as_floats(name: str, dtype: torch.dtype, gated: bool, device: torch.device) -> None:
    x = (3 * torch.randn(6, 2100, device=device)).to(dtype)
    x[1, 3], x[2, 40], x[3] = torch.nan, torch.inf, 0
    out, wanted = activation_launch.activate(x, name, gated), activated(x, name, gated)
    finite, eps = wanted.isfinite(), 0.0 if name in EXACT else torch.finfo(dtype).eps
    assert torch.equal(out.isfinite(), finite)
    assert torch.equal(out[1].isnan(), wanted[1].isnan())
    # Of float32, tails of the functions lose a few bits.
    torch.testing.assert_close(out[finite], wanted[finite], rtol=2 * eps, atol=32 * eps if eps < 1e-6 else eps / 50)


@GATED
@pytest.mark.parametrize("shape", [(0, 64), (5, 0), (70,), (2, 3, 70), (1, 2), (3, 4102)])
def test_shapes_and_strides_of_floats(shape: tuple[int, ...], gated: bool, device: torch.device) -> None:
    x = torch.randn(shape, device=device).bfloat16()
    for each in (x, x[..., ::2] if shape[-1] % 4 == 0 else x, x[None].expand(3, *shape)):
        assert torch.equal(activation_launch.activate(each, "relu2", gated), activated(each, "relu2", gated))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gelu_of_every_value_of_16_bits(dtype: torch.dtype, device: torch.device) -> None:
    x = torch.arange(-(2**15), 2**15, device=device).to(torch.int16).view(dtype).view(64, 1024)
    out = activation_launch.activate(x, "gelu", False)
    exact = x.double() * torch.special.erfc(-x.double() * 0.5**0.5) / 2
    info = torch.finfo(dtype)
    finite = exact.isfinite()
    assert torch.equal(out.isnan(), exact.isnan())
    assert torch.equal(out[~finite & ~exact.isnan()].double(), exact[~finite & ~exact.isnan()])
    # A rounding to 16 bits, and 2^-17 before it; what is below 2^-126 may become 0.
    allowed = exact.abs() * (info.eps / 2 + 2**-17) + max(info.smallest_normal * info.eps / 2, 2.0**-126)
    assert ((out.double() - exact).abs() <= allowed)[finite].all()
    assert (out.float() == exact.float().to(dtype).float())[finite].float().mean() > 0.98


OF_EXPERTS = [
    *(GatedActivation(name, gated) for name in ACTIVATIONS for gated in (True, False)),
    GatedActivation("silu", limit=0.7),
    GatedActivation("gelu_tanh", gated=False, limit=0.5),
    dataclasses.replace(GPT_OSS, limit=0.7),
]


@DTYPES
@pytest.mark.parametrize("activation", OF_EXPERTS, ids=str)
def test_gradients_of_experts_activations(
    activation: GatedActivation, dtype: torch.dtype, device: torch.device
) -> None:
    """Against autograd in float64; rows beyond the last one of a part aren't written."""
    M, K = 5, 1030
    h = torch.randn(M, activation.columns(K), device=device).to(dtype)
    grad, factors = torch.randn(M, K, device=device).to(dtype), torch.rand(M, device=device)
    end = torch.tensor([M], dtype=torch.int32, device=device)
    found = activation_launch.activation_backward(h, grad, factors, end, activation, 8)
    exact_h, exact_factors = h.double().requires_grad_(), factors.double().requires_grad_()
    out = exact_factors[:, None] * grad.double() * in_float64(activation, exact_h)
    wanted = torch.autograd.grad(out.sum(), (exact_h, exact_factors))
    assert [each.dtype for each in found] == [dtype, torch.float32]
    # A GPU's exponentials have a relative error of up to 2^-20 here.
    eps = max(torch.finfo(dtype).eps, 2**-20)
    torch.testing.assert_close(found[0].double(), wanted[0], rtol=eps, atol=1e-5)
    torch.testing.assert_close(found[1].double(), wanted[1], rtol=1e-5, atol=1e-4)


def in_float64(activation: GatedActivation, h: Tensor) -> Tensor:
    """As ``GatedActivation``, which computes in float32."""
    gate, up = h.chunk(2, dim=-1) if activation.gated else (h, None)
    if activation.limit is not None:
        gate = gate.clamp(max=activation.limit)
        up = None if up is None else up.clamp(-activation.limit, activation.limit)
    out = gate * torch.sigmoid(activation.alpha * gate) if activation.alpha != 1 else ACTIVATIONS[activation.name](gate)
    return out if up is None else out * (up + activation.up_offset)


def test_gradients_of_activations_of_few_of_many_rows(device: torch.device) -> None:
    h, grad = torch.randn(3, 64, device=device), torch.randn(3, 32, device=device)
    factors, end = torch.rand(3, device=device), torch.tensor([9, 3], dtype=torch.int32, device=device)
    activation = GatedActivation()
    alone = activation_launch.activation_backward(h, grad, factors, end[1:], activation, 3)
    among = activation_launch.activation_backward(h, grad, factors, end[1:], activation, 70)
    assert all(torch.equal(*pair) for pair in zip(alone, among, strict=True))
    assert activation_launch.activation_backward(h[:0], grad[:0], factors[:0], end[:1], activation, 4)[0].shape == (
        0,
        64,
    )
    h[1, 3] = torch.nan
    found, of_factors = activation_launch.activation_backward(h, grad, factors, end[1:], activation, 3)
    assert found[1, 3].isnan()
    assert of_factors[1].isnan()
    assert found[[0, 2]].isfinite().all()
    assert of_factors[[0, 2]].isfinite().all()
