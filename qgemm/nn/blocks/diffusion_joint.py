"""Blocks of diffusion transformers in which tokens of a text and of an image attend to one another.

A ``FusedJointBlock`` (Flux, Qwen-Image, Stable Diffusion 3, HunyuanVideo) has two streams, the tokens of a text and of
an image, with layers of their own and one attention over all tokens. A ``FusedSingleBlock`` (Flux, HunyuanVideo) has
one stream, and one product behind attention and MLP, which are computed side by side. A ``FusedParallelBlock`` (Flux 2)
has one product before both, too, and gets the tokens of text and image as one tensor.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from qgemm.kernels.norms import Norm
from qgemm.kernels.rotary.call import KeyValueStore
from qgemm.kernels.rows import QuantizedRows
from qgemm.nn.blocks.attention import HeadNorms
from qgemm.nn.blocks.diffusion import (
    IMAGE,
    TEXT,
    BlockAttention,
    DiffusionBlock,
    Modulation,
    Positions,
    added_and_normed,
    gated,
    is_absent,
    modulated,
    modulations_of,
)
from qgemm.nn.blocks.merged import MergedWeights
from qgemm.nn.blocks.mlp import FusedMlp
from qgemm.nn.blocks.operands import Input, Operands
from qgemm.ops.rotary import rotate, rotate_and_store
from qgemm.ops.rows import activate, activation_quantize

ANGLES = ("image_rotary_emb", "freqs_cis")
"""The blocks' names for cosines and sines, or for complex numbers."""
MASK = "attention_mask"
MAX_FLOAT16 = 65504.0
"""Flux and Qwen-Image limit what float16 blocks return to this."""

_KNOWN = {IMAGE, TEXT, *ANGLES, MASK, f"{TEXT}_mask"}


@dataclass(frozen=True, eq=False)
class OwnAttention:
    """Attention of a stream's tokens to one another alone, beside that to all (Stable Diffusion 3.5 Medium)."""

    attention: BlockAttention
    qkv: MergedWeights
    norms: HeadNorms
    out: MergedWeights

    def __call__(self, x: Input, operands: tuple[Operands, ...], dtype: torch.dtype) -> Tensor:
        """What it adds, for ``operands`` of ``qkv`` and ``out``."""
        of_qkv, out_of = operands
        q, k, v = rotate(self.attention.call(of_qkv.product(x, dtype), self.norms, None))
        return out_of.product(self.attention(q, k, v, None), dtype)


@dataclass(frozen=True, eq=False)
class Stream:
    """The layers for the tokens of a text, or of an image, or for both.

    - ``time``: the argument with the time step's embedding ``[B, T]``; ``modulation``: modules that are called on it
      one after another, none if it consists of the branches' vectors.
    - ``before``: the norm before each branch.
    - ``qkv``: projections of queries, keys and values; ``norms``: of queries and keys; ``out``: the projection behind
      attention.
    - ``own``: a second attention, whose norm is the third of ``before``.
    """

    time: str
    modulation: tuple[nn.Module, ...]
    before: tuple[Norm, ...]
    qkv: MergedWeights
    norms: HeadNorms | None
    out: MergedWeights
    mlp: FusedMlp
    own: OwnAttention | None = None

    @property
    def products(self) -> tuple[MergedWeights, ...]:
        """The weights of its products."""
        own = () if self.own is None else (self.own.qkv, self.own.out)
        return (self.qkv, self.out, *self.mlp.products, *own)

    def modulations(self, context: Mapping[str, Any]) -> list[Modulation]:
        """That of each branch in turn."""
        time = context[self.time]
        for module in self.modulation:
            time = module(time)
        return modulations_of(time, self.before)


