"""Samples with a value that no loader may take, though in many of them no tensor is made of it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from checkpoint.foreign import edit_quantization, edit_tensors
from checkpoint.samples import SAMPLES

Q = "model.layers.0.self_attn.q_proj"
EXPERTS = "model.layers.0.mlp.experts"
ZERO_POINT = r"weight_zero_point: the zero point is not 0, but the config says .* correct symmetric in the weights"
BIAS = rf"{Q}\.bias: the bias is not 0, but the model's layer has none: see that config.json is the one"


@dataclass(frozen=True)
class Refused:
    """``sample`` with a config and tensors that are edited; ``message``: what an error says of it."""

    sample: str
    message: str
    tensors: Callable[[dict[str, Tensor]], object] = lambda tensors: None
    quantization: Callable[[dict[str, Any]], object] = lambda values: None

    def write(self, folder: Path) -> Path:
        shutil.copytree(SAMPLES / self.sample, folder)
        edit_quantization(folder, self.quantization)
        edit_tensors(folder, self.tensors)
        return folder


def say_symmetric(values: dict[str, Any]) -> None:
    values["config_groups"]["group_0"]["weights"]["symmetric"] = True


def add_bias(tensors: dict[str, Tensor]) -> None:
    tensors[f"{Q}.bias"] = torch.ones(128)


def put(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.update({name: change(tensors[name])})


def add(leaf: str, like: str | None = None) -> Callable[[dict[str, Tensor]], object]:
    """An int8 tensor of ones: one number, or one for each of ``like``."""

    def change(tensors: dict[str, Tensor]) -> None:
        shape = (1,) if like is None else tensors[f"{Q}.{like}"].shape
        tensors[f"{Q}.{leaf}"] = torch.ones(shape, dtype=torch.int8)

    return change


def first(value: float) -> Callable[[Tensor], Tensor]:
    """Replaces the first number."""
    return lambda tensor: tensor.flatten().index_fill(0, torch.tensor([0]), value).view(tensor.shape)


REFUSED = {
    "an asymmetric file that says symmetric": Refused("ct-w4a16-g32-asym", ZERO_POINT, quantization=say_symmetric),
    "the same in 8 bits": Refused("ct-w8a16-g128-asym", ZERO_POINT, quantization=say_symmetric),
    "a zero point in a symmetric layer": Refused(
        "ct-w4a8-int", ZERO_POINT, add("weight_zero_point", like="weight_scale")
    ),
    "a zero point of the input": Refused(
        "ct-fp8-static",
        r"the zero point of the input is not 0, but .* in the input_activations",
        add("input_zero_point"),
    ),
    "infinity in mxfp4": Refused(
        "mxfp4-gpt-oss", r"gate_up_proj_scales? holds NaN", put(f"{EXPERTS}.gate_up_proj_scales", first(255))
    ),
    "NaN in a global scale": Refused(
        "nvfp4-modelopt",
        r"weight_(scale_2|global_scale) (is not finite|holds 1 of 1)",
        put(f"{Q}.weight_scale_2", first(torch.nan)),
    ),
    "another table of nf4": Refused(
        "bnb-nf4", "its quant_map isn't that of nf4", put(f"{Q}.weight.quant_map", first(0.5))
    ),
    "NaN in scales": Refused(
        "gptq-4bit-g128-sym", rf"{Q}\.\S+ (weight_scale )?holds (NaN|1 of)", put(f"{Q}.scales", first(torch.nan))
    ),
    **{
        f"a bias in {sample}": Refused(sample, BIAS, add_bias)
        for sample in (
            *("gptq-4bit-g128-sym", "awq-gemm-g128", "ct-w4a16-g128", "ct-fp8-dynamic", "fp8-block128", "bnb-nf4"),
            *("torchao-int8wo", "auto-round-gptq"),
        )
    },
}
