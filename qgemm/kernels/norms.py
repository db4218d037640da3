"""``Norm``: the norm of a row, as the models' modules compute it. ``NormCall``: a call of a function that has one.

Everything is computed in float32. Models differ in where a value is rounded to the row's dtype, and that decides its
bits.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

NORMS_OF_HEADS = ("rms", "rms_once", "rms_plus_one", "layer")
"""The kinds of norms that operators for queries and keys compute; see ``Norm``."""
NORMS = (*NORMS_OF_HEADS, "layer_plus_one")
"""The kinds of norms that modules compute."""
MODULATED = "layer_by_steps"
"""The kind of diffusion models' norms, whose weight and bias come from the time step."""


@dataclass(frozen=True)
class Norm:
    """A norm by kind, where ``y = x / sqrt(mean(x^2) + eps)`` and ``round`` is to the dtype of ``x``.

    - ``"rms"``: ``round(round(y) * weight)``, as in Llama, Mistral, Qwen, Phi-3, GLM, T5.
    - ``"rms_once"``: ``round(y * weight)``, as in OLMo 2, GPT-OSS, Gemma 4.
    - ``"rms_plus_one"``: ``round(y * (1 + weight))``, as in Gemma 1 to 3.
    - ``"layer"``: ``nn.LayerNorm``: ``round((x - mean) / sqrt(var + eps) * weight + bias)``; Cohere's has no bias.
    - ``"layer_plus_one"``: the same with ``round(1 + weight)`` as its weight, as in Nemotron.
    - ``"layer_by_steps"``: ``nn.LayerNorm``'s, as ``round(round(round(...) * weight) + bias)``: diffusion models
      compute ``norm(x) * (1 + scale) + shift`` as three operators.

    ``weight``, ``bias``: of the dtype of ``x``; those of layer norms may be float32, as in Wan, and then the norm
    is rounded once, at its end. They are ``[K]``, or ``[B, K]`` with a row for each sample of ``x [B, ..., K]``, as
    diffusion models compute from the time step.
    ``eps``: a number, at least 0. Raises ``ValueError`` for other values.
    """

    kind: str = "rms"
    eps: float = 1e-6

    def __post_init__(self) -> None:
        """Checks the values."""
        if self.kind not in (*NORMS, MODULATED):
            raise ValueError(f"norm is {self.kind!r}; it must be one of {sorted((*NORMS, MODULATED))}")
        if not 0 <= self.eps < math.inf:
            raise ValueError(f"eps is {self.eps}; it must be a finite number from 0 on")

    @property
    def is_layer(self) -> bool:
        """Whether it subtracts the mean, and may have a bias."""
        return self.kind in ("layer", "layer_plus_one", MODULATED)

    @property
    def adds_one(self) -> bool:
        """Whether 1 is added to its weight."""
        return self.kind.endswith("_plus_one")

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """The norm of the rows of ``x [..., K]``, in its dtype. ``weight``, ``bias``: ``[K]`` or ``[B, K]``."""
        if weight.ndim == 2:
            weight, bias = of_samples(weight, x), None if bias is None else of_samples(bias, x)
        if self.is_layer and self.adds_one:
            weight = weight + 1.0
        if self.kind == MODULATED:
            y = x.to(weight.dtype)
            y = F.layer_norm(y, x.shape[-1:], None, None, self.eps).to(y.dtype) if x.numel() else y
            return (y * weight if bias is None else y * weight + bias).to(x.dtype)
        if self.is_layer and weight.ndim > 1:
            y = F.layer_norm(x.float(), x.shape[-1:], None, None, self.eps) if x.numel() else x.float()
            y = y * weight.float()
            return (y if bias is None else y + bias.float()).to(x.dtype)
        if self.is_layer:
            # It has the dtype of ``x`` already, except under autocast.
            y = x.to(weight.dtype)
            return F.layer_norm(y, x.shape[-1:], weight, bias, self.eps).to(x.dtype) if x.numel() else x.clone()
        h = x.float()
        y = h * torch.rsqrt(h.square().mean(dim=-1, keepdim=True) + self.eps)
        if self.kind == "rms":
            return weight * y.to(x.dtype)
        factor = weight.float() if self.kind == "rms_once" else 1.0 + weight.float()
        return (y * factor).to(x.dtype)


class NormCall(NamedTuple):
    """What a function of ``dispatch`` with a norm gets, which says what it is; None for what the function doesn't have.

    ``dtype``: that of quantized rows; None if there are none. ``factor``: of the branch; ``total_factor``: of the
    total, one value. Each product is rounded to the dtype of ``x``.
    """

    x: Tensor
    residual: Tensor | None
    branch_weight: Tensor | None
    gate: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    norm: Norm
    input_scale: Tensor | None = None
    dtype: torch.dtype | None = None
    factor: float = 1.0
    total_factor: Tensor | None = None

    @property
    def adds(self) -> bool:
        """Whether there is a total that isn't ``x`` itself."""
        return adds_to(self.residual, self.branch_weight, self.gate, self.factor, self.total_factor)

    def total(self) -> Tensor:
        """The total, in plain PyTorch: the specification."""
        out = self.x if self.branch_weight is None else self.norm(self.x, self.branch_weight)
        out = out if self.gate is None else out * of_samples(self.gate, self.x)
        out = out if self.factor == 1.0 else out * self.factor
        out = (out if self.residual is None else self.residual + out).to(self.x.dtype)
        return out if self.total_factor is None else out * self.total_factor


def adds_to(
    residual: Tensor | None,
    branch_weight: Tensor | None,
    gate: Tensor | None,
    factor: float = 1.0,
    total_factor: Tensor | None = None,
) -> bool:
    """``NormCall.adds`` of a call with these, for callers that have no time to make one."""
    if residual is not None or branch_weight is not None or gate is not None:
        return True
    return factor != 1.0 or total_factor is not None


NormOutputs = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]
"""``total = residual + x``, its norm, the quantized rows of that and their scales; None for what isn't wanted."""


def of_samples(vectors: Tensor, x: Tensor) -> Tensor:
    """``vectors [B, K]`` with the dimensions of ``x [B, ..., K]``, with 1 between the first and the last.

    ``[K]`` stay as they are.
    """
    if vectors.ndim == 1:
        return vectors
    return vectors.reshape(vectors.shape[0], *(1,) * (x.ndim - 2), vectors.shape[1])
