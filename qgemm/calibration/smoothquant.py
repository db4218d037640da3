"""SmoothQuant: moves the difficulty of quantizing from activations to weights, by a scale per input channel.

``s_j = max|x_j|^alpha / max|W_j|^(1 - alpha)``; inputs are divided by ``s``, the weights' columns multiplied by it, so
that the float function stays the same. With ``alpha`` 0.5 both have the same largest magnitude in every channel, which
a scale per token or per tensor then serves better than it does a few large channels. Xiao et al. 2022, "SmoothQuant",
arXiv 2211.10438.

The division goes into the norm or the linear layer ahead (``folding.py``); layers where that can't be are left alone,
and say so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from qgemm.calibration.folding import Fold, find_folds, input_weights
from qgemm.calibration.method import Block, Method
from qgemm.calibration.rounding import dequantize, round_to_nearest, weight_grid
from qgemm.calibration.statistics import InputStatistics
from qgemm.nn.linear import linear_weight
from qgemm.scheme import QuantScheme, TensorScheme

ALPHAS = tuple(tenths / 10 for tenths in range(11))
"""What ``alpha="search"`` chooses from, beside no scales at all."""

_ROWS = 512


@dataclass(frozen=True)
class SmoothQuant(Method):
    """Scales the input channels of every layer for which there is a fold.

    - ``alpha``: 0 to 1, how much of the difficulty goes to the weights; or ``"search"``: for each fold the one of
      ``ALPHAS``, or none, with which its layers' outputs err least on calibration rows under their schemes.
    - ``through_linear``: whether scales also go into linear layers (values before the output projection, ups before the
      down-projection), or only into norms, as in the paper.
    """

    name: ClassVar[str] = "smoothquant"
    alpha: float | Literal["search"] = 0.5
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
            elif all(block.layers[name].scheme.activation is None for name in quantized):
                refused |= dict.fromkeys(quantized, "its input stays in float")
            elif not (seen := block.collect(quantized[:1], rows=_ROWS if self.alpha == "search" else 0)):
                refused |= dict.fromkeys(quantized, "it saw no tokens")
            else:
                try:
                    self._scale(block, fold, seen[quantized[0]])
                except ValueError as error:
                    refused |= dict.fromkeys(quantized, str(error))
        for name, reason in refused.items():
            block.layers[name].notes.append(f"smoothquant: not scaled: {reason}")

    def _scale(self, block: Block, fold: Fold, seen: InputStatistics) -> None:
        # Experts are quantized too; routers stay as they are.
        weights = [
            weight
            for name in fold.layers
            for weight in input_weights(block.model.get_submodule(name))
            if name in block.layers or weight.ndim == 3
        ]
        weight_amax = fold.tie(torch.stack([weight.abs().flatten(0, -2).amax(0).float() for weight in weights]).amax(0))
        input_amax = fold.tie(seen.channel_amax)
        if self.alpha != "search":
            fold.apply(block, smoothing_scales(input_amax, weight_amax, self.alpha))
            return
        candidates = [smoothing_scales(input_amax, weight_amax, alpha) for alpha in ALPHAS]
        candidates.insert(0, torch.ones_like(input_amax))
        works = [block.layers[name] for name in fold.layers if name in block.layers]
        losses = [
            sum(smoothed_loss(seen, linear_weight(work.module).detach(), scales, work.scheme) for work in works)
            for scales in candidates
        ]
        fold.apply(block, candidates[losses.index(min(losses))])


def smoothing_scales(input_amax: Tensor, weight_amax: Tensor, alpha: float) -> Tensor:
    """``input_amax^alpha / weight_amax^(1 - alpha)``, float32 ``[K]``; 1 for a channel where one of them is 0.

    ``input_amax [K]``: the largest magnitude in each input channel. ``weight_amax [K]``: in each column of the weights.
    """
    scales = input_amax.float() ** alpha / weight_amax.float() ** (1 - alpha)
    return torch.where((input_amax > 0) & (weight_amax > 0) & scales.isfinite() & (scales > 0), scales, 1.0)


@torch.no_grad()
def smoothed_loss(seen: InputStatistics, weight: Tensor, scales: Tensor, scheme: QuantScheme) -> float:
    """``|y - x W^T|^2 / |x W^T|^2`` over ``seen.rows``, with ``y`` of the quantized ``x / scales`` and ``W * scales``.

    ``weight [N, K]`` and its input are quantized to nearest as ``scheme`` says; a static input with the range of all
    that was seen.
    """
    assert seen.rows is not None
    x = seen.rows.float()
    wanted = x @ weight.float().T
    bits, group_size = weight_grid(scheme.weight)
    rounded = dequantize(round_to_nearest(weight.float() * scales, bits, group_size), group_size)
    if scheme.activation is None:
        got = (x / scales) @ rounded.T
    else:
        got = rounded_input(x / scales, scheme.activation, float((seen.channel_amax / scales).max())) @ rounded.T
    whole = float(wanted.square().sum())
    return float((got - wanted).square().sum()) / whole if whole else 0.0


def rounded_input(x: Tensor, scheme: TensorScheme, amax: float) -> Tensor:
    """``x [n, K]``, float32, as a layer with this activation scheme sees it; static inputs lie within ``amax``."""
    largest = x.abs().amax(-1, keepdim=True) if scheme.dynamic else x.new_full((1, 1), amax)
    if scheme.symmetric:
        scale = torch.where(largest > 0, largest / 127, 1.0)
        return (x / scale).round().clamp(-127, 127) * scale
    low, high = x.min().clamp(max=0), x.max().clamp(min=0)
    scale = torch.where(high > low, (high - low) / 255, 1.0)
    return (x / scale).round() * scale
