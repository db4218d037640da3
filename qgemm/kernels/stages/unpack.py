"""Weights of 4 and 8 bits as tiles that tensor cores multiply: unpacked, and widened to 16 bits, without rounding.

Byte j of a packed block holds the codes of its values j (low half) and ``j + HALF`` (high half), so a tile of bytes
becomes two tiles, of neighbouring blocks of K, in its own layout: no value changes its thread. On NVIDIA's sm_90 and
later that is written in PTX, four bytes in a register, 3 instructions for 8 values of int8 and 12 for 8 of 16 bits,
where the compiler's own conversions take several for each value.

- int8: ``16 q``, the nibble in a byte's upper half, for products that are exact in int32; the 1/16 goes to the scale.
- int4 as 16 bits: the nibble becomes the last bits of 136 + q (bfloat16) or 1032 + q (float16), minus that.
- fp4, fp8: sign, exponent and mantissa are moved into place, and the product by a power of two gives the exponent the
  other bias.
- nf4: looked up byte by byte in a table of 16 values, which registers hold.
- int8 as bfloat16: ``128 + q mod 128``, minus 128 or 256.

``FORMAT`` is a format's name. A tile of fp8 is given as uint8, by its bits, and none is NaN. The functions accept any
layout, so Triton and Gluon kernels share them.
"""

import torch
import triton
import triton.language as tl
from triton.runtime.jit import constexpr_function

from qgemm.kernels.stages.aggregate import INTERPRETING
from qgemm.kernels.stages.epilogue import rounded

# Two bytes of p to the low, or the high, bytes of two 16-bit lanes.
_LOW_LANES = "prmt.b32 t0, {p}, 0, 0x4140; prmt.b32 t1, {p}, 0, 0x4342;"
_HIGH_LANES = "prmt.b32 t0, {p}, 0, 0x1404; prmt.b32 t1, {p}, 0, 0x3424;"
_AND_XOR, _AND_OR, _CHOOSE = "0x6A", "0xEA", "0xCA"  # lop3's (a & b) ^ c, (a & b) | c and a ? b : c

NF4 = tl.constexpr(
    (-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334)
    + (-0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224)
    + (0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0)
)
_UNPACK_INT8 = "{ .reg .b32 t; shl.b32 t, $2, 4; and.b32 $0, t, 0xF0F0F0F0; and.b32 $1, $2, 0xF0F0F0F0; }"


def _unpack(format, kind):
    """Four registers out, of the low and the high half, one in."""
    if format == "nf4":
        return _nf4(kind)
    lines = [".reg .b32 t0, t1, s0, s1, m;"]
    if format == "int4":
        bits = {"bf16": "0x43084308", "f16": "0x64086408"}[kind]  # 136 and 1032, in which bit 3 is set
        lines += [_LOW_LANES.format(p="$4"), "shr.b32 s0, t0, 4; shr.b32 s1, t1, 4;", f"mov.b32 m, {bits};"]
        for out, lanes in enumerate(("t0", "t1", "s0", "s1")):
            lines.append(f"lop3.b32 {lanes}, {lanes}, 0x000F000F, m, {_AND_XOR}; sub.{kind}x2 ${out}, {lanes}, m;")
    else:
        lines += [_HIGH_LANES.format(p="$4"), "shl.b32 s0, t0, 4; shl.b32 s1, t1, 4;"]
        lines += [_floats(f"${out}", lanes, 1, 2, kind) for out, lanes in enumerate(("s0", "s1", "t0", "t1"))]
    return "{" + " ".join(lines) + "}"


