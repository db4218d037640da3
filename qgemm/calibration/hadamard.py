"""Hadamard rotations: spread outliers of a few channels over many, which reduces the rounding error.

``(x H) (W H)^T = x W^T`` for the orthonormal Walsh-Hadamard matrix ``H``. Ashkboos et al. 2024, "QuaRot",
arXiv 2404.00456. Two of the paper's rotations are here:

- ``online``: the layer itself rotates its input at run time (scheme ``int8-hadamard``). This works for any layer, and
  takes time; it is meant for down-projections, whose inputs have outliers that no preceding norm could absorb.
- ``values``: between an attention's values and its output projection, both weights are rotated beforehand, per head.
  Attention sums values over tokens, each channel separately, so this is exact and free. It is verified like a fold.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from qgemm.calibration.folding import Fold, OutputCheck, find_folds, head_dim_of, input_weights
from qgemm.calibration.method import Block, LayerWork, Method, Part
from qgemm.nn.linear_layer import linear_weight
from qgemm.numerics.hadamard import block_size, hadamard

_DOWN_PROJECTIONS = (
    "down_proj",
    "w2",
    "wo",
    "fc2",
    "mlp.c_proj",
    "dense_4h_to_h",
    "lin2",
    "output.dense",
    "output_dense",
    "ffn_output",
)


@dataclass(frozen=True)
class HadamardRotation(Method):
    """Rotates inputs; it comes before methods that round weights.

    - ``online``: which layers rotate their input at run time: ``"down-projections"``, ``"all"`` or ``"none"``.
    - ``values``: whether to rotate attention values, head by head, where it is verified that the output stays the same.

    Ashkboos et al. 2024, "QuaRot", arXiv 2404.00456.
    """

    name: ClassVar[str] = "hadamard"
    settles: ClassVar[tuple[Part, ...]] = ("inputs",)
    online: Literal["down-projections", "all", "none"] = "down-projections"
    values: bool = True

    def apply(self, block: Block) -> None:
        """Changes weights in place, and schemes of layers."""
        if self.values:
            for fold in find_folds(block)[0]:
                if rotate_values(block, fold):
                    fold.undecide(block)
        for work in block.layers.values():
            if self.online == "all" or (self.online == "down-projections" and is_down_projection(work.name)):
                _rotate_online(work)


def is_down_projection(name: str) -> bool:
    """Whether a layer, by its name, is the second one of a feed-forward network."""
    return name.endswith(_DOWN_PROJECTIONS) and not name.endswith("attention.output.dense")


def _rotate_online(work: LayerWork) -> None:
    K = linear_weight(work.module).shape[1]
    if block_size(K) == 1:
        work.notes.append(f"hadamard: not rotated: it has {K} columns, an odd number")
        return
    try:
        work.scheme = work.scheme.rotated()
    except ValueError as error:
        work.notes.append(f"hadamard: not rotated: {error}")
    else:
        work.undecide()


@torch.no_grad()
def rotate_values(block: Block, fold: Fold) -> bool:
    """Rotates an attention's values and its output projection's columns in place; returns whether that was possible.

    ``fold``: from the values to the output projection; for any other, nothing is done. Blocks have the size of the
    largest power of two that divides a head's width.
    """
    source = block.model.get_submodule(fold.source)
    layers = [block.model.get_submodule(name) for name in fold.layers]
    width = block_size(head_dim_of(block.model, (fold.source, *fold.layers)) or 1)
    columns = [weight for layer in layers for weight in input_weights(layer)]
    K = columns[0].shape[-1]
    if fold.is_norm(block) or width == 1 or K % width:
        return False
    channels = torch.arange(K, device="cpu") if fold.channels is None else fold.channels
    groups = torch.unique(channels.view(-1, width), dim=0)

    def rotate() -> None:
        _rotate_rows(source, groups)
        for weight in columns:
            weight.copy_(hadamard(weight.double().reshape(*weight.shape[:-1], -1, width)).reshape(weight.shape))

    return OutputCheck(block).keeps_outputs([source, *layers], rotate, lambda: _rotate_rows(source, groups))


def _rotate_rows(linear: nn.Module, groups: Tensor) -> None:
    """Rotates the output channels ``groups [n, width]`` of a layer, each group separately."""
    weight = linear_weight(linear).detach()
    groups = groups.to(weight.device)
    rows = weight[groups].double()  # [n, width, K]
    weight[groups] = hadamard(rows.transpose(1, 2)).transpose(1, 2).to(weight.dtype)
    if isinstance(linear.bias, Tensor):
        bias = linear.bias.detach()
        bias[groups] = hadamard(bias[groups].double()).to(bias.dtype)
