"""``execute``: the few instructions of PTX that unpack weights, run by Python."""

import re
import struct

import torch
from torch import Tensor


def execute(assembly: str, outputs: int, *words: int) -> list[int]:
    """What the output registers hold, given what the input registers do. Those of floats hold their bits."""
    registers = {f"${outputs + index}": word for index, word in enumerate(words)}

    def value(operand: str) -> int:
        return registers[operand] if operand in registers else int(operand, 0)

    for line in assembly.strip("{} ").split(";"):
        name, operands = line.split(maxsplit=1) if line.strip() else (".reg", "")
        if lanes := re.fullmatch(r"{(.*), (.*)}, (.*)", operands):
            low, high, given = lanes.groups()
            registers |= {low: value(given) & 0xFFFF, high: value(given) >> 16}
        elif lanes := re.fullmatch(r"(.*), {(.*), (.*)}", operands):
            to, low, high = lanes.groups()
            registers[to] = value(low) | value(high) << 16
        elif name in FLOATS:
            to, *rest = (operand.strip() for operand in operands.split(","))
            registers[to] = FLOATS[name](*map(value, rest))
        elif name != ".reg":
            to, *rest = (operand.strip() for operand in operands.split(","))
            registers[to] = INTEGERS[name.split(".")[0]](*map(value, rest), *name.split(".")[1:]) & 0xFFFFFFFF
    return [registers[f"${index}"] for index in range(outputs)]


def prmt(a: int, b: int, selector: int, _type: str) -> int:
    every = struct.pack("<II", a, b)
    chosen = [selector >> 4 * i & 15 for i in range(4)]
    return int.from_bytes(bytes((every[i & 7] >> 7) * 255 if i & 8 else every[i] for i in chosen), "little")


def lop3(a: int, b: int, c: int, table: int, _type: str) -> int:
    return sum((table >> (4 * (a >> i & 1) + 2 * (b >> i & 1) + (c >> i & 1)) & 1) << i for i in range(32))


def floats_of(bits: int, dtype: torch.dtype) -> Tensor:
    return torch.tensor(list(struct.pack("<I", bits)), dtype=torch.uint8).view(dtype)


def bits_of(values: Tensor) -> int:
    return int(values.view(torch.int32).item()) & 0xFFFFFFFF


def multiply(dtype: torch.dtype, a: int, b: int) -> int:
    return bits_of(floats_of(a, dtype) * floats_of(b, dtype))


def subtract(dtype: torch.dtype, a: int, b: int) -> int:
    return bits_of(floats_of(a, dtype) - floats_of(b, dtype))


def multiply_add(dtype: torch.dtype, a: int, b: int, c: int) -> int:
    """Exact in float64: values of few steps each."""
    first, second, third = (floats_of(each, dtype).double() for each in (a, b, c))
    return bits_of((first * second + third).to(dtype))


def to_float(dtype: torch.dtype, bits: int) -> int:
    return bits_of(floats_of(bits, dtype)[:1].float())


def rounded(dtype: torch.dtype, high: int, low: int) -> int:
    return bits_of(torch.cat([floats_of(low, torch.float32), floats_of(high, torch.float32)]).to(dtype))


INTEGERS = {
    "prmt": prmt,
    "lop3": lop3,
    "max": lambda a, b, _type: max(a >> 16, b >> 16) << 16 | max(a & 0xFFFF, b & 0xFFFF),
    "mov": lambda a, _type: a,
    "and": lambda a, b, _type: a & b,
    "xor": lambda a, b, _type: a ^ b,
    "shl": lambda a, b, _type: a << b,
    "shr": lambda a, b, _type: a >> b,
    "mul": lambda a, b, _half, _type: a * b,
}
FLOATS = {
    name: lambda *given, function=function, dtype=dtype: function(dtype, *given)
    for name, function, dtype in (
        ("mul.f32", multiply, torch.float32),
        ("fma.rn.f32", multiply_add, torch.float32),
        *(
            (name.format(kind), function, dtype)
            for kind, dtype in (("bf16", torch.bfloat16), ("f16", torch.float16))
            for name, function in (
                ("mul.{}x2", multiply),
                ("sub.{}x2", subtract),
                ("fma.rn.{}x2", multiply_add),
                ("cvt.f32.{}", to_float),
                ("cvt.rn.{}x2.f32", rounded),
            )
        ),
    )
}