def _widen(format, kind):
    """Two registers out, one in."""
    lines = [".reg .b32 t0, t1, s0, s1, m;"]
    if format == "fp8":
        lines.append(_HIGH_LANES.format(p="$2"))
        lines += [_floats(f"${out}", lanes, 3, 4, kind) for out, lanes in enumerate(("t0", "t1"))]
        return "{" + " ".join(lines).replace("s0, s1, ", "") + "}"
    lines.append(_LOW_LANES.format(p="$2"))
    for out, (lanes, sign) in enumerate((("t0", "s0"), ("t1", "s1"))):
        if kind == "f16":  # 1024 + 128 + q
            lines.append(f"lop3.b32 {lanes}, {lanes}, 0x00FF00FF, 0x64806480, {_AND_XOR};")
            lines.append(f"sub.f16x2 ${out}, {lanes}, m;")
        else:
            lines.append(f"lop3.b32 {sign}, {lanes}, 0x00800080, m, {_AND_OR};")
            lines.append(f"lop3.b32 {lanes}, {lanes}, 0x007F007F, m, {_AND_OR};")
            lines.append(f"sub.bf16x2 ${out}, {lanes}, {sign};")
    lines.insert(1, f"mov.b32 m, {'0x64806480' if kind == 'f16' else '0x43004300'};")
    return "{" + " ".join(lines) + "}"


def _floats(out, lanes, mantissa, exponent, kind):
    """Two small floats from the high bytes of two lanes; ``mantissa``, ``exponent``: how many bits they have."""
    to_mantissa, bias = (7, 127) if kind == "bf16" else (10, 15)
    shift = 15 - mantissa - exponent - (to_mantissa - mantissa)
    mask = (1 << mantissa + exponent) - 1 << to_mantissa - mantissa
    power = bias - ((1 << exponent - 1) - 1)  # which the exponents' biases differ by
    factor = bias + power << to_mantissa
    return (
        f"and.b32 m, {lanes}, 0x80008000; shr.b32 {lanes}, {lanes}, {shift}; "
        f"lop3.b32 {lanes}, {lanes}, {mask * 0x10001:#010x}, m, {_AND_OR}; "
        f"mov.b32 m, {factor * 0x10001:#010x}; mul.{kind}x2 {out}, {lanes}, m;"
    )


def _nf4(kind):
    """A nibble chooses a byte of each table of eight: two tables for each byte of a value, by the nibble's last bit."""
    torch_dtype = {"bf16": torch.bfloat16, "f16": torch.float16}[kind]
    values = [each & 0xFFFF for each in torch.tensor(NF4.value).to(torch_dtype).view(torch.int16).tolist()]
    lines = [".reg .b32 p, q, m, a, b, c;"]
    for pair in range(2):
        # m: the masks of the bytes whose nibbles' last bits are set.
        lines.append(f"shr.b32 p, $4, {16 * pair}; shl.b32 q, p, 4; prmt.b32 m, q, p, 0xD9C8; and.b32 p, p, 0x7777;")
        for out, shift in (("a", 0), ("c", 8)):
            words = [sum((values[start + i] >> shift & 0xFF) << 8 * i for i in range(4)) for start in (0, 4, 8, 12)]
            lines.append(
                f"prmt.b32 {out}, {words[0]:#x}, {words[1]:#x}, p; prmt.b32 b, {words[2]:#x}, {words[3]:#x}, p;"
            )
            lines.append(f"lop3.b32 {out}, m, b, {out}, {_CHOOSE};")
        lines.append(f"prmt.b32 ${pair}, a, c, 0x6240; prmt.b32 ${2 + pair}, a, c, 0x7351;")
    return "{" + " ".join(lines) + "}"


_KINDS = (("bf16", "bf16"), ("fp16", "f16"))  # as Triton and PTX call them
PTX = tl.constexpr(
    {
        "int4 int8": _UNPACK_INT8,
        **{f"{format} {name}": _unpack(format, kind) for format in ("int4", "fp4", "nf4") for name, kind in _KINDS},
        **{f"{format} {name}": _widen(format, kind) for format in ("int8", "fp8") for name, kind in _KINDS},
    }
)
"""By formats, from and to. Kernels can't call what makes it."""


@constexpr_function
def assembly(format, dtype):
    """The PTX that makes values of ``format`` ones of ``dtype``; None where there is none, or not for the target."""
    if INTERPRETING or dtype == tl.float32 or not tl.target_info.cuda_capability_geq(9, 0):
        return None
    return PTX.value[f"{format} {dtype}"]


