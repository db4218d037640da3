"""Which part of Quark's config a layer has, and what the config is called."""

from __future__ import annotations

from typing import Any

import pytest

from checkpoint.quark_layers import step
from qgemm.checkpoint.quark_config import Unsupported, config_of, describe, dtypes_in


def of(dtype: str) -> dict[str, Any]:
    return {"weight": step(dtype)}


QUANTIZATION = {
    "global_quant_config": of("int8"),
    "layer_quant_config": {"*.q_proj": of("int4"), "*self_attn*": of("uint8"), "lm_head": of("fp8_e4m3")},
    "exclude": ["*"],  # layers with scales are quantized all the same
}


@pytest.mark.parametrize(
    ("layer", "dtype"),
    [
        ("model.layers.0.self_attn.q_proj", "int4"),
        ("model.layers.0.self_attn.k_proj", "uint8"),
        ("model.lm_head", "int8"),
        ("lm_head", "fp8_e4m3"),
        ("q_proj", "int8"),
    ],
)
def test_the_first_pattern_counts(layer: str, dtype: str) -> None:
    assert config_of(layer, QUANTIZATION) == of(dtype)


def test_classes_come_before_the_global_config() -> None:
    by_class = {**QUANTIZATION, "layer_type_quant_config": {"Linear": of("uint4"), "Conv2d": of("int4")}}
    assert config_of("q_proj", by_class) == of("uint4")
    assert config_of("lm_head", by_class) == of("fp8_e4m3")
    empty = {**QUANTIZATION, "layer_type_quant_config": None, "layer_quant_config": None}
    assert config_of("lm_head", empty) == of("int8")


@pytest.mark.parametrize(
    ("quantization", "problem"),
    [
        ({"layer_quant_config": [1]}, "can't be found in layer_quant_config"),
        ({"layer_type_quant_config": "Linear"}, "can't be found in .* and layer_type_quant_config, which must be obj"),
        ({"global_quant_config": None}, "has no config: neither a layer_quant_config nor a global_quant_config"),
        ({"layer_quant_config": {"*": 8}}, "has no config"),
    ],
)
def test_no_config(quantization: dict[str, Any], problem: str) -> None:
    with pytest.raises(Unsupported, match=problem):
        config_of("a", quantization)


@pytest.mark.parametrize("axis", [0, 1, -2])
def test_activations_by_token(axis: int) -> None:
    inputs = {"dtype": "int8", "qscheme": "per_channel", "ch_axis": axis, "is_dynamic": True}
    assert describe({**of("int8"), "input_tensors": inputs}).scheme == "int8"
    shifted = describe({**of("int8"), "input_tensors": {**inputs, "symmetric": False}})
    assert (shifted.scheme, shifted.note) == (
        "int8-weight",
        "activations stay in float, where the checkpoint asks for int8",
    )


def test_dtypes() -> None:
    assert dtypes_in(QUANTIZATION) == "int8, int4, uint8, fp8_e4m3"
    twice = [step("fp4", 16), {**step("fp8_e4m3"), "is_scale_quant": True}]
    assert dtypes_in({"global_quant_config": {"weight": twice}}) == "fp4"
    assert dtypes_in({"global_quant_config": {"weight": 8}, "layer_quant_config": []}) == ""
