"""Routing: the kernel against its formula, in Triton's interpreter here, compiled on a GPU; the choice of equals."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from qgemm.kernels import Routing, route
from qgemm.kernels.router import launcher
from qgemm.kernels.router.config import MAX_FEW_TOKENS
from qgemm.kernels.router.dispatch import check_router_logits
from qgemm.kernels.router.reference import router_logits_reference

KINDS = (
    Routing(8, "softmax", True),  # Qwen3-MoE
    Routing(4, "softmax", False),  # OLMoE, Qwen2-MoE
    Routing(2, "softmax", True, in_float=True),  # Mixtral
    Routing(4, "softmax_of_top_k"),  # GPT-OSS
)
SIGMOID = Routing(4, "sigmoid", in_float=True, scale=2.5, floor=1e-20)  # GLM-4-MoE
ROUNDED = Routing(4, "sigmoid", scale=1.5, offset=1e-6, rounded=True)  # LFM2-MoE
OF_LOGITS = (
    Routing(3, "sigmoid_of_top_k"),  # Llama 4
    Routing(2, "sparsemixer", margin=0.02),  # Phi-3.5-MoE
    Routing(2, "sparsemixer", margin=0.5),
)
NAN, INF = float("nan"), float("inf")


def unlike(T: int, E: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Logits that differ from one another in a row, also in bfloat16."""
    steps = torch.rand(T, E).argsort(dim=-1).float()
    return ((steps - E / 2) / 16).to(dtype).to(device)


def assert_routed(found: tuple[Tensor, Tensor], logits: Tensor, routing: Routing) -> None:
    weights, index = routing(logits.cpu())
    assert found[1].dtype == torch.int64
    assert torch.equal(found[1].cpu(), index)
    assert found[0].dtype == weights.dtype
    # exp and a sum in another order: some units in the last place of float32, which may be one of bfloat16.
    rtol = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[weights.dtype]
    torch.testing.assert_close(found[0].cpu(), weights, rtol=rtol, atol=1e-7)


@pytest.mark.parametrize("routing", [*KINDS, *OF_LOGITS], ids=str)
@pytest.mark.parametrize(
    ("T", "E", "dtype"),
    [
        (3, 128, torch.bfloat16),
        (2, 60, torch.bfloat16),  # Qwen2-MoE's
        (1, 8, torch.float16),  # fewer than a warp has threads
        (1, 512, torch.float32),
        (0, 8, torch.float32),
    ],
)
def test_the_kernel_chooses_as_the_formula(
    T: int, E: int, dtype: torch.dtype, routing: Routing, device: torch.device
) -> None:
    logits = unlike(T, E, dtype, device)
    assert_routed(launcher.route(logits, routing), logits, routing)


@pytest.mark.parametrize(
    ("routing", "E", "biased"),
    [
        (SIGMOID, 160, True),
        (SIGMOID, 24, False),
        (replace(SIGMOID, groups=8, kept_groups=4), 256, True),  # DeepSeek V3's
        (replace(SIGMOID, groups=4, kept_groups=1), 32, False),
        (replace(SIGMOID, groups=4, kept_groups=2), 24, True),  # by PyTorch
        (Routing(4, "sigmoid", normalized=False), 128, True),
        (Routing(6, in_float=True, floor=1e-12), 64, True),  # Ernie 4.5
    ],
    ids=str,
)
def test_the_choice_by_groups_and_with_a_bias(routing: Routing, E: int, biased: bool, device: torch.device) -> None:
    logits = unlike(5, E, torch.float32, device)
    bias = torch.rand(E).to(device) if biased else None
    weights, index = launcher.route(logits, routing, bias)
    wanted, its_index = routing(logits.cpu(), None if bias is None else bias.cpu())
    # The formula's order is open.
    order, its_order = index.cpu().argsort(-1), its_index.argsort(-1)
    assert torch.equal(index.cpu().gather(-1, order), its_index.gather(-1, its_order))
    torch.testing.assert_close(weights.cpu().gather(-1, order), wanted.gather(-1, its_order), rtol=4e-6, atol=1e-7)


@pytest.mark.parametrize("biased", [False, True])
def test_weights_that_are_rounded_at_each_step(biased: bool, device: torch.device) -> None:
    """In bfloat16, where the sum of the weights is one of few values."""
    logits = unlike(5, 32, torch.bfloat16, device)
    bias = torch.rand(32).to(device) if biased else None
    weights, index = launcher.route(logits, ROUNDED, bias)
    wanted, its_index = ROUNDED(logits.cpu(), None if bias is None else bias.cpu())
    order, its_order = index.cpu().argsort(-1), its_index.argsort(-1)
    assert torch.equal(index.cpu().gather(-1, order), its_index.gather(-1, its_order))
    found, expected = weights.cpu().gather(-1, order), wanted.gather(-1, its_order)
    assert (found != expected).sum() <= 1  # whose exp a GPU rounds to another side
    torch.testing.assert_close(found, expected, rtol=8e-3, atol=0.0)


