"""``FusedMixture``: a mixture of experts with its router, in few kernels, and none that waits for the device.

``y = residual + (experts(x) + shared(x))``: the router's product, one kernel that chooses experts and weighs them, and
the experts' own, of which the last adds what comes after.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qgemm.kernels import Routing
from qgemm.nn.blocks.merged import MergedWeights, Operands
from qgemm.nn.experts import QuantExperts
from qgemm.ops.router import route


@dataclass(frozen=True, eq=False)
class FusedMixture:
    """How a module of a router and experts computes.

    ``module``: the whole. ``routing``: what the router does with its logits; None where that is unknown, and it is
    called. ``shared``: an expert of every token, called, times the sigmoid of ``shared_gate`` if there is one.
    """

    module: nn.Module
    router: nn.Module
    experts: QuantExperts
    routing: Routing | None
    shared: nn.Module | None = None
    shared_gate: nn.Module | None = None
    products: tuple[MergedWeights, ...] = ()

    @property
    def called(self) -> tuple[nn.Module | None, ...]:
        """What is called as the module that it is."""
        return self.shared, self.shared_gate

    def __call__(
        self,
        x: Tensor,
        operands: tuple[Operands, ...],
        residual: Tensor | None,
        dtype: torch.dtype,
        context: Mapping[str, Any],
    ) -> Tensor:
        """The module's output for ``x [..., H]``, plus ``residual``."""
        rows = x.reshape(-1, x.shape[-1])
        weights, index = self._route(rows)
        if self.shared is None:
            added = None if residual is None else residual.reshape(rows.shape)
            return self.experts(rows, index, weights, added).view(x.shape)  # type: ignore[no-any-return]
        shared: Tensor = self.shared(rows)
        if self.shared_gate is not None:
            shared = F.sigmoid(self.shared_gate(rows)) * shared
        out: Tensor = self.experts(rows, index, weights, shared).view(x.shape)
        return out if residual is None else residual + out

    def _route(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and experts of each row."""
        weight, bias = (self.router._parameters.get(name) for name in ("weight", "bias"))
        # Hooks are transformers' own here, for those who ask for the router's logits.
        if self.routing is None or self.router._forward_hooks or weight is None or weight.dtype != rows.dtype:
            _, weights, index = self.router(rows)
            return weights, index
        return route(F.linear(rows, weight, bias), self.routing)
