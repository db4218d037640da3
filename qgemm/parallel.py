"""``share_scales``: what processes that have parts of a model may do together beyond adding up."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from torch import nn

from qgemm.arguments import check_model
from qgemm.nn import LinearLayer
from qgemm.nn.int4_int8 import Int4Int8Linear

Model = TypeVar("Model", bound=nn.Module)


def share_scales(model: Model, enabled: bool = True) -> Model:
    """Has row-parallel layers quantize a row with the maximum of all of it, in place; returns ``model``.

    A model in tensor parallelism then computes what it computes in one process, but that sums of parts of rows are
    rounded to the model's dtype before they are added up. Otherwise each process takes the maximum of its own columns,
    which needs no more than the sum. All processes call it. It changes layers that find scales at run time; in
    mixtures, experts keep scales of their own, and so does every layer while gradients are asked for.

    Raises ``ValueError`` for a model of which no layer is row-parallel, or one is of the scheme ``int4-int8``, whose
    product finds scales within.
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
