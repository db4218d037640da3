"""What calibrate watches, and that it leaves no trace."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from typing import Any

import accelerate
import numpy as np
import pytest
import torch
from families import FAMILIES
from families.mixtures import MIXTURES
from torch import Tensor, nn

import qgemm
from qgemm.calibration import MinMax, Percentile, run_batches
from qgemm.numerics.formats import INT8


class Block(nn.Module):
    """One layer is called by keyword, one only if asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(32, 48)
        self.down = nn.Linear(48, 32)
        self.side = nn.Linear(32, 32)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor, with_side: bool = False) -> Tensor:
        x = self.down(input=self.dropout(self.up(x).relu()))
        return self.side(x) if with_side else x


def hooks(model: nn.Module) -> list[Any]:
    return [
        (list(module._forward_pre_hooks), list(module._forward_pre_hooks_with_kwargs), list(module._forward_hooks))
        for module in model.modules()
    ]


def inputs_of(model: nn.Module, names: list[str], run: Any) -> dict[str, Tensor]:
    """The rows that each layer is called with, seen by a ``forward`` of our own."""
    rows: dict[str, list[Tensor]] = {name: [] for name in names}
    originals = {name: model.get_submodule(name).forward for name in names}
    for name, forward in originals.items():

        def record(x: Tensor, name: str = name, forward: Any = forward) -> Tensor:
            rows[name].append(x.detach().reshape(-1, x.shape[-1]))
            return forward(x)

        model.get_submodule(name).forward = record  # type: ignore[method-assign]
    run()
    for name in names:
        del model.get_submodule(name).forward
    return {name: torch.cat(parts) for name, parts in rows.items()}


# Decoder, encoder, both with text and with sound, Conv1D, one block that is used twice, experts.
@pytest.mark.parametrize("family", ["llama", "bert", "t5", "whisper", "gpt2", "albert", "mixtral"])
def test_every_layer_that_is_swapped_is_watched(family: str) -> None:
    example = {**FAMILIES, **MIXTURES}[family]()
    model = example.model
    before = hooks(model)
    expected = example.output()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with qgemm.calibrate(model) as calibration:
            out = example.output()
    assert torch.equal(out, expected)
    assert hooks(model) == before

    rows = inputs_of(model, list(calibration.statistics), example.output)
    for name, seen in calibration.statistics.items():
        assert seen.tokens == rows[name].shape[0], name
        assert torch.equal(seen.channel_amax, rows[name].abs().amax(0)), name
        assert calibration.input_scales("int8-static")[name] == rows[name].abs().max().item() / INT8.steps

    qgemm.quantize_model(model, "int8-static", calibration=calibration)
    static = {name for name, m in model.named_modules() if isinstance(m, qgemm.QuantLinear)}
    assert static == set(calibration.statistics)
    for name in static:
        # float32 rounds once, as it does there.
        assert model.get_submodule(name).input_scale == torch.tensor(calibration.input_scales("int8-static")[name])
    # One scale for all tokens errs a little more than one for each; a wrong one errs by half.
    assert (example.output() - expected).norm() / expected.norm() < 0.08


def test_several_calls_add_up_and_skip_is_heeded() -> None:
    model = Block().eval()
    first, second = torch.randn(4, 32), 3 * torch.randn(2, 5, 32)
    with qgemm.calibrate(model, skip="side") as calibration:
        model(first)
        model(second)
    assert set(calibration.statistics) == {"up", "down"}
    assert calibration.statistics["up"].tokens == 14
    assert calibration.input_scales("int8-static")["up"] == second.abs().max().item() / INT8.steps


def test_the_observer_is_the_one_asked_for() -> None:
    model = Block().eval()
    with qgemm.calibrate(model, "percentile", skip="side") as named:
        model(torch.randn(4, 32))
    with qgemm.calibrate(model, Percentile(50.0), skip="side") as made:
        model(torch.randn(4, 32))
    assert named.statistics["up"].settings == {"percentile": 99.99}
    assert made.statistics["up"].settings == {"percentile": 50.0}
    assert 0 < made.input_scales("int8-static")["up"] < named.input_scales("int8-static")["up"]
    with pytest.raises(ValueError, match="observer is 'best'"), qgemm.calibrate(model, "best"):
        pass
    assert all(not any(lists) for lists in hooks(model))


def test_layers_that_saw_nothing_are_named() -> None:
    model = Block().eval()
    with warnings.catch_warnings(record=True) as caught, qgemm.calibrate(model) as calibration:
        model(torch.randn(4, 32))
        model.side(torch.empty(0, 32))
    assert "'side' saw no tokens, so there are no scales" in str(caught[0].message)
    assert caught[0].filename == __file__
    assert set(calibration.statistics) == {"up", "down"}
    weights = model.side.weight
    with pytest.warns(UserWarning, match="'side' saw no tokens of calibration and stay in float") as warned:
        qgemm.quantize_model(model, "int8-static", calibration=calibration)
    assert warned[0].filename == __file__
    assert model.side.weight is weights
    assert [record.name for record in qgemm.report(model).kept] == ["side"]


