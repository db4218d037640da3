"""``describe_experts``: how a float module of fused experts stores its weights and what it computes.

Since version 5, transformers stores all experts of a layer in one module with three-dimensional parameters. Most of its
models describe the layout in attributes that a decorator (``use_experts_implementation``) sets: whether there is a
gate, whether weights are transposed, whether gates and ups alternate, whether there are biases. Llama 4 has its own
layout, which is recognized by name. The code between the two products can't be read, so it is run and its values are
compared with ``GatedActivation``'s: experts with any other activation aren't recognized.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from qgemm.kernels.activations import ACTIVATIONS, GatedActivation

_SORTED_ROWS = {("transformers.models.llama4.modeling_llama4", "Llama4TextExperts")}
# 1.702 is GPT-OSS's, and also that of "quick_gelu".
_KNOWN_ALPHAS = (1.0, 1.702)


class UnknownExperts(TypeError):
    """A module of experts that ``QuantExperts`` can't replace; the text is the reason for a report."""


@dataclass(frozen=True)
class FloatExperts:
    """The layout and the computation of a float module of experts.

    - ``parameters``: its parameters' names, by ``QuantExperts``' names for them.
    - ``is_transposed``: weights are ``[E, K, N]`` instead of ``[E, N, K]``.
    - ``is_interleaved``: the first product's columns are gate 0, up 0, gate 1, ..., instead of all gates before all
      ups.
    - ``takes_sorted_rows``: it is called with equally many rows for each expert, in order, instead of with a routing.
    """

    num_experts: int
    hidden_size: int
    intermediate_size: int
    parameters: dict[str, str]
    activation: GatedActivation
    is_transposed: bool
    is_interleaved: bool
    takes_sorted_rows: bool

    @property
    def has_bias(self) -> bool:
        """Whether both products have biases."""
        return "down_proj_bias" in self.parameters

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> FloatExperts:
        """Reads what ``dataclasses.asdict`` gave."""
        return cls(**{**values, "activation": GatedActivation(**values["activation"])})

    def rows_of(self, name: str, weight: Tensor, expert: int) -> Tensor:
        """One expert's contiguous ``[N, K]`` from the float ``weight`` that ``QuantExperts`` calls ``name``."""
        rows = weight[expert].t() if self.is_transposed else weight[expert]
        return (gates_first(rows, 0) if self._alternates(name) else rows).contiguous()

    def bias_of(self, name: str, bias: Tensor) -> Tensor:
        """The float ``bias [E, N]`` that ``QuantExperts`` calls ``name``, in the order of its columns."""
        return gates_first(bias, 1) if self._alternates(name) else bias

    def restore(self, name: str, tensor: Tensor) -> Tensor:
        """Converts a weight or bias from the order of ``QuantExperts`` to that of the float module."""
        if self._alternates(name):
            tensor = torch.stack(tensor.chunk(2, dim=1), dim=2).flatten(1, 2)
        return tensor.transpose(1, 2).contiguous() if tensor.ndim == 3 and self.is_transposed else tensor

    def _alternates(self, name: str) -> bool:
        return self.is_interleaved and name.startswith("gate_up_proj")


def gates_first(tensor: Tensor, dim: int) -> Tensor:
    """Reorders gates and ups, which alternate along ``dim``, to all gates before all ups."""
    gates, ups = (tensor[(slice(None),) * dim + (slice(start, None, 2),)] for start in (0, 1))
    return torch.cat((gates, ups), dim=dim)


def describe_experts(module: nn.Module) -> FloatExperts:
    """How ``module`` stores its experts; raises ``UnknownExperts`` if ``QuantExperts`` can't replace it.

    It reads only shapes and dtypes of parameters, which may be on meta.
    """
    if not isinstance(module, nn.Module):
        raise UnknownExperts(f"it is a {type(module).__name__}, not a module")
    takes_sorted_rows = (type(module).__module__, type(module).__name__) in _SORTED_ROWS
    if takes_sorted_rows:
        has_gate, has_bias, is_transposed, is_interleaved = True, False, True, False
    elif _is_dispatched(module):
        flags = [getattr(module, flag, None) for flag in ("has_gate", "has_bias", "is_transposed", "is_concatenated")]
        if not all(isinstance(flag, bool) for flag in flags):
            raise UnknownExperts("it doesn't declare the layout of its experts")
        if getattr(module, "has_post_expert_norm", False):
            raise UnknownExperts("it has a norm after each expert")
        has_gate, has_bias, is_transposed = (flag is True for flag in flags[:3])
        is_interleaved = has_gate and flags[3] is False
    else:
        raise UnknownExperts("its layout of experts isn't one that qgemm knows")
    first = "gate_up_proj" if has_gate else "up_proj"
    parameters = {"gate_up_proj": first, "down_proj": "down_proj"}
    if has_bias:
        parameters |= {"gate_up_proj_bias": f"{first}_bias", "down_proj_bias": "down_proj_bias"}
    _check_parameters(module, parameters)
    activation = _find_activation(_gate_function(module, has_gate), has_gate, is_interleaved, module)
    if activation is None:
        raise UnknownExperts("its activation isn't one that qgemm computes")
    E, N, hidden_size = _shape(module, first, is_transposed)
    _, output_size, intermediate_size = _shape(module, "down_proj", is_transposed)
    if activation.columns(intermediate_size) != N or output_size != hidden_size:
        raise UnknownExperts("the shapes of its weights don't match")
    return FloatExperts(
        E, hidden_size, intermediate_size, parameters, activation, is_transposed, is_interleaved, takes_sorted_rows
    )


