"""``FusedLayer``: a transformer layer whose branches, norms and residuals are computed together.

Branches are attention and an MLP. Attention to an encoder may lie between them, and a branch that reads a separate
input of the layer may follow them. In a row:
``t = x + n2(attention(n1(x)))``, ``y = t + n4(mlp(n3(t)))``, where any of the norms may be missing. Side by side:
``y = x + attention(n1(x)) + mlp(n3(x))``. With the norms after the residuals: ``t = n2(x + attention(x))``,
``y = n4(t + mlp(t))``. A branch that isn't fused is called as a module.

Another ``forward`` of the instance computes this (``binding.py``). In cases that it doesn't handle it calls the class's
own ``forward``: training, also of parts; gradients; autocast; attention weights as outputs; hooks on modules that it
would bypass; layers that others have put in place of the original ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from qgemm.nn.blocks.attention import FusedAttention
from qgemm.nn.blocks.binding import fused_of
from qgemm.nn.blocks.cross_attention import KEY_VALUE_STATES, STATES, FusedCrossAttention
from qgemm.nn.blocks.fused_module import FusedModule
from qgemm.nn.blocks.latent_attention import FusedLatentAttention
from qgemm.nn.blocks.layer_input import FusedLayerInput
from qgemm.nn.blocks.merged import MergedWeights
from qgemm.nn.blocks.mixture import FusedMixture, MlpAndMixture
from qgemm.nn.blocks.mlp import FusedMlp
from qgemm.nn.blocks.operands import Operands, SummedOperands, read_rows
from qgemm.nn.blocks.position_bias import POSITION_BIAS
from qgemm.nn.blocks.steps import Factors, NormStep, add, add_and_read, normalize_and_read, quantize, read

Form = Literal["in a row", "side by side", "norms last", "alone"]

MAX_OUTPUT = torch.finfo(torch.float16).max - 1000
"""Encoders of transformers limit their layers' outputs to this."""
MAX_SMALL_ROWS = 16
"""Up to this many rows, the output projection adds the residual."""


@dataclass(frozen=True, eq=False)
class CalledBranch:
    """A branch that isn't fused: attention or an MLP, called as a module.

    ``told``: whether it gets all arguments of the layer, or only those that ``names`` lists. ``names``: what arguments
    are called there, if not the same; None leaves one out. ``adds``: whether the module itself adds the residual, its
    second argument. ``behind``: a layer that its output goes through.
    """

    module: nn.Module
    told: bool
    names: Mapping[str, str | None] = field(default_factory=dict)
    adds: bool = False
    products: tuple[MergedWeights, ...] = ()
    behind: nn.Module | None = None

    def __call__(
        self,
        x: Tensor,
        operands: tuple[Operands, ...],
        residual: Tensor | None,
        dtype: torch.dtype,
        context: Mapping[str, Any],
    ) -> Tensor:
        """The module's output for ``x [B, S, K]``, plus ``residual``."""
        names = (name for name in context if self.told or name in self.names)
        told: dict[Any, Any] = {self.names.get(name, name): context[name] for name in names}
        told.pop(None, None)
        out = self.module(x, residual, **told) if self.adds else self.module(x, **told)
        whole: Tensor = out[0] if isinstance(out, tuple) else out
        whole = (whole if self.behind is None else self.behind(whole)).view_as(x)
        return whole if residual is None or self.adds else add(whole, residual, None)


Branch = (
    FusedAttention
    | FusedLatentAttention
    | FusedCrossAttention
    | FusedMlp
    | FusedMixture
    | MlpAndMixture
    | FusedLayerInput
    | CalledBranch
)
AllOperands = Sequence[tuple[Operands, ...]]


@dataclass(frozen=True, eq=False)
class Step:
    """A branch of a layer, the ``norm`` before it and the ``out_norm`` after it.

    ``scale``: for layers in a row, a vector that multiplies the output: its module, and its name there; or None.
    """

    branch: Branch
    norm: NormStep | None = None
    out_norm: NormStep | None = None
    scale: tuple[nn.Module, str] | None = None