def test_a_calibration_of_no_layer_is_refused() -> None:
    model = Block().eval()
    with pytest.warns(UserWarning, match="saw no tokens"), qgemm.calibrate(model) as calibration:
        model.up(torch.empty(0, 32))
    with pytest.raises(ValueError, match="calibration has no statistics of 'up', 'down', 'side': run batches"):
        qgemm.quantize_model(model, "int8-static", calibration=calibration)
    assert type(model.up) is nn.Linear


# Called with a routing, and with as many rows for each expert. Where the router has its logits.
@pytest.mark.parametrize(("family", "router", "place", "k"), [("mixtral", "gate", 0, 2), ("llama4", "router", 1, 1)])
def test_experts_that_saw_no_tokens_are_named(family: str, router: str, place: int, k: int) -> None:
    example = MIXTURES[family]()
    model, token = example.model, example.inputs["input_ids"][:1, :1]
    names = [name for name, _ in model.named_modules() if name.endswith(".experts")]
    logits: dict[str, Tensor] = {}
    for name in names:
        parent = model.get_submodule(name.removesuffix(".experts"))

        def remember(module: nn.Module, args: Any, output: Any, name: str = name) -> None:
            logits[name] = output[place][0]

        parent.get_submodule(router).register_forward_hook(remember)
    with warnings.catch_warnings(record=True) as caught, qgemm.calibrate(model):
        model(token)
    expected = [f"{name}[{e}]" for name in names for e in range(4) if e not in logits[name].topk(k).indices]
    assert len(expected) == len(names) * (4 - k)
    shown = ", ".join(map(repr, expected[:5])) + (" and 1 more" if len(expected) == 6 else "")
    assert [str(warning.message).partition(" saw no tokens, so the calibration")[0] for warning in caught] == [shown]
    assert caught[0].filename == __file__

    # As quantize_model finds it, with a recipe and without.
    for settings in ({"scheme": "int8-static"}, {"recipe": []}):
        with warnings.catch_warnings(record=True) as caught:
            quantized = copy.deepcopy(model)
            qgemm.quantize_model(quantized, calibration=[{"input_ids": token}], progress=False, **settings)
        assert [str(warning.message).partition(" saw no tokens, so the calibration")[0] for warning in caught] == [
            shown
        ]
        assert caught[0].filename == __file__

    # A module that none reaches goes by its name alone.
    with warnings.catch_warnings(record=True) as caught, qgemm.calibrate(model):
        model.model.embed_tokens(token)
    assert str(caught[0].message).startswith(f"{names[0]!r}, {names[1]!r} saw no tokens, so the calibration")


def test_hooks_go_after_an_error_and_others_stay() -> None:
    model = Block().eval()
    model.up.register_forward_pre_hook(lambda module, args: None)
    before = hooks(model)
    with pytest.raises(RuntimeError, match="mine"), qgemm.calibrate(model):
        raise RuntimeError("mine")
    assert hooks(model) == before


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_and_inf_are_named_by_layer(bad: float) -> None:
    model = Block().eval()
    x = torch.randn(4, 32)
    x[2, 5] = bad
    with pytest.raises(ValueError, match="the input of 'up': x holds NaN or Inf"), qgemm.calibrate(model):
        model(x)
    assert all(not any(lists) for lists in hooks(model))


def test_gradients_and_dropout_are_as_without() -> None:
    model = Block().train()
    x = torch.randn(4, 32)
    torch.manual_seed(1)
    model(x).sum().backward()
    expected = model.up.weight.grad
    model.zero_grad()
    torch.manual_seed(1)
    with qgemm.calibrate(model, skip="side") as calibration:
        model(x).sum().backward()
    assert torch.equal(model.up.weight.grad, expected)
    assert not calibration.statistics["up"].channel_amax.requires_grad
    assert model.training


def test_a_model_on_meta_and_a_quantized_one_are_refused() -> None:
    with torch.device("meta"):
        model = Block()
    with pytest.raises(ValueError, match="the input of 'up' is on meta"), qgemm.calibrate(model):
        model(torch.empty(4, 32, device="meta"))
    with pytest.raises(ValueError, match="Block is quantized already"), qgemm.calibrate(qgemm.quantize_model(Block())):
        pass


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(32, 8)).to(dtype)
    x = torch.randn(4, 32, dtype=dtype)
    with qgemm.calibrate(model, "mse") as calibration:
        model(x)
    assert torch.equal(calibration.statistics["0"].channel_amax, x.abs().amax(0).float())


