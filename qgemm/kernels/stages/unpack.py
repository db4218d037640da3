"""Weights of 4 and 8 bits as tiles that tensor cores multiply: unpacked, and widened to 16 bits, without rounding.

Byte j of a packed block holds the codes of its values j (low half) and ``j + HALF`` (high half), so a tile of bytes
becomes two tiles, of neighbouring blocks of K, in its own layout: no value changes its thread. On NVIDIA's sm_90 and
later that is written in PTX, four bytes in a register, 12 instructions for 8 values, where the compiler's own
conversions take several for each.

- int4 as 16 bits: the nibble becomes the last bits of 136 + q (bfloat16) or 1032 + q (float16), minus that.
- fp4, fp8: sign, exponent and mantissa are moved into place, and the product by a power of two gives the exponent the
  other bias.
- nf4, as any codebook: looked up byte by byte in a table of 16 values, which registers hold.
- int8 as bfloat16: ``128 + q mod 128``, minus 128 or 256.
- pairs of int4 and int8: the code's bits as those of a small number, from which one multiply-add makes a value, or in
  bfloat16 a 64th of it, less the zero point.

``FORMAT`` is a format's name. A tile of fp8 is given as uint8, by its bits, and none is NaN. The functions accept any
layout, so Triton and Gluon kernels share them.
"""

import torch
import triton
import triton.language as tl
from triton.runtime.jit import constexpr_function

from qgemm.kernels.stages.aggregate import INTERPRETING
from qgemm.kernels.stages.epilogue import rounded
from qgemm.numerics.formats import FORMATS

AND_XOR, _AND_OR, _CHOOSE = "0x6A", "0xEA", "0xCA"  # lop3's (a & b) ^ c, (a & b) | c and a ? b : c

OF_4_BITS, OF_8_BITS = ([name for name, form in FORMATS.items() if form.bits == bits] for bits in (4, 8))
"""The names of formats."""

CODEBOOKS = tl.constexpr({name: form.table for name, form in FORMATS.items() if form.has_codebook})
"""The values of codes by a format's name."""


def _scaled_fp4(word, outs, scales):
    """Registers ``outs`` of the fp4 codes in ``word``, times those in ``scales``, in bfloat16.

    The first has the low codes of bytes 0 and 2, the second of 1 and 3, the others the high codes: so bits stay in
    their half of a register, and are masked where shifts have brought them.
    """
    each = enumerate(zip(outs, scales, strict=True))
    return " ".join(_scaled_nibble(word, nibble, out, scale) for nibble, (out, scale) in each)


def _scaled_nibble(lanes, nibble, out, scale):
    """Register ``out`` of the ``nibble``-th fp4 code in each half of ``lanes``, times ``scale``, in bfloat16."""
    to_sign, to_rest = 12 - 4 * nibble, 6 - 4 * nibble
    return (
        f"shl.b32 t, {lanes}, {to_sign}; and.b32 m, t, 0x80008000; "
        f"{'shl' if to_rest > 0 else 'shr'}.b32 s, {lanes}, {abs(to_rest)}; "
        f"lop3.b32 s, s, 0x01C001C0, m, {_AND_OR}; mov.b32 m, 0x7E807E80; "  # 2^126
        f"mul.bf16x2 s, s, m; mul.bf16x2 {out}, s, {scale};"
    )


def unpacked(format, kind, word, pair, low, high):
    """Registers ``low`` and ``high`` of the codes in bytes 0 and 1 of ``word``; in 2 and 3 if ``pair`` is 1."""
    if FORMATS[format].has_codebook:
        return _looked_up(format, kind, word, pair, low, high)
    if format == "int4":
        bits = {"bf16": "0x43084308", "f16": "0x64086408"}[kind]  # 136 and 1032, in which bit 3 is set
        lines = [f"prmt.b32 t, {word}, 0, {('0x4140', '0x4342')[pair]}; shr.b32 s, t, 4; mov.b32 m, {bits};"]
        for out, lanes in ((low, "t"), (high, "s")):
            lines.append(f"lop3.b32 {lanes}, {lanes}, 0x000F000F, m, {AND_XOR}; sub.{kind}x2 {out}, {lanes}, m;")
        return " ".join(lines)
    lanes = f"prmt.b32 t, {word}, 0, {('0x1404', '0x3424')[pair]}; shl.b32 s, t, 4;"
    return " ".join([lanes, _float(kind, "s", 1, 2, low), _float(kind, "t", 1, 2, high)])