@dataclass(frozen=True, eq=False)
class FusedLayer(FusedModule):
    """How a layer computes.

    - ``form``: how ``steps`` and their norms follow one another; see the module. ``"alone"``: an MLP by itself, such as
      a shared expert.
    - ``multiplier``: a factor of each branch, applied before the residual is added; ``residual_first``: for branches
      side by side, whether each is added to the residual in turn, or first to each other.
    - ``scale``: a factor of the layer's output: its module, and its name there; or None.
    - ``limited``: whether the output is limited in float16, to ``MAX_OUTPUT``.
    - ``crosses``: whether a branch is attention to an encoder.
    - ``defaults``: the arguments of ``forward`` after the first, by name and in order.
    - ``returned``: how many values ``forward`` returns in a tuple: the output, and attention's weights, which are None;
      0 if it returns only the output. ``returns_bias``: whether the position bias comes between them.
    """

    form: Form
    steps: tuple[Step, ...]
    multiplier: float = 1.0
    residual_first: bool = True
    scale: tuple[nn.Module, str] | None = None
    limited: bool = False
    crosses: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)
    returned: int = 0
    returns_bias: bool = False

    def prepare(self, layer: nn.Module, x: Any, context: Mapping[str, Any]) -> AllOperands | None:
        """The operands of all branches for this call of ``layer``; None if it can't be computed here."""
        known = self._knows_call(layer, x, context) and self._knows_attention(context) and self.has_its_modules()
        return self.operands() if known else None

    def _knows_call(self, layer: nn.Module, x: Any, context: Mapping[str, Any]) -> bool:
        """Whether the call wants the output alone, and can be computed by other modules than the layer's."""
        if not self.is_plain_call(layer, x, context) or context.get("output_attentions"):
            return False
        if self.returned == 1 and context.get("use_cache"):  # then the cache may be returned, too
            return False
        return (context.get(STATES, context.get(KEY_VALUE_STATES)) is not None) == self.crosses

    def _knows_attention(self, context: Mapping[str, Any]) -> bool:
        """Whether attention, if fused, returns no weights, and can handle the kind of its cache and sequences."""
        attention = self.steps[0].branch
        if self.returned and "output_attentions" not in self.defaults:
            config = getattr(getattr(attention, "module", None), "config", None)
            if getattr(config, "_attn_implementation", "") == "eager":  # it returns weights unasked
                return False
        if isinstance(attention, FusedAttention) and attention.packed:
            if "flash" in str(attention.module.config._attn_implementation):
                return False  # flash attention reads all sequences at once
        if isinstance(attention, (FusedAttention, FusedLatentAttention, FusedCrossAttention)):
            cache = context.get(attention.cache_name)
            return cache is None or not self.crosses or hasattr(cache, "cross_attention_cache")
        return True

    @property
    def products(self) -> tuple[MergedWeights, ...]:
        """The weights of all branches' products."""
        return tuple([product for step in self.steps for product in step.branch.products])

    def with_own_activations(self, in_float64: bool = False) -> FusedLayer:
        """The same, with MLPs that call their modules' own activations, in float64 if that is wanted."""
        branches = [
            branch.with_own_activation(in_float64) if isinstance(branch, FusedMlp) else branch
            for branch in (step.branch for step in self.steps)
        ]
        steps = [replace(step, branch=branch) for step, branch in zip(self.steps, branches, strict=True)]
        return replace(self, steps=tuple(steps))

    @property
    def forward(self) -> Callable[..., Any]:
        """The ``forward`` of a fused layer."""
        return forward

    def operands(self) -> AllOperands | None:
        """The operands of each branch's products; None if a product has none now."""
        found = [tuple([product.operands() for product in step.branch.products]) for step in self.steps]
        for own in found:
            if None in own:
                return None
        return found  # type: ignore[return-value]

    def __call__(self, x: Tensor, operands: AllOperands, context: MutableMapping[str, Any]) -> Tensor:
        """The layer's output for ``x [B, S, K]``."""
        out = self._compute(x, operands, context)
        return out.clamp(-MAX_OUTPUT, MAX_OUTPUT) if self.limited and out.dtype == torch.float16 else out

    def _compute(self, x: Tensor, operands: AllOperands, context: MutableMapping[str, Any]) -> Tensor:
        if self.form == "in a row":
            return self._in_a_row(x, operands, context)
        if self.form == "side by side":
            return self._side_by_side(x, operands, context)
        if self.form == "norms last":
            return self._norms_last(x, operands, context)
        return self.steps[0].branch(x, operands[0], None, x.dtype, context)

    def _in_a_row(self, x: Tensor, operands: AllOperands, context: MutableMapping[str, Any]) -> Tensor:
        dtype, of_layer = x.dtype, None if self.scale is None else getattr(*self.scale)
        # With few rows, the product adds the residual; with many, the kernel of the norm does.
        is_small = x.numel() <= MAX_SMALL_ROWS * x.shape[-1]
        reads = self._reads(operands)
        into: Any = read(x, self.steps[0].norm, reads[0])
        last = len(self.steps) - 1
        for i, step in enumerate(self.steps):
            adds = i == last or (is_small and not _is_summed(operands[i])) or getattr(step.branch, "adds", False)
            scale = None if step.scale is None else getattr(*step.scale)
            factors = Factors(self.multiplier, scale, of_layer if i == last else None)
            if factors.none and step.out_norm is None and adds:
                x = step.branch(into, operands[i], x, dtype, context)
                into = x if i == last else read(x, self.steps[i + 1].norm, reads[i + 1])
                continue
            out = step.branch(into, operands[i], None, dtype, context)
            if i == last:
                x = add(out, x, step.out_norm, factors)
            else:
                x, into = add_and_read(out, x, step.out_norm, self.steps[i + 1].norm, reads[i + 1], factors)
        return x

    def _side_by_side(self, x: Tensor, operands: AllOperands, context: MutableMapping[str, Any]) -> Tensor:
        attention, mlp = self.steps
        first: Any
        second: Any
        first, second = operands
        shares = mlp.norm is None
        # Rows are quantized ahead only where both branches read quantized rows, of one dtype.
        in_rows = read_rows(first) and (not shares or (read_rows(second) and first[0].dtype == second[0].dtype))
        into: Any = read(x, attention.norm, first if in_rows else ())
        if shares and in_rows and isinstance(into, Tensor):
            into = quantize(into, first[0])
        other: Any = into if shares else read(x, mlp.norm, second)
        residual = x if self.residual_first else None
        shard = second[-1].shard if all(map(_is_summed, operands)) else None
        if shard is not None:  # both branches share one sum, to which one process adds the residual
            first, second = ((*own[:-1], own[-1]._replace(sums=False)) for own in (first, second))
            residual = None if shard.rank else residual
        out = attention.branch(into, first, residual, x.dtype, context)
        out = mlp.branch(other, second, out, x.dtype, context)
        out = out if shard is None else shard.sum(out)
        return out if self.residual_first else add(out, x, None)

    def _norms_last(self, x: Tensor, operands: AllOperands, context: MutableMapping[str, Any]) -> Tensor:
        dtype, reads = x.dtype, self._reads(operands)
        into: Any = x
        for step, own, following in zip(self.steps, operands, (*reads[1:], ()), strict=True):
            # On a GPU the norm adds the residual: a product would take longer for it, since all SMs read their parts of
            # it while they store. On a CPU the product adds it to rows that are in the cache.
            adds = not x.is_cuda or getattr(step.branch, "adds", False)
            out = step.branch(into, own, x if adds else None, dtype, context)
            x, into = normalize_and_read(out, None if adds else x, step.out_norm, following)
        return x

    def _reads(self, operands: AllOperands) -> AllOperands:
        """The operands that read a branch's input."""
        return [() if isinstance(each.branch, MlpAndMixture) else operands[i] for i, each in enumerate(self.steps)]


def _is_summed(operands: tuple[Operands, ...]) -> bool:
    """Whether a branch ends with a product that is summed over processes."""
    return len(operands) > 0 and isinstance(operands[-1], SummedOperands)


def forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
    """The ``forward`` of a fused layer, with the arguments of the class's own."""
    fused: FusedLayer | None = fused_of(self)
    if fused is None:  # the layer was unfused, but a wrapper still holds this forward
        return type(self).forward(self, hidden_states, *args, **kwargs)
    context = {**fused.defaults, **kwargs}
    if args:
        context.update(zip(fused.defaults, args, strict=False))
    operands = fused.prepare(self, hidden_states, context)
    if operands is None:
        return type(self).forward(self, hidden_states, *args, **kwargs)
    out = fused(hidden_states, operands, context)
    values = (out, context.get(POSITION_BIAS), None) if fused.returns_bias else (out, None)
    return values[: fused.returned] if fused.returned else out
