"""What quantize_model swaps, leaves and refuses."""

from __future__ import annotations

import re
import weakref
from typing import Any

import pytest
import torch
from model.stack import Stack, reasons_of
from torch import Tensor, nn

import qgemm.model.restore
from qgemm import QuantLinear
from qgemm.model.report import report
from qgemm.numerics.formats import INT8
from qgemm.quantize import quantize_model


def _kept(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]


def test_every_linear_is_swapped_in_place() -> None:
    model = Stack(2)
    layers = model.layers
    assert quantize_model(model) is model
    assert model.layers is layers
    assert _kept(model) == []
    assert sum(isinstance(module, QuantLinear) for module in model.modules()) == 5


def test_a_layer_computes_what_float64_does_with_the_rounded_numbers() -> None:
    linear = nn.Linear(96, 40).eval()
    x = torch.randn(5, 96)
    model = quantize_model(nn.Sequential(linear))

    def rounded(values: Tensor) -> Tensor:
        scale = (values.abs().amax(1, keepdim=True) / INT8.steps).double()
        return (values.double() / scale).round() * scale

    expected = rounded(x) @ rounded(linear.weight.detach()).t() + linear.bias.detach().double()
    # All that is left is float32's rounding of the scaled sum, of numbers up to about 3.
    torch.testing.assert_close(model(x).double(), expected, rtol=0, atol=2e-6)


def test_weight_error_is_relative_to_the_weights_norm() -> None:
    linear = nn.Linear(96, 40)
    weight = linear.weight.detach().double()
    model = quantize_model(nn.Sequential(linear))
    stored = model[0].stored("weight").double() * model[0].weight_scale.double()[:, None]
    expected = ((stored - weight).norm() / weight.norm()).item()
    (record,) = report(model).records
    assert record.weight_error == pytest.approx(expected, rel=1e-6)
    # Rounding to a grid of step amax / 127 errs by 0.29 steps; a uniform weight's norm is 0.58 amax an element.
    assert 0.003 < expected < 0.006


def test_weight_error_of_a_wide_layer_and_of_zeros() -> None:
    # Large enough to be quantized and measured in several parts, the last one ragged.
    wide, zeros = nn.Linear(1024, 1500, bias=False), nn.Linear(32, 32)
    nn.init.zeros_(zeros.weight)
    weight = wide.weight.detach().clone()
    model = quantize_model(nn.Sequential(wide, zeros))
    stored = model[0].stored("weight") * model[0].weight_scale[:, None]
    first, second = report(model).records
    assert first.weight_error == pytest.approx(((stored - weight).norm() / weight.norm()).item(), rel=1e-4)
    assert second.weight_error == 0.0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_any_float_dtype(dtype: torch.dtype) -> None:
    model = quantize_model(Stack(1).to(dtype))
    assert model(torch.randn(3, 32, dtype=dtype)).dtype == dtype
    assert report(model).records[0].bytes_before == (32 * 48 + 48) * dtype.itemsize


def test_train_and_eval_stay_as_they_were() -> None:
    model = Stack(1).train()
    model.out.eval()
    quantize_model(model)
    assert model.layers[0].up.training
    assert not model.out.training


def test_meta_model_gets_the_structure() -> None:
    with torch.device("meta"):
        model = Stack(1)
    quantize_model(model)
    assert model.out.weight.dtype == torch.int8
    assert model.out.weight.is_meta
    assert {record.weight_error for record in report(model).records} == {None}


def test_gpt2s_conv1d_is_swapped_transposed() -> None:
    from transformers.pytorch_utils import Conv1D

    layer = Conv1D(24, 32)
    nn.init.normal_(layer.bias)
    x = torch.randn(4, 32)
    expected = layer(x)
    model = quantize_model(nn.Sequential(layer))
    assert model[0].weight.shape == (24, 32)
    assert (model(x) - expected).norm() / expected.norm() < 0.02


def test_falcons_linear_is_swapped() -> None:
    from transformers.models.falcon.modeling_falcon import FalconLinear

    assert isinstance(quantize_model(nn.Sequential(FalconLinear(32, 24)))[0], QuantLinear)


def test_a_class_that_only_looks_like_conv1d_is_not_a_layer() -> None:
    class Conv1D(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(32, 24))
            self.bias = None

    model = quantize_model(nn.Sequential(Conv1D(), nn.Linear(8, 8)))
    assert type(model[0]) is Conv1D