def widened(format, kind, word, pair, out):
    """Register ``out`` of two bytes of ``word``."""
    if format == "fp8":
        return f"prmt.b32 t, {word}, 0, {('0x1404', '0x3424')[pair]}; " + _float(kind, "t", 3, 4, out)
    lanes = f"prmt.b32 t, {word}, 0, {('0x4140', '0x4342')[pair]};"
    if kind == "f16":  # 1024 + 128 + q
        return f"{lanes} mov.b32 m, 0x64806480; lop3.b32 t, t, 0x00FF00FF, m, {AND_XOR}; sub.f16x2 {out}, t, m;"
    return (
        f"{lanes} mov.b32 m, 0x43004300; lop3.b32 s, t, 0x00800080, m, {_AND_OR}; "
        f"lop3.b32 t, t, 0x007F007F, m, {_AND_OR}; sub.bf16x2 {out}, t, s;"
    )


def _float(kind, lanes, mantissa, exponent, out):
    """Small floats in the upper bytes of two lanes; ``mantissa``, ``exponent``: how many bits they have."""
    to_mantissa, bias = (7, 127) if kind == "bf16" else (10, 15)
    shift = 15 - exponent - to_mantissa
    mask = (1 << mantissa + exponent) - 1 << to_mantissa - mantissa
    power = bias - ((1 << exponent - 1) - 1)  # which the exponents' biases differ by
    return (
        f"and.b32 m, {lanes}, 0x80008000; shr.b32 {lanes}, {lanes}, {shift}; "
        f"lop3.b32 {lanes}, {lanes}, {mask * 0x10001:#x}, m, {_AND_OR}; "
        f"mov.b32 m, {(bias + power << to_mantissa) * 0x10001:#x}; mul.{kind}x2 {out}, {lanes}, m;"
    )


def _looked_up(format, kind, word, pair, low, high):
    """A nibble chooses a byte of each table of eight: two tables for each byte of a value, by the nibble's last bit."""
    dtype = {"bf16": torch.bfloat16, "f16": torch.float16}[kind]
    table = FORMATS[format].decode(torch.arange(16, dtype=torch.uint8, device="cpu"))
    values = [each & 0xFFFF for each in table.to(dtype).view(torch.int16).tolist()]
    # m: the masks of the bytes whose nibbles' last bits are set.
    lines = [f"shr.b32 t, {word}, {16 * pair}; shl.b32 s, t, 4; prmt.b32 m, s, t, 0xD9C8; and.b32 t, t, 0x7777;"]
    for out, shift in (("a", 0), ("c", 8)):
        words = [sum((values[start + i] >> shift & 0xFF) << 8 * i for i in range(4)) for start in (0, 4, 8, 12)]
        lines.append(f"prmt.b32 {out}, {words[0]:#x}, {words[1]:#x}, t; prmt.b32 b, {words[2]:#x}, {words[3]:#x}, t;")
        lines.append(f"lop3.b32 {out}, m, b, {out}, {_CHOOSE};")
    lines.append(f"prmt.b32 {low}, a, c, 0x6240; prmt.b32 {high}, a, c, 0x7351;")
    return " ".join(lines)


