"""GPTQ against the same algorithm in NumPy, written with the paper's inverses and none of its Cholesky factors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from families.schemes import OF_WEIGHTS
from torch import Tensor, nn

from calibration.numpy_rounding import Array, grid, numpy_round, numpy_scales
from qgemm.calibration.gptq import GPTQ, SingularHessian, gptq
from qgemm.calibration.method import Block, Call, LayerWork
from qgemm.calibration.rounding import dequantize, mse_scale, output_loss, round_to_nearest, round_weight
from qgemm.nn import linear_class
from qgemm.nn.linear_layer import linear_weight
from qgemm.scheme import INT8_ROWS, SCHEMES, resolve_scheme

N, K = 12, 40


def numpy_gptq(
    weight: Array, moment: Array, bits: int, group_size: int | None, act_order: bool, damping: float = 0.01
) -> Array:
    """The values of OBQ with a fixed order of columns: equation 2 of the paper, with an inverse for every column."""
    scales = numpy_scales(weight, bits, group_size)
    damped = moment + damping * np.diag(moment).mean() * np.eye(len(moment))
    order = sorted(range(len(moment)), key=lambda k: -moment[k, k]) if act_order else list(range(len(moment)))
    left, q = weight.copy(), np.zeros_like(weight)
    for place, k in enumerate(order):
        to_come = order[place:]
        inverse = np.linalg.inv(damped[np.ix_(to_come, to_come)])
        q[:, k] = numpy_round(left[:, k], scales[:, k], bits)
        error = (left[:, k] - q[:, k] * scales[:, k]) / inverse[0, 0]
        left[:, to_come] -= np.outer(error, inverse[0])
    return q


def correlated(rows: int, K: int, seed: int = 0) -> Tensor:
    """Inputs ``[rows, K]`` of which a fourth of the directions hold nearly all."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(K, K, dtype=torch.float64, generator=generator)
    sizes = torch.exp(torch.linspace(0, -6, K, dtype=torch.float64))
    return torch.randn(rows, K, dtype=torch.float64, generator=generator) * sizes @ mix


def weight_and_moment(N: int = N, K: int = K, seed: int = 0) -> tuple[Tensor, Tensor]:
    x = correlated(300, K, seed)
    weight = torch.randn(N, K, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + 1))
    return weight, x.T @ x / 300


@pytest.mark.parametrize("act_order", [True, False])
@pytest.mark.parametrize(("bits", "group_size"), [(4, None), (8, None), (4, 8), (4, 16), (8, 128)])
@pytest.mark.parametrize("block_size", [1, 16, 128])  # of 40 columns: none waits, some do, all in one
def test_values_are_numpys(bits: int, group_size: int | None, act_order: bool, block_size: int) -> None:
    weight, moment = weight_and_moment()
    result = gptq(weight, moment, grid(bits, group_size), act_order=act_order, block_size=block_size)
    expected = numpy_gptq(weight.numpy(), moment.numpy(), bits, group_size, act_order)
    assert np.array_equal(result.weight.values.numpy(), expected)
    scales = round_to_nearest(weight, grid(bits, group_size)).scale
    assert torch.equal(result.weight.scale, scales)
    assert (expected != round_to_nearest(weight, grid(bits, group_size)).values.numpy()).mean() > 0.1


def test_other_dampings_are_numpys_too() -> None:
    weight, moment = weight_and_moment()
    for damping in (0.0, 0.3):
        expected = numpy_gptq(weight.numpy(), moment.numpy(), 4, 8, True, damping)
        assert np.array_equal(gptq(weight, moment, grid(4, 8), damping=damping).weight.values.numpy(), expected)


