"""How much memory quantize_model takes.

One layer more than the float model at most where memory is tight; else the quantized layers too, to have a way back.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from families.experts import ALL
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import qgemm.model.restore
from qgemm.quantize import quantize_model


class Memory(TorchDispatchMode):
    """Bytes of a model's storages and of those that operators made since, at their highest."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self._see(list(model.parameters()))
        self.start = self.peak = sum(size for _, size in self.alive.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self._see(out)
        self.peak = max(self.peak, sum(size for _, size in self.alive.values()))
        return out

    def _see(self, values: Any) -> None:
        for tensor in _tensors(values):
            # Storages on meta have a size, but take no memory.
            if tensor.is_meta:
                continue
            storage = tensor.untyped_storage()
            self.alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.alive = {key: entry for key, entry in self.alive.items() if not entry[0].expired()}


def _tensors(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _tensors(value)


@pytest.fixture
def _no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(qgemm.model.restore, "free_memory", lambda device: 0)


@pytest.mark.usefixtures("_no_room")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_peaks_at_the_float_model_and_one_layer(dtype: torch.dtype) -> None:
    # Layers of 2^22 weights: of small ones, a first part of fixed size counts for more.
    model = nn.Sequential(*(nn.Linear(2048, 2048, bias=False, dtype=dtype) for _ in range(3)))
    layer = 2**22 * dtype.itemsize
    with Memory(model) as memory:
        quantize_model(model)
    assert memory.start == 3 * layer
    # The int8 weight at least, or the measurement missed it.
    assert 2**22 <= memory.peak - memory.start <= layer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_with_room_memory_peaks_at_the_float_model_the_quantized_layers_and_one_layer(
    dtype: torch.dtype,
) -> None:
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False, dtype=dtype) for _ in range(4)))
    weights = 2**20
    with Memory(model) as memory:
        quantize_model(model)
    grown = memory.peak - memory.start
    # As much as must be free for a way back.
    assert 4 * weights <= grown <= 4 * weights * 17 // 16 + weights * dtype.itemsize


@pytest.mark.usefixtures("_no_room")
@pytest.mark.parametrize("family", ["mixtral", "llama4"])
def test_memory_of_experts_peaks_at_one_module_in_int8_and_one_expert(family: str) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = ALL[family]()
            # Of 32 experts, [E, N, K] or [E, K, N].
            shapes = (32, 512, 384), (32, 384, 256)
            first, second = ((E, K, N) for E, N, K in shapes) if family == "llama4" else shapes
            self.experts.gate_up_proj = nn.Parameter(torch.zeros(first, dtype=torch.bfloat16))
            self.experts.down_proj = nn.Parameter(torch.zeros(second, dtype=torch.bfloat16))

    model = nn.Sequential(Block(), Block())
    weights, expert = 32 * 384 * (512 + 256), 384 * 512
    with Memory(model) as memory:
        quantize_model(model)
    assert memory.start == 2 * 2 * weights
    grown = memory.peak - memory.start
    # int8 values and scales of one module, and of one expert some copies in float64.
    assert weights <= grown <= weights + 4 * 32 * (512 + 384) + 4 * 8 * expert
