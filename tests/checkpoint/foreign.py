"""What the tests of foreign checkpoints share: rewriting files, and logits."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from checkpoint.rewriting import edited, rewrite_file

IDS = torch.arange(48).reshape(3, 16)


@torch.no_grad()
def logits(model: nn.Module) -> Tensor:
    return model(IDS).logits.float()


needs_the_library = pytest.mark.skipif(
    sys.version_info < (3, 11), reason="compressed-tensors takes Python 3.11 or newer"
)


def relative(got: Tensor, wanted: Tensor) -> float:
    return float((got - wanted).norm() / wanted.norm())


def edit_quantization(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    with edited(folder / "config.json") as config:
        edit(config["quantization_config"])


def edit_tensors(folder: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    rewrite_file(path, tensors)


def same_tensors(model: nn.Module, other: nn.Module) -> bool:
    ours, theirs = model.state_dict(), other.state_dict()
    return ours.keys() == theirs.keys() and all(
        ours[name].dtype == theirs[name].dtype and torch.equal(ours[name], theirs[name]) for name in ours
    )
