"""Blocks of diffusion transformers that attend to themselves, then to a text, and have an MLP: Wan's.

Unlike those of ``diffusion_joint.py``, they compute norms and gates in float32, with one rounding at the end. The time
step's vectors are float32 then: ``(norm(x) * (1 + scale) + shift)``, rounded, and ``x + gate * branch``, rounded. They
belong to a sample, or, if a video's frames have time steps of their own (Wan 2.2 5B), to a token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qgemm.kernels.norms import Norm
from qgemm.kernels.rows import QuantizedRows
from qgemm.nn.blocks.attention import HeadNorms
from qgemm.nn.blocks.diffusion import (
    IMAGE,
    TEXT,
    TIME,
    BlockAttention,
    DiffusionBlock,
    Modulation,
    Positions,
    added_and_normed,
    gated,
    modulated,
)
from qgemm.nn.blocks.merged import MergedWeights
from qgemm.nn.blocks.mlp import FusedMlp
from qgemm.nn.blocks.operands import Input, Operands
from qgemm.nn.blocks.steps import NormStep, read
from qgemm.numerics.formats import FLOAT_DTYPES
from qgemm.ops.norms import add_norm_quantize
from qgemm.ops.rotary import rotate

ANGLES = "rotary_emb"
"""The block's name for cosines and sines ``[1, S, 1, D]``, each value twice."""
TEXT_TOKENS = 512
"""The number of a text's tokens where tokens of an image stand before them."""

_VECTORS = 6  # of a time step: shift, scale and gate of attention, and of the MLP


@dataclass(frozen=True, eq=False)
class Source:
    """Other tokens that a block attends to: the projection of their keys and values, and the norm of keys if any."""

    key_value: MergedWeights
    norm: NormStep | None

    def __call__(self, tokens: Tensor, operands: Operands, attention: BlockAttention) -> tuple[Tensor, Tensor]:
        """Keys and values ``[B, H, T, D]`` of ``tokens [B, T, K]``."""
        k, v = operands.product(tokens, tokens.dtype).chunk(2, dim=-1)
        sizes = attention.heads, attention.head_dim
        return _normed(k, self.norm).unflatten(-1, sizes).transpose(1, 2), v.unflatten(-1, sizes).transpose(1, 2)