def _programs():
    """PTX by what it makes of what. Of ``$`` numbers the first are out, the last is in."""
    found = {"scaled fp4 bf16": _scaled_fp4("$4", ("$0", "$2", "$1", "$3"), ("$5", "$7", "$5", "$7"))}
    lines = ["prmt.b32 a, $4, 0, 0x4140;"]
    for nibble, (out, scale) in enumerate((("u", "$5"), ("v", "$6"))):
        lines.append(_scaled_nibble("a", nibble, out, scale))
    found["scaled fp4 bf16 pair"] = " ".join([*lines, "mov.b32 {$0, $1}, u; mov.b32 {$2, $3}, v;"])
    # Codes as the last bits of a subnormal number, or four bits on, where the smallest normal numbers go on as evenly.
    for half, mask, flip in ((0, 0x000F000F, 0x00080008), (1, 0x00F000F0, 0x00800080)):
        codes = f"prmt.b32 t, $2, 0, 0x4140; lop3.b32 t, t, {mask:#x}, {flip:#x}, {AND_XOR};"
        found[f"scaled int4 bf16 {half}"] = (
            codes + " mov.b32 a, {$3, $3}; mov.b32 b, {$4, $4}; fma.rn.bf16x2 u, t, a, b; mov.b32 {$0, $1}, u;"
        )
        found[f"times int4 bf16 {half}"] = codes + " fma.rn.bf16x2 u, t, $3, $4; mov.b32 {$0, $1}, u;"
        found[f"codes int4 bf16 {half}"] = codes + " mov.b32 {$0, $1}, t;"
        magic = 0x64006400 | flip  # 1024
        found[f"codes int4 fp16 {half}"] = (
            f"prmt.b32 t, $2, 0, 0x4140; lop3.b32 t, t, {mask:#x}, {magic:#x}, {AND_XOR}; mov.b32 {{$0, $1}}, t;"
        )
        # One product moves the sign and, as bits of a subnormal or small number, the rest: they are 6 bits apart.
        found[f"times fp4 bf16 {half}"] = (
            f"prmt.b32 t, $2, 0, 0x4140; and.b32 t, t, {mask:#x}; mul.lo.u32 t, t, {0x1040 >> 4 * half:#x}; "
            "and.b32 t, t, 0x81C081C0; mul.bf16x2 u, t, $3; mov.b32 {$0, $1}, u;"
        )
    for half, step in enumerate((0x72007200, 0x70007000)):  # 2^101 and 2^97, which codes lack, and -8 * 2^-32
        for index, twice in enumerate(("0x1010", "0x3232")):
            found[f"factors int4 bf16 {half} {index}"] = (
                f"prmt.b32 t, $2, 0, {twice}; mov.b32 a, {step:#x}; mov.b32 b, 0xB100B100; "
                "mul.bf16x2 $0, t, a; mul.bf16x2 $1, t, b;"
            )
    for index in range(4):
        found[f"factors fp4 uint8 {index}"] = (
            f"prmt.b32 t, $2, 0, {0x4040 + 0x101 * index:#x}; shl.b32 t, t, 7; mov.b32 m, 0x00400040; "
            "max.u16x2 t, t, m; mov.b32 a, 0x6E806E80; mul.bf16x2 $0, t, a; mov.b32 $1, $0;"  # 2^94
        )
        found[f"factors fp4 int8 {index}"] = (
            f"prmt.b32 t, $2, 0, {0x0404 + 0x1010 * index:#x}; {_float('bf16', 't', 3, 4, 't')} "
            "mov.b32 a, 0x6E806E80; mul.bf16x2 $0, t, a; mov.b32 $1, $0;"
        )
    for name, kind in (("bf16", "bf16"), ("fp16", "f16")):
        for format in OF_4_BITS:
            both = [unpacked(format, kind, "$4", pair, f"${pair}", f"${2 + pair}") for pair in (0, 1)]
            found[f"{format} {name}"] = " ".join(both)
            pair = unpacked(format, kind, "$4", 0, "u", "v") + " mov.b32 {$0, $1}, u; mov.b32 {$2, $3}, v;"
            found[f"{format} {name} pair"] = pair
        for format in OF_8_BITS:
            found[f"{format} {name}"] = " ".join(widened(format, kind, "$2", pair, f"${pair}") for pair in (0, 1))
        found[f"fp8 {name} pair"] = widened("fp8", kind, "$2", 0, "u") + " mov.b32 {$0, $1}, u;"
    for name, flip in (("bf16", "0x00800080"), ("fp16", "0x64806480")):
        found[f"codes int8 {name} 0"] = f"prmt.b32 t, $2, 0, 0x4140; xor.b32 t, t, {flip}; mov.b32 {{$0, $1}}, t;"
    return {name: "{ .reg .b32 t, s, m, a, b, c, u, v; " + text + " }" for name, text in found.items()}


PTX = tl.constexpr(_programs())
"""Made beforehand: kernels can't call what makes it."""


@constexpr_function
def assembly(format, dtype, pair=""):
    """The PTX that makes values of ``format`` ones of ``dtype``; None where there is none, or not for the target."""
    if INTERPRETING or dtype == tl.float32 or not tl.target_info.cuda_capability_geq(9, 0):
        return None
    return PTX.value[f"{format} {dtype}{pair}"]


