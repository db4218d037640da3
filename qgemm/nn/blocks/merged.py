"""``MergedWeights``: layers that read one input, computed by one product.

``y = x @ cat(weights).T`` has the columns of the layers, one after another: queries, keys and values, or gate and up.
Merging only places memory: the weights, scales and biases of the layers become rows of one tensor each, while the
layers stay separate modules with their own parameters. So the names in a ``state_dict``, saved files, adapters and
hooks are the model's, merged or not, and nothing is stored twice.

A product of int8 rows has the same bits in a merged layer as in a separate one, because every column has its own sum
and scale. A product of floats may add in another order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn

from qgemm.nn.blocks.binding import fused_of
from qgemm.nn.blocks.operands import Operands, operands_of
from qgemm.nn.kinds import KINDS
from qgemm.nn.linear_layer import LinearLayer
from qgemm.nn.outliers import OutlierLinear
from qgemm.nn.quant_layer import frozen, joined_rows
from qgemm.nn.rotated import RotatedLinear

_Placed: TypeAlias = tuple[dict[str, Any], Tensor, int, Any, Any]
"""A layer's parameters, its weight, the weight's address, its scale and its bias."""


class MergedWeights:
    """The operands of ``layers``, rows side by side: ``operands()`` is that of one layer with all their outputs.

    Whatever moves or replaces a parameter of a layer (``.to()``, ``load_state_dict``, a copy) separates it from the
    others; then all are placed side by side again, at once or at the next call. A single layer isn't moved.
    """

    def __init__(self, layers: Sequence[LinearLayer]) -> None:
        """Places the weights of ``layers``. Raises ``ValueError`` if they can't be merged; see ``why_apart``."""
        if reason := why_apart(layers):
            raise ValueError(f"these layers can't be merged: {reason}")
        self.layers = tuple(layers)
        self._operands: Operands | None = None
        self._placed: tuple[_Placed, ...] = ()
        self._addresses: list[int] = []
        for layer in self.layers:
            layer.merged = self
        self.place()

    def operands(self) -> Operands | None:
        """The operands for all layers; None if the layers can't be computed together now.

        That is the case if one has no values, or is on another device.
        """
        if not torch.compiler.is_compiling() and not self._is_placed():
            self.place()
        return self._operands

    def place(self) -> None:
        """Places the layers' values side by side unless they are already, or can't be now."""
        agrees = self._agrees()
        if agrees and self._operands is not None and self._is_placed() and self._find_addresses() == self._addresses:
            return
        self.let_go()
        if not agrees or why_apart(self.layers):
            # Checked again once something changes.
            self._placed, self._addresses = self._find_places(), self._find_addresses()
            return
        first = self.layers[0]
        tensors: dict[str, Any] = {name: first._parameters.get(name) for name in first.shared_names}
        with _mode_of(self.layers):
            tensors |= {name: self._join(name) for name in self._placed_names}
        self._operands = operands_of(first, tensors)
        self._placed, self._addresses = self._find_places(), self._find_addresses()

    def let_go(self) -> None:
        """Forgets the placement: the values are no longer where they were placed."""
        self._operands, self._placed, self._addresses = None, (), []

    def separate(self) -> None:
        """Gives each layer memory of its own again."""
        self.let_go()
        for layer in self.layers:
            layer.merged = None
            if len(self.layers) > 1:
                with _mode_of([layer]):
                    for name in self._placed_names:
                        parameter = layer._parameters.get(name)
                        if parameter is not None:
                            parameter.data = parameter.data.clone()

    @property
    def _placed_names(self) -> tuple[str, ...]:
        """The names of parameters with a row for each output."""
        return (*self.layers[0].row_names, "bias")

    def _join(self, name: str) -> Tensor | None:
        """Returns one tensor whose rows become the data of the parameters ``name``; these stay the same objects."""
        parameters: list[Any] = [layer._parameters.get(name) for layer in self.layers]
        first: Tensor | None = parameters[0]
        given = [parameter for parameter in parameters if parameter is not None]
        if not given or len(parameters) == 1:
            return first
        # Layers without a bias get zeros, if another has one.
        given_or_not = zip(self.layers, parameters, strict=True)
        sizes = [layer.out_features if parameter is None else parameter.shape[0] for layer, parameter in given_or_not]
        parts = [
            given[0].new_zeros(size) if parameter is None else parameter.detach()
            for parameter, size in zip(parameters, sizes, strict=True)
        ]
        # A parameter, because a compiler may then assume that the address stays.
        beside = _rows_side_by_side(parts)
        whole = frozen(joined_rows(parts) if beside is None else beside)
        for parameter, own in zip(parameters, whole.detach().split(sizes), strict=True):
            if parameter is not None:
                parameter.data = own
        return whole

    def _find_places(self) -> tuple[_Placed, ...]:
        return tuple(
            (parameters, weight, weight.data_ptr(), parameters.get("weight_scale"), parameters.get("bias"))
            for parameters in (layer._parameters for layer in self.layers)
            if (weight := parameters.get("weight")) is not None
        )

    def _find_addresses(self) -> list[int]:
        parameters = (layer._parameters.get(name) for layer in self.layers for name in self._placed_names)
        found = [parameter.data_ptr() for parameter in parameters if parameter is not None]
        # Operands also hold steps derived from the scales, so the scales' versions count too.
        scales = [layer._parameters.get("weight_scale") for layer in self.layers if getattr(layer, "steps", None)]
        return found + [scale._version for scale in scales if scale is not None and not scale.is_inference()]

    def _is_placed(self) -> bool:
        """Whether the layers still have the same parameters, and their weights still the same addresses.

        Whatever moves only a scale or a bias (``.to(dtype)``, ``load_state_dict``) calls ``place``.
        """
        if not self._placed:
            return False
        for parameters, weight, address, weight_scale, bias in self._placed:
            if (
                parameters.get("weight") is not weight
                or weight.data_ptr() != address
                or parameters.get("weight_scale") is not weight_scale
                or parameters.get("bias") is not bias
            ):
                return False
        return True

    def _agrees(self) -> bool:
        """Whether all layers have values on one device, with scales and biases of one dtype, made in one mode."""
        for name in self._placed_names:
            kinds = {
                None if (p := layer._parameters.get(name)) is None else (p.device, p.dtype, p.is_inference())
                for layer in self.layers
            }
            kinds -= {None} if name == "bias" else set()
            if len(kinds) > 1 or any(kind is not None and kind[0].type == "meta" for kind in kinds):
                return False
        return not _differing(self.layers)

    def __getstate__(self) -> dict[str, Any]:
        """The layers, for ``pickle`` and ``deepcopy``: copies are placed side by side at the next call."""
        return {"layers": self.layers, "_operands": None, "_placed": (), "_addresses": []}


