"""``QuantExperts``: the experts of a mixture, with quantized weights, in one module.

``out[t] = sum over j of top_k_weights[t, j] * expert(top_k_index[t, j], x[t])``, where an expert is
``activation(x @ gate_up.T + bias) @ down.T + bias``, and the result has the dtype of ``x``. Each expert's weights are
those of two linear layers of the scheme: with int8 and fp8 activations, rows are quantized before either product.

Whatever order the float weights were in, these are ``[E, N, K]`` with all gates before all ups: K contiguous is what
quantized products are fast with, and one kernel then serves every model.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.fx import Proxy

from qgemm.kernels import GatedActivation
from qgemm.kernels.expert_weights import ExpertWeights, WeightOnlyExperts
from qgemm.nn.float_experts import FloatExperts, describe_experts
from qgemm.nn.kinds import linear_class, meta_linear
from qgemm.nn.linear_layer import NOT_FINITE, LinearLayer
from qgemm.nn.quant_layer import QuantLayer, check_dtype, check_sizes, frozen, narrowed, traced_as_leaf
from qgemm.nn.shard import Shard, Split, Style
from qgemm.ops import quant_experts, weight_only_experts
from qgemm.ops.declare import to_autocast_dtype
from qgemm.ops.direct import check_is_tensor
from qgemm.scheme import QuantScheme, resolve_scheme

_WEIGHTS = ("gate_up_proj", "down_proj")
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
# What follows a weight's name where a linear layer's parameter begins with "weight", and its bias.
_ENDS = ("", "_bias", "_scale", "_zero_point", "_global_scale")
# In the order of ``ExpertWeights``, and of ``WeightOnlyExperts``.
_OPERANDS = [f"{weight}{end}" for weight in _WEIGHTS for end in ("", "_scale", "_bias")]
_WEIGHT_ONLY_OPERANDS = [
    f"{weight}{end}" for weight in _WEIGHTS for end in ("", "_scale", "_zero_point", "_global_scale", "_bias")
]


class QuantExperts(QuantLayer):
    """Quantized experts: float ``[T, hidden_size]`` and a routing to ``[T, hidden_size]``.

    Parameters, none of which require a gradient, are those of ``E`` linear layers of the scheme, stacked: ``weight``,
    ``weight_scale`` and ``bias`` of such a layer are ``gate_up_proj``, ``gate_up_proj_scale`` and ``gate_up_proj_bias``
    here, and the same for ``down_proj``. With ``N = 2 * intermediate_size`` (gates, then ups), or ``N =
    intermediate_size`` for an activation that isn't gated:

    - ``int8``, ``fp8``: ``gate_up_proj`` int8 or float8_e4m3fn ``[E, N, hidden_size]``, ``gate_up_proj_scale`` float32
      ``[E, N]``; ``down_proj`` ``[E, hidden_size, intermediate_size]``, ``down_proj_scale`` ``[E, hidden_size]``.
    - ``fp8-block``: scales float32 ``[E, ceil(N / 128), ceil(hidden_size / 128)]``.
    - ``mxfp4``, ``int4`` and others whose activations stay in float: ``gate_up_proj`` packed, uint8 ``[E, N,
      packed_width(hidden_size)]``, or one byte a value, ``gate_up_proj_scale`` ``[E, N, groups]``, and maybe
      ``gate_up_proj_zero_point`` and ``gate_up_proj_global_scale``, as ``WeightOnlyLinear`` has them.
    - ``gate_up_proj_bias``, ``down_proj_bias``: ``[E, N]`` and ``[E, hidden_size]``, in ``dtype``, or None.

    The scales of a new module are NaN until it loads a ``state_dict``. ``from_experts`` makes one from float experts.
    """

    weight_names = _WEIGHTS
    scale_names = tuple(f"{name}_scale" for name in _WEIGHTS)
    index_names = tuple(f"{name}{end}" for name in _WEIGHTS for end in _ENDS[3:])
    made_by = "from_experts"
    gate_up_proj: nn.Parameter
    gate_up_proj_scale: nn.Parameter
    gate_up_proj_bias: nn.Parameter | None
    down_proj: nn.Parameter
    down_proj_scale: nn.Parameter
    down_proj_bias: nn.Parameter | None

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        activation: GatedActivation | None = None,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        scheme: str | QuantScheme = "int8",
    ) -> None:
        """``activation``: ``silu(gate) * up`` if None. ``dtype``: of the biases, PyTorch's default dtype if None.

        ``scheme``: one that ``QuantScheme.for_experts`` returns; raises ``ValueError`` for any other.
        """
        super().__init__()
        check_sizes(num_experts=num_experts, hidden_size=hidden_size, intermediate_size=intermediate_size)
        check_dtype(dtype)
        self.num_experts = num_experts
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.activation = activation or GatedActivation()
        self.has_bias = bias
        self.scheme = resolve_scheme(scheme)
        if self.scheme != (computed := self.scheme.for_experts()):
            raise ValueError(f'scheme {self.scheme.name!r} isn\'t supported for experts: use "{computed.name}"')
        for name in _WEIGHTS:
            own = self.scheme.of(name)
            one = linear_class(own)(*self._sizes(name), bias, device, dtype, own)
            for end in _ENDS:
                value = one._parameters.get(_leaf(end))
                stacked = None if value is None else value.detach().expand(num_experts, *value.shape).clone()
                self.register_parameter(f"{name}{end}", None if stacked is None else frozen(stacked))

    def _sizes(self, name: str) -> tuple[int, int]:
        """``(K, N)`` of the linear layers that ``name`` stacks."""
        columns = self.activation.columns(self.intermediate_size)
        return (self.hidden_size, columns) if name == "gate_up_proj" else (self.intermediate_size, self.hidden_size)

    def linear_of(self, name: str, expert: int | None = None) -> LinearLayer:
        """The linear layer that one expert's ``gate_up_proj`` or ``down_proj`` is, with views of the parameters here.

        With ``expert`` None, one on meta, without values.
        """
        linear = meta_linear(self.scheme.of(name), *self._sizes(name), self.has_bias)
        for end in _ENDS:
            value = self.stored(f"{name}{end}")
            if expert is not None and value is not None:
                setattr(linear, _leaf(end), frozen(value.detach()[expert]))
        return linear

    @property
    def float_numel(self) -> int:
        """The number of values in all experts' float weights and biases."""
        return self.num_experts * sum(self.linear_of(name).float_numel for name in _WEIGHTS)

    def splits(self, style: Style, parts: int = 1) -> dict[str, Split]:
        """Whole experts; or of each, columns of ``gate_up_proj`` and the rows of ``down_proj`` that they go to."""
        made = {}
        for name in _WEIGHTS:
            like = self.linear_of(name)
            inner = like.splits("column", self._parts) if name == "gate_up_proj" else like.splits("row")
            for end in _ENDS:
                if self.stored(f"{name}{end}") is None:
                    continue
                if style == "expert":
                    made[f"{name}{end}"] = Split(0)
                elif (split := inner.get(_leaf(end))) is not None:
                    made[f"{name}{end}"] = split._replace(dim=split.dim + 1)
        return made

    @property
    def _parts(self) -> int:
        """Of the rows of ``gate_up_proj``: gates and ups."""
        return self.activation.columns(self.intermediate_size) // max(self.intermediate_size, 1)

    def why_whole(self, style: Style, size: int, parts: int = 1) -> str:
        """If experts, or the groups in one, aren't so many times as many."""
        if style == "expert":
            return f"it has {self.num_experts} experts, for {size} processes" if self.num_experts % size else ""
        like = self.linear_of("gate_up_proj"), self.linear_of("down_proj")
        return like[0].why_whole("column", size, self._parts) or like[1].why_whole("row", size)

    def take_shard(self, shard: Shard) -> None:
        """In column parallelism, one process alone adds the biases of ``down_proj``."""
        super().take_shard(shard)
        if shard.style == "expert":
            self.num_experts //= shard.size
            return
        self.intermediate_size //= shard.size
        if shard.rank and self.down_proj_bias is not None:
            self.down_proj_bias = frozen(torch.zeros_like(self.down_proj_bias))

    def accepts_dtype(self, name: str, dtype: torch.dtype) -> bool:
        """As the linear layers of the scheme do."""
        weight, leaf = split_leaf(name)
        return _asked(self.scheme.of(weight), *self._sizes(weight), self.has_bias).accepts_dtype(leaf, dtype)

    def problem_with(self, name: str, value: Tensor) -> str:
        """What is wrong with ``value``, as of a linear layer of the scheme."""
        weight, leaf = split_leaf(name)
        return _asked(self.scheme.of(weight), *self._sizes(weight), self.has_bias).problem_with(leaf, value)

    @classmethod
    def from_experts(cls, experts: nn.Module, scheme: str | QuantScheme = "int8") -> QuantExperts:
        """Quantizes ``experts``, a module of transformers that holds fused experts, on their device.

        One expert at a time is quantized. Raises ``UnknownExperts`` (a ``TypeError``), with the reason, for a module
        whose layout or activation isn't known; ``ValueError`` if a weight holds NaN or Inf, or for a scheme that isn't
        one of experts. ``experts`` is unchanged; biases are shared unless their order changes.
        """
        source = describe_experts(experts)
        layer = cls.like(experts, source, scheme)
        for name, theirs in source.parameters.items():
            layer.fill(name, experts.get_parameter(theirs), source)
        return layer

    @staticmethod
    def like(experts: nn.Module, source: FloatExperts, scheme: str | QuantScheme) -> QuantExperts:
        """A module on meta with the sizes of ``experts``, which ``source`` describes, without values."""
        kind = QuantSortedExperts if source.takes_sorted_rows else QuantExperts
        layer = kind(
            source.num_experts,
            source.hidden_size,
            source.intermediate_size,
            source.activation,
            source.has_bias,
            "meta",
            experts.get_parameter(source.parameters["down_proj"]).dtype,
            scheme,
        )
        if hasattr(experts, "config"):
            layer.config = experts.config  # code around experts may look there
        return layer.train(experts.training)

    def like_in(self, scheme: str | QuantScheme) -> QuantExperts:
        """A module on meta with these sizes, in another ``scheme``, without values."""
        bias = self.down_proj_bias
        sizes = self.num_experts, self.hidden_size, self.intermediate_size
        dtype = None if bias is None else bias.dtype
        layer = type(self)(*sizes, self.activation, self.has_bias, "meta", dtype, scheme)
        if hasattr(self, "config"):
            layer.config = self.config
        return layer.train(self.training)

    def fill(self, name: str, value: Tensor, source: FloatExperts, decided: tuple[Tensor, ...] | None = None) -> None:
        """Takes over ``value``, a float weight or bias of the module that ``source`` describes, as ``name`` here.

        A weight is quantized an expert at a time, or a method has rounded it already (``decided``): values ``[E, N,
        K]`` and scales ``[E, N]`` or ``[E, N, groups]``. Raises ``ValueError`` if it holds NaN or Inf.
        """
        value = value.detach()
        if value.device.type == "meta":
            return
        if name.endswith("_bias"):
            bias = source.bias_of(name, value)
            setattr(self, name, frozen(narrowed(bias)))
            return
        stored: dict[str, Tensor] = {}
        for expert in range(self.num_experts):
            own, linear = source.rows_of(name, value, expert), self.linear_of(name)
            parts = None if decided is None else tuple(part[expert] for part in decided)
            if parts is not None:
                linear.check_weight(*parts)
            try:
                linear.take_weight(own, parts)
            except ValueError as error:
                if str(error) != NOT_FINITE:
                    raise
                raise ValueError(
                    f"{source.parameters[name]} of expert {expert} holds NaN or Inf, or numbers too large for a "
                    "scale, which can't be quantized: repair the checkpoint or skip the layer"
                ) from None
            for end in _ENDS:
                made = linear._parameters.get(_leaf(end))
                if made is not None and end != "_bias":
                    full = f"{name}{end}"
                    if full not in stored:
                        stored[full] = made.new_empty((self.num_experts, *made.shape))
                    stored[full][expert] = made
        for full, tensor in stored.items():
            setattr(self, full, frozen(tensor))

    def dequantize(self, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """The equivalent float weights, and the biases, with the names and order of the parameters: ``[E, N, K]``.

        ``dtype``: by default the biases', or float32. A shard raises ``ValueError``.
        """
        self.check_is_whole()
        dtype = dtype or (torch.float32 if self.down_proj_bias is None else self.down_proj_bias.dtype)
        tensors = {}
        for name in self.weight_names:
            like = self.linear_of(name)
            shape, device = (self.num_experts, like.out_features, like.in_features), self.stored(name).device
            tensors[name] = torch.empty(shape, dtype=dtype, device=device)
            for expert in range(self.num_experts):
                tensors[name][expert] = self.linear_of(name, expert).float_linear(dtype).weight.detach()
            if (bias := getattr(self, f"{name}_bias")) is not None:
                tensors[f"{name}_bias"] = bias.detach().to(dtype)
        return tensors

    def forward(
        self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, residual: Tensor | None = None
    ) -> Tensor:
        """``[T, hidden_size]`` in float16, bfloat16 or float32 to the same.

        ``top_k_index``: integers ``[T, k]``; one outside of 0 to E - 1 contributes nothing, like an expert on another
        device. ``top_k_weights``: float ``[T, k]``. ``residual``: added to the result, if there is one.
        """
        if isinstance(hidden_states, Proxy):
            added = () if residual is None else (residual,)
            return traced_as_leaf(self, hidden_states, top_k_index, top_k_weights, *added)
        check_is_tensor(top_k_index, "top_k_index")
        check_is_tensor(top_k_weights, "top_k_weights")
        # Others, such as weights in their place, would be cut to the numbers of experts.
        index = top_k_index.to(torch.int64) if top_k_index.dtype in _INTEGERS else top_k_index
        if self.shard is not None:
            return self._of_shard(hidden_states, index, top_k_weights, residual, self.shard)
        return self._compute(hidden_states, index, top_k_weights, residual)

    def _of_shard(
        self, hidden_states: Tensor, index: Tensor, top_k_weights: Tensor, residual: Tensor | None, shard: Shard
    ) -> Tensor:
        hidden_states, top_k_weights = shard.enter(hidden_states), shard.enter(top_k_weights)
        if shard.style == "expert":
            index = index - shard.rank * self.num_experts  # those of others are out of range
        return shard.sum(self._compute(hidden_states, index, top_k_weights, None if shard.rank else residual))

    def _compute(self, hidden_states: Tensor, index: Tensor, top_k_weights: Tensor, residual: Tensor | None) -> Tensor:
        weights = expert_weights(self.scheme, self.activation, self.stored)
        return compute_experts(hidden_states, index, top_k_weights, weights, residual)

    def extra_repr(self) -> str:
        """Sizes, activation and scheme, for ``print``."""
        return (
            f"num_experts={self.num_experts}, hidden_size={self.hidden_size}, "
            f"intermediate_size={self.intermediate_size}, activation={self.activation}, "
            f"bias={self.down_proj_bias is not None}, scheme={self.scheme.name!r}"
        )


class QuantSortedExperts(QuantExperts):
    """Quantized experts that are called as those of Llama 4: with as many rows for each expert, in their order.

    The rows come multiplied by their routing weight, so that a row of zeros is one that isn't for this expert. As its
    result is zeros too, it isn't computed.
    """

    def why_whole(self, style: Style, size: int, parts: int = 1) -> str:
        """Or in expert parallelism."""
        if style == "expert":
            return "its rows come in the order of all experts"
        return super().why_whole(style, size, parts)

    def forward(self, hidden_states: Tensor) -> Tensor:  # type: ignore[override]
        """``[E * T, hidden_size]``, the first ``T`` rows for the first expert, to the same."""
        if isinstance(hidden_states, Proxy):
            return traced_as_leaf(self, hidden_states)
        # As those of Llama 4 do; others give the dtype of their input.
        hidden_states = to_autocast_dtype(hidden_states)
        rows, E = hidden_states.shape[0], self.num_experts
        if rows % E:
            raise ValueError(f"hidden_states has {rows} rows; it must have as many for each of the {E} experts")
        experts = torch.arange(E, device=hidden_states.device)[:, None].expand(E, rows // E).reshape(rows)
        index = torch.where((hidden_states != 0).any(-1), experts, E)
        return super().forward(hidden_states, index[:, None], hidden_states.new_ones((rows, 1)))


def expert_weights(
    scheme: QuantScheme, activation: GatedActivation, get: Callable[[str], Tensor | None]
) -> ExpertWeights | WeightOnlyExperts:
    """The weights of experts as one value; ``get`` gives a parameter of ``QuantExperts`` by its name."""
    if not scheme.is_weight_only:
        return ExpertWeights._make((*map(get, _OPERANDS), activation))
    gate_up, down = (scheme.weight, scheme.down or scheme.weight)
    forms = gate_up.dtype, gate_up.group_size or 0, down.dtype, down.group_size or 0
    return WeightOnlyExperts._make((*map(get, _WEIGHT_ONLY_OPERANDS), activation, *forms))


def compute_experts(
    hidden_states: Tensor,
    index: Tensor,
    top_k_weights: Tensor,
    weights: ExpertWeights | WeightOnlyExperts,
    residual: Tensor | None = None,
) -> Tensor:
    """As ``QuantExperts``, of int64 ``index``."""
    if isinstance(weights, WeightOnlyExperts):
        return weight_only_experts(hidden_states, index, top_k_weights, weights, residual)
    return quant_experts(hidden_states, index, top_k_weights, weights, residual)


# For questions about one expert's tensors, of which a model may have 200,000.
_asked = functools.lru_cache(maxsize=64)(meta_linear)


def split_leaf(name: str) -> tuple[str, str]:
    """The weight that a parameter of experts belongs to, and what a linear layer calls it, such as ``weight_scale``."""
    weight = next(weight for weight in _WEIGHTS if name.startswith(weight))
    return weight, _leaf(name.removeprefix(weight))


def _leaf(end: str) -> str:
    return "bias" if end == "_bias" else f"weight{end}"
