"""Rounding to nearest against NumPy and the kernels, and scales of least squared error against a search by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from families.schemes import OF_WEIGHTS
from torch import Tensor, nn

from calibration.numpy_rounding import grid, numpy_round, numpy_scales
from qgemm.calibration.method import Block, Call, LayerWork
from qgemm.calibration.rounding import (
    MSEWeights,
    dequantize,
    expand_scale,
    mse_scale,
    nearest_scale,
    output_loss,
    round_by_mse,
    round_to_nearest,
    round_weight,
)
from qgemm.kernels import quantize_rows
from qgemm.nn import linear_class
from qgemm.numerics.groups import steps_of
from qgemm.scheme import INT8_ROWS, SCHEMES, resolve_scheme

GRIDS = [(8, None), (4, None), (8, 32), (4, 32), (4, 128)]


def heavy_tailed(N: int, K: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(N, K, generator=generator) * torch.randn(N, K, generator=generator).square()


def moment_of(K: int, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(256, K, generator=generator) @ torch.randn(K, K, generator=generator) + 1.0
    return x.T @ x / 256


def row_errors(weight: Tensor, scale: Tensor, bits: int, group_size: int | None) -> Tensor:
    return (
        dequantize(round_weight(weight, scale, grid(bits, group_size)), grid(bits, group_size), torch.float64)
        - weight.double()
    )


@pytest.mark.parametrize(("bits", "group_size"), GRIDS)
@pytest.mark.parametrize("K", [1, 96, 100])  # groups of 32: less than one, three, and a fourth of 4
def test_nearest_is_numpys(bits: int, group_size: int | None, K: int) -> None:
    weight = heavy_tailed(7, K)
    weight[2] = 0.0
    weight[3, :32] = 0.0
    weight[4] = 1e-42  # its scale would be subnormal
    weight[5] = torch.arange(K) - 7.5  # halves
    quantized = round_to_nearest(weight, grid(bits, group_size))
    scales = numpy_scales(weight.double().numpy(), bits, group_size)
    q = numpy_round(weight.numpy(), scales.astype(np.float32), bits)
    assert quantized.values.dtype == torch.int8
    assert quantized.scale.dtype == torch.float32
    assert quantized.scale.shape == ((7,) if group_size is None else (7, -(-K // group_size)))
    assert np.array_equal(quantized.values.numpy(), q)
    assert np.array_equal(expand_scale(quantized.scale, group_size, K).expand(7, K).numpy(), scales)
    assert np.array_equal(dequantize(quantized, grid(bits, group_size), torch.float64).numpy(), q * scales)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_eight_bits_per_row_are_those_of_the_kernels(dtype: torch.dtype) -> None:
    weight = heavy_tailed(33, 70).to(dtype)
    weight[1] = 0.0
    q, scale = quantize_rows(weight.float() if dtype == torch.float64 else weight)
    quantized = round_to_nearest(weight, INT8_ROWS)
    assert torch.equal(quantized.values, q)
    assert torch.equal(quantized.scale, scale)


@pytest.mark.parametrize("value", [1.0, -1.0])
def test_the_largest_value_of_four_bits_errs_by_half_a_step(value: float) -> None:
    for size in torch.linspace(1, 2, 50):  # 7.5 steps, a little more or a little less as its scale was rounded
        quantized = round_to_nearest(torch.stack((size * value, size * 0))[None], grid(4))
        assert quantized.values[0, 0] in ([7] if value > 0 else [-7, -8])
        error = dequantize(quantized, grid(4))[0, 0] - size * value
        assert abs(error).item() == pytest.approx(quantized.scale.item() / 2, rel=1e-5)


@pytest.mark.parametrize(("bits", "group_size"), GRIDS)
@pytest.mark.parametrize("weighing", [None, "diagonal", "blocks"])
def test_scales_of_least_error_are_never_worse(bits: int, group_size: int | None, weighing: str | None) -> None:
    weight, moment = heavy_tailed(8, 100), moment_of(100)
    given = {None: None, "diagonal": moment.diagonal(), "blocks": moment}[weighing]
    weigh = {None: torch.eye(100), "diagonal": moment.diagonal().diag(), "blocks": moment}[weighing].double()

    def group_losses(scale: Tensor) -> Tensor:
        errors = row_errors(weight, scale, bits, group_size)
        size = group_size or 100
        parts = [slice(start, start + size) for start in range(0, 100, size)]
        return torch.stack([((errors[:, p] @ weigh[p, p]) * errors[:, p]).sum(1) for p in parts], 1)

    plain, best = nearest_scale(weight, grid(bits, group_size)), mse_scale(weight, grid(bits, group_size), given)
    before, after = group_losses(plain), group_losses(best)
    assert (after <= before * (1 + 1e-5)).all()
    # With four bits and such tails a tenth or more is gained; with eight there is little to gain.
    assert after.sum() < before.sum() * (0.9 if bits == 4 else 0.9999)
    # No other multiple on the grid is better.
    for percent in range(106, 38, -2):
        assert (after <= group_losses(plain * (percent / 100)) * (1 + 1e-5)).all()


def test_a_row_of_zeros_keeps_its_scale_and_large_weights_are_searched_in_pieces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weight = heavy_tailed(9, 64)
    weight[3] = 0.0
    whole = mse_scale(weight, grid(4, 32), moment_of(64))
    assert whole[3].tolist() == [1.0, 1.0]
    monkeypatch.setattr("qgemm.calibration.rounding._PIECE", 2 * 64)
    torch.testing.assert_close(mse_scale(weight, grid(4, 32), moment_of(64)), whole)


def few_directions(K: int) -> Tensor:
    """The second moment of inputs with a mean, a few large channels, and most of the rest in few directions."""
    generator = torch.Generator().manual_seed(2)
    mix = torch.linalg.qr(torch.randn(K, K, generator=generator))[0] * (torch.arange(K) + 1.0)[:, None] ** -0.7
    x = torch.randn(2 * K, K, generator=generator) @ mix + 0.1 * torch.randn(K, generator=generator)
    x[:, :8] *= 20
    return x.T @ x / len(x)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("inputs", ["white", "mixed", "few directions"])
def test_of_long_rows_nothing_that_matters_is_missed(bits: int, inputs: str) -> None:
    K = 384
    moment = {"white": torch.eye(K), "mixed": moment_of(K), "few directions": few_directions(K)}[inputs]
    weight = heavy_tailed(40, K)

    def losses(scale: Tensor) -> Tensor:
        errors = row_errors(weight, scale, bits, None)
        return ((errors @ moment.double()) * errors).sum(1)

    plain, best = nearest_scale(weight, grid(bits)), mse_scale(weight, grid(bits), moment)
    least = torch.stack([losses(plain * (percent / 100)) for percent in range(106, 38, -2)]).amin(0)
    found = losses(best)
    assert (found <= losses(plain) * (1 + 1e-5)).all()
    assert found.sum() <= least.sum() * (1.002 if bits == 4 else 1.0001)
    assert (found <= least * 1.1).all()
    # The same every time, and in pieces.
    assert torch.equal(mse_scale(weight, grid(bits), moment), best)
    torch.testing.assert_close(mse_scale(weight[7:20], grid(bits), moment), best[7:20])
    assert mse_scale(torch.zeros(2, K), grid(bits), moment).tolist() == [1.0, 1.0]


def test_loss_is_that_of_the_outputs() -> None:
    x = torch.randn(300, 40, dtype=torch.float64)
    weight, approximation = torch.randn(2, 8, 40, dtype=torch.float64)
    lost = (x @ (weight - approximation).T).square().sum() / (x @ weight.T).square().sum()
    assert output_loss(weight, approximation, x.T @ x / 300) == pytest.approx(float(lost))
    assert output_loss(weight, weight, x.T @ x) == 0
    assert output_loss(torch.zeros(8, 40), approximation, x.T @ x) == 0


def block_of(linear: nn.Linear, batches: list[Tensor], scheme: str = "int8") -> Block:
    model = nn.Sequential(linear)
    works = {"0": LayerWork("0", linear, SCHEMES[scheme])}
    return Block("", model, model, works, [Call((x,)) for x in batches])


def test_the_method_decides_weights_with_and_without_data() -> None:
    linear = nn.Linear(64, 16)
    linear.weight.data = heavy_tailed(16, 64)
    x = torch.randn(50, 64) * torch.linspace(0.1, 4, 64)
    plain, weighted = block_of(linear, []), block_of(linear, [x[:20], x[20:]])
    MSEWeights().apply(plain)
    MSEWeights(by_input=True).apply(weighted)
    for block, moment in ((plain, None), (weighted, x.T @ x / 50)):
        weight = block.layers["0"].weight
        assert weight is not None
        assert block.layers["0"].notes == []
        expected = mse_scale(linear.weight.detach(), grid(8), moment)
        torch.testing.assert_close(weight.scale, expected)
        assert torch.equal(weight.values, round_weight(linear.weight, weight.scale, INT8_ROWS).values)
    assert not torch.equal(plain.layers["0"].weight.scale, weighted.layers["0"].weight.scale)  # type: ignore[union-attr]


def test_what_the_method_has_no_data_for() -> None:
    linear = nn.Linear(64, 16)
    with pytest.raises(ValueError, match="mse-weights with by_input needs calibration data"):
        MSEWeights(by_input=True).apply(block_of(linear, []))
    block = block_of(linear, [torch.empty(0, 64)])
    MSEWeights(by_input=True).apply(block)
    work = block.layers["0"]
    assert work.notes == ["mse-weights: it saw no tokens, so all inputs count alike"]
    assert torch.equal(work.weight.scale, mse_scale(linear.weight.detach(), INT8_ROWS))  # type: ignore[union-attr]


@pytest.mark.parametrize("name", OF_WEIGHTS)
def test_weights_of_every_scheme(name: str) -> None:
    linear, scheme = nn.Linear(300, 24), resolve_scheme(name).weight
    weight = linear.weight.detach()
    weight *= torch.linspace(0.01, 3, 24)[:, None]
    weight[3] = 0
    plain = round_to_nearest(weight, scheme)
    layer = linear_class(name).from_linear(linear, name)
    assert torch.equal(dequantize(plain, scheme), layer.dequantize().weight)
    moment = torch.rand(300) + 0.1
    for importance in (None, moment, torch.diag(moment)):
        best = round_by_mse(weight, importance, scheme)
        assert best.values.dtype == scheme.format.storage
        assert scheme.scale_dtype != "steps" or steps_of(best.scale) is not None
        decided = linear_class(name).from_linear(linear, name, weight=best.parts)
        assert torch.equal(dequantize(best, scheme), decided.dequantize().weight)
        weights = moment if importance is not None else torch.ones(300)
        losses = [((dequantize(each, scheme) - weight).square() @ weights).sum().item() for each in (best, plain)]
        # Of powers of two the plain ones may be the best; where all scales are fractions of the largest, none is free.
        assert losses[0] <= losses[1] * (1 + 1e-6)
        if scheme.format.bits == 4 and scheme.scale_dtype in ("bfloat16", "steps"):
            assert losses[0] < 0.99 * losses[1]


def test_the_largest_magnitude_of_either_sign_determines_the_global_scale() -> None:
    weight, scheme = heavy_tailed(16, 64).abs(), resolve_scheme("nvfp4").weight
    positive, negative = (dequantize(round_to_nearest(each, scheme), scheme) for each in (weight, -weight))
    assert torch.equal(negative, -positive)


def test_powers_of_two_may_be_halved_or_doubled() -> None:
    scheme = resolve_scheme("mxfp4").weight
    groups = torch.cat((torch.full((1, 31), 0.5), torch.tensor([[7.1]])), 1)  # 7.1 saturates under a scale of 1
    assert nearest_scale(groups, scheme).tolist() == [[1.0]]
    assert mse_scale(groups, scheme).tolist() == [[1.0]]
    assert mse_scale(groups, scheme, torch.tensor([1e-3] * 31 + [1.0])).tolist() == [[2.0]]
