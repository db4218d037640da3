"""Every byte unpacked and widened: by kernels of a few lines, and by the PTX of theirs, run by Python."""

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from qgemm.kernels.stages import unpack
from tests.kernels.stages.ptx import execute

BYTES = torch.arange(256, dtype=torch.uint8)
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
TABLES = {
    "int4": torch.tensor([*range(8), *range(-8, 0)], dtype=torch.float32),
    "fp4": torch.tensor(E2M1 + [-value for value in E2M1]),
    **{name: torch.tensor(values) for name, values in unpack.CODEBOOKS.value.items()},
}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def halves(dtype: torch.dtype, format: str) -> tuple[Tensor, Tensor]:
    table = TABLES[format].to(dtype)
    return table[BYTES.int() & 15], table[BYTES.int() >> 4]


def widened(dtype: torch.dtype, format: str) -> Tensor:
    return BYTES.view({"int8": torch.int8, "fp8": torch.float8_e4m3fn}[format]).to(dtype)


@triton.jit
def unpack_kernel(packed, low, high, FORMAT: tl.constexpr):
    offsets = tl.arange(0, 256)
    first, second = unpack.unpack(tl.load(packed + offsets), FORMAT, low.dtype.element_ty)
    tl.store(low + offsets, first)
    tl.store(high + offsets, second)


@triton.jit
def widen_kernel(values, out, FORMAT: tl.constexpr):
    offsets = tl.arange(0, 256)
    tl.store(out + offsets, unpack.widen(tl.load(values + offsets), FORMAT, out.dtype.element_ty))


@triton.jit
def unpack_pairs_kernel(pairs, low, high, FORMAT: tl.constexpr):
    offsets = tl.arange(0, 2)[:, None] * 64 + tl.arange(0, 64)[None, :]
    first, second = unpack.unpack_pairs(tl.load(pairs + offsets), FORMAT, low.dtype.element_ty)
    offsets = tl.arange(0, 2)[:, None] * 128 + tl.arange(0, 128)[None, :]
    tl.store(low + offsets, first)
    tl.store(high + offsets, second)


@triton.jit
def widen_pairs_kernel(pairs, out):
    offsets = tl.arange(0, 2)[:, None] * 64 + tl.arange(0, 64)[None, :]
    values = unpack.widen_pairs(tl.load(pairs + offsets), out.dtype.element_ty)
    tl.store(out + tl.arange(0, 2)[:, None] * 128 + tl.arange(0, 128)[None, :], values)


