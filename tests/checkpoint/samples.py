"""The small checkpoints in ``tests/data/formats``: loaded once, and compared with what their makers say of them."""

from __future__ import annotations

import hashlib
import json
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

import qgemm

SAMPLES = Path(__file__).parent.parent / "data" / "formats"
IDS = torch.arange(3, 35).view(2, 16)


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


@torch.no_grad()
def logit_error(name: str, reference: str = "logits") -> float:
    """The largest difference from the reference's logits, relative to the largest of those."""
    wanted = load_file(SAMPLES / name / "reference_logits.safetensors")[reference]
    return float((load_sample(name)[0](IDS).logits - wanted).abs().max() / wanted.abs().max())
