"""``share_scales``: makes tensor-parallel processes quantize with the scales of whole rows."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from torch import nn

from qgemm.arguments import check_model
from qgemm.nn import LinearLayer
from qgemm.nn.int4_int8 import Int4Int8Linear

Model = TypeVar("Model", bound=nn.Module)


def share_scales(model: Model, enabled: bool = True) -> Model:
    """Makes row-parallel layers quantize each row with the scale of the whole row, in place; returns ``model``.

    By default each process computes the scale from its own columns, and the only communication is the sum of the
    products. With shared scales, the processes first agree on the maximum of each row. The model then computes the same
    as in one process, except that each process rounds its product to the model's dtype before the products are summed.

    All processes must call it. It changes layers that compute scales at run time, but not experts. A layer doesn't
    share scales while gradients are computed. ``enabled=False`` undoes it.

    Raises ``ValueError`` for a model without row-parallel layers, or with a row-parallel layer in ``int4-int8``, whose
    product computes the scales itself.
    """
    check_model(model)
    named = {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, LinearLayer) and layer.shard is not None and layer.shard.style == "row"
    }
    layers = list(named.values())
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no row-parallel layer: from_pretrained(distributed_config=...) makes them"
        )
    within = [name for name, layer in named.items() if isinstance(layer, Int4Int8Linear)]
    if within and enabled:
        raise ValueError(
            f"{within[0]} is {named[within[0]].scheme.name}, whose product finds the scales of rows within: quantize "
            "row-parallel layers in another scheme, or leave them scales of their own (enabled=False)"
        )
    for layer in layers:
        assert layer.shard is not None
        layer.shard = replace(layer.shard, shares_scales=enabled)
        if layer.merged is not None:
            layer.merged.let_go()
    return model
