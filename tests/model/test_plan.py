"""SwapPlan: what is to become of a model's layers, before anything does."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from qgemm.model.plan import plan_swaps
from qgemm.model.selection import resolve_schemes


def test_a_plan_prints_as_a_table() -> None:
    model = nn.ModuleDict({"a": nn.Linear(64, 64, False), "b": nn.Linear(64, 128), "head": nn.Linear(64, 16, False)})
    plan = plan_swaps(model, resolve_schemes({"a": "int4", "*": "int8"}), ["head"], [])
    plan = replace(plan, notes={"b": "budget"})
    assert str(plan).splitlines() == [
        "layer  kind    scheme                 bytes  note",
        "-" * 51,
        "a      Linear  int4                16.0 KiB",
        "b      Linear  int8                32.5 KiB  budget",
        "head   Linear  float: output head   4.0 KiB",
        "-" * 51,
        "2 of 3 layers to quantize, 48.5 KiB of 52.5 KiB",
    ]
    assert plan.names == ["a", "b"]
    assert all(type(module) is nn.Linear for module in model.values())