@pytest.mark.parametrize("kind", ["dict", "tuple", "list", "tensor"])
def test_batches_of_every_kind(kind: str) -> None:
    x = torch.randn(4, 32)
    batch = {"dict": {"x": x, "with_side": True}, "tuple": (x, True), "list": [x, True], "tensor": x}[kind]
    model = Block().train()
    model.up.eval()

    def batches() -> Iterator[Any]:
        yield batch
        assert not torch.is_grad_enabled()
        assert not any(module.training for module in model.modules())

    qgemm.quantize_model(
        model, "int8-static", calibration=batches(), skip="side" if kind == "tensor" else None, progress=False
    )
    assert model.up.input_scale == x.abs().max() / INT8.steps
    assert model.training
    assert model.dropout.training
    assert not model.up.training


@pytest.mark.parametrize(
    ("calibration", "error", "message"),
    [
        (torch.ones(4, 32), TypeError, "calibration is a Tensor; it takes a Calibration, or an iterable of batches"),
        ({"x": torch.ones(4, 32)}, TypeError, "calibration is a dict"),
        (3, TypeError, "calibration is a int"),
        ([], ValueError, "calibration has no batch"),
        ([torch.ones(4, 32), "text"], TypeError, r"batch 1 of calibration is a str.*with the model's tokenizer"),
        # What a tokenizer and a data set return unless they are asked for tensors.
        ([{"input_ids": [[1, 2]]}], TypeError, r"batch 0 of calibration has input_ids of type list; .*return_tensors="),
        ([{"input_ids": np.ones((1, 2), int)}], TypeError, r"batch 0 .* has input_ids of type ndarray; "),
        ([torch.ones(4, 32), [1, 2, 3]], TypeError, r"batch 1 of calibration is a list of numbers; .*return_tensors="),
        ([torch.full((4, 32), torch.nan)], ValueError, "the input of 'up': x holds NaN"),
    ],
)
def test_what_is_no_calibration_leaves_the_model_alone(calibration: Any, error: Any, message: str) -> None:
    model = Block().train()
    before = {name: type(module) for name, module in model.named_modules()}
    with pytest.raises(error, match=message):
        qgemm.quantize_model(model, "int8-static", calibration=calibration)
    assert {name: type(module) for name, module in model.named_modules()} == before
    assert all(not any(lists) for lists in hooks(model))
    assert all(module.training for module in model.modules())


def test_calibration_beside_other_scales_and_schemes() -> None:
    model, x = Block().eval(), torch.randn(4, 32)
    with pytest.raises(ValueError, match="scheme 'int8' finds scales as it runs: calibration is for a static scheme"):
        qgemm.quantize_model(model, calibration=[x])
    with pytest.raises(ValueError, match="input_scales and calibration both give the scales"):
        qgemm.quantize_model(model, "int8-static", calibration=[x], input_scales={"up": 1.0})


def test_a_calibration_of_another_model() -> None:
    names = ["up", "down", "side"]
    other = run_batches(Block(), names, [(torch.ones(4, 32), True)], progress=False)
    other.statistics["down"] = MinMax().update(torch.ones(1, 8))
    with pytest.raises(ValueError, match="calibration saw 8 input columns of 'down', which has 48"):
        qgemm.quantize_model(Block(), "int8-static", calibration=other)


def test_a_weight_with_nan_is_named_before_the_model_runs() -> None:
    model = Block()
    with torch.no_grad():
        model.up.weight[0, 0] = torch.nan
    with pytest.raises(ValueError, match="the weight of 'up' holds NaN"):
        qgemm.quantize_model(model, "int8-static", calibration=[(torch.ones(4, 32), True)])


def test_hooks_that_change_the_input_come_first() -> None:
    model, x = nn.Sequential(nn.Linear(32, 8)), torch.randn(4, 32)
    model[0].register_forward_pre_hook(lambda module, args: (2 * args[0],))
    with qgemm.calibrate(model) as calibration:
        model(x)
    assert calibration.statistics["0"].amax == 2 * x.abs().max().item()


def test_a_model_that_accelerate_offloads() -> None:
    model, x = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 8)).eval(), torch.randn(4, 32)
    expected = model(x)
    scales = run_batches(model, ["0", "2"], [x], progress=False).input_scales("int8-static")
    accelerate.cpu_offload(model, torch.device("cpu"))
    assert model[0].weight.device.type == "meta"
    with qgemm.calibrate(model) as calibration:
        assert torch.equal(model(x), expected)
    assert calibration.input_scales("int8-static") == scales
    qgemm.quantize_model(model, "int8-static", calibration=[x], progress=False)
    assert (model(x) - expected).norm() / expected.norm() < 0.05


def test_a_layer_with_two_names_is_counted_once() -> None:
    model = nn.Sequential(nn.Linear(32, 32))
    model.append(model[0])
    with qgemm.calibrate(model) as calibration:
        model(torch.randn(4, 32))
    # Called twice, by either name.
    assert {name: seen.tokens for name, seen in calibration.statistics.items()} == {"0": 8}
    qgemm.quantize_model(model, "int8-static", calibration=calibration)
    assert model[0] is model[1]