@pytest.mark.parametrize("format", TABLES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_halves_of_every_byte(format: str, dtype: torch.dtype, device: torch.device) -> None:
    for kernel, packed in ((unpack_kernel, BYTES), (unpack_pairs_kernel, BYTES.view(torch.uint16))):
        low, high = (torch.empty(256, dtype=dtype, device=device) for _ in range(2))
        kernel[(1,)](packed.to(device), low, high, format)
        for found, expected in zip((low, high), halves(dtype, format), strict=True):
            assert torch.equal(found.cpu(), expected)


@pytest.mark.parametrize("format", ["int8", "fp8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_byte_widened(format: str, dtype: torch.dtype, device: torch.device) -> None:
    out = torch.empty(256, dtype=dtype, device=device)
    widen_kernel[(1,)]((BYTES.view(torch.int8) if format == "int8" else BYTES).to(device), out, format)
    assert same(out.cpu(), widened(dtype, format))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_byte_of_pairs_widened(dtype: torch.dtype, device: torch.device) -> None:
    out = torch.empty(256, dtype=dtype, device=device)
    widen_pairs_kernel[(1,)](BYTES.view(torch.uint16).to(device), out)
    assert same(out.cpu(), widened(dtype, "fp8"))


def same(found: Tensor, expected: Tensor) -> bool:
    """Whether all are equal but where NaN is expected."""
    return torch.equal(found.where(~expected.isnan(), 0), expected.nan_to_num(0.0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", [*TABLES, "fp8"])
def test_the_assembly_of_pairs(format: str, dtype: str) -> None:
    program = unpack.PTX.value[f"{format} {dtype} pair"]
    outputs = 4 if format in TABLES else 2
    found = [execute(program, outputs, word & 0xFFFF) for word in BYTES.view(torch.int16).tolist()]
    bits = [torch.tensor([each[i : i + 2] for each in found]).reshape(-1) for i in range(0, outputs, 2)]
    expected = halves(DTYPES[dtype], format) if format in TABLES else (widened(DTYPES[dtype], format),)
    for each, values in zip(bits, expected, strict=True):
        assert same(each.to(torch.int32).to(torch.int16).view(DTYPES[dtype]), values)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", TABLES)
def test_the_assembly_of_halves(format: str, dtype: str) -> None:
    out = run(unpack.PTX.value[f"{format} {dtype}"], 4)
    for found, expected in zip((out[:2], out[2:]), halves(DTYPES[dtype], format), strict=True):
        assert torch.equal(lanes(found).view(DTYPES[dtype]), expected)


BF16_SCALES = torch.tensor([0.0117, -0.0153, 1.0, -3.5e-12, 1.0e6, 3.0]).bfloat16()
E4M3_SCALES = torch.tensor([0.0117, -1.5, 1.0, 448.0, 2.0**-9, 0.0, -(2.0**-7), 3.25]).to(torch.float8_e4m3fn)
EXPONENTS = torch.tensor([127, 90, 120, 153, 40, 121, 127, 33], dtype=torch.uint8)


@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize(
    ("format", "scales", "values"),
    [
        ("int4", BF16_SCALES, BF16_SCALES.float()),
        ("fp4", E4M3_SCALES, E4M3_SCALES.float()),
        ("fp4", EXPONENTS, 2.0 ** (EXPONENTS.float() - 127)),
    ],
)
def test_the_assembly_that_scales(format: str, scales: Tensor, values: Tensor, half: int) -> None:
    """One rounding, of the exact product, for scales of any size and sign, from words of several."""
    kind = {torch.uint8: "uint8", torch.float8_e4m3fn: "int8", torch.bfloat16: f"bf16 {half}"}[scales.dtype]
    words, count = scales.view(torch.int32).tolist(), 4 // scales.itemsize
    for at, value in enumerate(values):
        factors = execute(unpack.PTX.value[f"factors {format} {kind} {at % count}"], 2, words[at // count] & 0xFFFFFFFF)
        found = multiplied(unpack.PTX.value[f"times {format} bf16 {half}"], factors)
        expected = (halves(torch.float32, format)[half] * value).bfloat16()
        assert torch.equal(found.float(), expected.float() * unpack.SCALED_BY.value)


@pytest.mark.parametrize("half", [0, 1])
def test_the_assembly_that_scales_a_row(half: int) -> None:
    """As above, with a scale for all codes of a row."""
    program = unpack.PTX.value[f"scaled int4 bf16 {half}"]
    for scale in BF16_SCALES:
        factors = [scale.float() * unpack._STEPS.value[half], scale.float() * (-8 * unpack.SCALED_BY.value)]
        words = [each.bfloat16().view(torch.int16).item() & 0xFFFF for each in factors]
        expected = (halves(torch.float32, "int4")[half] * scale.float()).bfloat16()
        assert torch.equal(multiplied(program, words).float(), expected.float() * unpack.SCALED_BY.value)


def multiplied(program: str, factors: list[int]) -> Tensor:
    """bfloat16 of every byte, in order, from ``program`` with these factors."""
    found = [execute(program, 2, word & 0xFFFF, *factors) for word in BYTES.view(torch.int16).tolist()]
    return torch.tensor(found).reshape(-1).to(torch.int32).to(torch.int16).view(torch.bfloat16)


@pytest.mark.parametrize(("format", "half"), [("int4", 0), ("int4", 1), ("int8", 0)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_assembly_of_codes(dtype: str, format: str, half: int) -> None:
    """A multiply-add makes values less their zero points of them, exactly: with any zero point of as many bits."""
    kind = DTYPES[dtype]
    program = unpack.PTX.value[f"codes {format} {dtype} {half}"]
    found = [execute(program, 2, word & 0xFFFF) for word in BYTES.view(torch.int16).tolist()]
    codes = torch.tensor(found).reshape(-1).to(torch.int32).to(torch.int16).view(kind).double()
    factor, offset, times = unpack.of_codes(format, getattr(tl, {"bf16": "bfloat16", "fp16": "float16"}[dtype]), half)
    values = halves(torch.float32, "int4")[half] if format == "int4" else widened(torch.float32, "int8")
    assert factor == torch.tensor(factor, dtype=kind).double()
    for zero in range(-128, 128) if format == "int8" else range(-16, 17):
        minus = torch.tensor(-(offset + zero) / times, dtype=kind).double()
        expected = (values.double() - zero) / times
        assert torch.equal(codes * factor + minus, expected)
        assert torch.equal(expected.to(kind).double(), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", ["int8", "fp8"])
def test_the_assembly_that_widens(format: str, dtype: str) -> None:
    out = run(unpack.PTX.value[f"{format} {dtype}"], 2)
    assert same(lanes(out).view(DTYPES[dtype]), widened(DTYPES[dtype], format))


def lanes(registers: list[list[int]]) -> Tensor:
    """The 16-bit lanes of pairs of registers, in order; of each pair there are 64."""
    return torch.tensor(registers, dtype=torch.int64).T.reshape(-1).to(torch.int32).view(torch.int16)


def run(assembly: str, outputs: int) -> list[list[int]]:
    """What the output registers hold for each four of ``BYTES``, as signed numbers."""
    found = [execute(assembly, outputs, word & 0xFFFFFFFF) for word in BYTES.view(torch.int32).tolist()]
    return [[value - (value >> 31 << 32) for value in each] for each in zip(*found, strict=True)]