@dataclass(frozen=True, eq=False)
class FusedCrossBlock(DiffusionBlock):
    """How a block with two attentions in turn computes.

    - ``module``: the block, whose ``scale_shift_table`` is added to the time step's vectors.
    - ``before``, ``between``, ``after``: the norms before attention, attention to the text, and the MLP.
    - ``attention``, ``qkv``, ``norms``, ``out``: attention to itself; ``cross``, ``query``, ``query_norm``,
      ``cross_out``: attention to a text, and to an image if there are two ``sources``. Norms are over all heads.
    """

    module: Any
    before: Norm
    attention: BlockAttention
    qkv: MergedWeights
    norms: HeadNorms
    out: MergedWeights
    between: NormStep
    cross: BlockAttention
    query: MergedWeights
    query_norm: NormStep
    sources: tuple[Source, ...]
    cross_out: MergedWeights
    after: Norm
    mlp: FusedMlp

    @property
    def products(self) -> tuple[MergedWeights, ...]:
        """The weights of all products."""
        sources = [each.key_value for each in self.sources]
        return (self.qkv, self.out, self.query, self.cross_out, *self.mlp.products, *sources)

    @property
    def attentions(self) -> tuple[BlockAttention, ...]:
        """Both."""
        return (self.attention, self.cross)

    @property
    def head_norms(self) -> tuple[HeadNorms, ...]:
        """The norms that come with the rotation."""
        return (self.norms,)

    def takes(self, context: Mapping[str, Any]) -> bool:
        """Whether all tensors have the known sizes and dtypes."""
        x, text, time = given = [context[name] for name in (IMAGE, TEXT, TIME)]
        if not all(type(each) is Tensor for each in given) or x.dim() != 3 or text.dim() != 3:
            return False
        B, S, K = x.shape
        if x.dtype != text.dtype or len(text) != B or time.shape[:-2] not in ((B,), (B, S)):
            return False
        if time.dtype not in FLOAT_DTYPES or time.shape[-2:] != (_VECTORS, K):
            return False
        if len(self.sources) > 1 and text.shape[1] <= TEXT_TOKENS:
            return False
        kinds = {None if each is None else each.dtype for each in self._vectors_between()}
        return len(kinds) == 1 and kinds <= {x.dtype, torch.float32} and self._knows(context[ANGLES], x)

    def _knows(self, angles: Any, x: Tensor) -> bool:
        """Whether it can rotate by ``angles``."""
        if angles is None:
            return True
        shape = (x.shape[1], 1, self.attention.head_dim)
        return len(angles) == 2 and all(
            type(each) is Tensor
            and each.dtype in (x.dtype, torch.float32)
            and each.shape[1:] == shape
            and len(each) in (1, len(x))
            for each in angles
        )

    def __call__(self, operands: tuple[Operands, ...], context: Mapping[str, Any]) -> Tensor:
        """The tokens, as the block returns them."""
        of_qkv, out_of, of_query, out_of_cross = operands[:4]
        of_mlp, of_sources = operands[4:6], operands[6:]
        x, dtype = context[IMAGE], context[IMAGE].dtype
        B, S, K = x.shape
        first, last = self._modulations(context[TIME])
        # A row of vectors for each sample or token.
        x = x.reshape(len(first.gate), -1, K)
        qkv = of_qkv.product(modulated(x, first, (of_qkv,)), dtype).view(B, S, -1)
        q, k, v = rotate(self.attention.call(qkv, self.norms, _positions(context[ANGLES])))
        del qkv
        branch = out_of.product(self.attention(q, k, v, None), dtype)
        del q, k, v
        vectors, norm = self._vectors_between(), self.between.norm
        assert norm is not None
        x, into = added_and_normed(branch.view(x.shape), x, first.gate, vectors, norm, (of_query,))
        q = of_query.product(into, dtype).view(B, S, -1)
        attended = self._attend(q, context[TEXT], of_sources, out_of_cross)
        branch = out_of_cross.product(attended, dtype).view(x.shape)
        x, into = added_and_normed(branch, x, None, last[:2], last.norm, of_mlp)
        return gated(self.mlp(into, of_mlp, None, dtype, {}), x, last.gate).view(B, S, K)

    def _vectors_between(self) -> tuple[Tensor | None, Tensor | None]:
        parameters = self.between.module._parameters
        return parameters.get("weight"), parameters.get("bias")

    def _modulations(self, time: Tensor) -> tuple[Modulation, Modulation]:
        """Those of attention and of the MLP, with vectors ``[B, K]``, or ``[B * S, K]`` if each token has its own."""
        found = self.module.scale_shift_table.float() + time.flatten(0, -3)
        found[:, 1::3] += 1
        shift, weight, gate, *last = found.unbind(1)
        return Modulation(weight, shift, gate, self.before), Modulation(last[1], last[0], last[2], self.after)

    def _attend(self, q: Tensor, tokens: Tensor, of_sources: tuple[Operands, ...], out_of: Operands) -> Input:
        """What queries ``q [B, S, K]`` find in the text, plus what they find in the image, as input for ``out_of``."""
        q = _normed(q, self.query_norm).unflatten(-1, (self.cross.heads, self.cross.head_dim))
        parts = (tokens,) if len(self.sources) == 1 else (tokens[:, -TEXT_TOKENS:], tokens[:, :-TEXT_TOKENS])
        attended = [
            self.cross(q, *source(part, own, self.cross), None)
            for source, part, own in zip(self.sources, parts, of_sources, strict=True)
        ]
        if len(attended) == 1:
            return attended[0]
        text, image = attended
        if not out_of.reads_rows:
            return text + image
        _, *rows = add_norm_quantize(image, text, None, None, None, self.after, out_of.input_scale, out_of.dtype)
        return QuantizedRows(*rows)


def _normed(x: Tensor, step: NormStep | None) -> Tensor:
    normed = read(x, step, ())
    assert isinstance(normed, Tensor)
    return normed


def _positions(angles: Any) -> Positions:
    """Cosines and sines for each pair, ``[1, S, D / 2]``."""
    return None if angles is None else (angles[0][:, :, 0, ::2], angles[1][:, :, 0, 1::2])
