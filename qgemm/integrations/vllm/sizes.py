"""``Sizes``: the part of a weight that a layer of vLLM has, its scheme, and whether the two are compatible."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch

from qgemm.nn.kinds import linear_class, meta_linear
from qgemm.nn.linear_layer import LinearLayer
from qgemm.numerics.blocks import BLOCK
from qgemm.numerics.hadamard import block_size
from qgemm.scheme import QuantScheme


@dataclass(frozen=True)
class Sizes:
    """``name``, ``scheme``: of the layer. ``rows``: of each part that was merged into it.

    ``own_K``: the number of the weight's columns on this rank, out of ``K``.
    """

    name: str
    scheme: QuantScheme
    own_K: int
    K: int
    rows: tuple[int, ...]

    @property
    def is_cut(self) -> bool:
        """Whether the weight is split along K, so that products are summed."""
        return self.own_K != self.K

    @property
    def spans(self) -> list[tuple[int, int]]:
        """The rows of each part: start and end."""
        return list(pairwise(accumulate(self.rows, initial=0)))

    @property
    def numbers(self) -> tuple[int, str, int, bool]:
        """The fields that a ``ScaledWeight`` has besides tensors."""
        weight = self.scheme.weight
        return self.own_K, weight.dtype, weight.group_size or max(self.own_K, 1), self.scheme.activation is not None

    def linear(self) -> LinearLayer:
        """A layer of qgemm of this size on meta, which has the same parameters."""
        return meta_linear(self.scheme, self.own_K, sum(self.rows), dtype=torch.float32)

    def check(self) -> None:
        """Raises ``ValueError`` for a split that the scheme doesn't allow."""
        weight, problem = self.scheme.weight, ""
        if weight.is_prescaled:
            raise ValueError(
                f"the plugin for vLLM doesn't compute {self.name} in {self.scheme.name!r}, with factors for its input: "
                "convert the folder with qgemm convert --to qgemm --scheme int8, or another scheme"
            )
        if self.is_cut and weight.group_size is not None and self.own_K % weight.group_size:
            problem = f"{self.own_K} of {self.K} columns don't end with a group of {weight.group_size}"
        elif self.is_cut and weight.is_ordered:
            problem = "its columns are in an order of their own"
        elif self.is_cut and self.scheme.rotates and block_size(self.own_K) != block_size(self.K):
            problem = f"its input is rotated in blocks of {block_size(self.K)}"
        elif weight.block is not None and any(rows % BLOCK for rows in self.rows[:-1]):
            problem = f"parts of {list(self.rows)} rows don't end with a block of {BLOCK}"
        if problem:
            raise ValueError(
                f"vLLM can't compute {self.name} in {self.scheme.name!r} so: {problem}; choose another "
                "--tensor-parallel-size, or another scheme for this layer"
            )

    def part(self, name: str, value: Any, part: int) -> Any:
        """The share of one part of a merged layer in the parameter ``name``."""
        if value is None:
            return None
        kind = linear_class(self.scheme)
        if name in (*kind.shared_names, *kind.index_names) and value.shape[0] == len(self.rows):
            return value[part]
        start, stop = self.spans[part]
        return value[start:stop]
