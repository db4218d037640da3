"""BitNet's checkpoints: what transformers' own layers compute from them, and what isn't read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.integrations.bitnet import AutoBitLinear, BitLinear, pack_weights, unpack_weights

import qgemm
from checkpoint.packers import linears, write
from qgemm import CheckpointError
from qgemm_cli.commands.inspect import examine

N, K = 16, 64


def tensors() -> dict[str, Tensor]:
    values = torch.randint(-1, 2, (N, K), generator=torch.Generator().manual_seed(0))
    return {"weight": pack_weights(values), "weight_scale": torch.tensor([1.75], dtype=torch.bfloat16)}


@pytest.mark.parametrize("kind", ["bitlinear", "autobitlinear"])
def test_its_layers(kind: str, tmp_path: Path) -> None:
    stored, config = tensors(), {"quant_method": "bitnet", "linear_class": kind, "quantization_mode": "offline"}
    folder = write(tmp_path, {"a": stored, "in_float": {"weight": torch.ones(2, K)}}, config)
    layer: Any = qgemm.load_quantized(folder, model=linears(a=(N, K), in_float=(2, K)))["a"]
    x = torch.randn(5, K)
    with torch.compiler.set_stance("force_eager"):
        values = unpack_weights(stored["weight"], torch.float32)
        if kind == "bitlinear":
            theirs: Any = BitLinear(K, N, bias=False, dtype=torch.float32)
            theirs.load_state_dict(stored)
        else:
            theirs = AutoBitLinear(K, N, bias=False, dtype=torch.float32)
            theirs.load_state_dict({**stored, "weight": values})  # which transformers unpacks while it reads files
        expected = theirs(x).detach()
    assert layer.scheme.name == "int8"
    assert torch.equal(layer.weight, values.to(torch.int8))
    torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=1e-5)
    assert ("int8", [N, K]) in [(each["storage"], each["shape"]) for each in examine(tmp_path, verify=True)["layers"]]


@pytest.mark.parametrize(
    ("config", "changed", "message"),
    [
        ({"linear_class": "other"}, {}, "linear_class is 'other'; qgemm reads 'bitlinear' and 'autobitlinear', so"),
        ({"linear_class": []}, {}, r"linear_class is \[\]; qgemm reads"),
        ({"linear_class": "autobitlinear", "quantization_mode": "online"}, {}, "quantization_mode is 'online'"),
        ({"use_rms_norm": True}, {}, "use_rms_norm has each layer normalize its input"),
        ({"linear_class": "autobitlinear"}, {"bias": torch.zeros(N)}, "a has a bias, which autobitlinear multiplies"),
        ({}, {"weight_scale": torch.ones(2)}, r"weight_scale is torch.float32 \[2\]; it must be"),
        ({}, {"weight_scale": torch.zeros(1)}, "weight_scale holds NaN, Inf"),
        ({}, {"weight_scale": torch.full((1,), torch.inf)}, "a.weight_scale: holds NaN or Inf"),
        (
            {},
            {"weight": torch.full((N // 4, K), 0x30, dtype=torch.uint8)},
            "a.weight: holds a value of 2, where all are",
        ),
        (
            {},
            {"weight": torch.zeros(N, dtype=torch.uint8)},
            r"a.weight is torch.uint8 \[16\]; it must be torch.uint8, \[N",
        ),
    ],
)
def test_refused(config: dict[str, Any], changed: dict[str, Tensor], message: str, tmp_path: Path) -> None:
    folder = write(tmp_path, {"a": {**tensors(), **changed}}, {"quant_method": "bitnet", **config})
    with pytest.raises(CheckpointError, match=message):
        qgemm.load_quantized(folder, model=linears(a=(N, K)))
