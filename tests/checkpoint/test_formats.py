"""What configs ask for beside weights: refused where it changes the result, and a note where it doesn't."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from checkpoint.foreign import edit_quantization
from checkpoint.rewriting import edited
from checkpoint.samples import SAMPLES
from qgemm import CheckpointError, load_quantized
from qgemm.checkpoint.cache_scales import NOTE
from qgemm.checkpoint.compressed_tensors import NO_ORDER
from qgemm.checkpoint.contents import Contents
from qgemm.checkpoint.formats import read_contents
from qgemm.checkpoint.layout import read_json

AUTO_ROUND, GPTQ, AWQ, PACKED = "auto-round-gptq", "gptq-4bit-g128-sym", "awq-gemm-g128", "ct-w4a16-g128"
LAYER = "model.layers.0.mlp.up_proj"


def contents_with(name: str, folder: Path, values: dict[str, Any]) -> Contents:
    shutil.copytree(SAMPLES / name, folder)
    edit_quantization(folder, lambda quantization: quantization.update(values))
    return read_contents(folder, read_json(folder / "config.json"), folder / "config.json")


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        (AUTO_ROUND, {"act_bits": 8, "act_dynamic": True}, "config.json: act_bits is 8"),
        (
            AUTO_ROUND,
            {"extra_config": {LAYER: {"act_bits": 8}}},
            rf"extra_config of '{LAYER}': act_bits is 8",
        ),
        (
            AUTO_ROUND,
            {"extra_config": {LAYER: {"data_type": "mx_fp"}}},
            rf"extra_config of '{LAYER}': data_type is 'mx",
        ),
        (
            AUTO_ROUND,
            {"rotation_config": {"hadamard_type": "hadamard"}},
            "it has a rotation_config, which .* so deq",
        ),
        (AUTO_ROUND, {"transform_config": {"transform_type": "hadamard"}}, "it has a transform_config"),
        (GPTQ, {"rotation": "hadamard"}, "it has a rotation, which qgemm doesn't compute, so dequantize it"),
        (GPTQ, {"meta": {"rotation": "random"}}, "it has a rotation"),
        (GPTQ, {"adapter": {"name": "lora", "rank": 32}}, "it has an adapter, which qgemm doesn't compute"),
        (AWQ, {"rotation": "hadamard"}, "it has a rotation"),
    ],
)
def test_refused(name: str, values: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        contents_with(name, tmp_path / "copy", values)


@pytest.mark.parametrize(
    ("name", "values", "notes"),
    [
        (AUTO_ROUND, {"static_kv_dtype": "fp8"}, [NOTE]),
        (GPTQ, {"kv_cache_scheme": {"num_bits": 8}}, [NOTE]),
        (AWQ, {"kv_cache_scheme": {"num_bits": 8}}, [NOTE]),
        # Of activations in float, and of layers in float.
        (AUTO_ROUND, {"act_bits": 16, "act_dynamic": True}, []),
        (AUTO_ROUND, {"extra_config": {"lm_head": {"bits": 16, "data_type": "float"}, LAYER: {"bits": 4}}}, []),
        (AUTO_ROUND, {"rotation_config": {}, "transform_config": None}, []),
        (GPTQ, {"rotation": None, "adapter": None}, []),
    ],
)
def test_notes(name: str, values: dict[str, Any], notes: list[str], tmp_path: Path) -> None:
    assert contents_with(name, tmp_path / "copy", values).notes == notes


def test_settings_of_the_text_model(tmp_path: Path) -> None:
    folder = shutil.copytree(SAMPLES / GPTQ, tmp_path / "copy")
    config = read_json(folder / "config.json")
    said = {**config.pop("quantization_config"), "kv_cache_scheme": {"num_bits": 8}}
    contents = read_contents(folder, {**config, "text_config": {"quantization_config": said}}, folder / "config.json")
    assert contents.notes == [NOTE]  # which the tensors alone don't tell
    said["rotation"] = "hadamard"
    with pytest.raises(CheckpointError, match="it has a rotation"):
        read_contents(folder, {**config, "text_config": {"quantization_config": said}}, folder / "config.json")
    # What the whole model's config says comes first.
    both = {**config, "quantization_config": {**said, "rotation": None}, "text_config": {"quantization_config": said}}
    assert read_contents(folder, both, folder / "config.json").notes == [NOTE]


def test_two_stored_tensors_stay_two_where_the_config_ties_them(tmp_path: Path) -> None:
    folder = shutil.copytree(SAMPLES / GPTQ, tmp_path / "copy")
    with edited(folder / "config.json") as config:
        config["tie_word_embeddings"] = True
    model, stored = load_quantized(folder), load_file(folder / "model.safetensors")
    assert model.all_tied_weights_keys == {"lm_head.weight": "model.embed_tokens.weight"}
    head, embeddings = stored["lm_head.weight"], stored["model.embed_tokens.weight"]
    assert not torch.equal(head, embeddings)
    assert torch.equal(model.lm_head.weight, head)
    assert torch.equal(model.model.embed_tokens.weight, embeddings)


@pytest.mark.parametrize(
    ("order", "notes"),
    [(named, [NO_ORDER]) for named in ("group", "dynamic", "GROUP", True)]
    + [("weight", []), ("static", []), (None, [])],
)
def test_an_order_that_files_do_not_have(order: object, notes: list[str], tmp_path: Path) -> None:
    groups = read_json(SAMPLES / PACKED / "config.json")["quantization_config"]["config_groups"]
    groups["group_0"]["weights"]["actorder"] = order
    assert contents_with(PACKED, tmp_path / "copy", {"config_groups": groups}).notes == notes