def test_one_layer_under_two_names_stays_one() -> None:
    model = Stack(2)
    model.layers[1].up = model.layers[0].up
    model.again = model.layers[0]
    quantize_model(model)
    assert isinstance(model.layers[0].up, QuantLinear)
    assert model.layers[1].up is model.layers[0].up is model.again.up
    assert [record.name for record in report(model).records].count("layers.0.up") == 1


def test_a_shared_layer_is_skipped_by_any_of_its_names() -> None:
    model = Stack(2)
    model.layers[1].up = model.layers[0].up
    quantize_model(model, skip="layers.1.up")
    assert _kept(model) == ["layers.0.up"]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 32)
        self.body = nn.Linear(32, 32)
        self.unembedding = nn.Linear(32, 11, bias=False)
        self.unembedding.weight = self.embedding.weight


def test_a_weight_shared_with_an_embedding_stays_float_and_shared() -> None:
    model = quantize_model(Tied())
    assert reasons_of(model) == {"unembedding": "it shares its weight with embedding"}
    assert model.unembedding.weight is model.embedding.weight


def test_two_layers_that_share_a_weight_count_its_bytes_once() -> None:
    model = nn.Sequential(nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False), nn.Linear(32, 8))
    model[1].weight = model[0].weight
    quantize_model(model)
    assert reasons_of(model) == {"0": "it shares its weight with 1", "1": "it shares its weight with 0"}
    assert [record.bytes_before for record in report(model).kept] == [4096, 0]


class Special(nn.Linear):
    pass


def _with_parametrization() -> nn.Module:
    return nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))


def _with_old_weight_norm() -> nn.Module:
    with pytest.warns(FutureWarning):
        return nn.utils.weight_norm(nn.Linear(8, 8))


def _pruned() -> nn.Module:
    from torch.nn.utils import prune

    return prune.l1_unstructured(nn.Linear(8, 8), "weight", amount=0.5)


def _with_own_forward() -> nn.Module:
    linear = nn.Linear(8, 8)
    linear.forward = lambda x: x
    return linear


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (lambda: Special(8, 8), "subclass of nn.Linear"),
        (_with_parametrization, "parametrized"),
        (_with_old_weight_norm, "computed from others"),
        (_pruned, "computed from others"),
        (_with_own_forward, "its forward was replaced"),
        (lambda: nn.Linear(8, 8).to(torch.float8_e4m3fn), "float8_e4m3fn"),
        (lambda: nn.Linear(8, 0), "empty"),
        (lambda: nn.Linear(0, 8), "empty"),
        (lambda: nn.LazyLinear(8), "it has no weight before its first call: run the model once"),
        (lambda: nn.LSTM(8, 8), "there is no quantized LSTM"),
        (lambda: nn.GRUCell(8, 8), "there is no quantized GRUCell"),
        (lambda: nn.Bilinear(8, 8, 8), "there is no quantized Bilinear"),
        # One more than int32 sums hold, on meta: it would be half a megabyte else.
        (lambda: nn.Linear(INT8.max_k + 1, 1, device="meta"), f"in_features is {INT8.max_k + 1}"),
    ],
)
@pytest.mark.filterwarnings("ignore:only .* of the bytes")
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_layers_that_stay_float_for_what_they_are(layer: Any, reason: str) -> None:
    model = quantize_model(nn.ModuleList([layer(), nn.Linear(8, 8)]))
    assert reason in reasons_of(model)["0"]
    assert isinstance(model[1], QuantLinear)


@pytest.mark.parametrize(
    ("skip", "kept"),
    [
        ("out", ["out"]),
        # A container, and not the ones whose names begin alike.
        ("layers.1", ["layers.1.up", "layers.1.down"]),
        ("layers.?", [f"layers.{i}.{part}" for i in range(10) for part in ("up", "down")]),
        ("*.1.up", ["layers.1.up"]),
        ("layers.1[01].down", ["layers.10.down", "layers.11.down"]),
        (re.compile(r"\.1\."), ["layers.1.up", "layers.1.down"]),
        # A search in the layer's own name: "layers" alone must not count as a match without "up".
        (re.compile(r"^(?!.*down)(?!out)"), [f"layers.{i}.up" for i in range(12)]),
        (["out", "*.0.up", re.compile("^layers.3.down$")], ["layers.0.up", "layers.3.down", "out"]),
        (iter(["out"]), ["out"]),
    ],
)
def test_skip(skip: Any, kept: list[str]) -> None:
    assert _kept(quantize_model(Stack(), skip=skip)) == kept


