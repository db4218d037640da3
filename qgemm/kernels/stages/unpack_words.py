"""Weights of 4 and 8 bits as operand A of ``mma.sync``, from int32 words of four bytes, in PTX for sm_90 and later.

A word's bytes become two registers of 16-bit values for each half, in the order of K. Bits at the end of a lane are a
bfloat16 below 2^-125, exactly, and one multiplication by 2^127 with an addition makes a value of them: no nibble is
shifted. That takes 6 instructions that move bits and 2 to 4 that multiply for 8 values of int4, 3 and 2 for 4 of int8.
What it leaves as a factor, ``times_of_words``, goes to the sums. A zero point is subtracted in place of a bias. A float
one is added in the instruction that scales, a bfloat16 or float16 where scales are of the same, else a float32.

Scales of groups that are less than a block multiply the values here, by a factor for a word's low half and one for its
high half: a bfloat16, and a second one for what it leaves of a wider scale, or float32 where values are float16.
"""

from collections.abc import Iterator

import triton
import triton.language as tl
from triton.runtime.jit import constexpr_function

from qgemm.kernels.stages.unpack import AND_XOR, OF_4_BITS, OF_8_BITS, unpacked, widened

INT4_BIAS = tl.constexpr(136)

_PAIRS = ("0x4140", "0x4342")  # prmt's selectors of two bytes, as lanes

SCALES = ("", " exact", " rest", " float")
"""How values are scaled: not, by one factor, by two bfloat16, by float32."""
ZEROS = ("", " zeros", " float zeros")
"""Zero points: none, those subtracted before values are scaled, those added as they are."""


def _int4(kind: str, selector: str, biased: bool, zeros: bool) -> str:
    """u, v: two values of the low half, or 136 more, and two of the high one, or a quarter of them."""
    bits = {"bf16": "0x43084308", "f16": "0x64086408"}[kind]  # 136 and 1032, in which bit 3 is set
    lines = [f"prmt.b32 t, $WORD, 0, {selector}; mov.b32 m, {bits}; lop3.b32 u, t, 0x000F000F, m, {AND_XOR};"]
    if zeros:
        lines.append(f"sub.{kind}x2 u, u, $ZERO0;")
    elif not biased:
        lines.append(f"sub.{kind}x2 u, u, m;")
    # 1024 + 16 (8 + q), or a bfloat16 of an exponent of at most one bit.
    bits, times, minus = {
        "bf16": ("0x00800080", "0x7F007F00", "0xC000C000"), "f16": ("0x64806480", "0x2C002C00", "0xD480D480")
    }[kind]  # fmt: skip
    lines.append(f"lop3.b32 v, t, 0x00F000F0, {bits}, {AND_XOR}; mov.b32 m, {times};")
    lines.append(f"mov.b32 s, {'$ZERO1' if zeros else minus}; fma.rn.{kind}x2 v, v, m, s;")
    return " ".join(lines)


def _int8(kind: str, selector: str) -> str:
    """u: two values, as bfloat16 a 64th of them."""
    if kind == "f16":  # 1024 + 128 + q
        lanes = f"xor.b32 t, $WORD, 0x80808080; mov.b32 m, 0x64646464; prmt.b32 u, t, m, {selector};"
        return lanes + " mov.b32 m, 0x64806480; sub.f16x2 u, u, m;"
    lanes = f"xor.b32 t, $WORD, 0x80808080; prmt.b32 t, t, 0, {selector};"
    return lanes + " mov.b32 m, 0x7F007F00; mov.b32 s, 0xC000C000; fma.rn.bf16x2 u, t, m, s;"


def _scaled(kind: str, scales: str, register: str, factor: int, added: str = "") -> str:
    """``register`` times a factor, and ``added`` to it; ``factor``: the number of its operand."""
    if scales == " exact" and added:
        return f"fma.rn.{kind}x2 {register}, {register}, ${factor}, {added};"
    if scales == " exact":
        return f"mul.{kind}x2 {register}, {register}, ${factor};"
    if scales == " rest":
        return f"mul.bf16x2 m, {register}, ${factor + 1}; fma.rn.bf16x2 {register}, {register}, ${factor}, m;"
    lanes = f"mov.b32 {{h0, h1}}, {register}; cvt.f32.{kind} f0, h0; cvt.f32.{kind} f1, h1; mov.b32 g, ${factor};"
    if added:
        lanes += f" mov.b32 z, {added}; fma.rn.f32 f0, f0, g, z; fma.rn.f32 f1, f1, g, z;"
    else:
        lanes += " mul.f32 f0, f0, g; mul.f32 f1, f1, g;"
    return f"{lanes} cvt.rn.{kind}x2.f32 {register}, f1, f0;"