@dataclass(frozen=True, eq=False)
class StreamsBlock(DiffusionBlock):
    """What both kinds have in common.

    - ``names``: the names of the arguments with tokens, in the order of the tokens in attention; ``limited``: of those
      that are limited in float16.
    - ``find_positions``: ``(context, number of the first tokens) -> positions`` of the first tokens and of the others,
      or of all.
    """

    attention: BlockAttention
    names: tuple[str, str]
    limited: tuple[str, ...]
    find_positions: Callable[[Mapping[str, Any], int], tuple[Positions, ...]]

    @property
    @abstractmethod
    def streams(self) -> tuple[Stream, ...]:
        """Its streams, one or two."""

    @property
    def attentions(self) -> tuple[BlockAttention, ...]:
        """Attention over all tokens, and that of single streams."""
        return (self.attention, *[each.own.attention for each in self.streams if each.own is not None])

    @property
    def head_norms(self) -> tuple[HeadNorms, ...]:
        """Those of all streams that have such norms."""
        own = [each.own.norms for each in self.streams if each.own is not None]
        return tuple([each.norms for each in self.streams if each.norms is not None] + own)

    def takes(self, context: Mapping[str, Any]) -> bool:
        """Whether tokens are alike, and there is nothing that adapters of images and others pass."""
        times = {stream.time for stream in self.streams}
        image, *others = (context[name] for name in (IMAGE, TEXT, *times))
        if not all(type(each) is Tensor for each in (image, *others)) or any(
            context[name].dim() != 2 for name in times
        ):
            return False
        if any(each.dtype != image.dtype or len(each) != len(image) for each in others):
            return False
        return all(is_absent(value) for name, value in context.items() if name not in _KNOWN | times)

    def _attend(self, parts: list[tuple[Tensor, HeadNorms | None, Positions]], mask: Tensor | None) -> Tensor:
        """Attention over the tokens of all ``parts``: their product, norms and positions. Frees them before that."""
        if len(parts) == 1:
            q, k, v = rotate(self.attention.call(*parts.pop()))
            return self.attention(q, k, v, mask)
        first, tokens = parts[0][0], sum(part[0].shape[1] for part in parts)
        shape = len(first), self.attention.heads, tokens, self.attention.head_dim
        k, v = first.new_empty(shape), first.new_empty(shape)
        del first
        queries, start = [], 0
        while parts:
            call = self.attention.call(*parts.pop(0))
            place = slice(start, start := start + call.qkv.shape[1])
            stored = KeyValueStore(k[:, :, place], v[:, :, place], None, None, None)
            queries.append(rotate_and_store(call, stored))
            del call
        q = torch.cat(queries, dim=1)
        del queries
        return self.attention(q, k, v, mask)


@dataclass(frozen=True, eq=False)
class FusedJointBlock(StreamsBlock):
    """How a block of two streams computes: ``first``, ``second``, in the order of ``names``."""

    first: Stream
    second: Stream

    @property
    def streams(self) -> tuple[Stream, ...]:
        """Both streams."""
        return (self.first, self.second)

    @property
    def products(self) -> tuple[MergedWeights, ...]:
        """The weights of all products."""
        return (*self.first.products, *self.second.products)

    def __call__(self, operands: tuple[Operands, ...], context: Mapping[str, Any]) -> tuple[Tensor, ...]:
        """The tokens of the text and of the image, as the block returns them."""
        tokens = [context[name] for name in self.names]
        count, before = len(self.first.products), tokens[0].shape[1]
        own = operands[:count], operands[count:]
        modulations = [stream.modulations(context) for stream in self.streams]
        products = [
            own[i][0].product(modulated(x, modulations[i][0], own[i][:1]), x.dtype) for i, x in enumerate(tokens)
        ]
        norms = [stream.norms for stream in self.streams]
        parts = [*zip(products, norms, self.find_positions(context, before), strict=True)]
        del products
        attended = self._attend(parts, _mask(context, tokens[1].shape[1]))
        of_streams = attended[:, :before], attended[:, before:]
        outputs = {
            name: _add_branches(x, of_streams[i], self.streams[i], own[i], modulations[i])
            for i, (name, x) in enumerate(zip(self.names, tokens, strict=True))
        }
        for name in self.limited:
            outputs[name] = limited(outputs[name])
        return tuple([outputs[name] for name in self.returned])


def _mask(context: Mapping[str, Any], others: int) -> Tensor | None:
    """Which keys count, ``[B, 1, 1, S]``; ``others``: tokens without a mask, behind those of a text that has one."""
    mask: Tensor | None = context.get(f"{TEXT}_mask")
    if mask is None:
        return context.get(MASK)
    return torch.cat([mask, mask.new_ones((mask.shape[0], others), dtype=torch.bool)], dim=1)[:, None, None]


def _add_branches(
    x: Tensor, attended: Tensor, stream: Stream, operands: tuple[Operands, ...], modulations: list[Modulation]
) -> Tensor:
    """``x`` with what attention and the MLP add."""
    _, out_of, *of_mlp = operands[: 2 + len(stream.mlp.products)]
    of_own, (attention, after, *others) = operands[2 + len(of_mlp) :], modulations
    branch, gate = out_of.product(attended, x.dtype), attention.gate
    if stream.own is not None:
        into = modulated(x, others[0], of_own[:1])
        x = gated(branch, x, gate)
        branch, gate = stream.own(into, of_own, x.dtype), others[0].gate
    x, into = added_and_normed(branch, x, gate, after[:2], after.norm, (*of_mlp,))
    return gated(stream.mlp(into, (*of_mlp,), None, x.dtype, {}), x, after.gate)


