"""``QuantExperts``: the experts of a mixture, with int8 weights, in one module.

``out[t] = sum over j of top_k_weights[t, j] * expert(top_k_index[t, j], x[t])``, where an expert is
``activation(x @ gate_up.T + bias) @ down.T + bias``; rows are quantized to int8 before either product, sums are int32,
and the result has the dtype of ``x``.

Whatever order the float weights were in, these are ``[E, N, K]`` with all gates before all ups: K contiguous is what
int8 products are fast with, and one kernel then serves every model.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.fx import Proxy

from qgemm.kernels import GatedActivation, quantize_rows
from qgemm.kernels.expert_weights import ExpertWeights
from qgemm.nn.float_experts import FloatExperts, describe_experts
from qgemm.nn.quant_layer import QuantLayer, check_dtype, check_sizes, frozen, narrowed, traced_as_leaf
from qgemm.ops import quant_experts
from qgemm.ops.declare import to_autocast_dtype
from qgemm.scheme import QuantScheme, resolve_scheme

# In the order of ``ExpertWeights``.
_OPERANDS = [f"{weight}{end}" for weight in ("gate_up_proj", "down_proj") for end in ("", "_scale", "_bias")]


class QuantExperts(QuantLayer):
    """Quantized experts: float ``[T, hidden_size]`` and a routing to ``[T, hidden_size]``.

    Parameters, none of which require a gradient, for ``E`` experts and ``N = 2 * intermediate_size`` (gates, then ups),
    or ``N = intermediate_size`` for an activation that isn't gated:

    - ``gate_up_proj``: int8 ``[E, N, hidden_size]``; ``gate_up_proj_scale``: float32 ``[E, N]``.
    - ``down_proj``: int8 ``[E, hidden_size, intermediate_size]``; ``down_proj_scale``: float32 ``[E, hidden_size]``.
    - ``gate_up_proj_bias``, ``down_proj_bias``: as the scales, in ``dtype``, or None.

    A new module has scales of NaN until it loads a ``state_dict``. ``from_experts`` makes one from float experts.
    """

    weight_names = ("gate_up_proj", "down_proj")
    scale_names = ("gate_up_proj_scale", "down_proj_scale")
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

        ``scheme``: raises ``ValueError`` for any but ``"int8"``.
        """
        super().__init__()
        check_sizes(num_experts=num_experts, hidden_size=hidden_size, intermediate_size=intermediate_size)
        check_dtype(dtype)
        self.num_experts = num_experts
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.activation = activation or GatedActivation()
        self.scheme = resolve_scheme(scheme)
        if self.scheme != (computed := self.scheme.for_experts()):
            raise ValueError(f'scheme {self.scheme.name!r} isn\'t supported for experts: use "{computed.name}"')
        N, storage = self.activation.columns(intermediate_size), self.scheme.weight.format.storage
        for name, shape in (("gate_up_proj", (N, hidden_size)), ("down_proj", (hidden_size, intermediate_size))):
            weight = torch.zeros(num_experts, *shape, dtype=storage, device=device)
            scale = torch.full((num_experts, shape[0]), torch.nan, dtype=torch.float32, device=device)
            setattr(self, name, frozen(weight))
            # Before the scale: a transformers model takes its first float parameter's dtype for its own.
            zeros = torch.zeros(num_experts, shape[0], dtype=dtype, device=device) if bias else None
            self.register_parameter(f"{name}_bias", None if zeros is None else frozen(zeros))
            setattr(self, f"{name}_scale", frozen(scale))

    @classmethod
    def from_experts(cls, experts: nn.Module, scheme: str | QuantScheme = "int8") -> QuantExperts:
        """Quantizes ``experts``, a module of transformers that holds fused experts, on their device.

        One expert at a time is quantized. Raises ``UnknownExperts`` (a ``TypeError``), with the reason, for a module
        whose layout or activation isn't known; ``ValueError`` if a weight holds NaN or Inf, or for a scheme other than
        ``"int8"``. ``experts`` is unchanged; biases are shared unless their order changes.
        """
        source = describe_experts(experts)
        layer = cls.like(experts, source, scheme)
        for name, theirs in source.parameters.items():
            layer.fill(name, experts.get_parameter(theirs), source)
        return layer

    @staticmethod
    def like(experts: nn.Module, source: FloatExperts, scheme: str | QuantScheme = "int8") -> QuantExperts:
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

    def fill(
        self, name: str, value: Tensor, source: FloatExperts, decided: tuple[Tensor, Tensor] | None = None
    ) -> None:
        """Takes over ``value``, a float weight or bias of the module that ``source`` describes, as ``name`` here.

        A weight is quantized an expert at a time, or a method has rounded it already (``decided``): values ``[E, N,
        K]`` and scales ``[E, N]``. Raises ``ValueError`` if it holds NaN or Inf.
        """
        value = value.detach()
        if value.device.type == "meta":
            return
        if name.endswith("_bias"):
            bias = source.bias_of(name, value)
            setattr(self, name, frozen(narrowed(bias)))
            return
        if decided is not None:
            for leaf, tensor in zip((name, f"{name}_scale"), decided, strict=True):
                setattr(self, leaf, frozen(tensor.to(value.device)))
            return
        shape = getattr(self, name).shape
        weight = torch.empty(shape, dtype=self.scheme.weight.format.storage, device=value.device)
        scale = torch.empty(shape[:2], dtype=torch.float32, device=value.device)
        for expert in range(self.num_experts):
            rows = source.rows_of(name, value, expert)
            weight[expert], scale[expert] = quantize_rows(narrowed(rows))
        if not scale.isfinite().all():
            expert = int((~scale.isfinite()).any(1).nonzero()[0])
            raise ValueError(
                f"{source.parameters[name]} of expert {expert} holds NaN or Inf, which can't be quantized: repair the "
                "checkpoint or skip the layer"
            )
        setattr(self, name, frozen(weight))
        setattr(self, f"{name}_scale", frozen(scale))

    def dequantize(self, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """The equivalent float weights, and the biases, with the names, shapes and order of the parameters.

        ``dtype``: by default the biases', or float32.
        """
        dtype = dtype or (torch.float32 if self.down_proj_bias is None else self.down_proj_bias.dtype)
        tensors = {}
        for name in self.weight_names:
            tensors[name] = (self.stored(name) * self.stored(f"{name}_scale")[..., None]).to(dtype)
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
            return traced_as_leaf(self, hidden_states, top_k_index, top_k_weights, *added)  # type: ignore[no-any-return]
        weights = ExpertWeights._make((*map(self.stored, _OPERANDS), self.activation))
        return quant_experts(hidden_states, top_k_index.to(torch.int64), top_k_weights, weights, residual)

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

    def forward(self, hidden_states: Tensor) -> Tensor:  # type: ignore[override]
        """``[E * T, hidden_size]``, the first ``T`` rows for the first expert, to the same."""
        if isinstance(hidden_states, Proxy):
            return traced_as_leaf(self, hidden_states)  # type: ignore[no-any-return]
        # As those of Llama 4 do; others give the dtype of their input.
        hidden_states = to_autocast_dtype(hidden_states)
        rows, E = hidden_states.shape[0], self.num_experts
        if rows % E:
            raise ValueError(f"hidden_states has {rows} rows; it must have as many for each of the {E} experts")
        experts = torch.arange(E, device=hidden_states.device)[:, None].expand(E, rows // E).reshape(rows)
        index = torch.where((hidden_states != 0).any(-1), experts, E)
        return super().forward(hidden_states, index[:, None], hidden_states.new_ones((rows, 1)))
