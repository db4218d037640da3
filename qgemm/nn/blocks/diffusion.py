"""Blocks of diffusion transformers: attention and MLPs whose norms, residuals and rotation are fused with products.

The time step decides what a norm does to a sample: ``norm(x) * (1 + scale) + shift``; and how much of a branch is
added: ``x + gate * branch``. Here is what the kinds of blocks share: ``diffusion_joint.py`` has those with a text and
an image side by side, ``diffusion_cross.py`` and ``diffusion_basic.py`` those that attend to a text.

As in ``layer.py``, another ``forward`` of the instance computes this, or calls the class's own.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor, nn
from torch.nn import functional as F

from qgemm.kernels.norms import Norm
from qgemm.kernels.rotary.call import RotaryCall
from qgemm.kernels.rows import QuantizedRows
from qgemm.nn.blocks.attention import HeadNorms
from qgemm.nn.blocks.binding import fused_of
from qgemm.nn.blocks.fused_module import FusedModule
from qgemm.nn.blocks.operands import Input, Operands, read_rows
from qgemm.nn.blocks.steps import NO_NORM
from qgemm.ops.norms import add_norm, add_norm_quantize, norm_quantize

IMAGE, TEXT, TIME = "hidden_states", "encoder_hidden_states", "temb"
"""The blocks' names for their tokens, and for the time step's embedding."""

Positions: TypeAlias = tuple[Tensor, Tensor] | None
"""Cosines and sines of a stream's tokens, ``[1, S, D / 2]`` in float32."""


@dataclass(frozen=True, eq=False)
class BlockAttention:
    """Attention of a block: over its tokens, or to others.

    - ``module``: the module, whose ``processor`` is of the class ``processor``.
    - ``attend``: diffusers' function that chooses a backend; None if the processor calls PyTorch's attention.
    - ``heads``: their number; ``head_dim``: values in each.
    """

    module: Any
    processor: type
    attend: Callable[..., Tensor] | None
    heads: int
    head_dim: int

    def is_as_it_was(self) -> bool:
        """Whether the module computes attention in the known way, in one process."""
        processor: Any = self.module.processor
        return type(processor) is self.processor and getattr(processor, "_parallel_config", None) is None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """``[B, S, H * D]`` of queries ``[B, S, H, D]``, keys and values ``[B, H, S, D]``."""
        if self.attend is None:
            out = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=mask).transpose(1, 2)
        else:
            backend = self.module.processor._attention_backend
            out = self.attend(q, k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask, backend=backend)
        return out.flatten(2, 3).to(q.dtype)

    def call(self, qkv: Tensor, norms: HeadNorms | None, positions: Positions) -> RotaryCall:
        """The arguments of the operators that normalize and rotate heads of ``qkv``."""
        cos, sin = (None, None) if positions is None else positions
        weights, norm = (None, None) if norms is None else norms.weights(qkv), None if norms is None else norms.norm
        assert weights is not None  # or the block wouldn't be computed here
        kind, eps = ("rms", 0.0) if norm is None else (norm.kind, norm.eps)
        return RotaryCall(qkv, cos, sin, weights[0], weights[1], kind, eps, self.heads, self.heads, interleaved=True)


class Modulation(NamedTuple):
    """What the time step decides for a branch, ``[B, K]`` each: ``1 + scale``, shift and gate; ``norm``: before it."""

    weight: Tensor
    shift: Tensor
    gate: Tensor
    norm: Norm


def modulations_of(vectors: Tensor, norms: tuple[Norm, ...]) -> list[Modulation]:
    """That of each branch in turn, of ``vectors [B, 3 * branches * K]``: shift, scale and gate of each."""
    stacked = vectors.unflatten(-1, (3 * len(norms), -1)).transpose(0, 1).contiguous()
    found, weights = stacked.unbind(), (1 + stacked[1::3]).unbind()
    return [Modulation(*each) for each in zip(weights, found[::3], found[2::3], norms, strict=True)]


@dataclass(frozen=True, eq=False)
class DiffusionBlock(FusedModule):
    """How a block computes.

    ``defaults``: the arguments of its ``forward``, in order; ``returned``: those whose tokens it returns, in order.
    """

    defaults: Mapping[str, Any] = field(kw_only=True)
    returned: tuple[str, ...] = field(kw_only=True)

    @property
    @abstractmethod
    def attentions(self) -> tuple[BlockAttention, ...]:
        """All that it computes."""

    @property
    @abstractmethod
    def head_norms(self) -> tuple[HeadNorms, ...]:
        """The norms of queries and keys that operators must be able to compute."""

    @abstractmethod
    def takes(self, context: Mapping[str, Any]) -> bool:
        """Whether it computes a call with these arguments."""

    @abstractmethod
    def __call__(self, operands: tuple[Operands, ...], context: Mapping[str, Any]) -> Any:
        """What the block returns, for ``operands`` of all ``products``."""

    @property
    def forward(self) -> Callable[..., Any]:
        """The ``forward`` of a fused block."""
        return forward


def modulated(x: Tensor, modulation: Modulation, operands: tuple[Operands, ...]) -> Input:
    """``norm(x) * (1 + scale) + shift`` as input for ``operands``."""
    weight, shift, _, norm = modulation
    if not read_rows(operands):
        return add_norm(x, None, None, weight, shift, norm)[1]
    return QuantizedRows(*norm_quantize(x, weight, shift, norm, operands[0].input_scale, operands[0].dtype))


def gated(branch: Tensor, x: Tensor, gate: Tensor) -> Tensor:
    """``x + gate * branch``."""
    return add_norm(branch, x, None, None, None, NO_NORM, gate)[0]


def added_and_normed(
    branch: Tensor,
    x: Tensor,
    gate: Tensor | None,
    vectors: tuple[Tensor | None, Tensor | None],
    norm: Norm,
    operands: tuple[Operands, ...],
) -> tuple[Tensor, Input]:
    """``total = x + gate * branch``, and its norm, of weight and bias ``vectors``, as input for ``operands``."""
    if not read_rows(operands):
        return add_norm(branch, x, None, *vectors, norm, gate)
    reads = operands[0].input_scale, operands[0].dtype
    total, *rows = add_norm_quantize(branch, x, None, *vectors, norm, *reads, gate)
    return total, QuantizedRows(*rows)


def is_absent(value: Any) -> bool:
    """Whether an argument of a block says nothing."""
    return value is None or value is False or (isinstance(value, dict) and not value)


def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    """The ``forward`` of a fused block, with the arguments of the class's own."""
    fused: DiffusionBlock | None = fused_of(self)
    if fused is not None:
        context = {**fused.defaults, **dict(zip(fused.defaults, args, strict=False)), **kwargs}
        operands = _operands(self, fused, context)
        if operands is not None:
            return fused(operands, context)
    return type(self).forward(self, *args, **kwargs)


def _operands(block: nn.Module, fused: DiffusionBlock, context: Mapping[str, Any]) -> tuple[Operands, ...] | None:
    """The operands of all products for a call of ``block``; None if it can't be computed here."""
    if context.keys() != fused.defaults.keys() or not fused.takes(context):
        return None
    image = context[IMAGE]
    if not fused.is_plain_call(block, image, context) or not all(each.is_as_it_was() for each in fused.attentions):
        return None
    if not fused.has_its_modules() or not all(each.weights(image) for each in fused.head_norms):
        return None
    operands = tuple([product.operands() for product in fused.products])
    return None if None in operands else operands  # type: ignore[return-value]
