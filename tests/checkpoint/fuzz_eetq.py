"""A good checkpoint of EETQ for the fuzzer, and what its layers stand for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from checkpoint.test_eetq import stored
from qgemm.nn import LinearLayer

Tensors = dict[str, Tensor]


def layers_of_eetq(width: int) -> list[Tensors]:
    """As transformers and as EETQ call their tensors."""
    layers = [stored(width, width, leaf, seed)[0] for seed, leaf in enumerate(("weight", "qweight", "weight"))]
    return [{name.removeprefix("a."): tensor for name, tensor in layer.items()} for layer in layers]


def check_eetq(model: nn.Module, files: Tensors, config: dict[str, Any]) -> None:
    for name, layer in model.named_modules():
        if not isinstance(layer, LinearLayer):
            continue
        weight = files.get(f"{name}.qweight", files.get(f"{name}.weight"))
        assert weight is not None
        K, N = weight.shape
        octets, wanted = weight.reshape(-1).view(torch.uint8), torch.empty(N, K, dtype=torch.int32)
        for column in range(K):
            # Of two rows, tiles of 64 columns in turn; of 16 columns, 0, 8, 1, 9, ...
            place = column // 64 * 128 + column % 64 // 16 * 16 + column % 8 * 2 + column % 16 // 8
            for row in (0, 1):
                wanted[row::2, column] = octets[place + 64 * row :: 2 * K].int() - 128
        scale = files[f"{name}.weight_scales"].float()[:, None]
        assert torch.equal(layer.dequantize(torch.float32).weight.detach(), wanted * scale), f"{name} differs"
