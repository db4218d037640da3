"""AWQ: protects the weights that are multiplied by large inputs, with a scale per input channel.

Lin et al. 2023, "AWQ: Activation-aware Weight Quantization for On-Device LLM Compression and Acceleration",
https://arxiv.org/abs/2306.00978. A weight's column is multiplied by ``s_k`` before it is rounded, and the input's
channel is divided by it: the column's error then counts only ``1 / s_k`` as much, as long as the scales of its groups
grow little.

    s = magnitude^ratio

where ``magnitude [K]`` is the root mean square of each input channel, divided by the geometric mean of all; it is 1 for
a channel of zeros. (The paper uses the mean absolute value, which can't be derived from the second moment.) Of 20
ratios from 0, which means no scales, to 0.95, it takes the one with the minimum error of the outputs, relative to the
outputs and summed over all layers with this input:

    error = mean |x (V / s - W)^T|^2 = trace((V / s - W) S (V / s - W)^T),    V = rounded(W * s)

with ``S`` the second moment of the inputs. For weights with many rows, ratios are ranked by a sample of the rows, and
the best ones and ratio 0 are compared by all rows. The division goes into the preceding norm or linear layer
(``folding.py``); layers where that isn't possible are rounded without scales, with a note.

Then weights are clipped: the scale of each group, or row, is the multiple of its plain scale with the minimum error of
the group's part of the output (``mse_scale``), as in the authors' code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from qgemm.calibration.expert_work import decide_experts
from qgemm.calibration.folding import Fold, find_folds
from qgemm.calibration.method import Block, LayerWork, Method, Part
from qgemm.calibration.rounded_part import rounded_moment, rounded_weight
from qgemm.calibration.rounding import (
    dequantize,
    mse_scale,
    nearest_scale,
    output_loss,
    output_power,
    round_by_mse,
    round_to_nearest,
    round_weight,
)
from qgemm.calibration.statistics import InputStatistics
from qgemm.scheme import TensorScheme

RATIOS = tuple(step / 20 for step in range(20))

# Ratios are ranked by this many rows of each weight; the best ones and no scales are compared by all rows.
_ROWS = 128
_FINALISTS = 3


@dataclass(frozen=True, eq=False)
class AWQScales:
    """The result of ``awq_scales``: ``scales [K]`` for this ``ratio``, and the sum of relative errors with them."""

    scales: Tensor
    ratio: float
    loss: float


@torch.no_grad()
def awq_scales(
    weights: Sequence[Tensor],
    second_moment: Tensor,
    schemes: Sequence[TensorScheme],
    tie: Callable[[Tensor], Tensor] = lambda scales: scales,
) -> AWQScales:
    """Scales for input channels with this ``second_moment [K, K]``, which all ``weights`` read, ``[N, K]`` each.

    - ``schemes``: how each weight is to be rounded.
    - ``tie``: a function that equalizes scales that must be equal (``Fold.tie``).
    """
    squares = second_moment.diagonal().float()
    alive = squares > 0
    mean = squares[alive].log().mean().exp() if alive.any() else squares.new_ones(())
    magnitude = torch.where(alive, squares / mean, 1.0).sqrt()
    candidates = [tie(magnitude**ratio) for ratio in RATIOS]
    places = list(range(len(RATIOS)))
    if any(len(weight) > _ROWS for weight in weights):
        sample = [
            weight[torch.arange(min(_ROWS, len(weight)), device="cpu") * len(weight) // _ROWS] for weight in weights
        ]
        losses = _losses(sample, second_moment, schemes, candidates)
        ranked = sorted(places, key=losses.__getitem__)
        places = sorted({0, *ranked[:_FINALISTS]})
    losses = _losses(weights, second_moment, schemes, [candidates[place] for place in places])
    least = losses.index(min(losses))
    return AWQScales(candidates[places[least]], RATIOS[places[least]], losses[least])


def _losses(
    weights: Sequence[Tensor], second_moment: Tensor, schemes: Sequence[TensorScheme], candidates: Sequence[Tensor]
) -> list[float]:
    """The sum of relative errors of the outputs of ``weights``, with each of the ``candidates [K]`` as scales."""
    losses = [0.0] * len(candidates)
    for weight, scheme in zip(weights, schemes, strict=True):
        if power := output_power(weight, second_moment):
            for place, scales in enumerate(candidates):
                rounded = dequantize(round_to_nearest(weight.float() * scales, scheme), scheme)
                losses[place] += output_power(rounded / scales - weight, second_moment) / power
    return losses


@dataclass(frozen=True)
class AWQ(Method):
    """Scales the input channels of layers whose scales can be folded into the previous one; clips; rounds to nearest.

    ``clip``: whether to search for the weights' scales. Without it, or if ``GPTQ`` follows, weights aren't clipped. Lin
    et al. 2023, "AWQ", arXiv 2306.00978.
    """

    name: ClassVar[str] = "awq"
    settles: ClassVar[tuple[Part, ...]] = ("inputs", "weights")
    clip: bool = True

    def apply(self, block: Block) -> None:
        """Scales the block's layers in place, then rounds their weights."""
        folds, refused = find_folds(block)
        seen = block.collect(second_moment=True)
        for fold in folds:
            quantized = [name for name in fold.layers if name in block.layers]
            if any(block.layers[name].scheme.rotates for name in quantized):
                refused |= dict.fromkeys(quantized, "a rotation mixes its input's channels")
            elif quantized[0] in seen:  # others are noted below
                try:
                    _scale(block, fold, [seen[name] for name in quantized])
                except ValueError as error:
                    refused |= dict.fromkeys(quantized, str(error))
        for name, reason in refused.items():
            block.layers[name].notes.append(f"awq: not scaled: {reason}")
        if self.clip:
            for experts in block.experts.values():
                decide_experts(block, experts, self.name, round_by_mse)
        for name, work in block.layers.items():
            if name in seen:
                self._round(work, rounded_moment(work, seen.pop(name)))
            else:
                work.notes.append("awq: it saw no tokens, so it is rounded to nearest")

    def _round(self, work: LayerWork, moment: Tensor) -> None:
        weight, scheme = rounded_weight(work), work.scheme.weight
        scale = mse_scale(weight, scheme, moment) if self.clip else nearest_scale(weight, scheme)
        work.weight = round_weight(weight, scale, scheme)
        work.loss = output_loss(weight, dequantize(work.weight, scheme), moment)


def _scale(block: Block, fold: Fold, seen: Sequence[InputStatistics]) -> None:
    """Scales the layers of ``fold``, and what was ``seen`` of their inputs, as another run of the block would see it.

    Raises ``ValueError`` as ``Fold.apply`` does.
    """
    moment = seen[0].second_moment
    assert moment is not None
    weights, schemes = fold.weights(block)
    by = fold.apply(block, awq_scales(weights, moment, schemes, fold.tie).scales)
    for each in seen:
        if each.second_moment is not None:
            each.second_moment.div_(by[:, None]).div_(by)