@pytest.mark.parametrize(
    ("skip", "message"),
    [
        ("layers.12", "'layers.12' matches no linear layer.*did you mean 'layers"),
        ("Out", "did you mean 'out'"),
        # As other libraries name layers: by the last part of a name, or by any part of it.
        ("up", r"did you mean '\*\.up'\?"),
        ("3.down", r"did you mean '\*\.3\.down'\?"),
        ("dow", r"did you mean '\*dow\*'\?"),
        ("layer.*", "'layer.*' matches no linear layer"),
        (re.compile("attn"), "regular expression 'attn' matches no linear layer's name"),
        (["out", "zzz"], "'zzz' matches no linear layer.*names are as in model.named_modules"),
    ],
)
def test_a_pattern_that_matches_nothing_is_an_error(skip: Any, message: str) -> None:
    model = Stack()
    with pytest.raises(ValueError, match=message):
        quantize_model(model, skip=skip)
    assert len(_kept(model)) == 25


def test_skip_of_a_wrong_type() -> None:
    with pytest.raises(TypeError, match="skip holds 3"):
        quantize_model(Stack(1), skip=[3])
    with pytest.raises(TypeError, match="skip is 3"):
        quantize_model(Stack(1), skip=3)


def test_a_layer_that_stays_float_anyway_may_be_skipped() -> None:
    assert reasons_of(quantize_model(Tied(), skip="unembedding")) == {
        "unembedding": "it shares its weight with embedding"
    }


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_weight_that_is_not_finite_is_named_before_anything_is_swapped(value: float) -> None:
    model = Stack(3)
    with torch.no_grad():
        model.layers[2].down.weight[31, 47] = value
        model.out.weight[0, 0] = value
    with pytest.raises(ValueError, match=r"weight of 'layers\.2\.down', 'out' holds NaN or Inf"):
        quantize_model(model)
    assert len(_kept(model)) == 7
    # The way out that the message names.
    quantize_model(model, skip=["layers.2.down", "out"])


def test_a_second_call_says_so() -> None:
    model = quantize_model(Stack(1), skip="out")
    with pytest.raises(ValueError, match="Stack is quantized already: 2 of its layers are QuantLinear"):
        quantize_model(model)


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (nn.Sequential(nn.ReLU()), {}, "Sequential has no linear layer"),
        (nn.Linear(4, 4), {}, "it is the model itself: put it into a module, such as nn.Sequential"),
        (nn.GRU(4, 4), {}, r"of GRU stay in float \(1 x there is no quantized GRU\)"),
        (Stack(1), {"skip": "*"}, r"all 3 linear layers of Stack stay in float \(3 x skip='\*'\)"),
    ],
)
def test_nothing_to_swap(model: nn.Module, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        quantize_model(model, **options)


def test_unknown_scheme() -> None:
    with pytest.raises(ValueError, match="scheme is 'int3'"):
        quantize_model(Stack(1), "int3")


def test_static_scales_reach_their_layers() -> None:
    model = quantize_model(
        Stack(1), "int8-static", input_scales={"layers.0.up": 0.5, "layers.0.down": torch.tensor([0.25])}, skip="out"
    )
    assert model.layers[0].up.input_scale == 0.5
    assert model.layers[0].down.input_scale == 0.25
    assert report(model).records[0].action == "int8-static"


@pytest.mark.parametrize(
    ("scheme", "scales", "message"),
    [
        (
            "int8-static",
            None,
            "needs a scale for the input of 'layers.0.up', .*, 'out': pass calibration=batches",
        ),
        ("int8-static", {"layers.0.up": 1.0}, "needs input_scales for 'layers.0.down', 'out' too"),
        ("int8-static", {"up": 1.0}, "input_scales names 'up', but the model has no such"),
        ("int8", {"out": 1.0}, "scheme 'int8' computes its scales at run time"),
    ],
)
def test_input_scales_that_do_not_fit(scheme: str, scales: Any, message: str) -> None:
    model = Stack(1)
    with pytest.raises(ValueError, match=message):
        quantize_model(model, scheme, input_scales=scales)
    assert len(_kept(model)) == 3


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf"), torch.ones(2)])
def test_input_scale_that_is_no_scale(value: Any) -> None:
    model = Stack(1)
    scales = {"layers.0.up": 1.0, "layers.0.down": 1.0, "out": value}
    with pytest.raises(ValueError, match=r"input_scales\['out'\] (is|has shape \[2\])"):
        quantize_model(model, "int8-static", input_scales=scales)
    assert len(_kept(model)) == 3


def test_forward_hooks_go_with_the_layer_and_can_still_be_removed() -> None:
    model = Stack(1)
    seen: list[str] = []
    handles = [
        model.out.register_forward_pre_hook(lambda *_: seen.append("before")),
        model.out.register_forward_hook(lambda *_, **__: seen.append("after"), with_kwargs=True),
        model.out.register_full_backward_hook(lambda *_: seen.append("backward")),
    ]
    quantize_model(model)
    model(torch.randn(2, 32, requires_grad=True)).sum().backward()
    assert seen == ["before", "after", "backward"]
    for handle in handles:
        handle.remove()
    model(torch.randn(2, 32))
    assert len(seen) == 3


def test_state_dict_hooks_are_refused() -> None:
    model = Stack(1)
    model.out.register_state_dict_pre_hook(lambda *_: None)
    with pytest.raises(ValueError, match="state-dict hooks of 'out' would be lost"):
        quantize_model(model)
    assert len(_kept(model)) == 3


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(4, 64, 32))
        self.down_proj = nn.Parameter(torch.randn(4, 32, 32))