@triton.jit
def unpack_int8(packed):
    """``16 q`` of int4, int8: the tiles of the low and of the high half of uint8 ``packed``."""
    ASSEMBLY: tl.constexpr = assembly("int4", tl.int8)
    if ASSEMBLY is not None:
        return tl.inline_asm_elementwise(ASSEMBLY, "=r,=r,r", [packed], (tl.int8, tl.int8), is_pure=True, pack=4)
    else:
        return (packed << 4).to(tl.int8, bitcast=True), (packed & 0xF0).to(tl.int8, bitcast=True)


@triton.jit
def unpack(packed, FORMAT: tl.constexpr, DTYPE: tl.constexpr):
    """The values of "int4", "fp4" or "nf4" as ``DTYPE``: the tiles of the low and the high half of uint8 ``packed``.

    They are exact but for nf4's, which are float32 and rounded.
    """
    ASSEMBLY: tl.constexpr = assembly(FORMAT, DTYPE)
    if ASSEMBLY is not None:
        return tl.inline_asm_elementwise(
            ASSEMBLY, "=r,=r,=r,=r,r", [packed], (DTYPE.value, DTYPE.value), is_pure=True, pack=4
        )
    else:
        return _decoded(packed & 15, FORMAT, DTYPE), _decoded(packed >> 4, FORMAT, DTYPE)


@triton.jit
def widen(values, FORMAT: tl.constexpr, DTYPE: tl.constexpr):
    """The values of "int8", int8, or of "fp8", uint8, as ``DTYPE``, exactly."""
    ASSEMBLY: tl.constexpr = assembly(FORMAT, DTYPE)
    if ASSEMBLY is not None:
        return tl.inline_asm_elementwise(ASSEMBLY, "=r,=r,r", [values], DTYPE.value, is_pure=True, pack=4)
    elif FORMAT == "int8":
        return values.to(tl.float32).to(DTYPE)
    else:
        return fp8_value(values).to(DTYPE)


@triton.jit
def fp8_value(bits):
    """float32 of e4m3 values, uint8 ``bits``."""
    return _signed(_small_float(bits & 127, 3, 1.0 / 512), bits >> 7)


@triton.jit
def _decoded(codes, FORMAT: tl.constexpr, DTYPE: tl.constexpr):
    if FORMAT == "int4":
        return ((codes ^ 8).to(tl.int32) - 8).to(tl.float32).to(DTYPE)
    elif FORMAT == "fp4":
        return _signed(_small_float(codes & 7, 1, 0.5), codes >> 3).to(DTYPE)
    else:
        return rounded(_nf4_value(codes, 0, 16), DTYPE)


@triton.jit
def _small_float(bits, MANTISSA: tl.constexpr, SMALLEST: tl.constexpr):
    """The float32 of a float without sign whose ``MANTISSA`` last bits are that; ``SMALLEST``: that of 1."""
    bits = bits.to(tl.int32)
    exponent = tl.maximum((bits >> MANTISSA) - 1, 0)
    whole = tl.where(bits >> MANTISSA == 0, bits, (bits & ((1 << MANTISSA) - 1)) | (1 << MANTISSA))
    return (whole << exponent).to(tl.float32) * SMALLEST


@triton.jit
def _signed(magnitudes, negative):
    return tl.where(negative != 0, -magnitudes, magnitudes)


@triton.jit
def _nf4_value(codes, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """The value of codes, of which ``COUNT`` from ``FIRST`` on are left to choose from."""
    if COUNT == 1:
        return tl.full(codes.shape, nf4_value(FIRST), tl.float32)
    else:
        HALF: tl.constexpr = COUNT // 2
        low = _nf4_value(codes, FIRST, HALF)
        return tl.where(codes >= FIRST + HALF, _nf4_value(codes, FIRST + HALF, HALF), low)


@constexpr_function
def nf4_value(code):
    """The value of a code."""
    return NF4[code]
