"""What the formats for other libraries share: which tensors are written, experts as layers, and targets."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from torch import Tensor, nn

from qgemm.checkpoint.model_names import expert_leaves, loses_single_experts, weights_of_experts
from qgemm.checkpoint.tensors import find_module, split_name, transient_names
from qgemm.model.selection import listed
from qgemm.nn import LinearLayer, QuantExperts, QuantLayer, QuantMultiheadAttention
from qgemm.nn.experts import split_leaf
from qgemm.nn.linear_layer import is_conv1d
from qgemm.scheme import QuantScheme, resolve_scheme
from qgemm.warn import warn_user

SAVE_IT = 'save it with format="qgemm"'
"""The way out that every refusal suggests."""


def tensors_for_others(
    model: nn.Module, layers: dict[str, QuantLayer], tensors: dict[str, Tensor], ties: dict[str, str], library: str
) -> dict[str, Tensor]:
    """Those of ``tensors`` that are written, unchanged.

    Of two tensors in ``ties``, only those that transformers ties itself are left out; so are buffers that
    ``state_dict`` leaves out. Raises ``ValueError`` for projections of an ``nn.MultiheadAttention``; warns about
    experts that transformers wouldn't read.
    """
    if packed := [name for name, module in model.named_modules() if isinstance(module, QuantMultiheadAttention)]:
        raise ValueError(
            f"{packed[0]} was an nn.MultiheadAttention, whose packed weights {library} can't store: "
            f"{', or '.join([SAVE_IT, *leave_in_float(packed, layers)])}"
        )
    if any(isinstance(module, QuantExperts) for module in model.modules()) and loses_single_experts(model):
        warn_user(
            f"transformers reads no files with a layer for each expert of a {type(model).__name__}, as {library} has "
            "them: its from_pretrained would fill experts with random numbers. qgemm.load_quantized reads them. For "
            'from_pretrained, save the model with format="qgemm"'
        )
    known = getattr(model, "all_tied_weights_keys", None) or {}
    # A layer with two names is written under both: transformers ties its weight and bias, but no scale.
    twice = {alias for alias in ties if isinstance(find_module(model, split_name(alias)[0]), QuantLayer)}
    left_out = transient_names(model) | {alias for alias, name in ties.items() if known.get(alias) == name} - twice
    return {name: tensor for name, tensor in tensors.items() if name not in left_out}


_GROUPS = ("int4", "int4-64", "int4-32", "int4-16")


def ways_out(
    scheme: QuantScheme, layers: Mapping[str, QuantLayer], fits: Callable[[QuantScheme, int, int], bool]
) -> str:
    """What to do about a layer with ``scheme`` that the format can't hold: another format, or schemes that all fit.

    ``fits``: whether the format can hold a layer ``[N, K]`` with a scheme.
    """
    return ", or ".join([SAVE_IT, *take_another_scheme(scheme, layers, fits)])


def take_another_scheme(
    scheme: QuantScheme, layers: Mapping[str, QuantLayer], fits: Callable[[QuantScheme, int, int], bool]
) -> list[str]:
    """Suggests schemes that can replace ``scheme`` and that fit all ``layers``; empty if there is none."""
    shapes = [shape for layer in layers.values() for shape in shapes_of(layer)]

    def fit(name: str) -> bool:
        found = resolve_scheme(name)
        return found != scheme and all(fits(found.for_experts() if own else found, N, K) for N, K, own in shapes)

    best = (next(filter(fit, alike), None) for alike in _kin(scheme))
    named = [f'"{name}"' for name in best if name is not None]
    if not named:
        return []
    *first, last = named
    others = f"{', '.join(first)} or {last}" if first else last
    return [f"load or quantize it with scheme={others}"]


def leave_in_float(modules: Sequence[str], layers: Iterable[str]) -> list[str]:
    """Suggests not to quantize ``modules``; empty if none of the quantized ``layers`` would remain."""
    inside = tuple(f"{name}." for name in modules)
    if all(f"{layer}.".startswith(inside) for layer in layers):
        return []
    return [f"quantize the float model with {listed(modules)} in skip"]


def _kin(scheme: QuantScheme) -> list[tuple[str, ...]]:
    """Names of schemes that can replace ``scheme``; in each tuple the first one that fits is the best."""
    end = "" if scheme.weight.symmetric or scheme.weight.dtype != "int4" else "-asymmetric"
    groups = tuple(f"{name}{end}" for name in _GROUPS)
    if scheme.weight.format.bits == 4:
        by_int8 = [tuple(f"{name}-int8" for name in groups), (f"int4-channel{end}-int8",)]
        return [*(by_int8 if scheme.activation else []), groups, (f"int4-channel{end}",), ("int8-weight",)]
    by_rows = [] if scheme.activation is None else [("int8" if scheme.weight.dtype == "int8" else "fp8",)]
    return [*by_rows, ("int8-weight",)]


def shapes_of(layer: QuantLayer) -> Iterator[tuple[int, int, bool]]:
    """``N`` and ``K`` of each of the layer's weights, and whether it belongs to experts."""
    if isinstance(layer, LinearLayer):
        yield layer.out_features, layer.in_features, False
    elif isinstance(layer, QuantExperts):
        yield layer.intermediate_size, layer.hidden_size, True
        yield layer.hidden_size, layer.intermediate_size, True


