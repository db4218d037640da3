"""A good checkpoint of AMD's Quark for the fuzzer, what its layers stand for, and what can be wrong with its config."""

from __future__ import annotations

import json
import random
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from checkpoint.fuzz_json import NUMBERS, OTHERS, Unfit, content_of, dump
from checkpoint.fuzz_models import CONFIG, Files
from checkpoint.quark_layers import integers, mxfp4, step, weight_of
from qgemm.nn import LinearLayer

Tensors = dict[str, Tensor]
_UINT4, _INT8 = step("uint4", 32), step("int8")
_MXFP4 = step("fp4", 32, scale_format="e8m0")
_STATIC = {"dtype": "int8", "qscheme": "per_tensor", "is_dynamic": False, "symmetric": True}


def layers_of_quark(width: int) -> list[Tensors]:
    """Packed groups with zero points, int8 by static int8, and mxfp4."""
    static = {"input_scale": torch.tensor(0.125), "input_zero_point": torch.zeros((), dtype=torch.int8)}
    return [
        integers(_UINT4, width, width)[0],
        {**integers(_INT8, width, width, seed=1)[0], **static},
        mxfp4(width, width, seed=2),
    ]


QUARK: dict[str, Any] = {
    "quant_method": "quark",
    "global_quant_config": {"weight": _MXFP4, "input_tensors": None, "output_tensors": None, "bias": None},
    "layer_quant_config": {
        "layers.0": {"weight": _UINT4, "input_tensors": None},
        "*.1": {"weight": _INT8, "input_tensors": _STATIC},
    },
    "layer_type_quant_config": {},
    "export": {"kv_cache_group": [], "pack_method": "reorder", "weight_format": "real_quantized"},
    "exclude": ["lm_head"],
    "algo_config": None,
}


def check_quark(model: nn.Module, files: Tensors, config: dict[str, Any]) -> None:
    export = config.get("export")
    export = export if isinstance(export, dict) else {}
    in_order = export.get("pack_method", config.get("pack_method")) == "order"
    for name, layer in model.named_modules():
        if not isinstance(layer, LinearLayer):
            continue
        own = {key.removeprefix(f"{name}."): tensor for key, tensor in files.items() if key.startswith(f"{name}.")}
        patterns = config.get("layer_quant_config") or {}
        found = next((value for pattern, value in patterns.items() if fnmatchcase(name, pattern)), None)
        if found is None:
            of_class = config.get("layer_type_quant_config") or {}
            found = of_class.get("Linear", config.get("global_quant_config"))
        said = found["weight"][0] if isinstance(found["weight"], list) else found["weight"]
        weight = layer.dequantize(torch.float32).weight.detach()
        assert torch.equal(weight, weight_of(own, said, in_order)), f"{name} is not what its file holds"


_STEP: dict[str, list[Any]] = {
    "dtype": ["int4", "uint4", "int8", "uint8", "fp8_e4m3", "fp4", "int2", "fp6_e2m3", "mx", None, [], 4],
    "qscheme": ["per_tensor", "per_channel", "per_group", "per_block", None, [], 1],
    "ch_axis": [0, 1, -1, 2, None, "0", True],
    "group_size": [16, 32, 48, 64, 0, -1, None, 2**63, "32"],
    "block_size": [[128, 128], [64], [], "128", None],
    "symmetric": [True, False, None, 1, "no"],
    "is_dynamic": [True, False, None, 1],
    "scale_format": ["e8m0", "e5m3", "float32", None, 1],
    "is_scale_quant": [True, False, None],
}
_LAYER: dict[str, list[Any]] = {
    "weight": [None, [], {}, [_INT8], [_INT8, _UINT4], "int8", [None]],
    "input_tensors": [None, [], {}, {"dtype": "fp8_e4m3"}, {**_STATIC, "is_dynamic": True}, [_STATIC, _STATIC], 8],
    "output_tensors": [None, {}, _STATIC],
    "bias": [None, {}, _STATIC],
}
_WHOLE: dict[str, list[Any]] = {
    "layer_quant_config": [{}, None, [], {"*": {}}, {"*": None}, {"[": {"weight": _INT8}}, {"*" * 500 + "x": {}}],
    "layer_type_quant_config": [{}, None, {"Linear": {"weight": _UINT4}}, {"Linear": 1}, "Linear"],
    "global_quant_config": [{}, None, [], {"weight": _INT8}],
    "export": [{}, None, [], {"pack_method": "order"}, {"pack_method": []}, {"weight_format": "fake_quantized"}],
    "algo_config": [None, [], {}, [{"name": "rotation", "r4": True}], [{"name": []}], {"name": "svdquant"}, "awq"],
    "kv_cache_quant_config": [{}, {"*k_proj": {}}, None, []],
    "softmax_quant_spec": [None, {}, _STATIC, 1],
    "pack_method": ["order", "reorder", None],
}


def break_steps(rng: random.Random, files: Files) -> None:
    """How a weight or an input is quantized, which config a layer has, and how files are packed."""
    try:
        config = json.loads(content_of(files, CONFIG))
        quantization = config["quantization_config"]
        layers = [quantization["global_quant_config"], *quantization["layer_quant_config"].values()]
        steps = [own[part] for own in layers for part in ("weight", "input_tensors") if isinstance(own[part], dict)]
        for _ in range(rng.choice([1, 1, 2])):
            places, fields = rng.choice([([quantization], _WHOLE), (layers, _LAYER), (steps, _STEP), (steps, _STEP)])
            field = rng.choice(sorted(fields))
            rng.choice(places)[field] = rng.choice(fields[field] * 3 + [rng.choice(NUMBERS), rng.choice(OTHERS)])
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise Unfit from error
    files[CONFIG] = dump(config).encode("utf-8", "surrogatepass")