@dataclass(frozen=True, eq=False)
class FusedSingleBlock(StreamsBlock):
    """How a block of one stream computes, whose attention and MLP share a norm and the product behind them.

    ``stream.mlp.down`` is the product behind both, ``stream.out`` the same.
    """

    stream: Stream

    @property
    def streams(self) -> tuple[Stream, ...]:
        """The stream."""
        return (self.stream,)

    @property
    def products(self) -> tuple[MergedWeights, ...]:
        """The weights of all products."""
        return (self.stream.qkv, *self.stream.mlp.products)

    def __call__(self, operands: tuple[Operands, ...], context: Mapping[str, Any]) -> tuple[Tensor, ...]:
        """The tokens of the text and of the image, as the block returns them."""
        of_qkv, of_mlp, out_of = operands
        tokens = [context[name] for name in self.names]
        before = tokens[0].shape[1]
        x = torch.cat(tokens, dim=1)
        (modulation,) = self.stream.modulations(context)
        into = modulated(x, modulation, (of_qkv,))
        qkv, positions = of_qkv.product(into, x.dtype), self.find_positions(context, before)
        products = [qkv] if len(positions) == 1 else [qkv[:, :before], qkv[:, before:]]
        parts = [(product, self.stream.norms, own) for product, own in zip(products, positions, strict=True)]
        del qkv, products
        attended = self._attend(parts, _mask(context, 0))
        h = of_mlp.product(into, x.dtype)
        if out_of.reads_rows:
            how = self.stream.mlp.activation_name, False, out_of.input_scale, out_of.dtype
            both: Input = QuantizedRows(*activation_quantize(h, *how, attended))
        else:
            both = torch.cat([attended, self.stream.mlp.activation(h)], dim=2)
        x = gated(out_of.product(both, x.dtype), x, modulation.gate)
        x = limited(x) if self.limited else x
        outputs = dict(zip(self.names, (x[:, :before], x[:, before:]), strict=True))
        return tuple([outputs[name] for name in self.returned])


@dataclass(frozen=True, eq=False)
class FusedParallelBlock(DiffusionBlock):
    """How a block of all tokens computes.

    - ``time``: the argument with vectors of the time step ``[B, 3 * K]``; ``before``: the norm before both branches.
    - ``into``: the projection of queries, keys and values, and of gates and ups of the MLP; ``norms``: of queries and
      keys; ``out``: the projection behind attention and MLP. ``activation``: of the gates, by name.
    - ``find_positions``: as in ``StreamsBlock``.
    """

    attention: BlockAttention
    time: str
    before: Norm
    into: MergedWeights
    norms: HeadNorms
    out: MergedWeights
    activation: str
    find_positions: Callable[[Mapping[str, Any], int], tuple[Positions, ...]]

    @property
    def attentions(self) -> tuple[BlockAttention, ...]:
        """Its one attention."""
        return (self.attention,)

    @property
    def head_norms(self) -> tuple[HeadNorms, ...]:
        """Those of queries and keys."""
        return (self.norms,)

    @property
    def products(self) -> tuple[MergedWeights, ...]:
        """The weights of both products."""
        return (self.into, self.out)

    def takes(self, context: Mapping[str, Any]) -> bool:
        """Whether the tokens are one tensor and stay one, and there is nothing that adapters pass."""
        x, time = context[IMAGE], context[self.time]
        if type(x) is not Tensor or type(time) is not Tensor or time.dim() != 2:
            return False
        if x.dtype != time.dtype or len(x) != len(time):
            return False
        known = {IMAGE, self.time, *ANGLES, "text_seq_len"}
        return all(is_absent(value) for name, value in context.items() if name not in known)

    def __call__(self, operands: tuple[Operands, ...], context: Mapping[str, Any]) -> Tensor:
        """The tokens, as the block returns them."""
        into, out_of = operands
        x = context[IMAGE]
        (modulation,) = modulations_of(context[self.time], (self.before,))
        both = into.product(modulated(x, modulation, (into,)), x.dtype)
        width = 3 * self.attention.heads * self.attention.head_dim
        h = both[..., width:]
        (positions,) = self.find_positions(context, 0)
        q, k, v = rotate(self.attention.call(both[..., :width], self.norms, positions))
        del both
        attended = self.attention(q, k, v, None)
        del q, k, v
        if out_of.reads_rows:
            how = self.activation, True, out_of.input_scale, out_of.dtype
            inner: Input = QuantizedRows(*activation_quantize(h, *how, attended))
        else:
            inner = torch.cat([attended, activate(h, self.activation, True)], dim=2)
        return limited(gated(out_of.product(inner, x.dtype), x, modulation.gate))


def limited(x: Tensor) -> Tensor:
    """``x``, limited if it is float16."""
    return x.clip(-MAX_FLOAT16, MAX_FLOAT16) if x.dtype == torch.float16 else x
