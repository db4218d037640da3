"""Blocks of diffusion transformers in which tokens of a text and of an image attend to one another.

A ``FusedJointBlock`` (Flux, Qwen-Image, Stable Diffusion 3) has two streams, the tokens of a text and of an image, with
layers of their own and one attention over all tokens. A ``FusedSingleBlock`` (Flux) has one stream, and one product
behind attention and MLP, which are computed side by side.
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
from qgemm.ops.rotary import rotate, rotate_and_store
from qgemm.ops.rows import activation_quantize

ANGLES = "image_rotary_emb"
"""The blocks' name for cosines and sines, or for complex numbers."""
MAX_FLOAT16 = 65504.0
"""Flux and Qwen-Image limit what float16 blocks return to this."""

_KNOWN = {IMAGE, TEXT, TIME, ANGLES, f"{TEXT}_mask"}


@dataclass(frozen=True, eq=False)
class Stream:
    """The layers for the tokens of a text, or of an image, or for both.

    - ``modulation``: modules that are called one after another on the time step's embedding ``[B, T]``.
    - ``before``: the norm before each branch.
    - ``qkv``: projections of queries, keys and values; ``norms``: of queries and keys; ``out``: the projection behind
      attention.
    """

    modulation: tuple[nn.Module, ...]
    before: tuple[Norm, ...]
    qkv: MergedWeights
    norms: HeadNorms | None
    out: MergedWeights
    mlp: FusedMlp

    @property
    def products(self) -> tuple[MergedWeights, ...]:
        """The weights of its products."""
        return (self.qkv, self.out, *self.mlp.products)

    def modulations(self, time: Tensor) -> list[Modulation]:
        """That of each branch in turn."""
        for module in self.modulation:
            time = module(time)
        found = time.unflatten(-1, (3 * len(self.before), -1)).transpose(0, 1).contiguous()
        weights = 1 + found[1::3]
        return [Modulation(*each) for each in zip(weights, found[::3], found[2::3], self.before, strict=True)]


@dataclass(frozen=True, eq=False)
class StreamsBlock(DiffusionBlock):
    """What both kinds have in common.

    ``find_positions``: ``(context, tokens of the first stream) -> positions of both``.
    """

    attention: BlockAttention
    find_positions: Callable[[Mapping[str, Any], int], tuple[Positions, Positions]]

    @property
    @abstractmethod
    def streams(self) -> tuple[Stream, ...]:
        """Its streams, one or two."""

    @property
    def attentions(self) -> tuple[BlockAttention, ...]:
        """Its one attention."""
        return (self.attention,)

    @property
    def head_norms(self) -> tuple[HeadNorms, ...]:
        """Those of all streams that have such norms."""
        return tuple([each.norms for each in self.streams if each.norms is not None])

    def takes(self, context: Mapping[str, Any]) -> bool:
        """Whether tokens are alike, and there is nothing that adapters of images and others pass."""
        image, text, time = given = [context[name] for name in (IMAGE, TEXT, TIME)]
        if not all(type(each) is Tensor for each in given) or not image.dtype == text.dtype == time.dtype:
            return False
        others = (value for name, value in context.items() if name not in _KNOWN)
        return len(image) == len(text) == len(time) and all(value is None or _is_empty(value) for value in others)


