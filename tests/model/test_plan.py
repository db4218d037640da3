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
        "layer  kind    scheme                bytes  note",
        "-" * 50,
        "a      Linear  int4                16.4 kB",
        "b      Linear  int8                33.3 kB  budget",
        "head   Linear  float: output head   4.1 kB",
        "-" * 50,
        "2 of 3 layers to quantize, 49.7 kB of 53.8 kB",
    ]
    assert plan.names == ["a", "b"]
    assert all(type(module) is nn.Linear for module in model.values())