def single_layers(
    model: nn.Module, layers: Mapping[str, QuantLayer], written: dict[str, Tensor]
) -> Iterator[tuple[str, QuantLayer, tuple[int, int], dict[str, Tensor]]]:
    """Takes the parameters of the quantized ``layers`` out of ``written``, and yields them as those of linear layers.

    That is the name in files, the layer of ``model``, ``[N, K]``, and the parameters. Experts become a layer each,
    under the names that files of the model's family use. Biases of other layers stay in ``written``, except those that
    depend on the weight.
    """
    for name, layer in layers.items():
        if isinstance(layer, LinearLayer):
            own = {leaf: written.pop(f"{name}.{leaf}") for leaf in layer.fixed_names if f"{name}.{leaf}" in written}
            yield name, layer, (layer.out_features, layer.in_features), own
        elif isinstance(layer, QuantExperts):
            own = {leaf: written.pop(f"{name}.{leaf}") for leaf, _ in layer.named_parameters(recurse=False)}
            for part, shape, parameters in _parts_of_experts(layer, own, expert_leaves(model)):
                yield f"{name}.{part}", layer, shape, parameters


def _parts_of_experts(
    experts: QuantExperts, own: dict[str, Tensor], leaves: tuple[str, str, str]
) -> Iterator[tuple[str, tuple[int, int], dict[str, Tensor]]]:
    for ours, parts, shape in weights_of_experts(experts, leaves):
        held, shared = {}, experts.linear_of(ours).whole_names
        for leaf, tensor in own.items():
            weight, theirs = split_leaf(leaf)
            if weight == ours:
                held[theirs] = tensor
        for expert in range(experts.num_experts):
            for index, leaf in enumerate(parts):
                layer = {
                    theirs: tensor[expert] if theirs in shared else tensor[expert].chunk(len(parts))[index]
                    for theirs, tensor in held.items()
                }
                yield f"{expert}.{leaf}", shape, layer


def is_target(module: nn.Module) -> bool:
    """Whether the library or vLLM would count a float module as a ``Linear`` target; vLLM counts routers and Conv1D."""
    if isinstance(module, LinearLayer):
        return False
    is_router = re.search(r"Router|Gating|Gate(?![a-z])", type(module).__name__) is not None
    is_linear = any(cls.__name__ in ("Linear", "LinearBase") for cls in type(module).__mro__)
    return is_linear or is_router or is_conv1d(module)
