"""Which branches of a fused layer add the residual in their last product."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from families import FAMILIES

from qgemm import fuse, quantize_model
from qgemm.nn.blocks.binding import fused_of
from qgemm.nn.blocks.layer import MAX_SMALL_ROWS
from qgemm.nn.blocks.operands import SummedOperands


@pytest.mark.parametrize(
    ("rows", "is_summed", "expected"),
    [
        (MAX_SMALL_ROWS, False, [True, True]),
        (MAX_SMALL_ROWS + 1, False, [False, True]),  # the first goes with the norm behind it
        (MAX_SMALL_ROWS, True, [False, True]),  # of several processes
    ],
)
def test_which_products_add_the_residual(rows: int, is_summed: bool, expected: list[bool]) -> None:
    model: Any = fuse(quantize_model(FAMILIES["llama"]().model))
    fused: Any = fused_of(model.model.layers[0])
    operands = fused.operands()
    if is_summed:
        operands[0] = (*operands[0][:-1], SummedOperands(operands[0][-1], None))  # type: ignore[arg-type]
    added: list[bool] = []

    def branch(x: Any, operands: Any, residual: torch.Tensor | None, *_: Any) -> torch.Tensor:
        added.append(residual is not None)
        return torch.zeros(1, rows, model.config.hidden_size)

    recording = replace(fused, steps=tuple(replace(step, branch=branch) for step in fused.steps))
    recording(torch.randn(1, rows, model.config.hidden_size), operands, {})
    assert added == expected
