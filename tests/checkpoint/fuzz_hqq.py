"""A good checkpoint of HQQ for the fuzzer, and what its layers stand for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from checkpoint.test_hqq import PARTS, stored
from qgemm.nn import LinearLayer

Tensors = dict[str, Tensor]


def layers_of_hqq(width: int) -> list[Tensors]:
    """Two values in a byte, ten in a word, and one in a byte."""
    layers = [stored(bits, width, width, size)[0] for bits, size in ((4, 32), (3, 64), (8, 16))]
    return [{name.removeprefix("a."): tensor for name, tensor in layer.items()} for layer in layers]


def check_hqq(model: nn.Module, files: Tensors, config: dict[str, Any]) -> None:
    for name, layer in model.named_modules():
        if not isinstance(layer, LinearLayer):
            continue
        own = {key.removeprefix(f"{name}."): tensor for key, tensor in files.items() if key.startswith(f"{name}.")}
        bits, size = int(own["nbits"]), int(own["group_size"])
        N, K = own["shape"].tolist()
        count, middle = PARTS.get(bits, 1), {4: 8, 8: 128}.get(bits, 0)
        parts = [own["W_q"].int() >> bits * (count - 1 - i) & (1 << bits) - 1 for i in range(count)]
        values = torch.cat(parts).flatten()[: N * K].view(N, K) - middle
        scale, zero = (own[leaf].float().view(N, K // size) for leaf in ("scale", "zero"))
        shift = (middle - zero) * scale
        wanted = values.float() * scale.repeat_interleave(size, 1) + shift.repeat_interleave(size, 1)
        weight = layer.dequantize(torch.float32).weight.detach()
        assert torch.equal(weight, wanted), f"{name} is not what its file holds"
