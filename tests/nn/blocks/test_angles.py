"""Rotary embeddings of models: one operator, with the bits of the module, and what it leaves to that."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from families import FAMILIES
from families.mixtures import MIXTURES
from fusion.structures import STRUCTURES

from qgemm import fuse, fusion_report, quantize_model, unfuse
from qgemm.fusion.probe import find_angles
from qgemm.nn.blocks.angles import Table
from tests.operators import operators


@pytest.mark.parametrize(
    ("family", "table"),
    [("llama", ("twice",)), ("cohere", ("each twice",)), ("phi", ("twice",)), ("olmo2", ("twice", True))],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_angles_are_one_operator(family: str, table: tuple[Any, ...], dtype: torch.dtype) -> None:
    example = FAMILIES[family]()
    model: Any = quantize_model(example.model.to(dtype))
    embedding = model.model.rotary_emb
    x, positions = torch.empty(2, 3, 64, dtype=dtype), torch.tensor([[0, 1, 2], [7, 900, 31_000]])
    expected = embedding(x, positions)
    fuse(model)
    assert vars(embedding)["_qgemm_fused"].tables == {"": Table(*table)}
    assert operators(embedding, x, position_ids=positions) == ["qgemm.rotary_angles"]
    assert all(map(torch.equal, embedding(x, positions), expected))
    assert ("model.rotary_emb", ("rotary",), 0.0) in [
        (each.name, each.parts, each.error) for each in fusion_report(model).others
    ]
    # What it doesn't know.
    assert all(map(torch.equal, embedding(x, positions.int()), expected))
    assert all(map(torch.equal, embedding(x, positions.float()), expected))
    unfuse(model)
    assert "forward" not in vars(embedding)


@pytest.mark.parametrize("family", ["llama", "phimoe"])
def test_frequencies_that_are_converted_later(family: str) -> None:
    model: Any = quantize_model({**FAMILIES, **MIXTURES}[family]().model, fuse=True)
    embedding = model.model.rotary_emb
    x, positions = torch.empty(2, 3, 64), torch.tensor([[0, 1, 2], [7, 900, 31_000]])
    assert operators(embedding, x, positions) == ["qgemm.rotary_angles"]
    model.bfloat16()
    found, wanted = embedding(x, positions), type(embedding).forward(embedding, x, positions)
    assert all(map(torch.equal, found, wanted))
    assert operators(embedding, x, positions) == ["qgemm.rotary_angles"]
    # PhiMoE computes them in every call, so the rounded ones in its buffer aren't its own.
    assert list(vars(embedding)["_qgemm_fused"].own) == ([""] if family == "phimoe" else [])
    model.float()
    assert all(map(torch.equal, embedding(x, positions), type(embedding).forward(embedding, x, positions)))


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_5"])
def test_positions_of_several_axes(family: str) -> None:
    """Pairs of Qwen2.5-VL have the positions of time, height or width in sections; those of Qwen3.5 by turns."""
    model: Any = quantize_model({**FAMILIES, **STRUCTURES}[family]().model).bfloat16()
    embedding = model.get_decoder().rotary_emb
    embedding.inv_freq, embedding.mrope_section = torch.rand(8), [4, 2, 2]
    x, positions = torch.empty(0, dtype=torch.bfloat16), torch.randint(31_000, (3, 2, 5))
    one = torch.arange(5)[None, None].expand(3, 2, -1)
    expected, of_one = embedding(x, positions), embedding(x, one)
    fuse(model, {})
    assert {*vars(embedding)["_qgemm_fused"].tables[""].axes} == {0, 1, 2}
    for given, wanted in ((positions, expected), (one, of_one)):
        assert operators(embedding, x, given) == ["qgemm.rotary_angles"]
        assert all(map(torch.equal, embedding(x, given), wanted))
    # Of fewer axes, or none: what the module itself does with them.
    assert "qgemm.rotary_angles" not in operators(embedding, x, positions[:1])
    with pytest.raises((IndexError, RuntimeError)):
        embedding(x, positions[0])


def test_an_embedding_may_know_types_of_layers() -> None:
    model: Any = quantize_model(STRUCTURES["gemma4"]().model)
    embedding = model.model.rotary_emb
    x, positions = torch.empty(2, 3, 64), torch.tensor([[0, 1, 2], [7, 900, 31_000]])
    types = ("sliding_attention", "full_attention")
    expected = [embedding(x, positions, each) for each in types]
    fuse(model)
    for each, wanted in zip(types, expected, strict=True):
        assert operators(embedding, x, positions, each) == ["qgemm.rotary_angles"]
        assert all(map(torch.equal, embedding(x, positions, layer_type=each), wanted))
    assert expected[0][0].shape != expected[1][0].shape
    with pytest.raises(KeyError):
        embedding(x, positions, "no type")


def test_embeddings_that_stay_as_they_are() -> None:
    model: Any = FAMILIES["llama"]().model
    embedding = model.model.rotary_emb
    assert find_angles(embedding) == {"": Table("twice")}
    for name, value in (("rope_type", "dynamic"), ("attention_scaling", None)):
        other = copy.deepcopy(embedding)
        setattr(other, name, value)
        assert find_angles(other) == {}

    class Rounded(type(embedding)):  # type: ignore[misc]
        def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
            return tuple(each.bfloat16().to(x.dtype) for each in super().forward(x, position_ids))

    embedding.__class__ = Rounded
    assert find_angles(embedding) == {}
    assert find_angles(model) == {}