# Seeds 0 to 9 gave factors of 8.5 to 12; independent inputs leave 1.2.
@pytest.mark.parametrize(("bits", "group_size"), [(4, None), (4, 32), (8, None), (8, 32)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loss_is_lower_than_that_of_rounding_to_nearest(bits: int, group_size: int | None, dtype: torch.dtype) -> None:
    weight, moment = weight_and_moment(64, 96)
    weight, moment = weight.to(dtype), moment.float()
    result = gptq(weight, moment, grid(bits, group_size))
    nearest = round_to_nearest(weight, grid(bits, group_size))
    plain_loss = output_loss(weight, dequantize(nearest, grid(bits, group_size)), moment)
    assert result.loss == output_loss(weight, dequantize(result.weight, grid(bits, group_size)), moment)
    assert result.loss < plain_loss / 7
    assert result.damping == 0.01


def test_dead_columns_are_rounded_to_nearest_and_move_nothing() -> None:
    weight, moment = weight_and_moment()
    dead = torch.tensor([0, 7, 39])
    alive = torch.tensor([k for k in range(K) if k not in (0, 7, 39)])
    moment[dead] = 0.0
    moment[:, dead] = 0.0
    scale = round_to_nearest(weight, grid(4)).scale
    values = gptq(weight, moment, grid(4), scale=scale).weight.values
    assert torch.equal(values[:, dead], round_weight(weight, scale, grid(4)).values[:, dead])
    alone = gptq(weight[:, alive], moment[alive][:, alive], grid(4), scale=scale)
    assert torch.equal(values[:, alive], alone.weight.values)
    # Nothing is known of any: all to nearest.
    unknown = gptq(weight, torch.zeros(K, K), grid(4)).weight
    assert torch.equal(unknown.values, round_weight(weight, scale, grid(4)).values)


def test_the_same_bits_each_time_and_ties_keep_their_order() -> None:
    weight, moment = weight_and_moment()
    first, second = (gptq(weight.float(), moment.float(), grid(4, 8)) for _ in range(2))
    assert torch.equal(first.weight.values, second.weight.values)
    even = moment / torch.outer(moment.diagonal().sqrt(), moment.diagonal().sqrt())
    even.fill_diagonal_(1.0)
    by_size, in_order = (gptq(weight, even, grid(4), act_order=act_order).weight.values for act_order in (True, False))
    assert torch.equal(by_size, in_order)


def test_a_singular_moment_takes_more_damping_or_is_refused() -> None:
    weight, moment = weight_and_moment()
    # Not positive definite by a twentieth of the mean, as rounding never leaves it, so that 0.1 helps and 0.01 doesn't.
    mean = moment.diagonal().mean()
    values, vectors = torch.linalg.eigh(moment)
    values[0] = -0.05 * mean
    indefinite = vectors @ values.diag() @ vectors.T
    result = gptq(weight, indefinite, grid(4))
    assert result.damping == pytest.approx(0.1)
    again = gptq(weight, indefinite, grid(4), damping=0.1)
    assert torch.equal(result.weight.values, again.weight.values)
    with pytest.raises(SingularHessian, match="is singular, even with a damping of 1"):
        gptq(weight, indefinite - 3 * mean * torch.eye(K), grid(4))
    # Of few rows, as every expert that is hardly used has it: singular in truth.
    few = correlated(3, K)
    assert gptq(weight, few.T @ few / 3, grid(4), damping=0.0).damping in (0.01, 0.1)
    moment[3, 3] = torch.nan
    with pytest.raises(SingularHessian, match="holds NaN or Inf"):
        gptq(weight, moment, grid(4))


def block_of(linear: nn.Module, batches: list[Tensor], scheme: str = "int8") -> tuple[Block, LayerWork]:
    model = nn.Sequential(linear)
    work = LayerWork("0", linear, SCHEMES[scheme])
    return Block("", model, model, {"0": work}, [Call((x,)) for x in batches]), work


@pytest.mark.parametrize("mse", [False, True])
def test_the_method_decides_the_weight(mse: bool) -> None:
    linear, x = nn.Linear(96, 32), correlated(200, 96).float()
    block, work = block_of(linear, [x[:150].reshape(3, 50, 96), x[150:]])
    before = linear.weight.clone()
    GPTQ(mse=mse).apply(block)
    moment = x.T @ x / 200
    scale = mse_scale(linear.weight.detach(), grid(8), moment.diagonal()) if mse else None
    result = gptq(linear.weight, moment, grid(8), scale=scale)
    assert work.weight is not None
    assert (work.weight.values != result.weight.values).float().mean() < 0.002  # the sums' last digits
    torch.testing.assert_close(work.weight.scale, result.weight.scale)
    assert work.loss == pytest.approx(result.loss, rel=1e-3)
    assert work.notes == []
    assert torch.equal(linear.weight, before)


def test_what_the_method_cannot_do_is_rounded_to_nearest_and_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    linear = nn.Linear(96, 32)
    weight = linear_weight(linear)
    nearest = round_to_nearest(weight, INT8_ROWS)

    def apply(batches: list[Tensor]) -> LayerWork:
        block, work = block_of(linear, batches)
        GPTQ(mse=False).apply(block)
        assert work.weight is not None
        assert torch.equal(work.weight.values, nearest.values)
        assert torch.equal(work.weight.scale, nearest.scale)
        return work

    assert apply([torch.empty(0, 96)]).notes == ["gptq: it saw no tokens, so it is rounded to nearest"]
    work = apply([torch.zeros(5, 96)])
    assert work.notes == ["gptq: no better than rounding to nearest, which it is"]
    assert work.loss == 0.0

    def singular(*args: object, **kwargs: object) -> None:
        raise SingularHessian("the second moment is singular")

    x = correlated(200, 96).float()
    monkeypatch.setattr("qgemm.calibration.gptq.gptq", singular)
    work = apply([x])
    assert work.notes == ["gptq: the second moment is singular, so it is rounded to nearest"]
    assert work.loss == pytest.approx(output_loss(weight, dequantize(nearest, INT8_ROWS), x.T @ x / 200), rel=1e-3)


def test_more_damping_is_noted() -> None:
    x = torch.zeros(4, 96)
    x[:, :4] = torch.randn(4, 4)
    x[:, 4] = x[:, 3]
    block, work = block_of(nn.Linear(96, 32), [x])
    GPTQ(damping=0.0).apply(block)
    assert work.notes == ["gptq: singular with a damping of 0, so 0.01 was taken"]


def test_settings_are_checked() -> None:
    assert GPTQ.from_dict(GPTQ(damping=0.1).to_dict()) == GPTQ(damping=0.1)
    assert GPTQ(block_size=1, damping=0).block_size == 1
    for damping in (-1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match=f"damping is {damping}"):
            GPTQ(damping=damping)
    with pytest.raises(ValueError, match="block_size is 0"):
        GPTQ(block_size=0)


@pytest.mark.parametrize("name", OF_WEIGHTS)
def test_weights_of_every_scheme(name: str) -> None:
    weight, moment = weight_and_moment(32, 96)
    weight, moment, scheme = weight.float() + 0.2, moment.float(), resolve_scheme(name).weight
    result = gptq(weight, moment, scheme)
    nearest = round_to_nearest(weight, scheme)
    assert result.loss < output_loss(weight, dequantize(nearest, scheme), moment) / 3
    linear = nn.Linear(96, 32, bias=False)
    linear.weight = nn.Parameter(weight)
    layer = linear_class(name).from_linear(linear, name, weight=result.weight.parts)
    assert torch.equal(layer.dequantize().weight, dequantize(result.weight, scheme))
