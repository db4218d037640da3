"""``share_scales`` without shards; what it does to shards is tested with two processes, in ``integrations``."""

from __future__ import annotations

import pytest
from torch import nn

import qgemm


def test_a_model_of_one_process() -> None:
    model = qgemm.quantize_model(nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)))
    with pytest.raises(ValueError, match="Sequential has no row-parallel layer"):
        qgemm.share_scales(model)
