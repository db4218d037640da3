"""``Shard``: the part of a layer that one of several processes holds, and the communication between them.

In column parallelism a layer has some rows of the weight, and so some of the outputs. In row parallelism it has some
columns: it multiplies its part of the input, and the products of all processes are summed. A mixture's experts are
split in either way inside each expert, or a process has some experts whole (expert parallelism).

A shard is a layer of its own: smaller, with plain parameters, so that kernels, fused blocks and CUDA graphs need no
special case. Between processes there is one sum, on the current stream, for each row-parallel layer or mixture.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, distributed

from qgemm.numerics.packing import HALF, pack_codes, unpack_codes

Style = Literal["column", "row", "expert"]


class Split(NamedTuple):
    """How a parameter is split: along ``dim``, where each of ``parts`` equal parts, such as gate and up, is split
    alike.

    ``codes``: the number of 4-bit codes in a row that is packed along ``dim``, the last dimension; 0 if it isn't
    packed. ``fill``: the code that pads a row.
    """

    dim: int
    parts: int = 1
    codes: int = 0
    fill: int = 0

    def packs_anew(self, size: int) -> bool:
        """Whether codes must be repacked, because blocks of ``size`` equal parts differ from those of the whole."""
        return self.codes // size % (2 * HALF) != 0


@dataclass(frozen=True, eq=False)
class Shard:
    """Which part of a layer a process holds.

    - ``style``: ``"column"``, ``"row"`` or ``"expert"``. ``group``: the processes; ``size``: how many they are;
      ``rank``: this one's number.
    - ``is_open``: whether the layer's input or output stays split, as the style has it; otherwise outputs are gathered
      in column parallelism, and the input comes whole in row parallelism.
    - ``shares_scales``: whether, in row parallelism, a row is quantized with the maximum of the whole row, as in a
      single process, instead of the maximum of this process's columns.
    - ``parts``: how many layers of equal size a column-parallel layer contains, such as gate and up.
    """

    style: Style
    group: Any
    rank: int
    size: int
    is_open: bool = True
    parts: int = 1
    shares_scales: bool = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Shard:
        """Returns itself: a copied layer belongs to the same group."""
        return self

    def part_of(self, whole: Tensor, split: Split) -> Tensor:
        """This process's part of a parameter, in memory of its own."""
        if split.packs_anew(self.size):
            codes = unpack_codes(whole.flatten(0, -2), split.codes)
            packed = pack_codes(self.own_columns(codes).contiguous(), split.fill)
            return packed.view(*whole.shape[:-1], -1)
        length = whole.shape[split.dim] // (split.parts * self.size)
        parts = whole.chunk(split.parts, split.dim)
        return torch.cat([part.narrow(split.dim, self.rank * length, length) for part in parts], split.dim)

    def whole_of(self, part: Tensor, split: Split) -> Tensor:
        """The whole parameter, from each process's part, split as ``split`` says. All processes must call it."""
        raw = part.detach().contiguous().view(torch.uint8)  # not all communication libraries send all dtypes
        gathered = [torch.empty_like(raw) for _ in range(self.size)]
        distributed.all_gather(gathered, raw, group=self.group)
        if split.packs_anew(1):
            codes = torch.cat([unpack_codes(each.flatten(0, -2), split.codes) for each in gathered], dim=1)
            return pack_codes(codes, split.fill).view(*part.shape[:-1], -1)
        pieces = [each.view(part.dtype).chunk(split.parts, split.dim) for each in gathered]
        return torch.cat([piece[i] for i in range(split.parts) for piece in pieces], split.dim)

    def enter(self, x: Tensor) -> Tensor:
        """What this process's part of the layer reads from the input."""
        if torch.is_grad_enabled() and x.requires_grad and (self.style != "row" or not self.is_open):
            x = _SumOfGradients.apply(x, self.group)
        return self.own_columns(x) if self.style == "row" and not self.is_open else x

    def leave(self, out: Tensor) -> Tensor:
        """The layer's output, or its part, from this process's result."""
        if self.style == "row":
            return self.sum(out)
        return out if self.is_open else self.gather(out)

    def sum(self, x: Tensor) -> Tensor:
        """The sum over all processes, in the memory of ``x``."""
        if torch.is_grad_enabled() and x.requires_grad:
            total: Tensor = _Sum.apply(x, self.group)
            return total
        distributed.all_reduce(x, group=self.group)
        return x

    def row_maxima(self, x: Tensor) -> Tensor:
        """The largest magnitude in each row over all processes, ``[..., 1]``."""
        maxima: Tensor = torch.linalg.vector_norm(x, torch.inf, dim=-1, keepdim=True)
        distributed.all_reduce(maxima, op=distributed.ReduceOp.MAX, group=self.group)
        return maxima

    def gather(self, x: Tensor) -> Tensor:
        """The columns ``[..., size * n]``, of which each process has ``[..., n]``."""
        if torch.is_grad_enabled() and x.requires_grad:
            whole: Tensor = _Gather.apply(x, self)
            return whole
        return self._gather(x)

    def gather_to_share(self, x: Tensor) -> Tensor:
        """As ``gather``, if each process then computes something different from the result."""
        whole = self.gather(x)
        if torch.is_grad_enabled() and whole.requires_grad:
            whole = _SumOfGradients.apply(whole, self.group)
        return whole

    def _gather(self, x: Tensor) -> Tensor:
        parts = x.new_empty(self.size * x.numel())
        # PyTorch's name since 2.13, which warns about the old one.
        into = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
        into(parts, x.reshape(-1), group=self.group)
        return parts.view(self.size, *x.shape).movedim(0, -2).reshape(*x.shape[:-1], -1)

    def own_columns(self, x: Tensor) -> Tensor:
        """This process's columns of ``x``."""
        length = x.shape[-1] // self.size
        return x.narrow(-1, self.rank * length, length)


class _Sum(torch.autograd.Function):
    """A sum over processes; its gradient is the same in all of them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        total = x.clone()
        distributed.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _SumOfGradients(torch.autograd.Function):
    """The identity, for what all processes read: the gradient is the sum of their gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        total = grad.contiguous().clone()
        distributed.all_reduce(total, group=ctx.group)
        return total, None


class _Gather(torch.autograd.Function):
    """Gathers all columns; its gradient is the same in all processes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shard: Shard) -> Tensor:
        ctx.shard = shard
        return shard._gather(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.shard.own_columns(grad).contiguous(), None
