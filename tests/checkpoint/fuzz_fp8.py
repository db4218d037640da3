"""Good checkpoints in small floats of FBGEMM, AutoFP8, AutoRound and ModelOpt for the fuzzer; one has a zero point."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from checkpoint.fuzz_foreign import OneNet, edit_shards, from_compressed_tensors, good_foreign, net_of, renamed
from checkpoint.fuzz_models import CONFIG, Good
from checkpoint.rewriting import edited
from qgemm.checkpoint import save_quantized

Tensors = dict[str, Tensor]
STATIC = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}
AUTO_ROUND = {"quant_method": "auto-round", "data_type": "fp", "bits": 8, "group_size": 0}
_W4A8 = {"quant_method": "modelopt", "quant_algo": "W4A8_MXFP4_FP8"}
_AUTO_STATIC = {**AUTO_ROUND, "act_bits": 8, "act_group_size": 0, "act_dynamic": False}
# The name of a folder, the scheme of its layer, what its tensors are called there, and the config.
FOLDERS: list[tuple[str, str, dict[str, str], dict[str, Any]]] = [
    ("fbgemm", "fp8", {}, {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}),
    ("fp8-tensor", "fp8", {"weight_scale": "weight_scale_inv"}, {"quant_method": "fp8"}),
    ("fp8-static", "fp8-static", {"input_scale": "activation_scale"}, STATIC),
    ("modelopt-fp8", "fp8-static", {}, {"quant_method": "modelopt", "quant_algo": "FP8"}),
    ("modelopt-mxfp8", "mxfp8", {}, {"quant_method": "modelopt", "quant_algo": "MXFP8"}),
    ("modelopt-mxfp4", "mxfp4", {"weight_packed": "weight"}, _W4A8),
    ("auto-round-static", "fp8-static", {}, _AUTO_STATIC),
    ("auto-round-weight", "fp8-weight", {}, AUTO_ROUND),
]


def make_fp8(folder: Path) -> list[Good]:
    """A scale a row, one for all, static ones; exponents; int8 with zero points; written into ``folder``."""
    made = []
    for name, scheme, leaves, quantization in FOLDERS:
        save_quantized(net_of(scheme), folder / name, format="compressed-tensors")
        edit_shards(folder / name, partial(renamed, leaves))
        if name != "fbgemm" and "mxfp" not in scheme:
            edit_shards(folder / name, _of_the_whole_tensor)
        with edited(folder / name / CONFIG) as config:
            config["quantization_config"] = quantization
        made.append(good_foreign(folder / name, OneNet, from_compressed_tensors))
    save_quantized(net_of("int8-static"), folder / "shifted", format="compressed-tensors")
    edit_shards(folder / "shifted", _with_a_zero_point)
    with edited(folder / "shifted" / CONFIG) as config:
        config["quantization_config"]["config_groups"]["group_0"]["input_activations"]["symmetric"] = False
    return [*made, good_foreign(folder / "shifted", OneNet, from_shifted)]


def _of_the_whole_tensor(name: str, tensor: Tensor) -> Tensors:
    """A scale of rows becomes one."""
    return {name: tensor.flatten()[0] if name.endswith(("weight_scale", "weight_scale_inv")) else tensor}


def _with_a_zero_point(name: str, tensor: Tensor) -> Tensors:
    own = {name: tensor}
    if name.endswith("input_scale"):
        own[name.replace("input_scale", "input_zero_point")] = torch.tensor([-20], dtype=torch.int8)
    return own


def from_shifted(files: Tensors) -> Tensors:
    """As ``from_compressed_tensors``, where inputs have a zero point: the bias takes off what it adds to products."""
    found = from_compressed_tensors(files)
    for name in [name for name in files if name.endswith(".input_zero_point")]:
        layer = name.rpartition(".")[0]
        weight, scale = found[f"{layer}.weight"], found[f"{layer}.weight_scale"]
        number = files[name].reshape(())
        added = weight.long().sum(1).double() * scale.flatten().double()
        added = added * found[f"{layer}.input_scale"].double() * number.double()
        bias = files.get(f"{layer}.bias")
        found[f"{layer}.bias"] = (-added if bias is None else bias.double() - added).float()
        found[name] = number
    return found
