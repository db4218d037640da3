"""The problem sizes: the linear layers of real models, as weights ``[N, K]``, by family; and rows of activations, M."""

from typing import NamedTuple

import torch


class WeightShape(NamedTuple):
    """A weight ``[N, K]`` and the model that it comes from."""

    family: str
    N: int
    K: int


# qkv, output, gate and up together, down: as inference engines fuse them.
_MODELS: dict[str, tuple[tuple[int, int], ...]] = {
    "llama-3-8b": ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)),
    "llama-3-70b": ((10240, 8192), (8192, 8192), (57344, 8192), (8192, 28672)),
    # Not multiples of 512, of 1,024 or of a power of 2 times the number of multiprocessors.
    "qwen2.5-7b": ((4608, 3584), (18944, 3584), (3584, 18944)),
}
SHAPES = tuple(WeightShape(family, N, K) for family, sizes in _MODELS.items() for N, K in sizes)
ROWS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
SUMMARY_FAMILIES = ("llama-3-8b", "llama-3-70b")
"""Geometric means are over these."""

QUICK_SHAPES = SHAPES[:4]
QUICK_ROWS = (1, 16, 64, 256, 1024, 4096)

# A CPU would take hours over the shapes above.
CPU_SHAPES = (WeightShape("minilm-l12", 1536, 384), WeightShape("llama-3-8b", 4096, 4096))
CPU_ROWS = (1, 32, 128)

HELD_OUT_SHAPES = (
    WeightShape("llama-2-13b", 15360, 5120),
    WeightShape("qwen2.5-32b", 5120, 27648),
    WeightShape("phi-3-mini", 3072, 3072),
    WeightShape("phi-3-mini", 16384, 3072),
    WeightShape("qwen2.5-1.5b", 1536, 8960),
    WeightShape("gemma-3-12b", 3840, 15360),
)
"""What ``select_config`` is judged on: never fit it to these. One that taught it something has to be replaced."""
HELD_OUT_ROWS = (1, 12, 48, 96, 192, 384, 768, 3072)


def parse_pair(text: str) -> tuple[int, int]:
    """``"16x1024"`` as the two numbers of a shape."""
    try:
        first, second = (int(part) for part in text.split("x"))
    except ValueError:
        raise ValueError(f"shape is {text!r}; it must be two numbers, such as 4096x14336") from None
    if min(first, second) < 1:
        raise ValueError(f"shape is {text!r}; both numbers must be at least 1")
    return first, second


def parse_shape(text: str) -> WeightShape:
    """``"4096x14336"`` as the weight shape ``N x K``, with its family if it is in the table."""
    N, K = parse_pair(text)
    known = [shape for shape in (*SHAPES, *CPU_SHAPES, *HELD_OUT_SHAPES) if (shape.N, shape.K) == (N, K)]
    return known[0] if known else WeightShape("custom", N, K)


def default_sizes(device: torch.device, quick: bool) -> tuple[tuple[WeightShape, ...], tuple[int, ...]]:
    """The shapes and the Ms that are measured where the user names none."""
    if device.type == "cpu":
        return CPU_SHAPES, CPU_ROWS
    return (QUICK_SHAPES, QUICK_ROWS) if quick else (SHAPES, ROWS)
