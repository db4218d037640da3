"""``from_pretrained`` with a recipe or batches: the bits of ``quantize_model`` on the model that is loaded in float."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES
from families.mixtures import MIXTURES

import qgemm
from integrations.folders import assert_same
from qgemm.calibration import GPTQ, Calibration, MinMax, MSEWeights, Recipe, SmoothQuant
from qgemm.nn import LinearLayer


@pytest.mark.slow(quick=["llama"])
@pytest.mark.parametrize(
    ("family", "scheme", "recipe", "dtype"),
    [
        ("llama", "int8-static", [SmoothQuant(), GPTQ()], torch.bfloat16),
        ("llama", {"*.mlp.*": "int4", "*": "int8-static"}, [GPTQ()], torch.float32),
        ("llama", "int8-static-asymmetric", None, torch.float32),
        ("bert", "int8-static", None, torch.float32),
        ("t5", "int8-outliers-16", [], torch.float32),
        ("mixtral", "int8", [GPTQ()], torch.float32),
    ],
)
def test_it_is_quantize_model_on_what_was_loaded(
    family: str, scheme: Any, recipe: Any, dtype: torch.dtype, tmp_path: Path
) -> None:
    example = {**FAMILIES, **MIXTURES}[family]()
    cls = type(example.model)
    example.model.save_pretrained(tmp_path / "float")
    settings: dict[str, Any] = {"skip": "*.o_proj" if family == "llama" else None, "recipe": recipe}
    in_place = cls.from_pretrained(tmp_path / "float", dtype=dtype)
    qgemm.quantize_model(in_place, scheme, calibration=[example.inputs] * 2, progress=False, **settings)
    config = qgemm.QGemmConfig(scheme, calibration=iter([example.inputs] * 2), **settings)
    for device_map in (None, "cpu"):
        loaded = cls.from_pretrained(tmp_path / "float", dtype=dtype, quantization_config=config, device_map=device_map)
        assert_same(loaded, in_place)
        assert qgemm.report(loaded) == qgemm.report(in_place)
        layers = [module for module in loaded.modules() if isinstance(module, LinearLayer)]
        assert layers
        assert not any(parameter.requires_grad for layer in layers for parameter in layer.parameters())
    loaded.save_pretrained(tmp_path / "quantized")
    again = cls.from_pretrained(tmp_path / "quantized")
    assert_same(again, in_place)
    assert qgemm.report(again) == qgemm.report(in_place)
    assert Recipe.of(again) == (None if recipe is None else Recipe(recipe))
    # What was done, and no batch.
    stored = loaded.config.quantization_config
    assert stored.manifest is not None
    assert stored.calibration is None
    assert "input_ids" not in (tmp_path / "quantized" / "config.json").read_text()


def test_an_observer_of_batches(tmp_path: Path) -> None:
    example = FAMILIES["llama"]()
    cls = type(example.model)
    example.model.save_pretrained(tmp_path / "float")
    options: dict[str, Any] = {"calibration": [example.inputs], "observer": "mse"}
    config = qgemm.QGemmConfig("int8-static", **options)
    assert qgemm.QGemmConfig.from_dict(config.to_dict()).to_dict() == config.to_dict()
    loaded = cls.from_pretrained(tmp_path / "float", quantization_config=config)
    assert_same(loaded, qgemm.quantize_model(cls.from_pretrained(tmp_path / "float"), "int8-static", **options))
    with pytest.raises(ValueError, match="observer computes scales from batches"):
        qgemm.QGemmConfig("int8-static", observer="mse")
    qgemm.save_quantized(loaded, tmp_path / "int8")
    with pytest.raises(ValueError, match="observer is for a float model"):
        cls.from_pretrained(
            tmp_path / "int8", quantization_config=qgemm.QGemmConfig.from_dict({"scheme": "int8", "observer": "mse"})
        )


def test_scales_of_a_calibration_are_taken_as_weights_are_read(tmp_path: Path) -> None:
    example = FAMILIES["llama"]()
    cls = type(example.model)
    example.model.save_pretrained(tmp_path)
    in_place = cls.from_pretrained(tmp_path)
    with qgemm.calibrate(in_place, "percentile") as seen, torch.no_grad():
        in_place(**example.inputs)
    qgemm.quantize_model(in_place, "int8-static", calibration=seen)
    config = qgemm.QGemmConfig("int8-static", calibration=seen)
    assert not config.loads_float
    assert_same(cls.from_pretrained(tmp_path, quantization_config=config), in_place)
    config = qgemm.QGemmConfig("int8-static", calibration=Calibration(MinMax()))
    with pytest.raises(ValueError, match="calibration has no statistics of"):
        cls.from_pretrained(tmp_path, quantization_config=config)


def test_as_a_dictionary_it_has_the_recipe_and_no_batch() -> None:
    recipe, batch = Recipe([SmoothQuant(alpha=0.5), GPTQ()]), {"input_ids": torch.ones(1, 4, dtype=torch.int64)}
    config = qgemm.QGemmConfig("int8-static", recipe=list(recipe), calibration=[batch])
    values = json.loads(json.dumps(config.to_dict()))
    assert values["recipe"] == recipe.to_dict()
    assert "calibration" not in values
    again = qgemm.QGemmConfig.from_dict(values)
    assert (again.quantization.recipe, again.calibration, again.loads_float) == (recipe, None, True)
    assert again.to_dict() == config.to_dict()
    assert qgemm.QGemmConfig().to_dict()["recipe"] is None
    values["recipe"] = {"methods": ["gptq", "smoothquant"]}
    with pytest.raises(qgemm.CheckpointError, match=r"quantization_config isn't qgemm's: recipe has smoothquant"):
        qgemm.QGemmConfig.from_dict(values)


def test_what_does_not_fit_is_said_before_weights_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    example = FAMILIES["llama"]()
    example.model.save_pretrained(tmp_path)
    batches = [example.inputs]
    monkeypatch.setattr(type(example.model), "_load_pretrained_model", lambda *_, **__: pytest.fail("weights are read"))

    def refused(message: str, *args: Any, **settings: Any) -> None:
        def load() -> None:
            config = qgemm.QGemmConfig(*args, **settings)
            type(example.model).from_pretrained(tmp_path, quantization_config=config)

        with pytest.raises((ValueError, TypeError), match=message):
            load()

    refused("the method gptq needs batches to run the model on: pass them as calibration", recipe=[GPTQ()])
    refused("the scheme 'int8-static' needs batches", "int8-static", recipe=[MSEWeights()])
    refused("scheme 'int8' finds scales as it runs: calibration is for a static scheme", calibration=batches)
    refused("'.*up_prj'.*did you mean|up_prj", skip="model.layers.0.mlp.up_prj", recipe=[MSEWeights()])
    refused("put a single batch into a list", "int8-static", calibration=example.inputs)
    refused("calibration has no batch", "int8-static", calibration=iter([]))
    refused("smoothquant after gptq", recipe=[GPTQ(), SmoothQuant()], calibration=batches)
    refused("input_scales and calibration both give the scales", "int8-static", input_scales={}, calibration=batches)
    refused("a recipe runs the model on data", recipe=[GPTQ()], calibration=Calibration(MinMax()))
    refused("pass batches as calibration", "int8-static-asymmetric", input_scales={})
