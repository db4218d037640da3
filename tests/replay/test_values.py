"""Arguments and outputs, taken apart and put together again."""

import enum
from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch
from torch import nn
from transformers import DynamicCache
from transformers.modeling_outputs import BaseModelOutput

from qgemm.replay.values import UnfitValueError, form_of, put_together, take_apart

Pair = namedtuple("Pair", ["left", "right"])
Kind = enum.Enum("Kind", ["A", "B"])
A, B, C = (torch.full((2,), float(i)) for i in range(3))
VALUES: dict[str, Any] = {
    "tensor": A,
    "parameter": nn.Parameter(A),
    "nested": (1, [A, {"b": B, "n": None, "m": {"c": [C]}}], "x", 2.0, True),
    "same twice": [A, A],
    "named": Pair(A, Pair(1, B)),
    "ordered": OrderedDict(b=B, a=A),
    "output": BaseModelOutput(last_hidden_state=A, hidden_states=(B, C)),
    "plain": [torch.float16, torch.device("cpu"), Kind.A, slice(1, 3), ..., 1j, b"x"],
    "empty": ((), [], {}),
}


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_values_come_back_with_other_tensors(value: Any) -> None:
    tensors: list[Any] = []
    structure = take_apart(value, tensors)
    hash(form_of(structure))
    again = put_together(structure, tensors)
    assert type(again) is type(value)
    assert str(again) == str(value)
    others = put_together(structure, [each + 10 for each in tensors])
    found: list[Any] = []
    assert form_of(take_apart(others, found)) == form_of(structure)
    assert [each.tolist() for each in found] == [(each + 10).tolist() for each in tensors]
    assert str(put_together(structure, tensors)) == str(value), "the structure has changed"


def test_outputs_have_their_attributes() -> None:
    tensors: list[Any] = []
    structure = take_apart(BaseModelOutput(last_hidden_state=A, hidden_states=(B,)), tensors)
    out = put_together(structure, [B, C])
    assert out.last_hidden_state is out["last_hidden_state"] is out[0] is B
    assert out.hidden_states[0] is C
    assert out.attentions is None


def test_forms_differ_by_kinds_and_values() -> None:
    values = [1, True, 1.0, None, "1", (1,), [1], {"a": 1}, OrderedDict(a=1), {"b": 1}, Pair(1, 1), (1, 1), [A], (A,)]
    values += [Kind.A, Kind.B, [A, 0], [0, A], ..., slice(1), slice(2), BaseModelOutput(last_hidden_state=A), ((1,), 1)]
    assert len({form_of(take_apart(value, [])) for value in values}) == len(values)


class Traced(torch.Tensor):
    pass


@pytest.mark.parametrize("value", [object(), DynamicCache(), {1, 2}, {1: A}, A.as_subclass(Traced), iter([A]), len])
def test_other_values_are_refused(value: Any) -> None:
    with pytest.raises(UnfitValueError, match=type(value).__name__):
        take_apart([value], [])
