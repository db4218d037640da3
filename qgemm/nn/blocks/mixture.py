"""``FusedMixture``: a mixture of experts with its router, in few kernels, without the host waiting for the device.

``MlpAndMixture``: a mixture in parallel with an MLP.

``y = residual + (experts(x) + shared(x))``: the router's product, one kernel that chooses and weights the experts, and
the experts' kernels, the last of which adds the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from qgemm.kernels import Routing
from qgemm.kernels.norms import Norm
from qgemm.nn.blocks.merged import MergedWeights
from qgemm.nn.blocks.mlp import FusedMlp
from qgemm.nn.blocks.operands import Operands
from qgemm.nn.blocks.steps import NormStep, add, read
from qgemm.nn.experts import QuantExperts
from qgemm.ops.norms import add_norm
from qgemm.ops.router import route, router_logits
from qgemm.ops.rows import gate_heads


@dataclass(frozen=True, eq=False)
class RouterStep:
    """A router of a mixture: its module, and what it computes.

    - ``routing``: what it computes from its logits; None where that is unknown, so that the module is called.
    - ``in_float``: whether its product is computed in float32.
    - ``bias``: a bias for the choice: its module, and its name there; or None. ``told``: whether the router gets it as
      an argument.
    - ``linear``: the module's child that multiplies; empty if the module itself does.
    - ``chooser``: where ``module`` returns only logits, the module whose ``route_tokens_to_experts`` chooses.
    - ``top_k``: the number of experts, where the module returns a score for each.
    - ``takes_batch``: whether the module takes ``[B, S, H]`` alone.
    """

    module: nn.Module
    routing: Routing | None = None
    in_float: bool = False
    bias: tuple[nn.Module, str] | None = None
    told: bool = False
    linear: str = ""
    chooser: Any = None
    top_k: int = 0
    takes_batch: bool = False

    def __call__(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and experts of ``rows [T, H]``: ``[T, top_k]`` each."""
        linear = self.module._modules.get(self.linear) if self.linear else self.module
        parameters = {} if linear is None else linear._parameters
        weight, bias = (parameters.get(name) for name in ("weight", "bias"))
        # Hooks here are transformers' own, for callers who ask for the router's logits.
        known = self.routing is not None and not self.module._forward_hooks and weight is not None
        if not known or (weight.dtype != rows.dtype and not self.in_float):  # type: ignore[union-attr]
            return self._call(rows)
        assert self.routing is not None
        assert weight is not None
        logits = router_logits(rows, weight, bias, torch.float32 if self.in_float else rows.dtype)
        weights, index = route(logits, self.routing, self._choice_bias())
        return (weights if self.routing.in_float else weights.to(rows.dtype)), index

    def _call(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        given = rows[None] if self.takes_batch else rows
        return self.chosen(rows, self.module(given, self._choice_bias()) if self.told else self.module(given))

    def chosen(self, rows: Tensor, out: Any) -> tuple[Tensor, Tensor]:
        """The weights and experts in ``out``, which the module returned for ``rows``."""
        if self.chooser is not None:
            index, weights = self.chooser.route_tokens_to_experts(rows, out)
            return weights, index
        if len(out) == 2:  # a score for each expert, 0 for those not chosen, and the logits
            index = out[1].topk(self.top_k, dim=-1)[1]
            return out[0].gather(-1, index), index
        # The logits come first, or last.
        first, second, third = out
        return (second, third) if first.is_floating_point() else (second, first)

    def _choice_bias(self) -> Tensor | None:
        if self.bias is None:
            return None
        holder, name = self.bias
        bias: Tensor = getattr(holder, name)
        return bias.detach().flatten()


@dataclass(frozen=True, eq=False)
class ScaledRouter:
    """Gemma 4's router: it normalizes and scales rows itself, and has a factor for each expert.

    ``routing``: applied to the logits ``proj(norm(x) * scale * scalar_root_size)``; the weights are then multiplied by
    their experts' ``per_expert_scale``. ``norm``: the kind that multiplies by ``scale`` as these steps do.
    """

    module: Any
    norm: Norm
    routing: Routing

    def __call__(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and experts of ``rows [T, H]``: ``[T, top_k]`` each."""
        module = self.module
        if module._forward_hooks or module.scale.dtype != rows.dtype:
            _, weights, index = module(rows)
            return weights, index
        x = add_norm(rows, None, module.scale, None, None, self.norm, factor=module.scalar_root_size)[0]
        weights, index = route(router_logits(x, module.proj.weight, None, x.dtype), self.routing)
        return weights * module.per_expert_scale[index], index


@dataclass(frozen=True, eq=False)
class FusedMixture:
    """How a module with a router and experts computes.

    ``module``: the whole. ``router``: chooses the experts of a token. ``shared``: an expert for every token, called as
    a module, times the sigmoid of ``shared_gate`` if there is one. ``scales_input``: whether the weight multiplies the
    expert's input, as in Llama 4, instead of its output.
    """

    module: nn.Module
    router: RouterStep
    experts: QuantExperts
    shared: nn.Module | None = None
    shared_gate: nn.Module | None = None
    scales_input: bool = False
    products: tuple[MergedWeights, ...] = ()

    @property
    def called(self) -> tuple[nn.Module | None, ...]:
        """The modules that are called unchanged."""
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
        weights, index = self.router(rows)
        if self.shared is None:
            added = None if residual is None else residual.reshape(rows.shape)
            return self._experts(rows, index, weights, added).view(x.shape)
        shared: Tensor = self.shared(rows)
        if self.shared_gate is not None:
            shared = gate_heads(shared[:, None], self.shared_gate(rows)[:, None], "sigmoid")[:, 0]
        out = self._experts(rows, index, weights, shared).view(x.shape)
        return out if residual is None else add(out, residual, None)

    def _experts(self, rows: Tensor, index: Tensor, weights: Tensor, residual: Tensor | None) -> Tensor:
        if not self.scales_input:
            return self.experts(rows, index, weights, residual)  # type: ignore[no-any-return]
        T, k = index.shape
        each = (rows[:, None] * weights[..., None]).flatten(0, 1)
        ones = weights.new_ones((T * k, 1))
        # Not the module's own call, which would compute the rows of every expert.
        if k == 1:
            return QuantExperts.forward(self.experts, each, index, ones, residual)
        out = QuantExperts.forward(self.experts, each, index.reshape(-1, 1), ones).view(T, k, -1).sum(dim=1)
        return out if residual is None else add(out, residual, None)


@dataclass(frozen=True, eq=False)
class MlpAndMixture:
    """An MLP and a mixture that read the same residual, each through its own norms, as in Gemma 4.

    ``mlp_out_norm(mlp(mlp_norm(x))) + out_norm(experts(norm(x)))``, where the router reads ``x`` itself.
    """

    mlp: FusedMlp
    mlp_norm: NormStep
    mlp_out_norm: NormStep
    router: RouterStep | ScaledRouter
    experts: QuantExperts
    norm: NormStep
    out_norm: NormStep

    @property
    def products(self) -> tuple[MergedWeights, ...]:
        """The weights of its products."""
        return self.mlp.products

    @property
    def called(self) -> tuple[nn.Module, ...]:
        """The modules that are called unchanged."""
        return (self.router.module,)

    def __call__(
        self,
        x: Tensor,
        operands: tuple[Operands, ...],
        residual: Tensor | None,
        dtype: torch.dtype,
        context: Mapping[str, Any],
    ) -> Tensor:
        """The sum of both for ``x [..., H]``, plus ``residual``."""
        rows = x.reshape(-1, x.shape[-1])
        of_mlp: Any = self.mlp(read(x, self.mlp_norm, operands), operands, None, dtype, context)
        of_mlp = read(of_mlp, self.mlp_out_norm, ())
        weights, index = self.router(rows)
        of_experts: Tensor = self.experts(read(rows, self.norm, ()), index, weights)
        out = add(of_experts.view(x.shape), of_mlp, self.out_norm)
        return out if residual is None else add(out, residual, None)
