"""AWQ's search against the same one in NumPy, over rows of inputs; and what it does to blocks of models."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from calibration.numpy_rounding import Array, grid, numpy_round, numpy_scales
from calibration.test_folding import block_of, build
from qgemm.calibration.awq import AWQ, AWQScales, awq_scales
from qgemm.calibration.method import Block, Call, LayerWork
from qgemm.calibration.rounding import dequantize, mse_scale, nearest_scale, output_loss, round_to_nearest, round_weight
from qgemm.nn.linear_layer import linear_weight
from qgemm.scheme import INT8_ROWS, SCHEMES

K = 48


def salient(rows: int = 200, seed: int = 0) -> Tensor:
    """Inputs of which a few channels are much larger than others."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.ones(K, dtype=torch.float64)
    sizes[[3, 17, 40]] = torch.tensor([30.0, 12.0, 60.0], dtype=torch.float64)
    return torch.randn(rows, K, dtype=torch.float64, generator=generator) * sizes


def normal(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def numpy_search(weights: list[Array], x: Array, bits: int, group_size: int | None) -> tuple[float, Array, float]:
    """The ratio, its scales and its loss: equations 4 and 5 of the paper, from rows."""
    magnitude = np.sqrt((x**2).mean(0))
    magnitude /= np.exp(np.log(magnitude).mean())
    results = []
    for ratio in np.arange(20) / 20:
        s = magnitude**ratio
        loss = 0.0
        for w in weights:
            scales = numpy_scales(w * s, bits, group_size)
            q = numpy_round(w * s, scales, bits) * scales
            loss += (((x / s) @ q.T - x @ w.T) ** 2).sum() / ((x @ w.T) ** 2).sum()
        results.append((loss, ratio, s))
    loss, ratio, s = min(results, key=lambda result: result[0])
    return float(ratio), s, loss


@pytest.mark.parametrize(("bits", "group_size"), [(4, None), (4, 16), (8, None)])
def test_the_search_is_numpys(bits: int, group_size: int | None) -> None:
    x, weights = salient(), [normal(16, K), 10 * normal(8, K, seed=2)]
    found = awq_scales(weights, x.T @ x / len(x), [grid(bits, group_size)] * 2)
    ratio, scales, loss = numpy_search([w.numpy() for w in weights], x.numpy(), bits, group_size)
    assert found.ratio == ratio
    assert ratio > 0.1
    np.testing.assert_allclose(found.scales.numpy(), scales, rtol=1e-5)
    # The largest value of a row lies halfway between two whole numbers, where a last digit decides.
    assert found.loss == pytest.approx(loss, rel=0.03)
    plain = sum(
        output_loss(w, dequantize(round_to_nearest(w, grid(bits, group_size)), grid(bits, group_size)), x.T @ x)
        for w in weights
    )
    assert found.loss < plain / 1.5


@pytest.mark.parametrize(("bits", "group_size"), [(4, 16), (8, None)])
def test_weights_of_many_rows_find_what_all_ratios_would(bits: int, group_size: int | None) -> None:
    x, weights = salient(), [normal(700, K) * normal(700, 1, seed=5), 10 * normal(8, K, seed=2)]
    found = awq_scales(weights, x.T @ x / len(x), [grid(bits, group_size)] * 2)
    _, _, loss = numpy_search([w.numpy() for w in weights], x.numpy(), bits, group_size)
    assert found.loss == pytest.approx(loss, rel=0.01)
    exact = dequantize(round_to_nearest(normal(300, K), grid(8)), grid(8))
    assert awq_scales([exact], x.T @ x / len(x), [grid(8)]).ratio == 0


def test_the_block_runs_on_the_data_once() -> None:
    batches = [torch.randn(10, K) for _ in range(3)]
    block, lengths = gated(batches), list[int]()
    block.module.register_forward_pre_hook(lambda module, args: lengths.append(args[0].data_ptr()))
    AWQ().apply(block)
    assert [lengths.count(batch.data_ptr()) for batch in batches[1:]] == [1, 1]


def test_weights_have_grids_of_their_own() -> None:
    x, weight = salient(), normal(16, K)
    moment = x.T @ x / len(x)
    losses = [awq_scales([weight], moment, [each]).loss for each in (grid(4), grid(4, 16))]
    both = awq_scales([weight, weight], moment, [grid(4), grid(4, 16)])
    assert sum(losses) <= both.loss < 1.3 * sum(losses)


def test_channels_of_zeros_and_even_ones_are_left_alone() -> None:
    x = salient()
    x[:, 5] = 0.0
    found = awq_scales([normal(16, K)], x.T @ x / len(x), [grid(4)])
    assert found.ratio > 0
    assert found.scales[5] == 1.0
    assert found.scales.isfinite().all()
    nothing = awq_scales([normal(16, K)], torch.zeros(K, K), [grid(4)])
    assert nothing.ratio == 0
    assert nothing.scales.tolist() == [1.0] * K
    # Rounded without an error: no scales are better.
    exact = round_to_nearest(normal(16, K), grid(8))
    assert awq_scales([dequantize(exact, grid(8))], x.T @ x / len(x), [grid(8)]).ratio == 0


def test_scales_that_must_be_equal_are() -> None:
    def tie(scales: Tensor) -> Tensor:
        return scales.reshape(2, K // 2).amax(0).repeat(2)

    x = salient()
    scales = awq_scales([normal(16, K)], x.T @ x / len(x), [grid(4)], tie).scales
    assert torch.equal(scales[: K // 2], scales[K // 2 :])
    assert scales[3] == scales[3 + K // 2] > 2


class Gated(nn.Module):
    """A norm and three layers after it, of which one has something between."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(K)
        self.up_proj = nn.Linear(K, 32, bias=False)
        self.gate_proj = nn.Linear(K, 32, bias=False)
        self.last = nn.Linear(32, K, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.last(torch.tanh(self.gate_proj(h) * self.up_proj(h)))


def gated(batches: list[Tensor]) -> Block:
    torch.manual_seed(0)
    model = Gated()
    with torch.no_grad():
        model.norm.weight[[3, 17, 40]] = torch.tensor([30.0, 12.0, 60.0])
    layers = {
        name: LayerWork(name, model.get_submodule(name), SCHEMES["int8"]) for name in ("up_proj", "gate_proj", "last")
    }
    return Block("", model, model, layers, [Call((x,)) for x in batches])


@pytest.mark.parametrize("clip", [True, False])
def test_a_block_computes_the_same_and_rounds_better(clip: bool) -> None:
    x = torch.randn(300, K)
    plain, block = gated([x]), gated([x[:100], x[100:]])
    expected = plain.module(x)
    losses = {}
    for name, seen in plain.collect(second_moment=True).items():
        weight = linear_weight(plain.layers[name].module).detach()
        rounded = dequantize(round_to_nearest(weight, INT8_ROWS), INT8_ROWS)
        losses[name] = output_loss(weight, rounded, seen.second_moment)  # type: ignore[arg-type]
    AWQ(clip=clip).apply(block)
    torch.testing.assert_close(block.module(x), expected, rtol=1e-4, atol=1e-5)
    for name, seen in block.collect(second_moment=True).items():
        work = block.layers[name]
        weight = linear_weight(work.module).detach()
        scale = mse_scale(weight, INT8_ROWS, seen.second_moment) if clip else nearest_scale(weight, INT8_ROWS)
        assert work.weight is not None
        assert torch.equal(work.weight.scale, scale)
        assert torch.equal(work.weight.values, round_weight(weight, scale, INT8_ROWS).values)
        assert work.loss == pytest.approx(
            output_loss(weight, dequantize(work.weight, INT8_ROWS), seen.second_moment)  # type: ignore[arg-type]
        )
        if name == "last":
            assert work.notes == ["awq: not scaled: nothing that is known to take scales makes its input"]
        else:
            assert work.notes == []
            assert work.loss < losses[name] / 2
    scaled = block.model.get_submodule("norm").weight / plain.model.get_submodule("norm").weight
    others = [k for k in range(K) if k not in (3, 17, 40)]
    assert scaled[[3, 17, 40]].max() < 0.7 * scaled[others].min()


def test_rotated_layers_are_not_scaled() -> None:
    block = gated([torch.randn(300, K)])
    before = block.model.get_submodule("up_proj").weight.clone()
    block.layers["gate_proj"].scheme = SCHEMES["int8-hadamard"]
    AWQ().apply(block)
    for name in ("gate_proj", "up_proj"):
        assert block.layers[name].notes == ["awq: not scaled: a rotation mixes its input's channels"]
    assert torch.equal(block.model.get_submodule("up_proj").weight, before)


def test_layers_that_saw_no_tokens_are_noted() -> None:
    block = gated([torch.empty(0, K)])
    before = {name: value.clone() for name, value in block.model.state_dict().items()}
    AWQ().apply(block)
    assert all(torch.equal(before[name], value) for name, value in block.model.state_dict().items())
    for work in block.layers.values():
        assert work.weight is None
        assert work.notes[-1] == "awq: it saw no tokens, so it is rounded to nearest"


def test_scales_that_do_not_go_in_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    unusable = AWQScales(torch.full((K,), torch.inf), 0.5, 0.0)
    monkeypatch.setattr("qgemm.calibration.awq.awq_scales", lambda *args: unusable)
    block = gated([torch.randn(300, K)])
    AWQ().apply(block)
    work = block.layers["up_proj"]
    assert work.notes == ["awq: not scaled: scales of the output of 'norm' must be finite and greater than 0"]
    assert work.weight is not None


# Conv1D; grouped queries, where scales are tied; and experts beside shared ones.
@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen2_moe"])
def test_models_compute_the_same(family: str) -> None:
    example, block = build(family)
    expected = example.output()
    before = {name: value.clone() for name, value in block.model.state_dict().items()}
    AWQ().apply(block)
    assert any(not torch.equal(before[name], value) for name, value in block.model.state_dict().items())
    torch.testing.assert_close(example.output(), expected, rtol=1e-3, atol=1e-4)
    assert all(work.weight is not None for work in block.layers.values())
    assert block_of(block.model, example.inputs).layers.keys() == block.layers.keys()
