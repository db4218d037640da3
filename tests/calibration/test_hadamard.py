"""Which layers and attention heads are rotated, that it changes nothing in float, and what it is good for."""

from __future__ import annotations

import copy
import re
from typing import Any

import numpy as np
import pytest
import torch
from families import FAMILIES

import qgemm
from calibration.blocks import block_of
from qgemm.calibration.folding import find_folds
from qgemm.calibration.gptq import GPTQ
from qgemm.calibration.hadamard import HadamardRotation, is_down_projection, rotate_values
from qgemm.calibration.rounding import MSEWeights
from qgemm.nn.linear_layer import linear_weight
from qgemm.scheme import resolve_scheme


def sylvester(n: int) -> np.ndarray[Any, Any]:
    """The Walsh-Hadamard matrix of order n, orthonormal."""
    return np.array([[1]]) if n == 1 else np.kron([[1, 1], [1, -1]], sylvester(n // 2)) / np.sqrt(2)


@pytest.mark.parametrize(
    ("family", "ends"),
    [
        ("llama", {"mlp.down_proj"}),
        ("gpt2", {"mlp.c_proj"}),
        ("bert", {"output.dense"}),
        ("opt", {"fc2"}),
        ("t5", {"DenseReluDense.wo"}),
        ("gpt_neox", {"mlp.dense_4h_to_h"}),
    ],
)
def test_down_projections_are_known(family: str, ends: set[str]) -> None:
    example = FAMILIES[family]()
    names = [name for name in block_of(example.model, example.inputs).layers if is_down_projection(name)]
    assert len(names) == (4 if family == "t5" else 2)
    assert all(name.endswith(tuple(ends)) and ".attention." not in name for name in names)


@pytest.mark.parametrize("scheme", ["int8", "int8-static"])
def test_online_rotation_is_a_scheme(scheme: str) -> None:
    example = FAMILIES["llama"]()
    block = block_of(example.model, example.inputs, scheme=scheme)
    before = {name: value.clone() for name, value in example.model.state_dict().items()}
    HadamardRotation(values=False).apply(block)
    for name, work in block.layers.items():
        assert work.scheme.name == (f"{scheme}-hadamard" if name.endswith("down_proj") else scheme)
        assert not work.notes
    assert all(torch.equal(value, before[name]) for name, value in example.model.state_dict().items())
    HadamardRotation("all", values=False).apply(block)
    assert {work.scheme.name for work in block.layers.values()} == {f"{scheme}-hadamard"}
    # Those that were rotated already have no other form.
    assert block.layers["model.layers.0.mlp.down_proj"].notes == [
        f"hadamard: not rotated: scheme '{scheme}-hadamard' can't be combined with a rotation"
    ]


def test_what_cannot_be_rotated_says_so() -> None:
    model = torch.nn.ModuleDict({"down_proj": torch.nn.Linear(9, 4), "w2": torch.nn.Linear(8, 4)})
    block = block_of(model, scheme="int8")
    block.layers["w2"].scheme = resolve_scheme("int4")
    HadamardRotation(values=False).apply(block)
    assert block.layers["down_proj"].notes == ["hadamard: not rotated: it has 9 columns, an odd number"]
    assert block.layers["w2"].notes == ["hadamard: not rotated: scheme 'int4' can't be combined with a rotation"]
    assert [work.scheme.name for work in block.layers.values()] == ["int8", "int4"]


# Grouped queries, one layer for queries, keys and values in three arrangements, biases, latent attention.
@pytest.mark.parametrize("family", ["llama", "phi3", "gpt2", "falcon", "gpt_neox", "bert", "deepseek_v3", "t5"])
def test_values_are_rotated_in_every_arrangement(family: str) -> None:
    example = FAMILIES[family]()
    expected = example.output()
    block = block_of(example.model, example.inputs)
    before = {name: linear_weight(work.module).clone() for name, work in block.layers.items()}
    HadamardRotation("none").apply(block)
    assert (example.output() - expected).norm() < 1e-5 * expected.norm()
    changed = [name for name, work in block.layers.items() if not torch.equal(linear_weight(work.module), before[name])]
    # Of each attention the output projection, and what makes the values.
    attentions = 6 if family == "t5" else 2
    assert len(changed) == 2 * attentions
    assert all(work.scheme.name == "int8" for work in block.layers.values())


def test_a_value_head_is_rotated_by_sylvesters_matrix() -> None:
    example = FAMILIES["llama"]()
    block = block_of(example.model, example.inputs)
    fold = next(fold for fold in find_folds(block)[0] if fold.source.endswith("layers.0.self_attn.v_proj"))
    v, o = (block.layers[name].module for name in (fold.source, *fold.layers))
    v_weight, o_weight = (linear_weight(layer).detach().clone().double().numpy() for layer in (v, o))
    assert rotate_values(block, fold)
    # Two value heads of 16, four query heads.
    np.testing.assert_allclose(
        linear_weight(v).detach().numpy(), np.kron(np.eye(2), sylvester(16)) @ v_weight, atol=1e-6
    )
    np.testing.assert_allclose(
        linear_weight(o).detach().numpy(), o_weight @ np.kron(np.eye(4), sylvester(16)), atol=1e-6
    )


def test_gated_products_are_not_rotated() -> None:
    example = FAMILIES["llama"]()
    block = block_of(example.model, example.inputs)
    before = {name: value.clone() for name, value in example.model.state_dict().items()}
    folds = [fold for fold in find_folds(block)[0] if not fold.source.endswith("v_proj")]
    assert any(fold.source.endswith("up_proj") for fold in folds)
    assert not any(rotate_values(block, fold) for fold in folds)
    assert all(torch.equal(value, before[name]) for name, value in example.model.state_dict().items())


def test_a_rotation_that_changes_outputs_is_undone() -> None:
    example = FAMILIES["llama"]()
    model: Any = example.model
    # As if the gated product were of heads.
    for layer in model.model.layers:
        layer.mlp.head_dim = 16
    block = block_of(model, example.inputs)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    fold = next(fold for fold in find_folds(block)[0] if fold.source.endswith("up_proj"))
    assert not rotate_values(block, fold)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_weights_that_were_decided_for_values_as_they_were_are_taken_back() -> None:
    example = FAMILIES["llama"]()
    block = block_of(example.model, example.inputs)
    GPTQ().apply(block)
    assert all(work.weight is not None for work in block.layers.values())
    HadamardRotation(online="none").apply(block)
    taken_back = {name.rpartition(".")[2] for name, work in block.layers.items() if work.weight is None}
    assert taken_back == {"v_proj", "o_proj"}


@pytest.mark.parametrize("scheme", ["int8", "int8-static"])
def test_spikes_at_down_projections_lose_their_harm(scheme: str) -> None:
    model: Any = FAMILIES["llama"]().model
    inputs = {"input_ids": torch.randint(5, 97, (8, 24), generator=torch.Generator().manual_seed(0))}
    # A channel of each gated product is large, and counts as much as its size says.
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.up_proj.weight[7] *= 30
        expected = model(**inputs).logits
    others, errors = re.compile("[qkvoe]_proj|up_proj"), []
    for recipe in ([], [HadamardRotation()]):
        quantized: Any = copy.deepcopy(model)
        qgemm.quantize_model(quantized, scheme, skip=others, calibration=[inputs], recipe=recipe or [MSEWeights()])
        with torch.no_grad():
            errors.append(float((quantized(**inputs).logits - expected).norm()))
    assert errors[1] < 0.5 * errors[0], errors


def test_settings() -> None:
    method = HadamardRotation("all", values=False)
    assert HadamardRotation.from_dict(method.to_dict()) == method
    with pytest.raises(ValueError, match="online of hadamard is 'some'"):
        HadamardRotation.from_dict({"online": "some"})
