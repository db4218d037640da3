"""``share_scales``: what processes that have parts of a model may do together beyond adding up."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from torch import nn

from qgemm.arguments import check_model
from qgemm.nn import LinearLayer

Model = TypeVar("Model", bound=nn.Module)


def share_scales(model: Model, enabled: bool = True) -> Model:
    """Has row-parallel layers quantize a row with the maximum of all of it, in place; returns ``model``.

    A model in tensor parallelism then computes what it computes in one process, but for the order of float additions.
    Otherwise each process takes the maximum of its own columns, which needs no more than the sum. All processes call
    it. It changes layers that find scales at run time; in mixtures, experts keep scales of their own.

    Raises ``ValueError`` for a model of which no layer is row-parallel.
    """
    check_model(model)
    layers = [
        layer
        for layer in model.modules()
        if isinstance(layer, LinearLayer) and layer.shard is not None and layer.shard.style == "row"
    ]
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no row-parallel layer: from_pretrained(distributed_config=...) makes them"
        )
    for layer in layers:
        assert layer.shard is not None
        layer.shard = replace(layer.shard, shares_scales=enabled)
        if layer.merged is not None:
            layer.merged.let_go()
    return model