@triton.jit
def unpack(packed, FORMAT: tl.constexpr, DTYPE: tl.constexpr):
    """The values of 4 bits as ``DTYPE``: the tiles of the low and the high half of uint8 ``packed``.

    They are exact but for those of a codebook, which are float32 and rounded.
    """
    ASSEMBLY: tl.constexpr = assembly(FORMAT, DTYPE)
    if ASSEMBLY is not None:
        return tl.inline_asm_elementwise(
            ASSEMBLY, "=r,=r,=r,=r,r", [packed], (DTYPE.value, DTYPE.value), is_pure=True, pack=4
        )
    else:
        return _decoded(packed & 15, FORMAT, DTYPE), _decoded(packed >> 4, FORMAT, DTYPE)


@triton.jit
def unpack_scaled(packed, low_scale, high_scale):
    """fp4 values times powers of two, bfloat16 ``*_scale`` of their shape, on Hopper.

    Exact where the product is a bfloat16. The inner two of each four are swapped, and the scales of all four are one.
    """
    return tl.inline_asm_elementwise(
        assembly("scaled fp4", tl.bfloat16), "=r,=r,=r,=r,r,r,r,r,r", [packed, low_scale, high_scale],
        (tl.bfloat16, tl.bfloat16), is_pure=True, pack=4,
    )  # fmt: skip


