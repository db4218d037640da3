"""``Shard``: the part of a layer that one of several processes has, and what the processes tell one another.

A layer in column parallelism has some rows of its weight, and so some of the outputs. One in row parallelism has some
columns: it multiplies its part of the input, and the products of all processes are added up. A mixture's experts are
cut in either way inside of each expert, or one process has some experts whole (expert parallelism).

A shard is a layer of its own: smaller, with plain parameters, so that kernels, fused blocks and CUDA graphs see nothing
else. Between processes there is one sum, on the current stream, for each layer in row parallelism or mixture.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, distributed

from qgemm.numerics.packing import HALF, pack_codes, unpack_codes

Style = Literal["column", "row", "expert"]


class Split(NamedTuple):
    """How a parameter is cut: along ``dim``, and each of ``parts`` equal parts of it by itself, such as gate and up.

    ``codes``: how many codes of 4 bits a row has that is packed along ``dim``, the last; 0 if none is. ``fill``: the
    code behind the last one.
    """

    dim: int
    parts: int = 1
    codes: int = 0
    fill: int = 0

    def packs_anew(self, size: int) -> bool:
        """Whether codes of ``size`` equal parts are in other blocks than those of the whole."""
        return self.codes // size % (2 * HALF) != 0


@dataclass(frozen=True, eq=False)
class Shard:
    """What one process has of a layer.

    - ``style``: ``"column"``, ``"row"`` or ``"expert"``. ``group``: the processes; ``rank``, ``size``: this one's
      number among them, and how many they are.
    - ``is_open``: whether the layer's input and output are cut as the style has it: else, in column parallelism, the
      outputs are gathered, and in row parallelism the input comes whole.
    - ``shares_scales``: whether, in row parallelism, a row is quantized with the maximum of all of it, as without
      processes, and not with that of the columns here.
    - ``parts``: how many layers of one size a layer in column parallelism stands for, such as gate and up.
    """

    style: Style
    group: Any
    rank: int
    size: int
    is_open: bool = True
    parts: int = 1
    shares_scales: bool = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Shard:
        """A copied layer is of the same group."""
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
        """The parameter of which each process has a part, cut as ``split`` says of that. All processes call it."""
        raw = part.detach().contiguous().view(torch.uint8)  # not all libraries send all dtypes
        gathered = [torch.empty_like(raw) for _ in range(self.size)]
        distributed.all_gather(gathered, raw, group=self.group)
        if split.packs_anew(1):
            codes = torch.cat([unpack_codes(each.flatten(0, -2), split.codes) for each in gathered], dim=1)
            return pack_codes(codes, split.fill).view(*part.shape[:-1], -1)
        pieces = [each.view(part.dtype).chunk(split.parts, split.dim) for each in gathered]
        return torch.cat([piece[i] for i in range(split.parts) for piece in pieces], split.dim)

    def enter(self, x: Tensor) -> Tensor:
        """What this process's part of the layer reads of the input."""
        if torch.is_grad_enabled() and x.requires_grad and (self.style != "row" or not self.is_open):
            x = _SumOfGradients.apply(x, self.group)
        return self.own_columns(x) if self.style == "row" and not self.is_open else x

    def leave(self, out: Tensor) -> Tensor:
        """The layer's output, or its part, from what this process has computed."""
        if self.style == "row":
            return self.sum(out)
        return out if self.is_open else self.gather(out)

    def sum(self, x: Tensor) -> Tensor:
        """The sum of what the processes have, in the memory of ``x``."""
        if torch.is_grad_enabled() and x.requires_grad:
            total: Tensor = _Sum.apply(x, self.group)
            return total
        distributed.all_reduce(x, group=self.group)
        return x

    def row_maxima(self, x: Tensor) -> Tensor:
        """The largest magnitude in each row of what all processes have, ``[..., 1]``."""
        maxima: Tensor = torch.linalg.vector_norm(x, torch.inf, dim=-1, keepdim=True)
        distributed.all_reduce(maxima, op=distributed.ReduceOp.MAX, group=self.group)
        return maxima

    def gather(self, x: Tensor) -> Tensor:
        """The columns ``[..., size * n]`` of which each process has ``[..., n]``."""
        if torch.is_grad_enabled() and x.requires_grad:
            whole: Tensor = _Gather.apply(x, self)
            return whole
        return self._gather(x)

    def gather_to_share(self, x: Tensor) -> Tensor:
        """As ``gather``, for what each process computes something else of."""
        whole = self.gather(x)
        if torch.is_grad_enabled() and whole.requires_grad:
            whole = _SumOfGradients.apply(whole, self.group)
        return whole

    def _gather(self, x: Tensor) -> Tensor:
        parts = x.new_empty(self.size * x.numel())
        # As PyTorch calls it from 2.13 on, where the name before warns.
        into = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
        into(parts, x.reshape(-1), group=self.group)
        return parts.view(self.size, *x.shape).movedim(0, -2).reshape(*x.shape[:-1], -1)

    def own_columns(self, x: Tensor) -> Tensor:
        """This process's of the columns of ``x``."""
        length = x.shape[-1] // self.size
        return x.narrow(-1, self.rank * length, length)


class _Sum(torch.autograd.Function):
    """The sum over processes, whose gradient all of them have."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        total = x.clone()
        distributed.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad, None


class _SumOfGradients(torch.autograd.Function):
    """What all processes read: each has a part of its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        total = grad.contiguous().clone()
        distributed.all_reduce(total, group=ctx.group)
        return total, None


class _Gather(torch.autograd.Function):
    """All columns, whose gradient all processes have."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shard: Shard) -> Tensor:
        ctx.shard = shard
        return shard._gather(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return ctx.shard.own_columns(grad).contiguous(), None
