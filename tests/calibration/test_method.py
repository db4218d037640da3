"""What a method is given, and how its settings become JSON-ready values and come back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import pytest
import torch
from torch import Tensor, nn

from qgemm.calibration.method import Block, Call, LayerWork, Method, first_tensor
from qgemm.scheme import SCHEMES


class Attention(nn.Module):
    """Two layers with one input, one called by keyword, one that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.o, self.unused = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor, gain: float = 1.0) -> tuple[None, Tensor]:
        return None, self.o(input=self.q(x) * gain + self.k(x))


def block(calls: list[Call]) -> Block:
    torch.manual_seed(0)
    module = Attention()
    layers = {f"a.{name}": LayerWork(f"a.{name}", child, SCHEMES["int8"]) for name, child in module.named_children()}
    return Block("a", module, nn.ModuleDict({"a": module}), layers, calls)


def test_collect_sees_each_layers_inputs_as_the_block_is_now() -> None:
    x, y = torch.randn(2, 3, 8), torch.randn(5, 8)
    work = block([Call((x,)), Call((), {"x": y, "gain": 3.0})])
    rows = torch.cat([x.reshape(-1, 8), y])
    for _ in range(2):
        seen = work.collect(second_moment=True, rows=100)
        assert set(seen) == {"a.q", "a.k", "a.o"}
        for name in ("a.q", "a.k"):
            assert seen[name].tokens == 11
            assert torch.equal(seen[name].rows, rows)
            torch.testing.assert_close(seen[name].second_moment, rows.T @ rows / 11)
        module = work.module
        gains = torch.tensor([1.0] * 6 + [3.0] * 5)[:, None]
        with torch.no_grad():
            torch.testing.assert_close(seen["a.o"].rows, module.q(rows) * gains + module.k(rows))
            module.q.weight.mul_(2.0)
    assert set(work.collect(["a.o"])) == {"a.o"}
    assert all(not child._forward_pre_hooks for child in module.modules())
    outputs = work.outputs()
    assert [output.shape for output in outputs] == [(2, 3, 8), (5, 8)]
    assert not outputs[0].requires_grad


def test_an_input_that_changes_in_place_isnt_taken_for_the_last() -> None:
    class Doubling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.first(x) + self.second(x.mul_(2.0))

    module = Doubling()
    layers = {name: LayerWork(name, child, SCHEMES["int8"]) for name, child in module.named_children()}
    seen = Block("", module, module, layers, [Call((torch.ones(3, 4),))]).collect(second_moment=True)
    assert (seen["second"].second_moment == 4 * seen["first"].second_moment).all()


def test_nan_is_named_by_layer() -> None:
    with pytest.raises(ValueError, match=r"the input of 'a\.q': x holds NaN"):
        block([Call((torch.full((1, 8), float("nan")),))]).collect()


def test_first_tensor() -> None:
    x = torch.zeros(1)
    for output in (x, (None, x, 1), [x], {"a": None, "b": x}):
        assert first_tensor(output) is x
    with pytest.raises(TypeError, match="returned a str"):
        first_tensor("x")


@dataclass(frozen=True)
class Example(Method):
    name: ClassVar[str] = "example"
    alpha: float = 0.5
    steps: int = 3
    order: bool = True
    limit: float | None = None
    kind: Literal["max", "mean"] = "max"
    count: int | float = 1

    def apply(self, block: Block) -> None: ...


def test_settings_come_back() -> None:
    for method in (Example(), Example(0.25, 7, False, 2.5, "mean", 0.5)):
        assert Example.from_dict(method.to_dict()) == method
    whole = Example.from_dict({"alpha": 1, "limit": 2, "count": 2})
    assert [type(value) for value in (whole.alpha, whole.limit, whole.count)] == [float, float, int]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"alfa": 1.0}, r"example has no setting 'alfa'; did you mean 'alpha'\?"),
        ({7: 1.0}, "example has no setting 7; there are 'alpha'"),
        ({"alpha": "1"}, "alpha of example is '1'; it must be a number"),
        ({"alpha": True}, "alpha of example is True"),
        ({"alpha": float("nan")}, "alpha of example is nan"),
        ({"alpha": 10**400}, "alpha of example is 1000"),
        ({"steps": 10**400}, "steps of example is 1000"),
        ({"steps": 1.0}, "it must be a whole number"),
        ({"order": 1}, "it must be true or false"),
        ({"limit": []}, "it must be a number or null"),
        ({"kind": "least"}, "it must be 'max' or 'mean'"),
    ],
)
def test_other_settings_are_refused(settings: dict[Any, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Example.from_dict(settings)
