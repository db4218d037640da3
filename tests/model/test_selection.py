"""What is quantized, and by which scheme: include beside skip, schemes by pattern."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES
from families.mixtures import MIXTURES
from torch import nn

import qgemm
from model.stack import Stack, reasons_of
from qgemm import QuantLinear
from qgemm.calibration import GPTQ, Budget
from qgemm.model.report import report
from qgemm.numerics.formats import INT8
from qgemm.quantize import quantize_model


def _actions(model: nn.Module) -> dict[str, str]:
    return {record.name: record.action for record in report(model).records}


UPS, DOWNS = ("layers.0.up", "layers.1.up"), ("layers.0.down", "layers.1.down")
BATCHES = [torch.randn(4, 32)]


@pytest.mark.parametrize(
    "include",
    ["lm_head", "*head", re.compile("head$"), "re:head$", ["lm_head", "model.layers.0"], iter(["lm_head"])],
)
def test_include_overrules_the_choice_of_an_output_head(include: Any) -> None:
    example = FAMILIES["llama"]()
    expected = example.output()
    quantize_model(example.model, include=include)
    assert report(example.model).kept == ()
    assert isinstance(example.model.get_submodule("lm_head"), QuantLinear)
    assert (example.output() - expected).norm() / expected.norm() < 0.05


def test_include_overrules_task_heads() -> None:
    example = FAMILIES["bert_classifier"]()
    quantize_model(example.model, include="classifier")
    assert report(example.model).kept == ()
    assert example.output().isfinite().all()


def test_include_overrules_rules() -> None:
    model = MIXTURES["qwen2_moe"]().model
    gate = "model.layers.0.mlp.shared_expert_gate"
    quantize_model(model, include=gate)
    reasons = reasons_of(model)
    assert gate not in reasons
    assert "routes tokens" in reasons["model.layers.1.mlp.shared_expert_gate"]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 32)
        self.body = nn.Linear(32, 32)
        self.special = nn.utils.parametrizations.weight_norm(nn.Linear(32, 32))
        self.unembedding = nn.Linear(32, 11, bias=False)
        self.unembedding.weight = self.embedding.weight


@pytest.mark.parametrize(
    ("include", "message"),
    [
        ("unembedding", "include: 'unembedding' matches only layers that can't be quantized: 1 x it shares its weig"),
        ("special", "include: 'special' matches only layers that can't be quantized: .*1 x it is parametrized"),
        (["*", "spec*"], r"include: 'spec\*' matches only"),
        ("head", "include: 'head' matches no linear layer"),
        ("re:(", r"include: 're:\(' isn't a valid regular expression"),
    ],
)
def test_include_cannot_do_what_cannot_be_done(include: Any, message: str) -> None:
    model = Tied()
    with pytest.raises(ValueError, match=message):
        quantize_model(model, include=include)
    assert not any(isinstance(module, QuantLinear) for module in model.modules())


def test_include_is_no_way_out_where_it_changes_nothing() -> None:
    with pytest.raises(ValueError, match=r"nothing to quantize: all 3 .*\)$"):
        quantize_model(Tied(), skip="body")


def test_a_tied_head_stays_tied_under_include() -> None:
    model: Any = FAMILIES["gpt2"]().model
    with pytest.raises(ValueError, match=r"can't be quantized: 1 x it shares its weight with transformer\.wte"):
        quantize_model(model, include="lm_head")
    # Beside others it is passed over.
    quantize_model(model, include="*")
    assert set(reasons_of(model)) == {"lm_head"}


def test_skip_wins_over_include() -> None:
    model = quantize_model(FAMILIES["llama"]().model, include="*", skip="lm_head")
    assert reasons_of(model) == {"lm_head": "skip='lm_head'"}
    with pytest.raises(ValueError, match=r"include: 'lm_head' matches only .*: 1 x skip='\*head'"):
        quantize_model(FAMILIES["llama"]().model, include="lm_head", skip="*head")


def test_wrong_types_of_include() -> None:
    with pytest.raises(TypeError, match="include holds 3"):
        quantize_model(Stack(2), include=[3])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="include is 3"):
        quantize_model(Stack(2), include=3)  # type: ignore[arg-type]


def test_what_is_included_is_calibrated_and_measured() -> None:
    example = FAMILIES["llama"]()
    with qgemm.calibrate(example.model, include="lm_head") as calibration, torch.no_grad():
        example.model(**example.inputs)
    assert "lm_head" in calibration.statistics
    measured = qgemm.sensitivity(example.model, [example.inputs], skip="model", include="lm_head")
    assert {record.name for record in measured.records} == {"lm_head"}
    quantize_model(example.model, budget=Budget(kl=10.0), calibration=[example.inputs], skip="model", include="lm_head")
    assert _actions(example.model)["lm_head"] == "int8"


def test_the_first_pattern_that_matches_counts() -> None:
    schemes = {"layers.0.up": "int4-channel", "*.up": "int4", "out": None, re.compile("layers"): "int8"}
    model = quantize_model(Stack(2), schemes)
    assert _actions(model) == {
        "layers.0.up": "int4-channel",
        "layers.0.down": "int8",
        "layers.1.up": "int4",
        "layers.1.down": "int8",
        "out": "float",
    }
    assert reasons_of(model) == {"out": "scheme={'out': None}"}
    assert model(torch.randn(3, 32)).isfinite().all()


def test_layers_that_no_pattern_matches_stay() -> None:
    model = quantize_model(Stack(2), {"*.up": qgemm.SCHEMES["int8"]})
    assert set(reasons_of(model)) == {*DOWNS, "out"}
    assert set(reasons_of(model).values()) == {"no pattern of scheme matches it"}


@pytest.mark.parametrize("name", ["[x]", "a[0]"])
def test_a_name_that_looks_like_a_pattern(name: str) -> None:
    model = nn.ModuleDict({name: nn.Linear(32, 32), "other": nn.Linear(32, 32)})
    quantize_model(model, skip=name)
    assert _actions(model) == {name: "float", "other": "int8"}


def test_skip_and_include_beside_schemes_by_pattern() -> None:
    model = quantize_model(Stack(2), {"*.up": "int4", "*": "int8"}, skip=["layers.0.up", "out"])
    assert reasons_of(model) == {"layers.0.up": "skip='layers.0.up'", "out": "skip='out'"}
    llama = quantize_model(FAMILIES["llama"]().model, {"lm_head": "int4", "*": "int8"}, include="lm_head")
    assert _actions(llama)["lm_head"] == "int4"
    # A default stays one: a pattern that matches it is no wish to quantize it.
    llama = quantize_model(FAMILIES["llama"]().model, {"lm_head": "int4", "*": "int8"})
    assert reasons_of(llama) == {"lm_head": "output head"}


@pytest.mark.parametrize(
    ("scheme", "message"),
    [
        ({}, "scheme is an empty mapping"),
        ({"*.attn": "int4", "*": "int8"}, r"scheme: '\*.attn' matches no linear layer"),
        ({"*": "int8", "*.up": "int4"}, r"scheme: '\*.up' comes after patterns that match all of its layers"),
        ({"*": "int9"}, "scheme is 'int9'"),
        ("int4+int8-weight", r"'int4\+int8-weight', which is for experts alone, and layers.0.up is linear"),
        ({"*": None}, r"nothing to quantize: all 5 .* \(5 x scheme=\{'\*': None\}\)$"),
    ],
)
def test_schemes_by_pattern_that_do_not_fit(scheme: Any, message: str) -> None:
    model = Stack(2)
    with pytest.raises(ValueError, match=message):
        quantize_model(model, scheme)
    assert not any(isinstance(module, QuantLinear) for module in model.modules())


def test_keys_that_are_no_patterns() -> None:
    with pytest.raises(TypeError, match="scheme holds 3"):
        quantize_model(Stack(2), {3: "int8"})  # type: ignore[dict-item]


def test_a_budget_takes_no_mapping() -> None:
    with pytest.raises(ValueError, match="a mapping of schemes can't be combined with a budget"):
        quantize_model(Stack(2), {"*": "int8"}, budget=Budget(error=1.0), calibration=BATCHES)


def test_scales_are_wanted_for_static_layers_alone() -> None:
    schemes = {"*.up": "int8-static", "*": "int8"}
    with pytest.raises(ValueError, match=r"'int8-static' needs .* 'layers.0.up', 'layers.1.up'"):
        quantize_model(Stack(2), schemes)
    model = quantize_model(Stack(2), schemes, input_scales=dict.fromkeys(UPS, 0.5))
    assert [_actions(model)[name] for name in ("layers.0.up", "layers.0.down")] == ["int8-static", "int8"]
    # Scales of more layers, as a calibration of the whole model has them, do no harm.
    net = Stack(2)
    with qgemm.calibrate(net) as calibration:
        net(*BATCHES)
    by_scales = quantize_model(net, schemes, input_scales=calibration.input_scales("int8-static"))
    assert by_scales.layers[0].up.input_scale == calibration.input_scales("int8-static")["layers.0.up"]


@pytest.mark.parametrize("options", [{}, {"recipe": [GPTQ()]}, {"device": "cpu"}])
def test_batches_calibrate_static_layers_alone(options: dict[str, Any]) -> None:
    schemes = {"*.up": "int8-static", "*.down": "int4", "*": "int8"}
    model = quantize_model(Stack(2), schemes, calibration=BATCHES, **options)
    actions = _actions(model)
    assert {actions[name] for name in UPS} == {"int8-static"}
    assert {actions[name] for name in DOWNS} == {"int4"}
    assert actions["out"] == "int8"
    # The same again from statistics of the whole float model, where nothing else changes the inputs.
    if not options:
        torch.testing.assert_close(model.layers[0].up.input_scale, BATCHES[0].abs().max() / INT8.steps)


def test_schemes_with_columns_or_rotations_by_pattern_go_block_by_block() -> None:
    model = quantize_model(Stack(2), {"*.up": "int8-outliers-16", "*": "int8-static-hadamard"}, calibration=BATCHES)
    assert _actions(model)["layers.1.up"] == "int8-outliers-16"
    assert _actions(model)["layers.1.down"] == "int8-static-hadamard"


def test_experts_have_a_scheme_of_their_own_or_none() -> None:
    schemes = {"model.layers.0.mlp.experts": None, "*.experts": "int4-int8", "*": "int4"}
    actions = _actions(quantize_model(MIXTURES["mixtral"]().model, schemes))
    assert actions["model.layers.0.mlp.experts"] == "float"
    assert actions["model.layers.1.mlp.experts"] == "int4"
    assert actions["model.layers.1.self_attn.q_proj"] == "int4"


def test_every_way_in_gives_the_same_model(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    schemes = {"re:mlp": "int4", "model.layers.0.self_attn.q_proj": None, "*": "int8"}
    example = FAMILIES["llama"]()
    example.model.save_pretrained(tmp_path / "float")
    config = qgemm.QGemmConfig(schemes, include="lm_head")
    on_load = AutoModelForCausalLM.from_pretrained(tmp_path / "float", quantization_config=config)
    qgemm.quantize_checkpoint(tmp_path / "float", tmp_path / "int8", schemes, include="lm_head")
    streamed = qgemm.load_quantized(tmp_path / "int8")
    quantize_model(example.model, schemes, include="lm_head")
    assert _actions(on_load) == _actions(streamed) == _actions(example.model)
    assert _actions(on_load)["lm_head"] == "int8"
    wanted = example.model.state_dict()
    for found in (on_load.state_dict(), streamed.state_dict()):
        assert list(found) == list(wanted)
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