@dataclass(frozen=True, eq=False)
class FusedJointBlock(StreamsBlock):
    """How a block of two streams computes.

    - ``first``, ``second``: the streams, in the order of their tokens in attention; ``names``: their arguments' names.
    - ``limited``: the streams that are limited in float16, by the names of their arguments.
    """

    first: Stream
    second: Stream
    names: tuple[str, str]
    limited: tuple[str, ...]

    @property
    def streams(self) -> tuple[Stream, ...]:
        """Both streams."""
        return (self.first, self.second)

    @property
    def products(self) -> tuple[MergedWeights, ...]:
        """The weights of all products."""
        return (*self.first.products, *self.second.products)

    def __call__(self, operands: tuple[Operands, ...], context: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """The tokens of the text and of the image, as the block returns them."""
        tokens = [context[name] for name in self.names]
        own, before = (operands[:4], operands[4:]), tokens[0].shape[1]
        positions = self.find_positions(context, before)
        modulations = [stream.modulations(context[TIME]) for stream in self.streams]
        shape = len(tokens[0]), self.attention.heads, before + tokens[1].shape[1], self.attention.head_dim
        k, v = (tokens[0].new_empty(shape) for _ in range(2))
        queries, start = [], 0
        for i, x in enumerate(tokens):
            qkv = own[i][0].product(modulated(x, modulations[i][0], own[i]), x.dtype)
            call = self.attention.call(qkv, self.streams[i].norms, positions[i])
            place = slice(start, start := start + x.shape[1])
            stored = KeyValueStore(k[:, :, place], v[:, :, place], None, None, None)
            queries.append(rotate_and_store(call, stored))
        attended = self.attention(torch.cat(queries, dim=1), k, v, self._mask(context, start - before))
        parts = attended[:, :before], attended[:, before:]
        done = [_add_branches(x, parts[i], self.streams[i].mlp, own[i], modulations[i]) for i, x in enumerate(tokens)]
        outputs = dict(zip(self.names, done, strict=True))
        for name in self.limited:
            outputs[name] = limited(outputs[name])
        return outputs[TEXT], outputs[IMAGE]

    def _mask(self, context: Mapping[str, Any], others: int) -> Tensor | None:
        """Which keys count, ``[B, 1, 1, S]``; ``others``: tokens without a mask, behind those that have one."""
        mask = context.get(f"{TEXT}_mask")
        if mask is None:
            return None
        return torch.cat([mask, mask.new_ones((mask.shape[0], others), dtype=torch.bool)], dim=1)[:, None, None]


def _add_branches(
    x: Tensor, attended: Tensor, mlp: FusedMlp, operands: tuple[Operands, ...], modulations: list[Modulation]
) -> Tensor:
    """``x`` with what attention and the MLP add."""
    out_of, of_mlp, (attention, after) = operands[1], operands[2:], modulations
    branch = out_of.product(attended, x.dtype)
    x, into = added_and_normed(branch, x, attention.gate, after[:2], after.norm, of_mlp)
    return gated(mlp(into, of_mlp, None, x.dtype, {}), x, after.gate)


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

    def __call__(self, operands: tuple[Operands, ...], context: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """The tokens of the text and of the image, as the block returns them."""
        of_qkv, of_mlp, out_of = operands
        text = context[TEXT].shape[1]
        x = torch.cat([context[TEXT], context[IMAGE]], dim=1)
        positions, _ = self.find_positions(context, x.shape[1])
        (modulation,) = self.stream.modulations(context[TIME])
        into = modulated(x, modulation, (of_qkv,))
        qkv = of_qkv.product(into, x.dtype)
        q, k, v = rotate(self.attention.call(qkv, self.stream.norms, positions))
        del qkv
        attended = self.attention(q, k, v, None)
        del q, k, v
        h = of_mlp.product(into, x.dtype)
        if out_of.reads_rows:
            how = self.stream.mlp.activation_name, False, out_of.input_scale, out_of.dtype
            both: Input = QuantizedRows(*activation_quantize(h, *how, attended))
        else:
            both = torch.cat([attended, self.stream.mlp.activation(h)], dim=2)
        x = limited(gated(out_of.product(both, x.dtype), x, modulation.gate))
        return x[:, :text], x[:, text:]


def limited(x: Tensor) -> Tensor:
    """``x``, limited if it is float16."""
    return x.clip(-MAX_FLOAT16, MAX_FLOAT16) if x.dtype == torch.float16 else x


def _is_empty(value: Any) -> bool:
    return isinstance(value, dict) and not value
