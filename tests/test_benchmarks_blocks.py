"""The benchmark of a block: rates are those of its operations and bytes, and wrong outputs are refused."""

from __future__ import annotations

import pytest
import torch

from benchmarks import blocks
from benchmarks.models.providers import PROVIDERS, Provider
from benchmarks.models.shapes import ModelShape
from qgemm_cli.timing import QUICK

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 99,
}
TINY = ModelShape("tiny", "LlamaConfig", 2, SIZES)
# q and o, k and v, the MLP, the norms.
WEIGHTS = 2 * 64 * 64 + 2 * 32 * 64 + 3 * 96 * 64 + 2 * 64


@torch.no_grad()
def test_rates_and_table() -> None:
    theirs, ours = blocks.measure(TINY, [(2, 16)], QUICK, torch.device("cpu"))
    assert (theirs.provider, ours.provider) == ("bf16", "qgemm")
    seconds = theirs.us / 1e6
    assert theirs.tflops * 1e12 * seconds == pytest.approx(2 * 32 * (WEIGHTS + 64 * 16))
    assert theirs.gb_per_s * 1e9 * seconds == pytest.approx(4 * WEIGHTS + 2 * 2 * 16 * 64 * 4)
    assert theirs.weight_bytes == 4 * WEIGHTS
    assert theirs.error == 0
    assert ours.weight_bytes < 0.4 * theirs.weight_bytes
    assert 0 < ours.error < blocks.MAX_ERROR
    header, rows = blocks.table([theirs, ours])
    assert rows[1][header.index("times bf16")] == f"{theirs.us / ours.us:.2f}"


def test_a_token_is_multiplied_by_the_experts_that_it_chooses() -> None:
    sizes = {**SIZES, "moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2, "head_dim": 16}
    shape = ModelShape("tiny", "Qwen3MoeConfig", 2, sizes)
    block = shape.build(torch.device("meta"), layers=1).model.layers[0]
    attention = 2 * 64 * 64 + 2 * 32 * 64 + 2 * 16
    experts = 2 * 3 * 32 * 64
    router = 8 * 64
    found = blocks._weights_of_a_token(block, shape.make_config(1))
    assert found == attention + experts + router + 2 * 64


@torch.no_grad()
def test_wrong_outputs_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def spoil(model: torch.nn.Module) -> list[str]:
        model.get_submodule("model.layers.0.mlp.down_proj").weight.data[:16] *= 200  # type: ignore[operator,union-attr]
        return []

    monkeypatch.setitem(PROVIDERS, "qgemm", Provider("qgemm", spoil))
    with pytest.raises(ValueError, match="wrong output of qgemm: relative error"):
        blocks.measure(TINY, [(1, 8)], QUICK, torch.device("cpu"))
