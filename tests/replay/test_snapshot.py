"""What a ``Snapshot`` of a model notices, and what it leaves alone."""

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from qgemm.replay.snapshot import Snapshot, UnfitModelError


class Config:
    def __init__(self) -> None:
        self.width = 4
        self.attention = "sdpa"


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.other = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("table", torch.zeros(3))
        self.scale, self.plain = float("0.5"), torch.zeros(1)
        self.active, self.tables = ["a"], [torch.zeros(1)]
        self.settings, self.options = {"rank": 3000}, vars(Config())
        self.long = list(range(100))
        self.rows, self.name = 1000, "part"
        self.empty: dict[str, int] = {}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([Part(), Part()])
        self.config = Config()


def second(model: Model) -> Any:
    return model.parts[1]


def move_item(last: dict[str, Any], following: dict[str, Any]) -> None:
    """To where it still follows the same item."""
    items = {**last, **following}
    last.clear()
    following.clear()
    following.update(items)


CHANGES: dict[str, Callable[[Any], object]] = {
    "number": lambda part: setattr(part, "scale", 0.25),
    "string": lambda part: setattr(part, "name", "other"),
    "list": lambda part: part.active.append("b"),
    "item": lambda part: part.active.__setitem__(0, "c"),
    "dictionary": lambda part: part.settings.update(rank=4),
    "dictionary of an object": lambda part: part.options.update(width=5),
    "empty dictionary": lambda part: part.empty.update(width=5),
    "kind of number": lambda part: setattr(part, "rows", 1000.0),
    "key": lambda part: [part.settings.pop("rank"), part.settings.update(alpha=3000)],
    "first item of the next list": lambda part: part.tables.insert(0, part.active.pop()),
    "first item of the next dictionary": lambda part: move_item(part.settings, part.options),
    "number for a dictionary": lambda part: setattr(part, "settings", 1),
    "new attribute": lambda part: setattr(part, "other_scale", 1),
    "attribute gone": lambda part: delattr(part, "scale"),
    "attribute renamed": lambda part: [setattr(part, "other_name", part.name), delattr(part, "name")],
    "tensor": lambda part: setattr(part, "plain", torch.zeros(1)),
    "tensor gone": lambda part: delattr(part, "plain"),
    "number for a tensor": lambda part: setattr(part, "plain", 1),
    "storage of a tensor": lambda part: part.plain.set_(torch.zeros(1)),
    "list of tensors": lambda part: setattr(part, "tables", [torch.zeros(1)]),
    "tensor of a list": lambda part: part.tables.__setitem__(0, torch.zeros(1)),
    "data": lambda part: setattr(part.layer.weight, "data", torch.zeros(4, 4)),
    "storage": lambda part: part.table.set_(torch.zeros(3)),
    "size of storage": lambda part: part.table.untyped_storage().resize_(0),
    "swapped": lambda part: torch.utils.swap_tensors(part.layer.weight, nn.Parameter(torch.zeros(4, 4))),
    "parameter": lambda part: setattr(part.layer, "weight", nn.Parameter(torch.zeros(4, 4))),
    "parameter gone": lambda part: setattr(part.layer, "bias", None),
    "buffer": lambda part: setattr(part, "table", torch.zeros(3)),
    "buffer moved": lambda part: part.layer._buffers.update(table=part._buffers.pop("table")),
    "module": lambda part: setattr(part, "layer", nn.Linear(4, 4)),
    "module renamed": lambda part: setattr(part, "_modules", {"layer": part.layer, "last": part.other}),
    "module moved": lambda part: [setattr(part.layer, "inner", part.other), delattr(part, "other")],
    "modules exchanged": lambda part: part._modules.update(layer=part.other, other=part.layer),
    "module gone": lambda part: delattr(part, "other"),
    "new module": lambda part: part.add_module("more", nn.ReLU()),
    "class": lambda part: setattr(part.layer, "__class__", type("Other", (nn.Linear,), {})),
    "hook": lambda part: part.layer.register_forward_hook(lambda *_: None),
    "hook before": lambda part: part.register_forward_pre_hook(lambda *_: None),
    "forward": lambda part: setattr(part.layer, "forward", torch.relu),
    "training": lambda part: part.train(),
}

# After these a graph may read freed memory, so it must not even run.
OF_MEMORY = {"tensor", "list of tensors", "data", "storage", "size of storage", "swapped", "parameter", "buffer"}
OF_MEMORY |= {"tensor gone", "storage of a tensor"}


@pytest.mark.parametrize("change", CHANGES)
def test_changes_are_noticed(change: str) -> None:
    model = Model().eval()
    snapshot = Snapshot(model, [model.config])
    assert snapshot.holds()
    kept = copy.copy(vars(second(model)))  # so that nothing new lies where the old was
    CHANGES[change](second(model))
    if change in OF_MEMORY:
        assert not snapshot.memory_holds()
    assert not snapshot.holds()
    del kept
    assert Snapshot(model, [model.config]).holds()


def test_a_value_at_the_address_of_the_former_is_noticed() -> None:
    model = Model()
    snapshot = Snapshot(model)
    for value in ("0.7", "0.9"):  # the second would lie where the first was freed
        second(model).scale = float(value)
    assert not snapshot.holds()


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_modules_of_torchscript_are_refused() -> None:
    model = Model()
    snapshot = Snapshot(model)
    second(model).layer = torch.jit.trace(second(model).layer, torch.zeros(1, 4))
    assert not snapshot.holds()
    with pytest.raises(UnfitModelError, match="TorchScript"):
        Snapshot(model)


def test_others_are_noticed_unless_they_are_ignored() -> None:
    model = Model()
    seeing, ignoring = Snapshot(model, [model.config]), Snapshot(model, [model.config], ["attention"])
    model.config.attention = "eager"
    assert not seeing.holds()
    assert ignoring.holds()
    model.config.width = 5
    assert not ignoring.holds()


def test_equal_values_and_values_of_tensors_are_no_change() -> None:
    model = Model()
    part = second(model)
    snapshot = Snapshot(model)
    for _ in range(2):
        part.rows, part.scale, part.settings["rank"] = int("1000"), float("0.5"), int("3000")
        part.layer.weight.data.fill_(3)
        part.long[3] = 7
        assert snapshot.holds()
    part.rows = 1001
    assert not snapshot.holds()


def test_nothing_is_kept_alive() -> None:
    model = Model()
    snapshot = Snapshot(model)
    part = second(model)
    references = [weakref.ref(part.layer), weakref.ref(part.layer.weight), weakref.ref(part.plain)]
    gc.disable()
    try:
        part.layer = part.plain = None
        assert [reference() for reference in references] == [None] * 3
        assert not snapshot.holds()
        reference = weakref.ref(model)
        del model, part
        assert reference() is None
        assert not snapshot.holds()
    finally:
        gc.enable()
