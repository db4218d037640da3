"""What ``from_pretrained`` reads of a quantized folder: each process its part of the tensors, and nothing twice."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from torch import distributed
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.distributed import DistributedConfig

import qgemm
from qgemm.checkpoint.safetensors_file import read_headers


class CountedFile:
    """A safetensors file of which it is known what was read, by name."""

    bytes_read: dict[str, int]

    def __init__(self, *args: Any, **options: Any) -> None:
        self._file = safetensors.safe_open(*args, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> CountedFile:
        return self

    def __exit__(self, *args: Any) -> None:
        self._file.__exit__(*args)

    def get_slice(self, name: str) -> Any:
        part = self._file.get_slice(name)

        class Counted:
            def __getattr__(self, attribute: str) -> Any:
                return getattr(part, attribute)

            def __getitem__(self, index: Any) -> torch.Tensor:
                value: torch.Tensor = part[index]
                CountedFile.bytes_read[name] = CountedFile.bytes_read.get(name, 0) + value.nbytes
                return value

        return Counted()


SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 512,
    "intermediate_size": 512,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def llama() -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**SIZES))


def mixture() -> Qwen3MoeForCausalLM:
    config = Qwen3MoeConfig(**SIZES, moe_intermediate_size=64, num_experts=4, num_experts_per_tok=2, head_dim=128)
    return Qwen3MoeForCausalLM(config)


@pytest.mark.parametrize(
    ("build", "scheme", "experts"),
    [(llama, "int8", False), (llama, "int4", False), (mixture, "int8", False), (mixture, "int8", True)],
    ids=["int8", "int4", "columns of experts", "experts"],
)
def test_a_process_reads_its_part_of_the_files_alone(
    build: Callable[[], Any], scheme: str, experts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    model = qgemm.quantize_model(build(), scheme)
    model.save_pretrained(tmp_path)
    monkeypatch.setattr("transformers.modeling_utils.safe_open", CountedFile)
    monkeypatch.setattr(CountedFile, "bytes_read", {}, raising=False)
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    distributed.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)  # nobody else is there
    try:
        config = DistributedConfig(tp_plan="auto", enable_expert_parallel=experts)
        type(model).from_pretrained(tmp_path, distributed_config=config)
    finally:
        distributed.destroy_process_group()
    # Scales of whole rows that are cut are needed whole, and transformers cuts no embeddings, norms and routers.
    whole = r"embed_tokens|norm|mlp\.gate\."
    if scheme == "int8" and not experts:
        whole += r"|(o_proj|down_proj)\.weight_scale|down_proj_scale"
    stored = read_headers(tmp_path, json.loads((tmp_path / "config.json").read_text()))
    for name, tensor in stored.items():
        if experts and "experts" not in name:
            continue
        if "rotary_emb" not in name:  # read afterwards, by qgemm
            assert CountedFile.bytes_read[name] * (1 if re.search(whole, name) else 2) == tensor.nbytes, name