def test_sigmoids_that_vanish_or_are_none(device: torch.device) -> None:
    logits = torch.full((4, 40), -200.0, device=device)
    logits[1, 7] = INF
    logits[2, 7] = NAN
    logits[3, 7:11] = 0.0
    weights, index = launcher.route(logits, SIGMOID)
    assert weights[0].tolist() == [0.0] * 4
    assert index[0].tolist() == [0, 1, 2, 3]
    assert (index[1, 0], weights[1].tolist()) == (7, [2.5, 0.0, 0.0, 0.0])
    assert index[2, 0] == 7
    assert weights[2].isnan().all()
    assert index[3].tolist() == [7, 8, 9, 10]
    assert weights[3].tolist() == [0.625] * 4


def test_strides(device: torch.device) -> None:
    logits = unlike(3, 16, torch.float32, device).t().contiguous().t()
    assert_routed(launcher.route(logits, KINDS[1]), logits, KINDS[1])


@pytest.mark.parametrize("routing", [*KINDS, *OF_LOGITS], ids=str)
def test_of_equal_experts_the_kernel_takes_the_first(routing: Routing, device: torch.device) -> None:
    logits = torch.zeros(2, 40, device=device)
    logits[0, 1::2] = -0.0  # equal to 0
    logits[1, 30] = 1.0
    _, index = launcher.route(logits, routing)
    k = routing.top_k
    assert index.tolist() == [[*range(k)], [30, *range(k - 1)]]


@pytest.mark.parametrize("routing", KINDS, ids=str)
@pytest.mark.parametrize("logits", [(NAN, 1.0), (-NAN, 1.0), (INF, 1.0), (-INF, -INF)], ids=str)
def test_garbage_is_never_a_finite_weight_nor_an_expert_that_is_none(
    logits: tuple[float, ...], routing: Routing, device: torch.device
) -> None:
    x = torch.zeros(2, 16, device=device)
    x[1] = x[1].fill_(logits[1])
    x[1, 5] = logits[0]
    assert x[1, 5].signbit() == (math.copysign(1.0, logits[0]) < 0)
    weights, index = launcher.route(x, routing)
    assert weights[0].isfinite().all()
    assert weights[1].isnan().all()
    assert index.unique(dim=-1).shape == index.shape
    assert index.min() >= 0
    assert index.max() < 16


def test_experts_that_are_ruled_out(device: torch.device) -> None:
    x = torch.full((1, 16), -INF, device=device)
    x[0, 3], x[0, 9] = 1.0, 2.0
    weights, index = launcher.route(x, Routing(3))
    assert index.tolist() == [[9, 3, 0]]
    assert weights[0, 2] == 0
    assert weights.sum().item() == pytest.approx(1.0)


@pytest.mark.parametrize("E", [33, launcher.MAX_EXPERTS + 1])
def test_many(E: int, device: torch.device) -> None:
    """All experts of a few; and of more than a warp holds."""
    logits, routing = unlike(2, E, torch.float32, device), Routing(33)
    assert_routed(launcher.route(logits, routing), logits, routing)


