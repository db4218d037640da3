"""Steps of scales are found once, and again when the scales are others."""

import copy
import pickle

import pytest
import torch
from torch import nn

from qgemm.kernels.weight_only.int8_config import MIN_ROWS_FOR_STEPS
from qgemm.nn import Int4Int8Linear, row_steps
from qgemm.nn.blocks.merged import MergedWeights
from qgemm.nn.blocks.operands import FloatOperands
from qgemm.nn.row_steps import MAX_SEARCHES, RowSteps

MANY = MIN_ROWS_FOR_STEPS


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_steps, "_are_of_use", lambda scale: scale.device.type == "cpu")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


@pytest.fixture
def layer() -> Int4Int8Linear:
    torch.manual_seed(0)
    return Int4Int8Linear.from_linear(nn.Linear(512, 24), "int4-int8")


def test_scales_of_a_new_layer_are_in_steps(layer: Int4Int8Linear) -> None:
    assert layer.steps is not None
    step = layer.steps.of(layer.weight_scale, MANY)
    assert step is not None
    assert step.dtype == torch.float32
    multiples = layer.weight_scale.float() / step[:, None]
    assert multiples.equal(multiples.round())
    assert 1 <= multiples.min() <= multiples.max() <= 16


def test_few_rows_need_none(layer: Int4Int8Linear) -> None:
    assert RowSteps().of(layer.weight_scale, MANY - 1) is None


def test_none_for_scales_of_other_libraries(layer: Int4Int8Linear) -> None:
    assert RowSteps().of(torch.rand(24, 4).bfloat16(), MANY) is None


def test_asymmetric_layers_look_for_none() -> None:
    assert Int4Int8Linear(256, 8, scheme="int4-asymmetric-int8").steps is None
    assert Int4Int8Linear(256, 8, scheme="int4-channel-int8").steps is None


def test_found_once(layer: Int4Int8Linear, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = RowSteps()
    step = steps.of(layer.weight_scale, MANY)
    monkeypatch.setattr(row_steps, "steps_of", None)
    assert steps.of(layer.weight_scale, 2 * MANY) is step


def test_found_again_when_a_state_is_loaded(layer: Int4Int8Linear) -> None:
    other = Int4Int8Linear.from_linear(nn.Linear(512, 24), "int4-int8")
    assert layer.steps is not None
    assert other.steps is not None
    before, wanted = layer.steps.of(layer.weight_scale, MANY), other.steps.of(other.weight_scale, MANY)
    layer.load_state_dict(other.state_dict())
    found = layer.steps.of(layer.weight_scale, MANY)
    assert before is not None
    assert found is not None
    assert wanted is not None
    assert found.equal(wanted)
    assert not found.equal(before)


def test_found_again_in_other_memory(layer: Int4Int8Linear) -> None:
    steps = RowSteps()
    assert steps.of(layer.weight_scale, MANY) is not None
    layer.weight_scale.data = torch.rand(24, 4).bfloat16()
    assert steps.of(layer.weight_scale, MANY) is None


def test_not_looked_for_again_and_again(layer: Int4Int8Linear) -> None:
    steps = RowSteps()
    scales = [layer.weight_scale.clone() for _ in range(MAX_SEARCHES + 1)]
    found = [steps.of(scale, MANY) for scale in scales]
    assert all(step is not None for step in found[:-1])
    assert found[-1] is None


def test_not_looked_for_in_a_graph(layer: Int4Int8Linear, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert RowSteps().of(layer.weight_scale, MANY) is None


def test_they_are_no_state(layer: Int4Int8Linear) -> None:
    assert layer.steps is not None
    assert layer.steps.of(layer.weight_scale, MANY) is not None
    assert "steps" not in " ".join(layer.state_dict())
    copies: list[Int4Int8Linear] = [copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))]
    for other in copies:
        assert other.steps is not None
        assert vars(other.steps) == {}
        assert other.steps.of(other.weight_scale, MANY) is not None


def test_merged_layers_have_those_of_all(layer: Int4Int8Linear) -> None:
    other = Int4Int8Linear.from_linear(nn.Linear(512, 8), "int4-int8")
    merged = MergedWeights([layer, other])

    def step() -> torch.Tensor | None:
        operands = merged.operands()
        assert isinstance(operands, FloatOperands)
        return operands.weight.step

    first = step()
    assert first is not None
    assert first.shape == (32,)
    new = Int4Int8Linear.from_linear(nn.Linear(512, 8), "int4-int8")
    other.load_state_dict(new.state_dict())
    second = step()
    assert second is not None
    assert second[:24].equal(first[:24])
    assert new.steps is not None
    found = new.steps.of(new.weight_scale, MANY)
    assert found is not None
    assert second[24:].equal(found)


def test_found_when_a_layer_is_made_or_loaded(layer: Int4Int8Linear, monkeypatch: pytest.MonkeyPatch) -> None:
    other = Int4Int8Linear(512, 24)
    other.load_state_dict(layer.state_dict())
    for each in (layer, other):
        assert each.steps is not None
        with monkeypatch.context() as patch:
            patch.setattr(row_steps, "steps_of", None)
            assert each.steps.of(each.weight_scale, MANY) is not None
