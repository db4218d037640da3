"""HQQ's safetensors files: the library's samples, and the layout written out value by value."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import qgemm
from checkpoint.packers import linears
from checkpoint.samples import layers_in, logit_error
from qgemm import CheckpointError

SCHEMES = {"hqq-4bit-g64": "int4-64-float-zeros", "hqq-8bit-g32": "int8-weight-32-float-zeros"}


@pytest.mark.parametrize("name", SCHEMES)
def test_samples(name: str) -> None:
    for layer in layers_in(SCHEMES[name], name).values():
        assert (layer.weight_scale.dtype, layer.weight_zero_point.dtype) == (torch.bfloat16, torch.float32)
    assert logit_error(name) < 1e-6


PARTS = {1: 8, 2: 4, 3: 10, 4: 2}


def stored(bits: int, N: int, K: int, size: int, **changes: Any) -> tuple[dict[str, Tensor], Tensor]:
    """The tensors of a layer ``a``, and its weight."""
    torch.manual_seed(0)
    groups = torch.randint(0, 1 << bits, (N * K // size, size), dtype=torch.uint8)
    scale, zero = (torch.rand(len(groups), 1).half() * each for each in (0.1, 2.0**bits))
    weight = ((groups - zero.double()) * scale.double()).view(N, K)
    packed = groups
    if bits <= 4:  # parts of the groups, the first in the highest bits
        count = PARTS[bits]
        rows = -(-len(groups) // count)
        padded = torch.cat((groups.int(), torch.zeros(count * rows - len(groups), size, dtype=torch.int32)))
        packed = sum(part << bits * (count - 1 - i) for i, part in enumerate(padded.split(rows)))
        packed = packed if bits == 3 else packed.to(torch.uint8)
    said = {"nbits": bits, "group_size": size, "axis": 1, "shape": [N, K], "view_as_float": 0, **changes}
    numbers = {name: torch.tensor(value) for name, value in said.items() if value is not None}
    tensors = {"W_q": packed, "scale": scale, "zero": zero, **numbers}
    return {f"a.{name}": tensor for name, tensor in tensors.items()}, weight


def load(folder: Path, tensors: dict[str, Tensor], N: int, K: int, method: str | None = "hqq") -> Any:
    save_file(tensors, folder / "model.safetensors")
    config = {} if method is None else {"quantization_config": {"quant_method": method}}
    (folder / "config.json").write_text(json.dumps(config))
    return qgemm.load_quantized(folder, model=linears(a=(N, K)))["a"]


@pytest.mark.parametrize(
    ("bits", "N", "K", "size", "scheme"),
    [
        (4, 6, 96, 32, "int4-32-float-zeros"),
        (4, 5, 128, 64, "int4-64-float-zeros"),  # the halves end within a row
        (4, 4, 48, 48, "int4-channel-float-zeros"),
        (8, 5, 96, 32, "int8-weight-32-float-zeros"),
        (8, 3, 20, 20, "int8-weight-float-zeros"),
        (1, 8, 64, 32, "int4-32-float-zeros"),
        (2, 6, 96, 32, "int4-32-float-zeros"),  # parts end within a row
        (3, 7, 96, 32, "int4-32-float-zeros"),  # 21 groups: the last part has fewer
        (3, 5, 128, 64, "int4-64-float-zeros"),  # ten
        (5, 5, 96, 32, "int8-weight-32-float-zeros"),
        (6, 4, 64, 64, "int8-weight-float-zeros"),
    ],
)
def test_layouts(bits: int, N: int, K: int, size: int, scheme: str, tmp_path: Path) -> None:
    tensors, weight = stored(bits, N, K, size)
    layer = load(tmp_path, tensors, N, K, None if N == 6 else "hqq")
    assert layer.scheme.name == scheme
    assert torch.equal(layer.weight_scale, tensors["a.scale"].view(N, K // size))
    error = (layer.dequantize(torch.float64).weight - weight).abs().amax()
    assert error <= 2.0**-23 * weight.abs().amax() * 2


def test_three_values_are_stored_in_2_bits(tmp_path: Path) -> None:
    tensors, weight = stored(2, 6, 96, 32, nbits=1.58)
    layer = load(tmp_path, tensors, 6, 96)
    assert layer.scheme.name == "int4-32-float-zeros"
    assert (layer.dequantize(torch.float64).weight - weight).abs().amax() <= 2.0**-22 * weight.abs().amax()


def changed(bits: int = 4, **changes: Any) -> dict[str, Tensor]:
    return stored(bits, 4, 64, 32, **changes)[0]


GOOD = changed()
REFUSED: dict[str, tuple[dict[str, Tensor], str]] = {
    "other bits": (
        changed(nbits=7),
        r"a has 7 bits, axis 1; qgemm reads HQQ of 1 to 6 and 8 bits, axis 1, so dequantize",
    ),
    "groups of rows": (changed(axis=0), r"a has 4 bits, axis 0; qgemm reads HQQ of 1 to 6 and 8 bits, axis 1"),
    "groups of 8": (stored(4, 4, 64, 8)[0], r"a has groups of 8 columns; qgemm computes groups of any multiple of 16"),
    "as floats": ({**GOOD, "a.W_q": GOOD["a.W_q"].view(torch.float16)}, r"a.W_q is torch.float16 .* not viewed as fl"),
    "no scale": ({k: v for k, v in GOOD.items() if k != "a.scale"}, r"a.scale is missing"),
    "no zero": ({k: v for k, v in GOOD.items() if k != "a.zero"}, r"a.zero is missing; it must be of a float"),
    "whole zeros": ({**GOOD, "a.zero": GOOD["a.zero"].to(torch.int32)}, r"a.zero is torch.int32"),
    "no bits": (changed(nbits=None), r"a.nbits is None, which doesn't say what the layer is"),
    "a broken group": (changed(group_size=48), r"a has the shape \[4, 64\], in groups of 48 columns"),
    "no shape": (changed(shape=[4]), r"a.shape is \[4\], which doesn't say"),
    "float bits": (changed(nbits=4.0), r"a.nbits is torch.float32 \[\]; it must be a whole number"),
    "other parts of bits": (changed(nbits=1.5), r"a.nbits is torch.float32 \[\]; it must be a whole number"),
    "a size in floats": (changed(group_size=32.0), r"a.group_size is torch.float32 \[\]; it must be a whole number"),
    "too large": (stored(8, 4, 64, 32, nbits=6)[0], r"a.W_q: values go up to \d+; those of 6 bits go up to 63"),
    "words": (changed(nbits=3), r"a.W_q is torch.uint8 \[4, 32\]; it must be torch.int32 \[1, 32\]"),
    "another shape": (changed(shape=[8, 64]), r"a.W_q is torch.uint8 \[4, 32\]; it must be torch.uint8 \[8, 32\]"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str, tmp_path: Path) -> None:
    tensors, message = REFUSED[case]
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path, tensors, 4, 64)


@pytest.mark.parametrize("leaf", ["scale", "zero"])
def test_nan(leaf: str, tmp_path: Path) -> None:
    tensors = changed()
    tensors[f"a.{leaf}"][3] = torch.nan
    with pytest.raises(CheckpointError, match=rf"a\.({leaf}|scale) holds NaN"):
        load(tmp_path, tensors, 4, 64)
