"""A file that is half written is gone on with, in the middle of a tensor, and its bytes are the same."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from qgemm import quantize_checkpoint
from qgemm.model.swap import WeightError
from qgemm.streaming.source import Source
from streaming.files import Stopped, assert_same_files, quantize_whole, stop_after

SIZES: dict[str, Any] = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}


@pytest.fixture(params=["llama", "gpt2", "mixtral"])
def cut(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint of which every weight is several pieces: rows as they lie in the file, columns, and experts."""
    # 7 divides none of the sizes. What is written is noted after every second piece or so.
    monkeypatch.setattr(WeightError, "rows_at_a_time", staticmethod(lambda shape, in_step=1: 7))
    monkeypatch.setattr("qgemm.streaming.shards._BYTES_AT_A_TIME", 1500)
    monkeypatch.setattr("qgemm.streaming.shards._BYTES_BETWEEN_NOTES", 1000)
    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model: Any = {
        "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, **heads)),
        "gpt2": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=97, n_positions=32, n_embd=32, n_layer=1, n_head=4)),
        "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**SIZES, **heads, num_local_experts=3)),
    }[request.param]()
    model.to(torch.bfloat16).save_pretrained(tmp_path / "float")
    return tmp_path / "float"


@pytest.mark.slow(quick=["llama"])
def test_nothing_that_was_noted_is_made_again(cut: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: Counter[tuple[str, int, int]] = Counter()
    read_rows = Source.read_rows

    def record(self: Source, name: str, start: int, stop: int) -> torch.Tensor:
        reads[name, start, stop] += 1
        return read_rows(self, name, start, stop)

    quantize_whole(cut, tmp_path / "whole")
    monkeypatch.setattr(Source, "read_rows", record)
    quantize_checkpoint(cut, tmp_path / "at-once")
    at_once = Counter(reads)
    reads.clear()
    runs = 0
    while not (tmp_path / "streamed").exists():
        runs += 1
        with monkeypatch.context() as patched:
            stop_after(4, patched)
            try:
                quantize_checkpoint(cut, tmp_path / "streamed")
            except Stopped:
                continue
    assert runs > 5
    assert_same_files(tmp_path / "whole", tmp_path / "at-once")
    assert_same_files(tmp_path / "whole", tmp_path / "streamed")
    # Rows are read once. What is read as a whole (a weight by columns; an expert, of two tensors) is read once more by
    # the run that goes on with it.
    is_read_by_rows = json.loads((cut / "config.json").read_text())["model_type"] == "llama"
    assert (reads - at_once).total() <= (0 if is_read_by_rows else 2 * runs)
    assert not at_once - reads


@pytest.mark.slow(quick=["cut"])
@pytest.mark.parametrize("damage", ["values", "cut", "gone"])
def test_a_file_that_was_changed_meanwhile_is_made_again(
    damage: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qgemm.streaming.shards._BYTES_BETWEEN_NOTES", 1000)
    quantize_whole(source, tmp_path / "whole")
    with monkeypatch.context() as patched:
        stop_after(9, patched)
        with pytest.raises(Stopped):
            quantize_checkpoint(source, tmp_path / "streamed")
    partial = tmp_path / "streamed.partial"
    (begun,) = json.loads((partial / "journal.json").read_text())["begun"].values()
    assert begun["units"] > 3
    (path,) = (partial / "content").iterdir()
    content = bytearray(path.read_bytes())
    if damage == "gone":
        path.unlink()
    else:
        # The first tensor, which is written first, begins behind the header.
        start = 8 + int.from_bytes(content[:8], "little")
        content[start + 5] ^= 1
        path.write_bytes(content if damage == "values" else content[:start])
    if damage == "gone":
        quantize_checkpoint(source, tmp_path / "streamed")
    else:
        with pytest.warns(UserWarning, match=r"model\.safetensors differs from what was written, so it is made again"):
            quantize_checkpoint(source, tmp_path / "streamed")
    assert_same_files(tmp_path / "whole", tmp_path / "streamed")


def test_what_lies_behind_the_end_is_cut_off(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qgemm.streaming.shards._BYTES_BETWEEN_NOTES", 1000)
    quantize_whole(source, tmp_path / "whole")
    with monkeypatch.context() as patched:
        stop_after(1, patched)
        with pytest.raises(Stopped):
            quantize_checkpoint(source, tmp_path / "streamed")
    (path,) = (tmp_path / "streamed.partial" / "content").iterdir()
    with path.open("r+b") as file:
        file.seek(10**6)
        file.write(b"of somebody else")
    quantize_checkpoint(source, tmp_path / "streamed")
    assert_same_files(tmp_path / "whole", tmp_path / "streamed")
