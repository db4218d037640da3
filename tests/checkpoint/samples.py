"""The small checkpoints in ``tests/data/formats``: loaded once, and compared with what their makers say of them."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import qgemm
from qgemm.nn import WeightOnlyLinear

SAMPLES = Path(__file__).parent.parent / "data" / "formats"
IDS = torch.arange(3, 35).view(2, 16)
NAMES = sorted(folder.name for folder in SAMPLES.iterdir() if folder.is_dir())
# Of every library, and of what its files hold, one with the most to it.
USUAL = [
    "auto-round-gptq",
    "awq-gemm-g32-skip",
    "bnb-nf4-double",
    "ct-mixed",
    "eetq-int8",
    "fbgemm-fp8",
    "fp8-block128",
    "gptq-4bit-g64-asym-desc-act",
    "hqq-4bit-g64",
    "mlx-mixed",
    "mxfp4-gpt-oss",
    "nvfp4-modelopt",
    "quanto-mixed",
    "quark-mixed",
    "torchao-fp8wo",
    "torchao-int4",
]


def every_sample(usual: Iterable[str] = USUAL) -> list[Any]:
    """The parameters of a test of all samples, of which those that aren't ``usual`` run with ``--complete`` alone."""
    usual = set(usual)
    assert usual <= set(NAMES)
    return [pytest.param(name, marks=[] if name in usual else pytest.mark.complete) for name in NAMES]


@cache
def load_sample(name: str) -> tuple[Any, list[str]]:
    """The model in float32, for all tests that don't change it, and the warnings that loading it gave."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = qgemm.load_quantized(SAMPLES / name)
    return model.float(), [str(each.message) for each in caught]


def digest(weight: Tensor) -> str:
    return hashlib.sha256(weight.detach().float().contiguous().numpy().tobytes()).hexdigest()


def reference_weights(name: str) -> dict[str, dict[str, Any]]:
    return json.loads((SAMPLES / name / "reference_weights.json").read_text())


def wrong_weights(name: str) -> list[str]:
    """The layers whose dequantized weights differ from the reference in any bit."""
    model = load_sample(name)[0]
    return [
        layer
        for layer, wanted in reference_weights(name).items()
        if digest(model.get_submodule(layer).dequantize(torch.float32).weight) != wanted["sha256_float32"]
    ]


def layers_in(scheme: str, name: str) -> dict[str, WeightOnlyLinear]:
    """The layers of a sample by name: all are in ``scheme``, with the reference's weights, and there is no warning."""
    model, warned = load_sample(name)
    assert warned == []
    layers = {path: layer for path, layer in model.named_modules() if isinstance(layer, WeightOnlyLinear)}
    assert {layer.scheme.name for layer in layers.values()} == {scheme}
    assert wrong_weights(name) == []
    return layers


@torch.no_grad()
def logit_error(name: str, reference: str = "logits") -> float:
    """The largest difference from the reference's logits, relative to the largest of those."""
    wanted = load_file(SAMPLES / name / "reference_logits.safetensors")[reference]
    return float((load_sample(name)[0](IDS).logits - wanted).abs().max() / wanted.abs().max())
