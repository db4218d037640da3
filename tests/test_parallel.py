"""``share_scales`` without shards; what it does to shards is tested with two processes, in ``integrations``."""

from __future__ import annotations

import pytest
from torch import nn

import qgemm
from qgemm.nn.shard import Shard


def test_a_model_of_one_process() -> None:
    model = qgemm.quantize_model(nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)))
    with pytest.raises(ValueError, match="Sequential has no row-parallel layer"):
        qgemm.share_scales(model)


def test_layers_that_cannot_share_are_named() -> None:
    model = qgemm.quantize_model(nn.Sequential(nn.Linear(512, 16), nn.Linear(16, 512)), "int4-int8")
    for layer in model:
        layer.cut(Shard("row" if layer.in_features == 512 else "column", None, 0, 2))
    with pytest.raises(ValueError, match=r"0 is int4-int8, .* \(enabled=False\)"):
        qgemm.share_scales(model)
    assert not model[0].shard.shares_scales
    qgemm.share_scales(model, enabled=False)