@triton.jit
def unpack_scaled_pairs(pairs, low_scale, high_scale):
    """fp4 values times powers of two, on Hopper, of two neighbouring bytes in each uint16: two tiles ``[n, 2 k]``.

    ``*_scale``: uint32 of the shape of ``pairs``, the same bfloat16 in both halves.
    """
    SHAPE: tl.constexpr = [pairs.shape[0], 2 * pairs.shape[1]]
    a, b, c, d = tl.inline_asm_elementwise(
        assembly("scaled fp4", tl.bfloat16, " pair"), "=h,=h,=h,=h,r,r,r", [pairs.to(tl.uint32), low_scale, high_scale],
        (tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=1,
    )  # fmt: skip
    return tl.join(a, b).reshape(SHAPE), tl.join(c, d).reshape(SHAPE)


@triton.jit
def exponent_pairs(two):
    """The powers of 2 with the two exponents in each uint16, on Hopper: uint32 with a bfloat16 in both halves."""
    ASSEMBLY: tl.constexpr = EXPONENTS
    return tl.inline_asm_elementwise(
        ASSEMBLY, "=r,=r,r", [two.to(tl.uint32)], (tl.uint32, tl.uint32), is_pure=True, pack=1
    )


EXPONENTS = tl.constexpr(
    "{ .reg .b32 t, m; prmt.b32 t, $2, 0, 0x4140; shl.b32 t, t, 7; mov.b32 m, 0x00400040; max.u16x2 t, t, m; "
    "prmt.b32 $0, t, 0, 0x1010; prmt.b32 $1, t, 0, 0x3232; }"
)
"""The smallest power has no exponent of its own."""


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
    wide = bits.to(tl.int32)
    # The bits of a float32 that is too small by the difference of the exponents' biases.
    return (((wide & 127) << 20) | (wide >> 7 << 31)).to(tl.float32, bitcast=True) * 2.0**120


@triton.jit
def scale_value(raw):
    """float32 of scales as they are stored: floats, uint8 exponents of powers of 2, or the bits of e4m3 as int8."""
    if raw.dtype == tl.uint8:
        # The smallest has no exponent of its own.
        return tl.maximum(raw.to(tl.int32) << 23, 1 << 22).to(tl.float32, bitcast=True)
    elif raw.dtype == tl.int8:
        return fp8_value(raw.to(tl.uint8, bitcast=True))
    else:
        return raw.to(tl.float32)


@triton.jit
def unpack_pairs(pairs, FORMAT: tl.constexpr, DTYPE: tl.constexpr):
    """As ``unpack``, of two neighbouring bytes in each uint16, ``[n, k]``: two tiles ``[n, 2 k]``.

    The layout of ``pairs`` may be one of which tensor cores want twice as many values along K.
    """
    ASSEMBLY: tl.constexpr = assembly(FORMAT, DTYPE, " pair")
    SHAPE: tl.constexpr = [pairs.shape[0], 2 * pairs.shape[1]]
    if ASSEMBLY is not None:
        a, b, c, d = tl.inline_asm_elementwise(
            ASSEMBLY, "=h,=h,=h,=h,r", [pairs.to(tl.uint32)], (DTYPE.value, DTYPE.value, DTYPE.value, DTYPE.value),
            is_pure=True, pack=1,
        )  # fmt: skip
        return tl.join(a, b).reshape(SHAPE), tl.join(c, d).reshape(SHAPE)
    else:
        packed = tl.join((pairs & 255).to(tl.uint8), (pairs >> 8).to(tl.uint8)).reshape(SHAPE)
        return unpack(packed, FORMAT, DTYPE)


SCALED_BY = tl.constexpr(2.0**-32)
"""What ``unpack_times_scale`` gives is multiplied by, so that its factors are no larger than bfloat16's largest."""
_STEPS = tl.constexpr((2.0**133 * 2.0**-32, 2.0**129 * 2.0**-32))


@triton.jit
def unpack_times_scale(pairs, scale, HALF: tl.constexpr):
    """``q * scale * SCALED_BY`` of int4 as bfloat16, rounded once: ``[n, 2 k]`` of a half of ``pairs``, ``[n, k]``.

    ``scale``: of rows, float32 of bfloat16 values, below 2^27. ``q + 8``, as bits, is a subnormal number: that many of
    the smallest steps. A product and a sum make ``(q + 8) * scale - 8 * scale`` of it, and nothing is taken away first.
    """
    SHAPE: tl.constexpr = [pairs.shape[0], 2 * pairs.shape[1]]
    factor = (scale * _STEPS.value[HALF]).to(tl.bfloat16)[:, None]
    minus = (scale * (-8 * SCALED_BY)).to(tl.bfloat16)[:, None]
    ASSEMBLY: tl.constexpr = assembly("scaled int4", tl.bfloat16, " 0" if HALF == 0 else " 1")
    a, b = tl.inline_asm_elementwise(
        ASSEMBLY, "=h,=h,r,h,h", [pairs.to(tl.uint32), factor, minus], (tl.bfloat16, tl.bfloat16), is_pure=True, pack=1
    )
    return tl.join(a, b).reshape(SHAPE)


@constexpr_function
def _program(start, format, scale, half, *index):
    """The PTX that starts with ``start``. Factors of scales of 8 bits are the same for both halves."""
    what = str(scale) if str(scale) in ("uint8", "int8") else f"bf16 {half}"
    return PTX.value[" ".join([start, format, what, *map(str, index)])]


@triton.jit
def factors_of_codes(words, INDEX: tl.constexpr, SCALE: tl.constexpr, FORMAT: tl.constexpr, HALF: tl.constexpr):
    """What codes are multiplied by, and what is then added, for ``unpack_times``: a bfloat16 twice in an int32.

    ``words``: int32 of several scales of the dtype ``SCALE``, below 2^27, of fp4 below 2^34, of which the ``INDEX``-th
    is meant. To fp4 nothing is added.
    """
    ASSEMBLY: tl.constexpr = _program("factors", FORMAT, SCALE, HALF, INDEX)
    return tl.inline_asm_elementwise(ASSEMBLY, "=r,=r,r", [words], (tl.int32, tl.int32), is_pure=True, pack=1)


@triton.jit
def unpack_times(pairs, factor, added, FORMAT: tl.constexpr, HALF: tl.constexpr):
    """As ``unpack_times_scale``, of int4 or fp4, with ``factor`` and ``added`` of ``factors_of_codes`` for each pair.

    The bits of fp4, moved, are a number that is too small by a power of two.
    """
    SHAPE: tl.constexpr = [pairs.shape[0], 2 * pairs.shape[1]]
    ASSEMBLY: tl.constexpr = _program("times", FORMAT, None, HALF)
    a, b = tl.inline_asm_elementwise(
        ASSEMBLY, "=h,=h,r,r,r", [pairs.to(tl.uint32), factor, added], (tl.bfloat16, tl.bfloat16), is_pure=True, pack=1
    )
    return tl.join(a, b).reshape(SHAPE)


@triton.jit
def widen_pairs(pairs, DTYPE: tl.constexpr):
    """As ``widen``, of fp8, two neighbouring bytes in each uint16, ``[n, k]``: a tile ``[n, 2 k]``."""
    ASSEMBLY: tl.constexpr = assembly("fp8", DTYPE, " pair")
    SHAPE: tl.constexpr = [pairs.shape[0], 2 * pairs.shape[1]]
    if ASSEMBLY is not None:
        a, b = tl.inline_asm_elementwise(
            ASSEMBLY, "=h,=h,r", [pairs.to(tl.uint32)], (DTYPE.value, DTYPE.value), is_pure=True, pack=1
        )
        return tl.join(a, b).reshape(SHAPE)
    else:
        values = tl.join((pairs & 255).to(tl.uint8), (pairs >> 8).to(tl.uint8)).reshape(SHAPE)
        return widen(values, "fp8", DTYPE)


@constexpr_function
def of_codes(format, dtype, half):
    """``factor``, ``offset`` and ``times``: ``codes_of_pairs * factor - offset / times`` is ``q / times``, exactly.

    So it is with a zero point added to the offset. In bfloat16, codes are that many of the smallest steps, 2^-133.
    """
    if dtype == tl.bfloat16:
        return 2.0 ** (127 - 4 * half), 8 if format == "int4" else 128, 64.0
    if format == "int8":
        return 1.0, 1152, 1.0
    return (1.0, 1032, 1.0) if half == 0 else (1 / 16, 72, 1.0)


@triton.jit
def codes_of_pairs(pairs, HALF: tl.constexpr, FORMAT: tl.constexpr, DTYPE: tl.constexpr):
    """The codes of int4 or int8 as the last bits of numbers of ``DTYPE``, on Hopper; see ``of_codes``.

    ``[n, 2 k]`` of ``pairs``, ``[n, k]``: of int4, those of a half.
    """
    ASSEMBLY: tl.constexpr = assembly("codes " + FORMAT, DTYPE, " 0" if HALF == 0 else " 1")
    SHAPE: tl.constexpr = [pairs.shape[0], 2 * pairs.shape[1]]
    a, b = tl.inline_asm_elementwise(
        ASSEMBLY, "=h,=h,r", [pairs.to(tl.uint32)], (DTYPE.value, DTYPE.value), is_pure=True, pack=1
    )
    return tl.join(a, b).reshape(SHAPE)


@constexpr_function
def _fused(dtype):
    kind = {"bf16": "bf16x2", "fp16": "f16x2", "fp32": "f32"}[str(dtype)]
    return f"fma.rn.{kind} $0, $1, $2, $3;"


@triton.jit
def multiply_add(values, factor, added):
    """``values * factor + added``, rounded once, on Hopper; all of one float dtype and shape."""
    PTX: tl.constexpr = _fused(values.dtype)
    OPERANDS: tl.constexpr = "=f,f,f,f" if values.dtype == tl.float32 else "=r,r,r,r"
    PACK: tl.constexpr = 1 if values.dtype == tl.float32 else 2
    DTYPE: tl.constexpr = values.dtype
    return tl.inline_asm_elementwise(PTX, OPERANDS, [values, factor, added], DTYPE.value, is_pure=True, pack=PACK)


@triton.jit
def _decoded(codes, FORMAT: tl.constexpr, DTYPE: tl.constexpr):
    if FORMAT == "int4":
        return ((codes ^ 8).to(tl.int32) - 8).to(tl.float32).to(DTYPE)
    elif FORMAT == "fp4":
        # The bits of a float32 that is too small by the difference of the exponents' biases.
        bits = codes.to(tl.int32)
        bits = ((bits & 7) << 22) | ((bits & 8) << 28)
        return (bits.to(tl.float32, bitcast=True) * 2.0**126).to(DTYPE)
    else:
        bits = _looked_up_bits(codes.to(tl.int32), FORMAT, 0, 4)
        return rounded(bits.to(tl.float32, bitcast=True), DTYPE)


@triton.jit
def _looked_up_bits(codes, FORMAT: tl.constexpr, FIRST: tl.constexpr, LEFT: tl.constexpr):
    """The float32 bits of the values of int32 codes, which are ``FIRST`` plus their last ``LEFT`` bits.

    Masks are values, not conditions: AMD has few scalar registers for those, and Triton would look up each value in
    every warp that multiplies it.
    """
    if LEFT == 0:
        return tl.full(codes.shape, codebook_value(FORMAT, FIRST), tl.float32).to(tl.int32, bitcast=True)
    else:
        low = _looked_up_bits(codes, FORMAT, FIRST, LEFT - 1)
        high = _looked_up_bits(codes, FORMAT, FIRST + (1 << LEFT - 1), LEFT - 1)
        mask = (codes << (32 - LEFT)) >> 31
        return high & mask | low & ~mask


@constexpr_function
def codebook_value(format, code):
    """The value of a code."""
    return CODEBOOKS.value[format][code]