def test_fused_experts_are_reported_and_warned_of() -> None:
    model = nn.Module()
    model.experts, model.out = Experts(), nn.Linear(32, 8)
    with pytest.warns(UserWarning, match=r"only 2% of the bytes .*: 98%: fused experts: .*That can't be quantized"):
        quantize_model(model)
    assert set(reasons_of(model)) == {"experts.gate_up_proj", "experts.down_proj"}
    assert report(model).coverage < 0.03


def _half_a_head(out_features: int) -> nn.Module:
    return nn.ModuleDict({"body": nn.Linear(32, 32, bias=False), "head": nn.Linear(32, out_features, bias=False)})


def test_coverage_under_half_is_warned_of_with_the_cause_and_the_way_out() -> None:
    wanted = (
        r"only 25% of the bytes in this model's weights are quantized, so it stays almost as large\. "
        r"What stays in float: 75%: output head \('head'\)\. include=\['head'\] quantizes 75% more"
    )
    with pytest.warns(UserWarning, match=wanted):
        quantize_model(_half_a_head(96))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("model", "options"),
    [
        (_half_a_head(32), {}),  # just half
        (_half_a_head(96), {"include": "head"}),
        # What was asked for needs no warning.
        (Stack(1), {"skip": "layers"}),
        (Stack(1), {"scheme": {"out": "int8"}}),
        (Stack(1), {"scheme": {"layers": None, "*": "int8"}}),
    ],
)
def test_no_warning_of_coverage(model: nn.Module, options: dict[str, Any]) -> None:
    quantize_model(model, **options)


def test_without_room_each_float_weight_is_freed_before_the_next_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(qgemm.model.restore, "free_memory", lambda device: 0)
    model = Stack(4)
    weights = {id(p): weakref.ref(p) for name, p in model.named_parameters() if name.endswith("weight")}
    from_linear = QuantLinear.from_linear.__func__  # type: ignore[attr-defined]
    alive = []

    def counting(cls: type[QuantLinear], *args: Any) -> QuantLinear:
        alive.append(sum(weight() is not None for weight in weights.values()))
        return from_linear(cls, *args)

    monkeypatch.setattr(QuantLinear, "from_linear", classmethod(counting))
    quantize_model(model)
    # Without a garbage collection in between: no cycle may hold them.
    assert alive == list(range(9, 0, -1))
    assert all(weight() is None for weight in weights.values())


def test_progress_is_silent_unless_asked_for(capfd: pytest.CaptureFixture[str]) -> None:
    quantize_model(Stack(1))
    assert capfd.readouterr() == ("", "")
    quantize_model(Stack(1), progress=True)
    assert "3/3" in capfd.readouterr().err
    quantize_model(Stack(1), progress=False)
    assert capfd.readouterr() == ("", "")
