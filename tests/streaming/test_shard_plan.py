"""A file's plan goes to another process and back as JSON, and the file that is made of it is the same."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from families import FAMILIES

from qgemm.calibration.quantization import Quantization
from qgemm.scheme import SCHEMES, QuantScheme
from qgemm.streaming.float_tensors import FloatTensor, parse_float
from qgemm.streaming.journal import Begun
from qgemm.streaming.plan import plan_checkpoint
from qgemm.streaming.shard_plan import ShardPlan
from qgemm.streaming.shards import write_shard
from qgemm.streaming.source import open_source

SIZES: dict[str, Any] = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
HEADS: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}


def save(model: Any, folder: Path) -> Path:
    """A folder with the checkpoint of a float model."""
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def written(shard: ShardPlan) -> tuple[bytes, dict[str, float]]:
    """A file and the errors of its weights."""
    file = io.BytesIO()
    errors = write_shard(file, shard, torch.device("cpu"), lambda count: None, Begun(""), lambda begun: None, {})  # type: ignore[arg-type]
    return file.getvalue(), errors


def refuse(values: dict[str, Any]) -> FloatTensor:
    """No tensor is made by transformers."""
    raise AssertionError(values)


def check_plans(source: Path, wanted: Quantization, max_shard_size: str = "20KB") -> list[dict[str, Any]]:
    """Compares the files of ``wanted`` with those of the plans that went through JSON; returns these plans."""
    described = []
    with open_source(source) as opened, open_source(source) as other:
        plan = plan_checkpoint(opened, wanted, [], max_shard_size)
        for name in plan.shards:
            shard = plan.shard(name)
            described.append(json.loads(json.dumps(shard.to_dict())))
            again = ShardPlan.from_dict(described[-1], lambda values: parse_float(values, other, refuse))
            assert again.to_dict() == shard.to_dict()
            assert again.bytes_to_read == shard.bytes_to_read
            assert written(again) == written(shard)
    return described


def kinds(described: list[dict[str, Any]]) -> set[str]:
    """How the float tensors in plans come about."""
    floats = [weight["values"] for shard in described for weight in shard["weights"]]
    floats += [each for shard in described for each in shard["copied"].values()]
    floats += [each["of"] for each in floats if "of" in each]
    return {next(iter(each)) for each in floats}


def _is_from_files(scheme: QuantScheme) -> bool:
    return not (scheme.is_static or scheme.needs_data)


@pytest.mark.parametrize("scheme", [name for name, each in SCHEMES.items() if _is_from_files(each)])
def test_schemes(scheme: str, source: Path) -> None:
    described = check_plans(source, Quantization.of(scheme))
    assert kinds(described) == {"stored", "values"}  # rotary frequencies are in no file
    assert {weight["scheme"] for shard in described for weight in shard["weights"]} == {scheme}


def test_a_scheme_for_each_layer_and_given_scales(source: Path) -> None:
    names = [f"model.layers.{layer}.mlp.down_proj" for layer in (0, 1)]
    schemes = {names[0]: "int8-static", names[1]: "nvfp4", "*.self_attn.*": "int4-32", "*": None}
    wanted = Quantization.of(schemes, input_scales={names[0]: 0.25}, skip=re.compile("layers.0.*q_proj"), include="*")
    described = check_plans(source, wanted)
    weights = {weight["layer"]: weight["scheme"] for shard in described for weight in shard["weights"]}
    assert set(weights.values()) == {"int8-static", "nvfp4", "int4-32"}
    assert "model.layers.0.self_attn.q_proj" not in weights
    assert any(f"{names[0]}.input_scale" in shard["copied"] for shard in described)


@pytest.mark.parametrize("scheme", ["int8", "int4-32", "nvfp4", "fp8-block"])
def test_experts_that_files_hold_one_by_one(scheme: str, tmp_path: Path) -> None:
    config = transformers.MixtralConfig(**SIZES, **HEADS, num_local_experts=4)
    source = save(transformers.MixtralForCausalLM(config), tmp_path / "float")
    assert kinds(check_plans(source, Quantization.of(scheme), "50KB")) == {"stored", "values", "of", "experts"}


def test_experts_whose_gates_and_ups_alternate(tmp_path: Path) -> None:
    config = transformers.GptOssConfig(**SIZES, **HEADS, num_local_experts=4, num_experts_per_tok=2)
    source = save(transformers.GptOssForCausalLM(config), tmp_path / "float")
    described = check_plans(source, Quantization.of("int8"), "50KB")
    assert "of" in kinds(described)
    layouts = [each["values"]["layout"] for shard in described for each in shard["weights"] if "of" in each["values"]]
    assert all(layout["is_transposed"] and layout["is_interleaved"] for layout in layouts)


@pytest.mark.parametrize("family", ["gpt2", "siglip", "t5"])
def test_weights_that_lie_otherwise(family: str, tmp_path: Path) -> None:
    # Transposed, packed in nn.MultiheadAttention, partly kept in float32.
    check_plans(save(FAMILIES[family]().model, tmp_path / "float"), Quantization.of("int8"))


def test_parameters_that_the_model_computes(tmp_path: Path) -> None:
    sizes = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": 97, "pad_token_id": 0}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "decoder_start_token_id": 0}
    config = transformers.MarianConfig(**sizes, **heads, encoder_ffn_dim=48, decoder_ffn_dim=48)
    source = save(transformers.MarianMTModel(config), tmp_path / "float")
    described = check_plans(source, Quantization.of("int8"))
    computed = {name for shard in described for name, each in shard["copied"].items() if "values" in each}
    assert any("embed_positions" in name for name in computed)


def test_what_transformers_makes_is_asked_for(tmp_path: Path) -> None:
    heads = {"num_attention_heads": 4}
    model = transformers.NomicBertModel(transformers.NomicBertConfig(**SIZES, **heads))
    source = save(model, tmp_path / "float")
    asked: list[str] = []

    def make(values: dict[str, Any]) -> FloatTensor:
        asked.append(values["made"])
        return FloatTensor(tuple(values["shape"]), torch.bfloat16, lambda start, stop: torch.ones(()))

    with open_source(source) as opened:
        plan = plan_checkpoint(opened, Quantization.of("int8"), [], "1MB")
        for name in plan.shards:
            ShardPlan.from_dict(plan.shard(name).to_dict(), lambda values: parse_float(values, opened, make))
    assert sorted(each.rpartition("self_attn.")[2] for each in asked) == [f"{each}_proj.weight" for each in "kqv"]
