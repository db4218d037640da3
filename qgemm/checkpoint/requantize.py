"""``requantize``: layers of one scheme made anew in another, from the float weights that their values stand for.

A few rows at a time, so that no weight is ever in float as a whole. Values are rounded to nearest; the error of the
first quantization stays, and that of the second, in 8 bits a small part of it, comes on top.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from qgemm.checkpoint.errors import CheckpointError
from qgemm.nn import LinearLayer, QuantLayer, linear_class
from qgemm.nn.carry_over import carry_over
from qgemm.nn.linear_layer import largest
from qgemm.nn.quant_layer import frozen
from qgemm.scheme import QuantScheme, resolve_scheme

# Temporaries are of so many values at a time.
_PIECE = 1 << 22


def resolve_target(scheme: str | QuantScheme) -> QuantScheme:
    """The scheme that layers are to have. Raises ``ValueError`` for one whose layers need more than their weight."""
    found = resolve_scheme(scheme)
    if found.needs_data:
        raise ValueError(
            f"scheme is {found.name!r}, which needs data to run the model on: quantize the float model, with "
            "calibration, or load the checkpoint in a scheme such as 'int8'"
        )
    return found


def requantize(
    model: nn.Module,
    layers: dict[str, QuantLayer],
    values: dict[str, Tensor],
    tied: dict[str, str],
    scheme: QuantScheme,
) -> None:
    """Makes ``scheme``'s layers of ``layers``, by name, and puts their parameters into ``values`` for those of before.

    ``model``: the float one. ``values``: what the checkpoint holds, by name, from which those of each layer are taken
    as it is made. ``tied``: names that stand for another's value; changed likewise. Raises ``CheckpointError``, naming
    the layer, for values that can't be quantized, and for experts, which have no other scheme yet.
    """
    names: dict[QuantLayer, list[str]] = {}
    for name, layer in layers.items():
        names.setdefault(layer, []).append(name)
    for layer, own in names.items():
        wanted = scheme if isinstance(layer, LinearLayer) else scheme.for_experts()
        if layer.scheme == wanted:
            continue
        if not isinstance(layer, LinearLayer):
            raise CheckpointError(
                f"{own[0]} holds experts with the scheme {layer.scheme.name!r}, which can't be made {wanted.name!r}: "
                "load them as they are"
            )
        _take(layer, own, values, tied)
        try:
            made = in_scheme(layer, wanted)
        except ValueError as error:
            raise CheckpointError(f"{own[0]} can't be quantized with scheme {wanted.name!r}: {error}") from error
        carry_over(model.get_submodule(own[0]), made)
        made.layer_name = own[0]
        for name in own:
            layers[name] = made
            for leaf, parameter in made.named_parameters(recurse=False):
                if name == own[0]:
                    values[f"{name}.{leaf}"] = parameter
                else:
                    tied[f"{name}.{leaf}"] = f"{own[0]}.{leaf}"


def _take(layer: LinearLayer, names: list[str], values: dict[str, Tensor], tied: dict[str, str]) -> None:
    """Gives a layer on meta its values, which go out of ``values`` and ``tied``."""
    for leaf in [leaf for leaf, _ in layer.named_parameters(recurse=False)]:
        full_names = [f"{name}.{leaf}" for name in names]
        found = [values.pop(name) for name in full_names if name in values]
        sources = [tied.pop(name) for name in full_names if name in tied]
        value = found[0] if found else values[sources[0]]
        setattr(layer, leaf, frozen(value.detach()))


def in_scheme(layer: LinearLayer, scheme: QuantScheme) -> LinearLayer:
    """A layer with ``scheme`` that stands for the weight and bias of ``layer``, on its device.

    Raises ``ValueError`` for a weight that isn't finite.
    """
    bias = layer.float_bias()
    dtype = torch.float32 if bias is None else bias.dtype
    made = linear_class(scheme)(layer.in_features, layer.out_features, bias is not None, "meta", dtype, scheme)
    amax = None
    if made.needs_amax:
        amax = torch.stack([largest(rows) for rows in _rows(layer)]).amax()
    made.start_rows(next(layer.parameters()).device, amax)
    parts: dict[str, Tensor] = {}
    start = 0
    for rows in _rows(layer):
        for leaf, part in made.convert_rows(rows).items():
            if leaf not in parts:
                parts[leaf] = torch.empty((layer.out_features, *part.shape[1:]), dtype=part.dtype, device=part.device)
            parts[leaf][start : start + len(part)] = part
        start += len(rows)
    for leaf, value in parts.items():
        setattr(made, leaf, frozen(value))
    made.take_bias(None if bias is None else bias.detach())
    return made.train(layer.training)


def _rows(layer: LinearLayer) -> Iterator[Tensor]:
    """The float rows, a few at a time; once an empty piece of a layer without rows."""
    parameters: Mapping[str, Tensor] = {name: layer.stored(name).detach() for name in layer.row_names}
    step = max(1, _PIECE // max(layer.in_features, 1))
    for start in range(0, max(layer.out_features, 1), step):
        piece = {name: value[start : start + step] for name, value in parameters.items()}
        yield layer.restore_rows(piece, torch.float32)
