"""diffusers' ``BasicTransformerBlock``: attention to itself, then to a text, and an MLP.

Those of Stable Diffusion 1.5, 2 and XL don't read the time step: their norms have weights, and residuals no gates.
PixArt's have norms and gates of a time step, whose vectors are the same for all blocks, apart from what each adds; and
no norm before attention to the text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from qgemm.kernels.norms import Norm
from qgemm.nn.blocks.attention import HeadNorms
from qgemm.nn.blocks.diffusion import (
    IMAGE,
    TEXT,
    BlockAttention,
    DiffusionBlock,
    added_and_normed,
    gated,
    is_absent,
    modulated,
    modulations_of,
)
from qgemm.nn.blocks.diffusion_cross import Source
from qgemm.nn.blocks.merged import MergedWeights
from qgemm.nn.blocks.mlp import FusedMlp
from qgemm.nn.blocks.operands import Input, Operands
from qgemm.nn.blocks.steps import NO_NORM, NormStep, add_and_read, read

MASK, TIMESTEP = "encoder_attention_mask", "timestep"
"""The block's names for what is added to scores of a text's tokens, ``[B, 1, T]``, and for the time step's vectors."""

_UNREAD = {TIMESTEP, "class_labels", "added_cond_kwargs"}  # what blocks with other norms read


@dataclass(frozen=True, eq=False)
class BasicBlock(DiffusionBlock):
    """What both kinds have in common.

    - ``module``: the block.
    - ``attention``, ``qkv``, ``out``: attention to itself; ``cross``, ``query``, ``source``, ``cross_out``: to a text.
    """

    module: Any
    attention: BlockAttention
    qkv: MergedWeights
    out: MergedWeights
    cross: BlockAttention
    query: MergedWeights
    source: Source
    cross_out: MergedWeights
    mlp: FusedMlp

    @property
    def products(self) -> tuple[MergedWeights, ...]:
        """The weights of all products."""
        return (self.qkv, self.out, self.query, self.source.key_value, self.cross_out, *self.mlp.products)

    @property
    def attentions(self) -> tuple[BlockAttention, ...]:
        """Both."""
        return (self.attention, self.cross)

    @property
    def head_norms(self) -> tuple[HeadNorms, ...]:
        """None: queries and keys have no norms."""
        return ()

    def takes(self, context: Mapping[str, Any]) -> bool:
        """Whether there are tokens of an image and a text, no other mask than the text's, and nothing of adapters."""
        x, text, mask = context[IMAGE], context[TEXT], context[MASK]
        if type(x) is not Tensor or type(text) is not Tensor or x.dim() != 3 or text.dim() != 3:
            return False
        if x.dtype != text.dtype or len(x) != len(text) or self.module._chunk_size is not None:
            return False
        if mask is not None and (type(mask) is not Tensor or mask.shape != (len(x), 1, text.shape[1])):
            return False
        return all(is_absent(value) for name, value in context.items() if name not in {IMAGE, TEXT, MASK, *_UNREAD})

    def _attend(self, into: Input, operands: tuple[Operands, ...], x: Tensor) -> Tensor:
        """What attention to itself adds to ``x [B, S, K]``."""
        of_qkv, out_of, *_ = operands
        qkv = of_qkv.product(into, x.dtype).view(*x.shape[:2], 3, self.attention.heads, self.attention.head_dim)
        q, k, v = qkv.unbind(2)
        attended = self.attention(q, k.transpose(1, 2), v.transpose(1, 2), None)
        del qkv, q, k, v
        return out_of.product(attended, x.dtype)

    def _attend_to_text(
        self, into: Input, operands: tuple[Operands, ...], x: Tensor, context: Mapping[str, Any]
    ) -> Tensor:
        """What attention to the text adds to ``x [B, S, K]``."""
        _, _, of_query, of_text, out_of, *_ = operands
        mask = None if context[MASK] is None else context[MASK][:, None]
        q = of_query.product(into, x.dtype).view(*x.shape[:2], self.cross.heads, self.cross.head_dim)
        attended = self.cross(q, *self.source(context[TEXT], of_text, self.cross), mask)
        del q
        return out_of.product(attended, x.dtype)


@dataclass(frozen=True, eq=False)
class FusedBasicBlock(BasicBlock):
    """How a block computes whose three ``norms`` have weights: before each attention, and before the MLP."""

    norms: tuple[NormStep, NormStep, NormStep]

    def __call__(self, operands: tuple[Operands, ...], context: Mapping[str, Any]) -> Tensor:
        """The tokens, as the block returns them."""
        x = context[IMAGE].contiguous()  # behind a convolution it isn't, and would be copied twice
        of_qkv, _, of_query, _, _, *of_mlp = operands
        first, second, third = self.norms
        branch = self._attend(read(x, first, (of_qkv,)), operands, x)
        x, into = add_and_read(branch, x, None, second, (of_query,))
        branch = self._attend_to_text(into, operands, x, context)
        x, into = add_and_read(branch, x, None, third, (*of_mlp,))
        del branch
        return self.mlp(into, (*of_mlp,), x, x.dtype, {})


@dataclass(frozen=True, eq=False)
class FusedTimedBasicBlock(BasicBlock):
    """How a block computes whose norms, ``before`` attention to itself and the MLP, have the time step's vectors."""

    before: tuple[Norm, Norm]

    def takes(self, context: Mapping[str, Any]) -> bool:
        """Whether the time step's vectors are known, too."""
        x, time = context[IMAGE], context[TIMESTEP]
        if not super().takes(context) or type(time) is not Tensor or time.numel() != 6 * len(x) * x.shape[2]:
            return False
        return {time.dtype, self.module.scale_shift_table.dtype} == {x.dtype}

    def __call__(self, operands: tuple[Operands, ...], context: Mapping[str, Any]) -> Tensor:
        """The tokens, as the block returns them."""
        x = context[IMAGE].contiguous()
        of_qkv, _, of_query, _, _, *of_mlp = operands
        vectors = self.module.scale_shift_table.flatten() + context[TIMESTEP].reshape(len(x), -1)
        first, last = modulations_of(vectors, self.before)
        branch = self._attend(modulated(x, first, (of_qkv,)), operands, x)
        x, into = added_and_normed(branch, x, first.gate, (None, None), NO_NORM, (of_query,))
        branch = self._attend_to_text(into, operands, x, context)
        x, into = added_and_normed(branch, x, None, last[:2], last.norm, (*of_mlp,))
        return gated(self.mlp(into, (*of_mlp,), None, x.dtype, {}), x, last.gate)
