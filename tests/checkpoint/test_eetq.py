"""EETQ's checkpoints: the sample, which its own packer made, the layout step by step, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import qgemm
from checkpoint.packers import linears
from checkpoint.samples import load_sample, logit_error, wrong_weights
from qgemm import CheckpointError
from qgemm.nn.quant_layer import QuantLayer

NAME = "eetq-int8"


def test_the_sample() -> None:
    model, warned = load_sample(NAME)
    assert warned == []
    assert {layer.scheme.name for layer in model.modules() if isinstance(layer, QuantLayer)} == {"int8-weight"}
    assert wrong_weights(NAME) == []
    assert logit_error(NAME) < 1e-6


def stored(N: int, K: int, leaf: str = "weight", seed: int = 0) -> tuple[dict[str, Tensor], Tensor]:
    """The tensors of a layer ``a``, in the steps of the library, and its weight, float32."""
    torch.manual_seed(seed)
    values, scale = torch.randint(-128, 128, (N, K), dtype=torch.int8), torch.rand(N).half() + 0.5
    rows = values.t()  # [K, N]; of each 16 of these rows:
    read = [8 * (row % 4 // 2) + row % 2 + 2 * (row // 4) for row in range(16)]
    columns = torch.cat([rows[start : start + 16][read] for start in range(0, K, 16)]).t()
    pairs = [torch.cat([part for both in zip(*pair, strict=True) for part in both]) for pair in _tiles(columns)]
    octets = (torch.stack(pairs).int() + 128).to(torch.uint8).view(-1, 4)[:, [0, 2, 1, 3]]
    packed = octets.reshape(K, N).view(torch.int8)
    weight = values.float() * scale.float()[:, None]
    return {f"a.{leaf}": packed.contiguous(), "a.weight_scales": scale}, weight


def _tiles(columns: Tensor) -> list[list[tuple[Tensor, ...]]]:
    """For each two columns, their tiles of 64 values."""
    return [[column.split(64) for column in columns[n : n + 2]] for n in range(0, len(columns), 2)]


def load(folder: Path, tensors: dict[str, Tensor], N: int, K: int, **config: Any) -> Any:
    save_file(tensors, folder / "model.safetensors")
    quantization = {"quantization_config": {"quant_method": "eetq", "weights": "int8", **config}}
    (folder / "config.json").write_text(json.dumps({} if N == 2 else quantization))
    return qgemm.load_quantized(folder, model=linears(a=(N, K)))["a"]


@pytest.mark.parametrize("leaf", ["weight", "qweight"])
@pytest.mark.parametrize(("N", "K"), [(2, 64), (6, 192), (64, 128)])
def test_the_order(N: int, K: int, leaf: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qgemm.checkpoint.words._PIECE", 512)
    tensors, weight = stored(N, K, leaf)
    layer = load(tmp_path, tensors, N, K)
    assert torch.equal(layer.dequantize(torch.float32).weight, weight)
    assert torch.equal(layer.weight_scale, tensors["a.weight_scales"][:, None])


GOOD = stored(4, 64)[0]
REFUSED: dict[str, tuple[dict[str, Tensor], dict[str, Any], str]] = {
    "int4": (GOOD, {"weights": "int4"}, "weights is 'int4'; qgemm reads EETQ of int8, so dequantize it"),
    "no weight": ({"a.weight_scales": torch.ones(4)}, {}, r"a.weight is missing; it must be torch.int8, \[K, N\]"),
    "in float": ({**GOOD, "a.weight": torch.ones(64, 4)}, {}, "a.weight is torch.float32"),
    "part of a tile": (
        {**GOOD, "a.weight": torch.ones(32, 4).char()},
        {},
        r"a.weight is .*\[32, 4\]; it must be of a multiple of 64",
    ),
    "an odd column": (
        {**GOOD, "a.weight": torch.ones(64, 3).char()},
        {},
        r"a.weight is .*\[64, 3\]; it must be of a mul",
    ),
    "other scales": ({**GOOD, "a.weight_scales": torch.ones(5)}, {}, r"a.weight_scales is .*\[5\]"),
    "another model": (stored(2, 128)[0], {}, r"layer a has the shape \[2, 128\]; the model's is \[4, 64\]"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str, tmp_path: Path) -> None:
    tensors, config, message = REFUSED[case]
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path, tensors, 4, 64, **config)
