"""The benchmark of diffusion transformers: its table, and that its models are fused and compute the same."""

from __future__ import annotations

import pytest
import torch

from benchmarks import diffusion
from benchmarks.diffusion import Result
from benchmarks.encoders import FLOAT, WAYS
from qgemm import fusion_report


def test_the_table_compares_with_bfloat16() -> None:
    results = [Result("flux", FLOAT, 20.0, 18.0, 0.0), Result("flux", "int8, fused", 10.0, 9.0, 0.035)]
    header, rows = diffusion.table(results)
    assert header == ["model", "", "call, ms", "times", "kernels, ms", "times", "error"]
    assert rows[1] == ["flux", "int8, fused", "10.00", "2.00", "9.00", "2.00", "0.035"]


@pytest.mark.parametrize(
    ("name", "blocks"), [("flux", 6), ("flux2", 3), ("qwen-image", 4), ("hunyuan-video", 4), ("wan", 2), ("sdxl", 7)]
)
def test_models(name: str, blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("diffusers")
    monkeypatch.setattr(diffusion, "SIDE", 4)
    monkeypatch.setattr(diffusion, "VIDEO", (1, 8, 8))
    for heads in (diffusion.HEADS, diffusion.FLUX2_HEADS, diffusion.VIDEO_HEADS):
        monkeypatch.setitem(heads, "num_attention_heads", 1)
    for key in diffusion.UNET:
        monkeypatch.setitem(diffusion.UNET, key, (32,) * 3 if key == "block_out_channels" else 1)
    outs = {}
    with torch.inference_mode():
        for way, change in WAYS.items():
            model, given = diffusion.build(name, torch.device("cpu"))
            change(model)
            outs[way] = diffusion.output(model, given).double()
    assert len(fusion_report(model).fused) == blocks
    wanted = outs[FLOAT]
    assert all((out - wanted).norm() <= diffusion.MAX_ERROR * wanted.norm() for out in outs.values())