def known_experts(module: nn.Module) -> FloatExperts | None:
    """How ``module`` stores its experts; None if it has none, or in a layout that qgemm doesn't know."""
    if all(parameter.ndim != 3 for parameter in module.parameters(recurse=False)):
        return None
    try:
        return describe_experts(module)
    except UnknownExperts:
        return None


def _is_dispatched(module: nn.Module) -> bool:
    # The decorator's own forward, which follows the attributes. A subclass with another one may compute anything.
    code = getattr(type(module).forward, "__code__", None)
    return code is not None and "experts_interface" in code.co_freevars


def _check_parameters(module: nn.Module, parameters: dict[str, str]) -> None:
    own = {name for name, parameter in module.named_parameters()} | {name for name, _ in module.named_buffers()}
    if own != set(parameters.values()):
        unknown = sorted(own ^ set(parameters.values()))
        raise UnknownExperts(f"it holds tensors that experts don't have ({', '.join(unknown[:3])})")
    num_experts = {module.get_parameter(theirs).shape[0] for theirs in parameters.values()}
    if len(num_experts) != 1:
        raise UnknownExperts("the shapes of its weights don't match")


def _shape(module: nn.Module, name: str, is_transposed: bool) -> tuple[int, int, int]:
    """``(E, N, K)`` of a weight; its bias, if any, must fit."""
    weight = module.get_parameter(name)
    if weight.ndim != 3:
        raise UnknownExperts(f"its {name} has shape {list(weight.shape)}, not three dimensions")
    E, N, K = weight.transpose(1, 2).shape if is_transposed else weight.shape
    bias = module._parameters.get(f"{name}_bias")
    if bias is not None and bias.shape != (E, N):
        raise UnknownExperts("the shapes of its weights don't match")
    return E, N, K


def _gate_function(module: nn.Module, has_gate: bool) -> Callable[[Tensor], Tensor]:
    own = getattr(module, "_apply_gate", None)
    act_fn = getattr(module, "act_fn", None)
    if has_gate and callable(own):
        return own  # type: ignore[no-any-return]
    if not callable(act_fn):
        raise UnknownExperts("it has no act_fn")
    if not has_gate:
        return act_fn  # type: ignore[no-any-return]

    def default(h: Tensor) -> Tensor:
        gate, up = h.chunk(2, dim=-1)
        out: Tensor = act_fn(gate) * up
        return out

    return default


@torch.no_grad()
def _find_activation(
    function: Callable[[Tensor], Tensor], has_gate: bool, is_interleaved: bool, module: nn.Module
) -> GatedActivation | None:
    """The activation that gives the same values as ``function``, also beyond its limits; None if there is none."""
    limits, alphas = _numbers(module, "limit"), _numbers(module, "alpha")
    reach = 2 * max(12.0, *limits, 0.0)
    # Explicit, because while transformers loads a model the default dtype may be bfloat16 and the default device meta.
    options: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
    gate = torch.linspace(-reach, reach, 481, **options).expand(5, -1)
    up = torch.tensor([-reach, -1.3, 0.4, 1.0, reach], **options)[:, None].expand(gate.shape)
    halves = torch.cat((gate, up), dim=-1)
    h = (torch.stack((gate, up), dim=-1).flatten(1) if is_interleaved else halves) if has_gate else gate
    try:
        wanted = function(h.clone())
    except Exception:  # third-party code, which may raise anything
        return None
    if not isinstance(wanted, Tensor) or wanted.shape != gate.shape:
        return None
    for candidate in _candidates(has_gate, limits, alphas):
        if torch.allclose(candidate(halves if has_gate else gate), wanted.float(), rtol=1e-5, atol=1e-5):
            return candidate
    return None


def _numbers(module: nn.Module, kind: str) -> list[float]:
    values = (value for name, value in vars(module).items() if kind in name and isinstance(value, float | int))
    return [float(value) for value in values if 0 < value < float("inf")]


def _candidates(gated: bool, limits: list[float], alphas: list[float]) -> Iterator[GatedActivation]:
    """Candidates, the simplest first."""
    offsets = (0.0, 1.0) if gated else (0.0,)
    for limit, up_offset, name in product((None, *limits), offsets, ACTIVATIONS):
        for alpha in (*_KNOWN_ALPHAS, *alphas) if name == "silu" else (1.0,):
            yield GatedActivation(name, gated, limit, alpha, up_offset)
