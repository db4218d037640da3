"""Bias correction: adds the mean error of a quantized layer's output to its bias.

``bias += E[x W^T] - E[x_q W_q^T] = E[x] (W - W_q)^T + E[x - x_q] W_q^T`` over the calibration data, where ``x_q`` and
``W_q`` are the values of the rounded input and weight. Nagel et al. 2019, "Data-Free Quantization Through Weight
Equalization and Bias Correction", arXiv 1906.04721, section 4.2, in its empirical form. It helps if the mean of the
inputs isn't 0, as after ReLU or GELU and in channels that are always large.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from qgemm.calibration.method import Block, LayerWork, Method, Part
from qgemm.calibration.rounded_part import rounded_input, rounded_part, rounded_weight
from qgemm.calibration.rounding import dequantize, round_to_nearest
from qgemm.calibration.statistics import InputStatistics

_ROWS = 1024


@dataclass(frozen=True)
class BiasCorrection(Method):
    """Corrects the bias of every layer that has one; the others get a note.

    It comes after the method that rounds weights; weights that no method has rounded are rounded to nearest. Nagel et
    al. 2019, arXiv 1906.04721, section 4.2.
    """

    name: ClassVar[str] = "bias-correction"
    settles: ClassVar[tuple[Part, ...]] = ("biases",)

    def apply(self, block: Block) -> None:
        """Corrects biases in place."""
        seen = block.collect([name for name, work in block.layers.items() if _bias(work) is not None], rows=_ROWS)
        for name, work in block.layers.items():
            bias = _bias(work)
            if bias is None:
                work.notes.append("bias-correction: it has no bias")
            elif name not in seen:
                work.notes.append("bias-correction: it saw no tokens")
            else:
                bias.add_(mean_output_error(work, seen[name]).to(bias.device))


@torch.no_grad()
def mean_output_error(work: LayerWork, seen: InputStatistics) -> Tensor:
    """``E[x W^T] - E[x_q W_q^T]``, float32 ``[N]``: ``E[x]`` is over all inputs, ``E[x - x_q]`` over the rows kept."""
    weight, scheme = rounded_weight(work).float(), work.scheme.weight
    rounded = dequantize(work.weight or round_to_nearest(weight, scheme), scheme)
    x, x_rounded = rounded_input(work, seen)
    mean = rounded_part(work, seen.mean.float())
    return (weight - rounded) @ mean + rounded @ (x - x_rounded).mean(0)


def _bias(work: LayerWork) -> Tensor | None:
    bias = work.module._parameters.get("bias")
    return None if bias is None else bias.detach()
