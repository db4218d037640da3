"""Layers of MLX's files, written out value by value, and what they stand for by the format's description."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

Tensors = dict[str, Tensor]
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def packed(codes: np.ndarray[Any, Any], bits: int) -> Tensor:
    """uint32 words ``[..., K * bits / 32]`` of ``codes``, ``[..., K]``: one long number, low bits first."""
    single = codes[..., None] >> np.arange(bits) & 1
    octets = np.packbits(single.reshape(*codes.shape[:-1], -1).astype(np.uint8), axis=-1, bitorder="little")
    return torch.from_numpy(octets.view("<u4"))


def affine(bits: int, size: int, *shape: int, dtype: torch.dtype = torch.float16, seed: int = 0) -> Tensors:
    """The tensors of a layer in groups of ``size`` values."""
    rng = np.random.default_rng(bits + 8 * seed)
    codes = rng.integers(0, 1 << bits, shape, dtype=np.int64)
    grid = (*shape[:-1], shape[-1] // size)
    scale, bias = (torch.from_numpy(rng.standard_normal(grid)).to(dtype) for _ in range(2))
    return {"weight": packed(codes, bits), "scales": scale, "biases": bias}


def small_floats(mode: str, *shape: int) -> Tensors:
    """The tensors of a layer in a mode of small floats, none of them NaN."""
    rng, size = np.random.default_rng(0), 16 if mode == "nvfp4" else 32
    octets = rng.integers(0, 0x78, (*shape[:-1], shape[-1] if mode == "mxfp8" else shape[-1] // 2), dtype=np.uint8)
    scale = rng.integers(0x30, 0x40, (*shape[:-1], shape[-1] // size), dtype=np.uint8)
    return {"weight": torch.from_numpy(octets.view("<u4")), "scales": torch.from_numpy(scale)}


def weight_of(own: Tensors, mode: str, bits: int, size: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """The weight, computed in ``dtype``."""
    words = own["weight"]
    if mode == "mxfp8":
        values = torch.from_numpy(words.contiguous().numpy().view(np.uint8)).view(torch.float8_e4m3fn).to(dtype)
    else:
        single = np.unpackbits(words.contiguous().numpy().view(np.uint8), axis=-1, bitorder="little")
        codes = torch.from_numpy(single.reshape(*words.shape[:-1], -1, bits) @ (1 << np.arange(bits)))
        values = codes.to(dtype) if mode == "affine" else torch.tensor([*E2M1, *(-e for e in E2M1)]).to(dtype)[codes]
    scale, bias = own["scales"], None
    if mode == "affine":
        middle = 1 << (bits - 1) if bits in (4, 8) else 0
        # With this zero point float32 rounds as qgemm does.
        scale, bias = scale.to(dtype), own["biases"].to(dtype) + middle * scale.to(dtype)
        values -= middle
    elif mode == "nvfp4":
        scale = scale.view(torch.float8_e4m3fn).to(dtype)
    else:
        scale = 2.0 ** (scale.to(dtype) - 127)
    scaled = values * scale.repeat_interleave(size, dim=-1)
    return scaled if bias is None else scaled + bias.repeat_interleave(size, dim=-1)