def _program(format: str, kind: str, biased: bool, zeros: str, scales: str) -> str:
    """Operands: the parts, the word, for each half the zero point, and for each half its factor, or two."""
    halves = 1 if format in ("int8", "fp8") else 2
    word = 4 * halves
    factors = word + 1 + halves * bool(zeros)
    subtracts = zeros == ZEROS[1]
    lines = []
    for pair, selector in enumerate(_PAIRS):
        if format == "int4":
            lines.append(_int4(kind, selector, biased, subtracts))
        elif format == "int8":
            lines.append(_int8(kind, selector))
        elif format == "fp8":
            lines.append(widened(format, kind, "$WORD", pair, "u"))
        else:
            lines.append(unpacked(format, kind, "$WORD", pair, "u", "v"))
        for half in range(halves):
            register, part = "uv"[half], 4 * half + 2 * pair
            if subtracts and format != "int4":
                lines.append(f"sub.{kind}x2 {register}, {register}, $ZERO{half};")
            if scales:
                factor = factors + half * (1 + (scales == " rest"))
                lines.append(_scaled(kind, scales, register, factor, f"$ZERO{half}" if zeros == ZEROS[2] else ""))
            lines.append(f"mov.b32 {{${part}, ${part + 1}}}, {register};")
    registers = ".reg .b32 t, s, m, a, b, c, u, v; .reg .b16 h0, h1; .reg .f32 f0, f1, g, z;"
    text = " ".join(lines).replace("$WORD", f"${word}")
    for half in range(halves):
        text = text.replace(f"$ZERO{half}", f"${word + 1 + half}")
    return "{ " + registers + " " + text + " }"


def _programs() -> Iterator[tuple[str, str]]:
    for name, kind in (("bf16", "bf16"), ("fp16", "f16")):
        for format in (*OF_4_BITS, *OF_8_BITS):
            yield f"{format} {name} biased", _program(format, kind, True, "", "")
            for scales in SCALES:
                for zeros in ZEROS[: 3 if scales in (" exact", " float") else 2]:
                    yield f"{format} {name}{scales}{zeros}", _program(format, kind, False, zeros, scales)


WORDS_PTX = tl.constexpr(dict(_programs()))
"""Made beforehand: kernels can't call what makes it."""


@constexpr_function
def _assembly(format, dtype, biased, zeros, scales):
    return WORDS_PTX.value[f"{format} {dtype}{' biased' if biased else ''}{scales}{zeros}"]


@constexpr_function
def _operands(format, count):
    return ",".join(["=h"] * (4 if format in ("int8", "fp8") else 8) + ["r"] * count)


@constexpr_function
def times_of_words(format, dtype, half):
    """What ``unpack_words`` leaves to be multiplied by, half by half."""
    times = {"int4": (1.0, 4.0), "int8": (64.0,)} if dtype == tl.bfloat16 else {}
    return times.get(format, (1.0, 1.0))[half]


@triton.jit
def zero_of_words(zero, FORMAT: tl.constexpr, DTYPE: tl.constexpr, half: tl.constexpr):
    """What ``unpack_words`` takes for zero points, float32, of a half: what it adds or subtracts in place of a bias."""
    if FORMAT == "int4":
        if half == 0:
            return zero + (136.0 if tl.bfloat16 == DTYPE else 1032.0)
        else:
            return zero * -0.25 - 2.0 if tl.bfloat16 == DTYPE else -72.0 - zero
    else:
        return zero / times_of_words(FORMAT, DTYPE, half)


@triton.jit
def unpack_words(
    words, zeros, factors, FORMAT: tl.constexpr, DTYPE: tl.constexpr, BIASED: tl.constexpr, SCALES: tl.constexpr,
    ZEROS: tl.constexpr,
):  # fmt: skip
    """The values in int32 ``words``, over ``times_of_words``: for each half four tiles, of a word's first to last byte.

    ``zeros``, ``factors``: of each word, as ``_program`` says, or empty. ``zeros`` are what ``zero_of_words`` makes, or
    floats over ``times_of_words``, as ``ZEROS`` says.
    ``BIASED``: low halves of int4 are ``INT4_BIAS`` more than they are.
    """
    ASSEMBLY: tl.constexpr = _assembly(FORMAT, DTYPE, BIASED, ZEROS, SCALES)
    given = (words,) + zeros + factors
    OPERANDS: tl.constexpr = _operands(FORMAT, len(given))
    D: tl.constexpr = DTYPE
    if FORMAT == "int8" or FORMAT == "fp8":
        return (tl.inline_asm_elementwise(ASSEMBLY, OPERANDS, given, (D.value, D.value, D.value, D.value), True, 1),)
    else:
        a, b, c, d, e, f, g, h = tl.inline_asm_elementwise(
            ASSEMBLY, OPERANDS, given, (D.value, D.value, D.value, D.value, D.value, D.value, D.value, D.value), True, 1
        )
        return (a, b, c, d), (e, f, g, h)
