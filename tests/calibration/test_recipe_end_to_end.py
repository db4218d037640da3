"""Recipes on models with outlier channels, and saved and loaded."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from checkpoint.rewriting import edited
from families import FAMILIES
from torch import nn

import qgemm
from calibration.blocks import llama_with_outliers
from qgemm.calibration import AWQ, GPTQ, METHODS, BiasCorrection, Method, MSEWeights, Recipe, SmoothQuant

SCHEMES = [*qgemm.SCHEMES, "int8-outliers-16", "int8-static-outliers-16"]
# What each has is in another scheme, too.
FEW = {"int8-hadamard", "int8-outliers-16", "fp8-static", "int4-channel", "fp8-weight", "mxfp8"}


def relative_error(model: nn.Module, inputs: dict[str, torch.Tensor], expected: torch.Tensor) -> float:
    with torch.no_grad():
        out = model(**inputs).logits
    return float((out - expected).norm() / expected.norm())


def error_with(scheme: str, recipe: list[Method] | None, factor: float = 30.0) -> float:
    """Of the logits of a model with outliers, on other tokens than those of the calibration."""
    model = llama_with_outliers(factor)[0]
    tokens = torch.randint(5, 97, (72, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model(tokens[64:]).logits
    qgemm.quantize_model(model, scheme, calibration=tokens[:64].split(16), recipe=recipe)
    return relative_error(model, {"input_ids": tokens[64:]}, expected)


@pytest.mark.slow
def test_outliers_are_what_smoothquant_and_gptq_help_against() -> None:
    static = error_with("int8-static", None)
    smoothed = error_with("int8-static", [SmoothQuant(0.5)])
    both = error_with("int8-static", [SmoothQuant(0.5), GPTQ()])
    assert smoothed < 0.5 * static
    assert both < smoothed
    # As without outliers.
    assert both < error_with("int8-static", None, factor=1.0)


@pytest.mark.slow
def test_methods_for_weights_help_at_4_bits() -> None:
    nearest, gptq, awq = (
        error_with("int4", recipe, factor=1.0) for recipe in ([], [GPTQ()], [AWQ(clip=False), GPTQ()])
    )
    assert awq < gptq < 0.9 * nearest


def recipe_for(name: str) -> list[Method]:
    return {
        "weights": [AWQ(), GPTQ(act_order=False)],
        "everything": [method() for method in METHODS.values() if method is not MSEWeights],
    }[name]


@pytest.mark.slow(quick=["bert-int8-static-everything", "t5-int4-weights"])
@pytest.mark.parametrize(
    ("family", "scheme", "recipe"),
    [
        *(
            pytest.param("llama", scheme, "everything", marks=[pytest.mark.complete] if scheme in FEW else [])
            for scheme in SCHEMES
        ),
        ("llama", "int8", "weights"),
        ("bert", "int8-static", "everything"),
        ("t5", "int4", "weights"),
        *(
            pytest.param("llama", scheme, "weights", marks=pytest.mark.complete)
            for scheme in SCHEMES
            if scheme != "int8"
        ),
        pytest.param("bert", "int8-static", "weights", marks=pytest.mark.complete),
        pytest.param("t5", "int4", "everything", marks=pytest.mark.complete),
    ],
)
def test_every_combination_is_saved_and_loaded_bit_for_bit(
    family: str, scheme: str, recipe: str, tmp_path: Path
) -> None:
    example = FAMILIES[family]()
    model = qgemm.quantize_model(
        example.model, scheme, calibration=[example.inputs], recipe=recipe_for(recipe), progress=False
    )
    expected = example.output()
    assert expected.isfinite().all()
    qgemm.save_quantized(model, tmp_path)
    loaded = qgemm.load_quantized(tmp_path)
    example.model = loaded
    assert torch.equal(example.output(), expected)
    assert qgemm.report(loaded) == qgemm.report(model)
    assert Recipe.of(loaded) == Recipe(recipe_for(recipe))
    left, right = model.state_dict(), loaded.state_dict()
    assert set(left) == set(right)
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_save_pretrained_keeps_the_recipe(tmp_path: Path) -> None:
    example = FAMILIES["llama"]()
    recipe = Recipe([SmoothQuant(alpha=0.7), GPTQ()])
    qgemm.quantize_model(example.model, "int8-static", calibration=[example.inputs], recipe=recipe)
    expected = example.output()
    example.model.save_pretrained(tmp_path)
    example.model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(example.output(), expected)
    assert Recipe.of(example.model) == recipe
    assert "recipe: smoothquant, gptq" in str(qgemm.report(example.model))


def test_without_a_recipe_there_is_none(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 4))
    qgemm.quantize_model(model)
    assert Recipe.of(model) is None
    qgemm.save_quantized(model, tmp_path)
    assert "recipe" not in json.loads((tmp_path / "qgemm_report.json").read_text())["report"]


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ([], "report can't be read: recipe of the report must be a dictionary"),
        ({"methods": {}}, "report can't be read: recipe of the report must be a dictionary"),
        ({"methods": [{"gptq": {"damping": [1]}}]}, "report can't be read: recipe of the report holds"),
        # Of a newer qgemm: the model still loads.
        ({"methods": [{"gptq": {"phase": 1}}, {"newer": {}}]}, None),
    ],
)
def test_recipes_of_others(recipe: Any, message: str | None, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 4))
    qgemm.quantize_model(model, recipe=[MSEWeights()])
    qgemm.save_quantized(model, tmp_path)
    with edited(tmp_path / "qgemm_report.json") as values:
        values["report"]["recipe"] = recipe
    source = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 4))
    if message is not None:
        with pytest.raises(qgemm.CheckpointError, match=message):
            qgemm.load_quantized(tmp_path, model=source)
        return
    loaded = qgemm.load_quantized(tmp_path, model=source)
    assert "recipe: gptq, newer" in str(qgemm.report(loaded))
    with pytest.raises(ValueError, match="gptq has no setting 'phase'"):
        Recipe.of(loaded)


def test_methods_without_data_need_none() -> None:
    model, plain = (nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 4)).requires_grad_(False) for _ in range(2))
    plain.load_state_dict(model.state_dict())
    qgemm.quantize_model(model, recipe=[MSEWeights()])
    qgemm.quantize_model(plain)
    errors = [[record.weight_error for record in qgemm.report(each).records] for each in (model, plain)]
    assert all(one is not None and other is not None and one < other for one, other in zip(*errors, strict=True))
    assert BiasCorrection.needs_data


OTHER_FORMATS = ["int4-32-asymmetric-ordered", "nvfp4", "mxfp8", "int4-32-int8", "fp8", "fp8-block", "nf4"]


@pytest.mark.parametrize("scheme", OTHER_FORMATS)
def test_recipes_of_other_formats(scheme: str) -> None:
    example = FAMILIES["llama"]()
    wanted = example.output()
    calibration = [{"input_ids": torch.randint(0, 97, (4, 24))} for _ in range(2)]
    plain, options = copy.deepcopy(example), {"calibration": calibration, "progress": False}
    qgemm.quantize_model(plain.model, scheme, recipe=[], **options)
    qgemm.quantize_model(example.model, scheme, recipe=[AWQ(clip=False), GPTQ()], **options)
    assert (example.output() - wanted).norm() < 1.2 * (plain.output() - wanted).norm()
    records = [qgemm.report(each.model).quantized for each in (example, plain)]
    assert not any("gptq" in record.note for record in records[0])
    ours, theirs = (torch.tensor([record.output_error for record in each]) for each in records)
    # Half of the error of fp8 products is that of activations.
    assert (ours / theirs).max() < (0.95 if scheme.startswith("fp8") else 0.8)


def test_recipes_of_layers_outside_of_blocks() -> None:
    """They are quantized after the blocks, beside parameters of 8 bits."""
    torch.manual_seed(0)
    model = transformers.BertModel(FAMILIES["bert"]().model.config).eval()
    calibration = [{"input_ids": torch.randint(0, 97, (4, 24))} for _ in range(2)]
    qgemm.quantize_model(model, "nvfp4", recipe=[AWQ(clip=False), GPTQ()], calibration=calibration, progress=False)
    assert isinstance(model.pooler.dense, qgemm.nn.WeightOnlyLinear)
    assert "failed" not in str(qgemm.report(model))
