"""SmoothQuant: moves the difficulty of quantization from activations to weights, with a scale per input channel.

``s_j = max|x_j|^alpha / max|W_j|^(1 - alpha)``; inputs are divided by ``s`` and the weights' columns are multiplied by
it, so that the float function stays the same. With ``alpha`` 0.5 both have the same largest magnitude in every channel,
so a scale per token or per tensor suits them better than it suits a few large channels. Xiao et al. 2022,
"SmoothQuant", arXiv 2211.10438.

The division goes into the preceding norm or linear layer (``folding.py``); layers where that isn't possible are left
alone, with a note.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from qgemm.calibration.folding import Fold, find_folds
from qgemm.calibration.method import Block, LayerWork, Method, Part
from qgemm.calibration.rounded_part import rounded_input, rounded_part
from qgemm.calibration.rounding import dequantize, round_to_nearest
from qgemm.calibration.statistics import InputStatistics
from qgemm.nn.linear_layer import linear_weight

ALPHAS = tuple(tenths / 10 for tenths in range(11))
"""The values that ``alpha="search"`` chooses from, besides no scales at all."""

_ROWS = 512


@dataclass(frozen=True)
class SmoothQuant(Method):
    """Scales the input channels of every layer whose scales can be folded into the previous one.

    - ``alpha``: 0 to 1, how much of the difficulty moves to the weights; or ``"search"``: for each fold, the one of 0,
      0.1, ... 1, or no scales at all, with the minimum error of its layers' outputs on calibration rows.
    - ``through_linear``: whether scales also go into linear layers (values before the output projection, ups before the
      down-projection), or only into norms, as in the paper.

    Xiao et al. 2022, "SmoothQuant", arXiv 2211.10438.
    """

    name: ClassVar[str] = "smoothquant"
    settles: ClassVar[tuple[Part, ...]] = ("inputs",)
    alpha: float | Literal["search"] = "search"
    through_linear: bool = True

    def __post_init__(self) -> None:
        """Raises ``ValueError`` for an alpha out of range."""
        if self.alpha != "search" and not (isinstance(self.alpha, int | float) and 0 <= self.alpha <= 1):
            raise ValueError(f"alpha is {self.alpha!r}; it must be 0 to 1, or 'search'")

    def apply(self, block: Block) -> None:
        """Scales the block's layers in place."""
        folds, refused = find_folds(block)
        for fold in folds:
            quantized = [name for name in fold.layers if name in block.layers]
            if not self.through_linear and not fold.is_norm(block):
                refused |= dict.fromkeys(quantized, "its input comes from a linear layer, and through_linear is off")
            elif all(block.layers[name].scheme.is_weight_only for name in quantized):
                refused |= dict.fromkeys(quantized, "its input stays in float")
            elif not (seen := block.collect(quantized[:1], rows=_ROWS if self.alpha == "search" else 0)):
                refused |= dict.fromkeys(quantized, "it saw no tokens")
            else:
                try:
                    self._scale(block, fold, seen[quantized[0]])
                except ValueError as error:
                    refused |= dict.fromkeys(quantized, str(error))
                else:
                    fold.undecide(block)
        for name, reason in refused.items():
            block.layers[name].notes.append(f"smoothquant: not scaled: {reason}")

    def _scale(self, block: Block, fold: Fold, seen: InputStatistics) -> None:
        weights = fold.weights(block)[0]
        weight_amax = fold.tie(torch.stack([weight.abs().amax(0).float() for weight in weights]).amax(0))
        input_amax = fold.tie(seen.channel_amax)
        if self.alpha != "search":
            fold.apply(block, smoothing_scales(input_amax, weight_amax, self.alpha))
            return
        candidates = [smoothing_scales(input_amax, weight_amax, alpha) for alpha in ALPHAS]
        candidates.insert(0, torch.ones_like(input_amax))
        works = [block.layers[name] for name in fold.layers if name in block.layers]
        losses = [sum(smoothed_loss(work, seen, scales) for work in works) for scales in candidates]
        fold.apply(block, candidates[losses.index(min(losses))])


def smoothing_scales(input_amax: Tensor, weight_amax: Tensor, alpha: float) -> Tensor:
    """``input_amax^alpha / weight_amax^(1 - alpha)``, float32 ``[K]``; 1 where that is 0 or not finite.

    ``input_amax [K]``: the largest magnitude in each input channel. ``weight_amax [K]``: in each column of the weights.
    """
    scales = input_amax.float() ** alpha / weight_amax.float() ** (1 - alpha)
    return torch.where(scales.isfinite() & (scales > 0), scales, 1.0)


@torch.no_grad()
def smoothed_loss(work: LayerWork, seen: InputStatistics, scales: Tensor) -> float:
    """``|y - x W^T|^2 / |x W^T|^2`` over ``seen.rows``, with ``y`` of the quantized ``x / scales`` and ``W * scales``.

    Weight and input are rounded to nearest, according to the layer's scheme.
    """
    weight = linear_weight(work.module).detach().float() * scales
    part, scheme = rounded_part(work, weight), work.scheme.weight
    rounded = dequantize(round_to_nearest(part, scheme), scheme)
    x, x_rounded = rounded_input(work, seen, scales)
    assert seen.rows is not None
    whole = float(((seen.rows.float() / scales) @ weight.T).square().sum())
    return float((x_rounded @ rounded.T - x @ part.T).square().sum()) / whole if whole else 0.0