def _rows_side_by_side(parts: Sequence[Tensor]) -> Tensor | None:
    """``torch.cat(parts)`` as a view, if they follow one another in memory; else None.

    They do in a copy, a file or another process, and where they were moved together, as by ``share_memory``.
    """
    first, end = parts[0], parts[0].storage_offset()
    storage = first.untyped_storage()._cdata
    for part in parts:
        is_next = part.untyped_storage()._cdata == storage and part.storage_offset() == end
        if not is_next or not part.is_contiguous() or not part.numel():
            return None
        end += part.numel()
    return first.as_strided((end - first.storage_offset(),), (1,)).view(-1, *first.shape[1:])


def why_apart(layers: Sequence[nn.Module]) -> str:
    """Why ``layers`` can't be merged; empty if they can."""
    if reason := next(filter(None, map(_why_alone, layers)), ""):
        return reason
    linear = cast(Sequence[LinearLayer], layers)
    for layer in linear[:-1]:
        if layer.out_features % layer.rows_in_step:
            return f"{_name(layer)} has {layer.out_features} outputs, which aren't whole blocks of {layer.rows_in_step}"
    first, *others = linear
    for other in others:
        if other.in_features != first.in_features:
            return f"{_name(first)} has {first.in_features} inputs, {_name(other)} {other.in_features}"
        if other.scheme != first.scheme:
            return f"{_name(first)} is {first.scheme.name}, {_name(other)} {other.scheme.name}"
    if name := _differing(linear):
        return f"{name} of {_name(first)} differs from its siblings'"
    return ""


def _why_alone(layer: nn.Module) -> str:
    """Why ``layer`` can't be merged with any other; empty if it can."""
    if not isinstance(layer, LinearLayer) or type(layer) not in KINDS:
        return f"{_name(layer)} is of class {type(layer).__name__}, which isn't a quantized layer's"
    if hasattr(layer, "_hf_hook"):
        return f"accelerate moves the weight of {_name(layer)}"
    is_replaced = "forward" in vars(layer) and fused_of(layer) is None
    if layer._forward_hooks or layer._forward_pre_hooks or is_replaced:
        return f"{_name(layer)} has hooks, or another forward"
    if type(layer._parameters.get("weight")) is not nn.Parameter:
        return f"the weight of {_name(layer)} is computed, or split among processes"
    if layer.shard is not None and layer.shard.style == "row" and isinstance(layer, _OF_WHOLE_ROWS):
        return f"{_name(layer)} is split among processes, and reads other columns than its own"
    if layer.shard is not None and not layer.shard.is_open:
        does = "gathers its outputs" if layer.shard.style == "column" else "takes its part of a whole input"
        return f"{_name(layer)} is split among processes, and {does}"
    return ""


@contextmanager
def _mode_of(layers: Sequence[LinearLayer]) -> Iterator[None]:
    """Inside, no gradients are recorded, and new tensors are inference tensors if the weights of ``layers`` are.

    A parameter that gets data of the other kind can't be used any more.
    """
    weight = layers[0]._parameters.get("weight")
    with torch.no_grad(), torch.inference_mode(mode=weight is not None and weight.is_inference()):
        yield


_OF_WHOLE_ROWS = RotatedLinear, OutlierLinear
"""The classes whose row-parallel shards read columns that other processes have."""


def _differing(layers: Sequence[LinearLayer]) -> str:
    """The name of the first parameter that layers must share but that differs; empty if there is none."""
    first, *others = layers
    for name in first.shared_names:
        own = first._parameters.get(name)
        if own is None or own.is_meta:
            continue
        for other in others:
            value = other._parameters.get(name)
            if value is None or value.device != own.device or not torch.equal(value, own):
                return name
    return ""


def _name(layer: Any) -> str:
    return getattr(layer, "layer_name", "") or "a layer"