@pytest.mark.parametrize("routing", [*KINDS, *OF_LOGITS, ROUNDED, replace(SIGMOID, groups=8, kept_groups=4)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_on_a_cpu_it_has_the_bits_of_pytorch(dtype: torch.dtype, routing: Routing) -> None:
    logits = torch.randn(50, 64).to(dtype)  # with equal ones in bfloat16
    for found, wanted in zip(route(logits, routing), routing(logits), strict=True):
        assert torch.equal(found, wanted)


def test_arguments() -> None:
    with pytest.raises(TypeError, match=r"logits is torch\.int64"):
        route(torch.zeros(2, 8, dtype=torch.int64), Routing(2))
    with pytest.raises(ValueError, match=r"logits is \[2, 8\]; it must be \[T, E\] with at least top_k = 9 experts"):
        route(torch.zeros(2, 8), Routing(9))
    with pytest.raises(ValueError, match="kind is 'linear'"):
        Routing(2, "linear")
    with pytest.raises(ValueError, match="kept_groups is 3; it must be from 1 to groups = 2"):
        Routing(2, "sigmoid", groups=2, kept_groups=3)
    with pytest.raises(ValueError, match="logits has 8 experts; they must be 3 groups"):
        route(torch.zeros(2, 8), Routing(2, groups=3))
    with pytest.raises(ValueError, match="top_k is 3, more than 1 of 4 groups have of 8"):
        route(torch.zeros(2, 8), Routing(3, groups=4))
    with pytest.raises(ValueError, match=r"bias is torch\.float32 \[4\]; it must be floats, \[8\]"):
        route(torch.zeros(2, 8), Routing(2), torch.zeros(4))
    with pytest.raises(ValueError, match="softmax_of_top_k chooses by the logits alone"):
        route(torch.zeros(2, 8), Routing(2, "softmax_of_top_k"), torch.zeros(8))
    with pytest.raises(ValueError, match="top_k is 0"):
        Routing(0)


def operands(
    T: int, E: int, K: int, dtype: torch.dtype, of_weight: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    x, weight, bias = torch.randn(T, K), torch.randn(E, K) / K**0.5, torch.randn(E)
    return x.to(device, dtype), weight.to(device, of_weight), bias.to(device, of_weight)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(
    ("T", "E", "K", "dtype", "of_weight", "to"),
    [
        (1, 8, 512, torch.bfloat16, torch.bfloat16, torch.bfloat16),
        (5, 8, 2880, torch.bfloat16, torch.bfloat16, torch.bfloat16),  # GPT-OSS's K; a token alone
        (3, 5, 53, torch.float16, torch.float16, torch.float16),
        (2, 3, 1, torch.bfloat16, torch.bfloat16, torch.float32),  # Triton makes a constant of a length of 1
        (4, 6, 1030, torch.bfloat16, torch.bfloat16, torch.float32),  # GLM-4-MoE; a block that is nearly empty
        (MAX_FEW_TOKENS, 3, 200, torch.bfloat16, torch.float32, torch.float32),  # DeepSeek V3
        (2, 6, 300, torch.float32, torch.float32, torch.float32),
    ],
)
def test_logits_of_few_tokens(
    T: int,
    E: int,
    K: int,
    dtype: torch.dtype,
    of_weight: torch.dtype,
    to: torch.dtype,
    biased: bool,
    device: torch.device,
) -> None:
    x, weight, bias = operands(T, E, K, dtype, of_weight, device)
    given = x, weight, bias if biased else None
    found, wanted = launcher.router_logits(*given, to), router_logits_reference(*given, to)
    assert found.dtype == wanted.dtype == to
    exact = router_logits_reference(*given, torch.float64)
    assert (found.double() - exact).norm() <= 2 * (wanted.double() - exact).norm() + 1e-7 * exact.norm()
    # The same bits among any number; unless rows aren't aligned, which the compiler spreads over threads in other ways.
    for token in (0, T - 1) if K % 16 == 0 else ():
        assert torch.equal(launcher.router_logits(x[token : token + 1], *given[1:], to)[0], found[token])


def test_logits_of_views_and_of_many_tokens(device: torch.device) -> None:
    x, weight, bias = operands(40, 8, 64, torch.bfloat16, torch.bfloat16, device)
    few = launcher.router_logits(x[:3], weight, bias, torch.bfloat16)
    views = x.t().contiguous().t()[:3], torch.stack((weight, weight), 1)[:, 0], bias.repeat_interleave(2)[::2]
    assert torch.equal(launcher.router_logits(*views, torch.bfloat16), few)
    every_other = torch.stack((x[:3], x[:3]), 1)[:, 1]
    assert torch.equal(launcher.router_logits(every_other, weight, bias, torch.bfloat16), few)
    many = launcher.router_logits(x, weight, bias, torch.float32)
    assert torch.equal(many, router_logits_reference(x, weight, bias, torch.float32))
    assert launcher.router_logits(x[:0], weight, bias, torch.float32).shape == (0, 8)


def test_logits_of_what_is_not_finite(device: torch.device) -> None:
    x, weight, _ = operands(3, 4, 70, torch.bfloat16, torch.bfloat16, device)
    x[1, 5], x[2, 69] = NAN, INF
    found = launcher.router_logits(x, weight, None, torch.float32)
    assert found.isfinite().tolist() == [[True] * 4, [False] * 4, [False] * 4]


BF16, F32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("x", "weight", "bias", "dtype", "error", "message"),
    [
        (torch.ones(2, 4, dtype=torch.int8), torch.ones(3, 4), None, F32, TypeError, "x is torch.int8"),
        (torch.ones(2, 4), torch.ones(3, 5), None, F32, ValueError, "x is \\[2, 4\\] and weight \\[3, 5\\]"),
        (torch.ones(2, 4), torch.ones(3, 4), None, BF16, TypeError, "dtype is torch.bfloat16"),
        (torch.ones(2, 4).bfloat16(), torch.ones(3, 4), None, BF16, TypeError, "weight is torch.float32"),
        (torch.ones(2, 4), torch.ones(3, 4), torch.ones(2), F32, ValueError, "bias is \\[2\\]; it must be \\[3\\]"),
        (torch.ones(2, 4), torch.ones(3, 4), torch.ones(3).int(), F32, TypeError, "bias is torch.int32"),
    ],
)
def test_logits_of_what_does_not_fit(
    x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        check_router_logits(x, weight, bias, dtype)
