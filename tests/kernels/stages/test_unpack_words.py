"""Every byte unpacked by the programs of words, run by a few lines of Python: values, zero points, and scales."""

import struct

import pytest
import torch
from torch import Tensor

from qgemm.kernels.stages import unpack_words
from tests.kernels.stages.ptx import execute
from tests.kernels.stages.test_unpack import BYTES, DTYPES, TABLES, halves, same, widened

FORMATS = [*TABLES, "int8", "fp8"]
WORDS = BYTES.view(torch.int32).tolist()
EXACT = 1.40625  # a scale of few bits, and one of many
WIDE = 0.0173


def run(name: str, operands: list[int]) -> list[Tensor]:
    """The halves' values of all bytes, float64; ``operands``: what a program takes beside the word."""
    program = unpack_words.WORDS_PTX.value[name]
    dtype = DTYPES[name.split()[1]]
    count = 4 * (2 if name.split()[0] in TABLES else 1)
    found = torch.tensor([execute(program, count, word & 0xFFFFFFFF, *operands) for word in WORDS])
    values = found.to(torch.int32).to(torch.int16).view(dtype).double()
    return [values[:, start : start + 4].flatten() for start in range(0, count, 4)]


def expected(format: str, dtype: str) -> tuple[Tensor, ...]:
    found = halves(DTYPES[dtype], format) if format in TABLES else (widened(DTYPES[dtype], format),)
    return tuple(each.double() for each in found)


def times(format: str, dtype: str) -> tuple[float, float]:
    return {"int4": (1.0, 4.0), "int8": (64.0, 64.0)}.get(format, (1.0, 1.0)) if dtype == "bf16" else (1.0, 1.0)


def twice(value: float, dtype: torch.dtype) -> int:
    return int(torch.tensor([value, value]).to(dtype).view(torch.int32).item()) & 0xFFFFFFFF


def float_bits(value: float) -> int:
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", FORMATS)
def test_every_value(format: str, dtype: str) -> None:
    for found, wanted, factor in zip(
        run(f"{format} {dtype}", []), expected(format, dtype), times(format, dtype), strict=False
    ):
        assert same(found * factor, wanted)


def test_the_bias_may_stay_with_low_halves() -> None:
    low, high = run("int4 bf16 biased", [])
    wanted = expected("int4", "bf16")
    assert torch.equal(low, wanted[0] + unpack_words.INT4_BIAS.value)
    assert torch.equal(high * 4, wanted[1])


@pytest.mark.parametrize("zero", [-8, -3, 0, 7])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", ["int4", "int8"])
def test_zero_points(format: str, dtype: str, zero: int) -> None:
    factors = times(format, dtype)
    if format == "int4":
        bias, last = {"bf16": (136.0, -2.0 - zero / 4), "fp16": (1032.0, -72.0 - zero)}[dtype]
        operands = [bias + zero, last]
    else:
        operands = [zero / factors[0]]
    found = run(f"{format} {dtype} zeros", [twice(each, DTYPES[dtype]) for each in operands])
    for each, wanted, factor in zip(found, expected(format, dtype), factors, strict=False):
        assert torch.equal(each * factor, wanted - zero)


@pytest.mark.parametrize("zero", [0.0, -0.7109375, 1.5, 1000.0])
@pytest.mark.parametrize("scales", ["exact", "float"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", ["int4", "int8"])
def test_float_zero_points(format: str, dtype: str, scales: str, zero: float) -> None:
    """They are added to what the scale makes of a value, and that is rounded once."""
    factors, scale = times(format, dtype), EXACT if scales == "exact" else WIDE
    kind = DTYPES[dtype] if scales == "exact" else torch.float32
    operands = [zero / factor for factor in factors[: 2 if format == "int4" else 1]] + [scale] * len(factors)
    words = [twice(each, kind) if scales == "exact" else float_bits(each) for each in operands]
    found = run(f"{format} {dtype} {scales} float zeros", words[: 4 if format == "int4" else 2])
    for each, wanted, factor in zip(found, expected(format, dtype), factors, strict=False):
        exact = (wanted * scale + zero) / factor
        nearest = exact.to(DTYPES[dtype]).double()
        if scales == "exact":
            assert torch.equal(each, nearest)
        else:
            assert ((each - exact).abs() <= exact.abs() * torch.finfo(DTYPES[dtype]).eps * 0.51 + 1e-7).all()


@pytest.mark.parametrize("scales", ["exact", "rest", "float"])
@pytest.mark.parametrize("format", FORMATS)
def test_scales(format: str, scales: str) -> None:
    """A scale of few bits is one factor; of more, values are as near as the dtype has them, or next to that."""
    dtype = "fp16" if scales == "float" else "bf16"
    scale = EXACT if scales == "exact" else WIDE
    near = float(torch.tensor(scale).bfloat16())
    one = {
        "exact": [twice(scale, torch.bfloat16)],
        "rest": [twice(near, torch.bfloat16), twice(scale - near, torch.bfloat16)],
        "float": [float_bits(scale)],
    }[scales]
    count = 2 if format in TABLES else 1
    for found, wanted, factor in zip(
        run(f"{format} {dtype} {scales}", one * count), expected(format, dtype), times(format, dtype), strict=False
    ):
        exact, eps = wanted * scale, torch.finfo(DTYPES[dtype]).eps
        smallest = torch.finfo(DTYPES[dtype]).smallest_normal * eps
        near_enough = (found * factor - exact).abs() <= exact.abs() * eps * 0.51 + smallest
        assert (near_enough | wanted.isnan()).all()
