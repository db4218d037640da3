"""Blocks of Stable Diffusion 1.5, 2 and XL: attention to themselves, then to a text, and an MLP, each behind a norm.

Time steps don't reach these blocks: norms have weights of their own, and residuals no gates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from qgemm.nn.blocks.attention import HeadNorms
from qgemm.nn.blocks.diffusion import IMAGE, TEXT, BlockAttention, DiffusionBlock, is_absent
from qgemm.nn.blocks.diffusion_cross import Source
from qgemm.nn.blocks.merged import MergedWeights
from qgemm.nn.blocks.mlp import FusedMlp
from qgemm.nn.blocks.operands import Operands
from qgemm.nn.blocks.steps import NormStep, add_and_read, read

_UNREAD = {"timestep", "class_labels", "added_cond_kwargs"}  # arguments that blocks with such norms don't read


@dataclass(frozen=True, eq=False)
class FusedBasicBlock(DiffusionBlock):
    """How diffusers' ``BasicTransformerBlock`` computes.

    - ``module``: the block.
    - ``norms``: before attention, before attention to the text, and before the MLP.
    - ``attention``, ``qkv``, ``out``: attention to itself; ``cross``, ``query``, ``source``, ``cross_out``: to a text.
    """

    module: Any
    norms: tuple[NormStep, NormStep, NormStep]
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
        """Whether there are tokens of an image and a text, no masks, and nothing that adapters pass."""
        x, text = context[IMAGE], context[TEXT]
        if type(x) is not Tensor or type(text) is not Tensor or x.dim() != 3 or text.dim() != 3:
            return False
        if x.dtype != text.dtype or len(x) != len(text) or self.module._chunk_size is not None:
            return False
        return all(is_absent(value) for name, value in context.items() if name not in {IMAGE, TEXT, *_UNREAD})

    def __call__(self, operands: tuple[Operands, ...], context: Mapping[str, Any]) -> Tensor:
        """The tokens, as the block returns them."""
        of_qkv, out_of, of_query, of_text, out_of_cross, *of_mlp = operands
        x = context[IMAGE].contiguous()  # behind a convolution it isn't, and would be copied twice
        dtype = x.dtype
        first, second, third = self.norms
        qkv = of_qkv.product(read(x, first, (of_qkv,)), dtype).unflatten(-1, (3, self.attention.heads, -1))
        q, k, v = qkv.unbind(2)
        branch = out_of.product(self.attention(q, k.transpose(1, 2), v.transpose(1, 2), None), dtype)
        del qkv, q, k, v
        x, into = add_and_read(branch, x, None, second, (of_query,))
        q = of_query.product(into, dtype).unflatten(-1, (self.cross.heads, -1))
        attended = self.cross(q, *self.source(context[TEXT], of_text, self.cross), None)
        x, into = add_and_read(out_of_cross.product(attended, dtype), x, None, third, (*of_mlp,))
        return self.mlp(into, (*of_mlp,), x, dtype, {})
