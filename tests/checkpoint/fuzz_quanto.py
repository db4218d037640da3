"""A good checkpoint of optimum-quanto for the fuzzer, and what its layers stand for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from checkpoint.test_quanto import packed
from qgemm.nn import LinearLayer

Tensors = dict[str, Tensor]


def layers_of_quanto(width: int) -> list[Tensors]:
    """Two values in a byte, with float shifts; four in a byte, with whole ones; and int8."""
    layers = [packed(bits, width, width, size, bits == 2)[0] for bits, size in ((4, 32), (2, 64))]
    values = torch.randint(-128, 128, (width, width), dtype=torch.int8)
    layers.append({"a.weight._data": values, "a.weight._scale": torch.rand(width, 1).half() + 0.5})
    for layer in layers:
        layer |= {f"a.{name}_scale": torch.ones(()) for name in ("input", "output")}
    return [{name.removeprefix("a."): tensor for name, tensor in layer.items()} for layer in layers]


def check_quanto(model: nn.Module, files: Tensors, config: dict[str, Any]) -> None:
    for name, layer in model.named_modules():
        if not isinstance(layer, LinearLayer):
            continue
        own = {key.removeprefix(f"{name}."): tensor for key, tensor in files.items() if key.startswith(f"{name}.")}
        scale, N, K = own["weight._scale"].float(), layer.out_features, layer.in_features
        if (octets := own.get("weight._data._data")) is None:
            wanted = own["weight._data"].float() * scale.reshape(-1, 1)
        else:
            bits = 4 if octets.shape[0] * 2 == len(scale) else 2
            parts = [octets.int() >> bits * i & (1 << bits) - 1 for i in range(8 // bits)]
            values, shift = torch.cat(parts)[: len(scale)], own["weight._shift"]
            middle = 8 if bits == 4 else 0
            if shift.dtype == torch.uint8:
                wanted = (values - shift.int()).float() * scale
            else:
                wanted = (values - middle).float() * scale + (middle * scale - shift.float())
        weight = layer.dequantize(torch.float32).weight.detach()
        assert torch.equal(weight, wanted.reshape(N, K)), f"{name} is not what its file holds"
