"""Blocks of GGUF: the values are those that gguf, the package of llama.cpp, computes from the same bytes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize, quantize
from torch import Tensor

from checkpoint.gguf_files import HALVES, random_blocks
from qgemm.checkpoint.gguf_types import TYPES, BlockType, common_scheme
from qgemm.numerics.groups import dequantize as dequantize_groups

BY_NAME = {kind.name: kind for kind in TYPES.values()}
READ_TYPES = [kind.name for kind in TYPES.values() if kind.decode is not None]
# Their zero points are sums, which may be rounded.
SUMS = ("Q4_1", "Q4_K")
WRITTEN = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "TQ1_0", "TQ2_0", "MXFP4")


def theirs(rows: Tensor, kind: BlockType) -> Tensor:
    if kind.name == "Q1_0":  # which the package doesn't compute: a bit says the sign of the factor
        blocks = rows.reshape(-1, 18).numpy()
        bits = np.unpackbits(blocks[:, 2:], axis=1, bitorder="little").astype(np.float32)
        return torch.from_numpy((2 * bits - 1) * blocks[:, :2].copy().view(np.float16)).view(len(rows), -1)
    return torch.from_numpy(dequantize(rows.numpy(), GGMLQuantizationType[kind.name]))


def assert_same(rows: Tensor, kind: BlockType) -> None:
    found, wanted = kind.dequantize(rows, torch.float32), theirs(rows, kind)
    assert wanted.isfinite().all()
    if kind.name in SUMS:
        # Half a unit in the last place of the zero point, of the value, and of theirs.
        scale, zeros = (each.repeat_interleave(32, dim=1).abs() for each in kind.parts(rows)[1:3])
        assert ((found - wanted).abs() <= 2.0**-24 * (zeros + 2 * wanted.abs())).all()
        assert (zeros <= wanted.abs() + 8 * scale).all()
    else:
        assert torch.equal(found, wanted)


def test_types_are_those_of_the_package() -> None:
    known = {number: (kind.name, kind.values, kind.nbytes) for number, kind in TYPES.items()}
    theirs = {kind.value: (kind.name, *GGML_QUANT_SIZES[kind]) for kind in GGMLQuantizationType}
    assert {number: theirs.get(number, known[number]) for number in known} == known
    assert sorted(READ_TYPES) == sorted(HALVES)
    assert len(READ_TYPES) == 24


@pytest.mark.parametrize("name", READ_TYPES)
def test_blocks_of_random_bytes(name: str) -> None:
    kind = BY_NAME[name]
    rows = torch.from_numpy(random_blocks(name, 67, 1024))
    assert_same(rows, kind)
    parts = [part for part in kind.parts(rows) if part is not None]
    assert [(tuple(part.shape), part.dtype) for part in parts] == list(kind.part_shapes(67, 1024).values())


@pytest.mark.parametrize("name", WRITTEN)
def test_blocks_of_floats(name: str) -> None:
    weight = np.random.default_rng(0).standard_normal((9, 512), dtype=np.float32)
    weight[3] = 0
    assert_same(torch.from_numpy(quantize(weight, GGMLQuantizationType[name])), BY_NAME[name])


@pytest.mark.parametrize("name", SUMS)
def test_sums_that_are_rounded(name: str) -> None:
    """Zero points far below the scales: a sum has more than 24 bits."""
    kind = BY_NAME[name]
    rows = torch.from_numpy(random_blocks(name, 8, 1024, std=1000.0)).view(-1, kind.nbytes)
    rows[:, 2:4] = (torch.rand(len(rows), 1) * 2.0**-9).half().view(torch.uint8)
    rows = rows.view(8, -1)
    assert_same(rows, kind)
    assert not torch.equal(kind.dequantize(rows, torch.float32), theirs(rows, kind))


@pytest.mark.parametrize("name", READ_TYPES)
def test_columns_in_another_order(name: str) -> None:
    """Heads of 128 columns, of which the groups of most types are parts."""
    kind, rows = BY_NAME[name], torch.from_numpy(random_blocks(name, 5, 1024))
    columns = torch.arange(1024).view(2, 4, 128).transpose(0, 1).flatten()
    weight = kind.scheme.weight
    assert weight.group_size is not None
    if weight.group_size > 128:
        assert kind.group_order(columns) is None
        return
    assert kind.group_order(columns[:-1]) is None
    values, scale, zeros, factor = kind.parts(rows, columns=columns)
    found = dequantize_groups(values, scale, zeros, factor, weight.format, weight.group_size, 1024, torch.float32)
    assert torch.equal(found, kind.dequantize(rows, torch.float32)[:, columns])


@pytest.mark.parametrize(
    ("names", "scheme"),
    [
        (("Q4_K", "Q5_K"), "int8-weight-32-float-zeros"),
        (("Q6_K", "Q5_K"), "int8-weight-16-float-zeros"),
        (("Q4_0", "Q4_K"), "int4-32-float-zeros"),
        (("Q3_K", "Q1_0"), "int4-16"),
        (("Q8_0", "Q8_0"), "int8-weight-32"),
        (("TQ1_0", "IQ4_XS"), "int8-weight-32"),
        (("MXFP4", "Q8_0"), None),
        (("Q8_0", "F16"), None),
        (("NVFP4", "NVFP4"), None),
    ],
)
def test_a_scheme_for_two_types(names: tuple[str, str], scheme: str | None) -> None:
    kinds = [BY_NAME[name] for name in names]
    common = common_scheme(kinds)
    assert (None if common is None else common.name) == scheme
    if common is None:
        return
    weight = common.weight
    assert weight.group_size is not None
    for kind in kinds:
        rows = torch.from_numpy(random_blocks(kind.name, 5, 1024))
        parts = kind.parts(rows, scheme=common)
        made = [(tuple(part.shape), part.dtype) for part in parts if part is not None]
        assert made == list(kind.part_shapes(5, 1024, common).values())
        found = dequantize_groups(*parts, weight.format, weight.group_size, 1024, torch.float32)
        assert torch.equal(found, kind.dequantize(rows, torch.float32))


def test_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large weights are decoded some rows at a time."""
    rows = torch.from_numpy(random_blocks("Q5_K", 7, 256))
    whole = BY_NAME["Q5_K"].parts(rows)
    monkeypatch.setattr("qgemm.checkpoint.gguf_types._PIECE", 512)
    for one, other in zip(BY_NAME["Q5_K"].parts(rows)[:3], whole[:3], strict=True):
        assert torch.equal(one, other)


def test_scales_of_nvfp4() -> None:
    """All that files may have, with all values; others are refused."""
    kind = BY_NAME["NVFP4"]
    rows = torch.arange(256).to(torch.uint8)[:, None].repeat(1, 4)
    octets = torch.arange(0, 256, 17).to(torch.uint8).repeat(256, 2)  # the codes 0 to 15, each twice in a byte
    rows = torch.cat((rows, octets), dim=1)
    assert_same(rows[:127], kind)
    for row in rows[127:]:
        with pytest.raises(ValueError, match="it holds NaN or Inf"):
            kind.dequantize(row[None], torch.float32)
    assert torch.equal(kind.parts(rows, torch.tensor([0.75])).global_scale, torch.tensor([0.75, 1.0]))
