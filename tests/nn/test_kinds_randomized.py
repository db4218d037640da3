"""Layers of random schemes, sizes and inputs on a CPU, against plain PyTorch and float64; a seed is always the same."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from families.schemes import EVERY_LAYER, input_scale_for
from torch import Tensor, nn

from qgemm.kernels.reference import (
    block_scaled_mm_reference,
    quantize_groups_reference,
    quantize_rows_reference,
    scaled_mm_reference,
    weight_only_linear_reference,
)
from qgemm.kernels.scaled_weight import ScaledWeight
from qgemm.nn import AsymmetricLinear, BlockScaledLinear, LinearLayer, OutlierLinear, RotatedLinear, linear_class
from qgemm.numerics.hadamard import hadamard
from qgemm.scheme import resolve_scheme

CASES, COMPLETE_SEEDS = 20, 50
DTYPES = [torch.float16, torch.bfloat16, torch.float32]
# Around vectors of instructions, packed blocks, groups and their halves.
SIZES = [1, 15, 16, 17, 31, 32, 64, 127, 128, 129, 255, 256, 257, 384, 513]


def random_scheme(rng: random.Random, K: int) -> str:
    """One of those with a name, or of a family."""
    group = 16 * rng.randint(1, 12)
    size = rng.choice(["", "-channel", f"-{group}"])
    size = "" if group == 128 else size  # which isn't named
    packed = f"int4{size}{rng.choice(['', '-asymmetric'])}"
    packed += "" if size == "-channel" else rng.choice(["", "-ordered"])
    count = 16 * rng.randint(1, 2)
    outliers = f"{rng.choice(['int8', 'int8-static'])}-outliers-{count if count <= K else 16}"
    grouped = [f"nf4-{group + 64}", f"int8-weight-{group}{rng.choice(['', '-asymmetric', '-asymmetric-ordered'])}"]
    found = rng.choice([*(2 * [packed, f"{packed}-int8"]), *grouped, outliers, *2 * [rng.choice(EVERY_LAYER)]])
    return found if resolve_scheme(found).outlier_columns <= K else packed


def random_layer(rng: random.Random, name: str, N: int, K: int, dtype: torch.dtype) -> LinearLayer:
    """Of random weights, some rows of them zeros, in random order of columns if it has one."""
    scheme, linear = resolve_scheme(name), nn.Linear(K, N, bias=rng.random() < 0.5).to(dtype)
    linear.weight.data *= 10 ** rng.uniform(-2, 2)
    linear.weight.data[rng.randrange(N)] = 0
    columns = torch.tensor(sorted(rng.sample(range(K), scheme.outlier_columns)), dtype=torch.int64)
    made = linear_class(scheme)
    layer = made.from_linear(
        linear, scheme, input_scale_for(scheme), outlier_columns=columns if scheme.outlier_columns else None
    )
    if getattr(layer, "input_order", None) is not None:
        layer.input_order = nn.Parameter(torch.randperm(K).int(), requires_grad=False)
    return layer


def random_input(rng: random.Random, K: int, dtype: torch.dtype) -> Tensor:
    """Of up to three dimensions and any strides; a row of zeros, one of large values."""
    shape = rng.choice([(K,), (1, K), (rng.randint(1, 70), K), (2, rng.randint(0, 9), K)])
    layout = rng.randrange(3)
    if layout == 0 or len(shape) == 1:
        x = torch.randn(shape)
    elif layout == 1:
        x = torch.randn(*shape[:-1], 2 * K)[..., ::2]
    else:
        x = torch.randn(*shape[:-2], K, shape[-2]).transpose(-1, -2)
    if x.numel():
        x.view(-1) if x.ndim == 1 else x.select(-2, rng.randrange(x.shape[-2])).mul_(rng.choice([0, 1, 100]))
    return x.to(dtype)


def products(layer: LinearLayer, x: Tensor) -> tuple[Tensor, Tensor]:
    """What plain PyTorch gives for ``layer``, rounded as its output is, and the same sums in float64."""
    dtype, bias = x.dtype, layer.bias
    added = 0 if bias is None else bias.double()
    if layer.scheme.is_weight_only or layer.scheme.weight.dtype == "int4":
        return _of_weights(layer, x)
    if isinstance(layer, BlockScaledLinear):
        q, scale = quantize_groups_reference(x)
        rows, row_scale = q.reshape(-1, x.shape[-1]), scale.reshape(-1, scale.shape[-1])
        reference = block_scaled_mm_reference(rows, layer.stored("weight"), row_scale, layer.weight_scale, bias, dtype)
        exact = _spread(q.double(), scale) @ layer.dequantize(torch.float64).weight.t() + added
        return reference.view(exact.shape), exact
    outliers: Tensor | float = 0.0
    if isinstance(layer, OutlierLinear):
        kept = x.index_select(-1, layer.outlier_columns)
        outliers = kept.double() @ layer.outlier_weight.to(dtype).double().t()
        x = x.index_fill(-1, layer.outlier_columns, 0)
    if isinstance(layer, RotatedLinear):
        rotated = torch.ops.qgemm.hadamard(x)
        size = x.double().norm(dim=-1, keepdim=True)
        assert ((rotated - hadamard(x.double())).abs() <= 2 * torch.finfo(dtype).eps * size).all()
        x = rotated
    zero_point = layer.input_zero_point if isinstance(layer, AsymmetricLinear) else None
    weight = layer.stored("weight").detach()
    q, scale = quantize_rows_reference(x, layer.stored("input_scale"), zero_point, weight.dtype)
    rows = q.reshape(-1, x.shape[-1])
    reference = scaled_mm_reference(rows, weight.t(), scale.reshape(-1), layer.weight_scale, bias, dtype)
    weight = weight.double() * layer.weight_scale.double()[:, None]
    exact = q.double() * scale.double()[..., None] @ weight.t() + added
    reference = reference.view(exact.shape)
    return (reference.double() + outliers).to(dtype), exact + outliers


def _of_weights(layer: LinearLayer, x: Tensor) -> tuple[Tensor, Tensor]:
    scheme, size = layer.scheme, layer.scheme.weight.group_size or layer.in_features
    names = ("weight", "weight_scale", "weight_zero_point", "weight_global_scale", "input_order", "bias")
    has_int8 = scheme.activation is not None
    whole = ScaledWeight(*map(layer.stored, names), layer.in_features, scheme.weight.dtype, size, has_int8)
    added = 0 if layer.bias is None else layer.bias.double()
    if has_int8:
        q, scale = quantize_rows_reference(x)
        rows = q.double() * scale.double()[..., None]
    else:
        rows = x.double()
    reference, exact = weight_only_linear_reference(x, whole), rows @ whole.dequantize(torch.float64).t() + added
    if x.dtype == torch.float32 and not has_int8 and exact.numel():
        # With operands exchanged PyTorch's library adds in another order: with AVX-512, errors are up to 8 times as
        # large.
        exchanged = (whole.dequantize(torch.float32) @ x.reshape(-1, x.shape[-1]).t()).t() + added
        exchanged = exchanged.float().view(exact.shape)
        reference = max(reference, exchanged, key=lambda each: float((each - exact).abs().max()))
    return reference, exact


def _spread(q: Tensor, scale: Tensor) -> Tensor:
    return q * scale.double().repeat_interleave(128, dim=-1)[..., : q.shape[-1]]


SEEDS = [pytest.param(seed, marks=[] if seed < 6 else pytest.mark.complete) for seed in range(COMPLETE_SEEDS)]


@pytest.mark.parametrize("seed", SEEDS)
@torch.no_grad()
def test_random_layers(seed: int, assert_as_accurate: Any) -> None:
    rng = random.Random(seed)
    for number in range(CASES):
        torch.manual_seed(1000 * seed + number)
        N, K = (rng.choice([*SIZES, rng.randint(1, 600)]) for _ in range(2))
        dtype, name = rng.choice(DTYPES), random_scheme(rng, K)
        layer, x = random_layer(rng, name, N, K, dtype), random_input(rng, K, dtype)
        if isinstance(layer, OutlierLinear):
            x[..., layer.outlier_columns] *= 10
        reference, exact = products(layer, x)
        case = f"case {number}: {layer}, x {x.dtype} {list(x.shape)} with strides {x.stride()}"
        try:
            assert_as_accurate(layer(x), reference, exact)
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from error
