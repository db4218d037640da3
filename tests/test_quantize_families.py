"""quantize_model on a tiny random model of every family: what is swapped, what stays, and how far the output moves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, Example
from torch import nn
from transformers import PreTrainedModel

from qgemm import QuantLinear
from qgemm.checkpoint import load_quantized, save_quantized
from qgemm.model.report import report
from qgemm.nn.attention import opened_attention
from qgemm.quantize import quantize_model

QUICK = ("llama", "bert", "t5", "gpt2")
families = pytest.mark.parametrize("family", FAMILIES)


def _in_layers(*paths: str, layers: int = 2) -> set[str]:
    return {path.replace("*", str(layer)) for path in paths for layer in range(layers)}


_MAMBA = {"lm_head"} | _in_layers(*(f"backbone.layers.*.mixer.{name}" for name in ("x_proj", "dt_proj", "out_proj")))

# All linear layers that stay in float, by family; elsewhere it is the output head, lm_head.
KEPT = {
    "bert": {"cls.predictions.transform.dense", "cls.predictions.decoder"},
    "bert_classifier": {"classifier"},
    "roberta": {"lm_head.dense", "lm_head.decoder"},
    "distilbert": {"vocab_transform", "vocab_projector"},
    "albert": {"predictions.dense", "predictions.decoder"},
    "vit": {"classifier"},
    "swin": {"classifier"},
    "siglip": set(),
    "siglip_vision": set(),
    "clip": set(),
    "clip_vision": set(),
    "whisper": {"proj_out"},
    "mamba": _MAMBA,
    "falcon_mamba": _MAMBA,
    "jamba": {"lm_head", "model.layers.0.mamba.dt_proj"},
}
TIED = ("qwen3", "gpt2", "opt", "bert", "t5", "gemma3", "whisper", "bart", "bloom", "albert")
# Less than 95 % of the bytes in linear weights outside heads are quantized: half of a state space model's goes to a
# fused kernel.
SMALL_COVERAGE = {"mamba": 0.55, "falcon_mamba": 0.55}


def kept_in(family: str) -> set[str]:
    return KEPT.get(family, {"lm_head"})


@pytest.mark.slow(quick=QUICK)
@families
def test_output_stays_close_to_the_float_model(family: str) -> None:
    example = FAMILIES[family]()
    expected = example.output()
    quantize_model(example.model)
    out = example.output()
    # Each product of 8-bit values errs by about 1 % (weights 0.6 %, activations as much again); a dozen of them in a
    # row, adding up at random, come to 1 to 3.2 %. One transposed weight moves these outputs by 7 to 116 %.
    assert (out - expected).norm() / expected.norm() < 0.05
    # And no single token is off.
    assert torch.cosine_similarity(out.flatten(0, -2), expected.flatten(0, -2)).min() > 0.998
    # The layers did run in int8.
    assert not torch.equal(out, expected)


@pytest.mark.slow(quick=QUICK)
@families
def test_each_layer_answers_as_the_float_layer_did(family: str) -> None:
    # Outputs alone would hide a lost bias: attention, for one, is blind to the bias of its keys.
    original, model = FAMILIES[family]().model, quantize_model(FAMILIES[family]().model)
    with opened_attention(original):
        layers = dict(original.named_modules())
    for record in report(model).quantized:
        old, new = layers[record.name], model.get_submodule(record.name)
        x = torch.randn(16, new.in_features)
        with torch.no_grad():
            expected = old(x)
            assert (new(x) - expected).norm() / expected.norm() < 0.02, record.name
            if new.bias is not None:
                assert torch.equal(new.bias, old.bias), record.name


@families
def test_all_linear_layers_but_heads_are_quantized(family: str) -> None:
    model = FAMILIES[family]().model
    weights = sum(p.numel() for name, p in model.named_parameters() if p.ndim == 2 and name.endswith("weight"))
    quantize_model(model)
    result = report(model)
    kept = kept_in(family)
    assert {record.name for record in result.kept} == kept
    assert all(record.reason for record in result.kept)
    assert all(record.weight_error is not None and record.weight_error < 0.01 for record in result.quantized)
    # Counted without the report: what is no embedding and no head is int8 now.
    int8 = sum(p.numel() for p in model.parameters() if p.dtype == torch.int8)
    left = [module for name, module in model.named_modules() if isinstance(module, nn.Embedding) or name in kept]
    left_out = {id(p): p.numel() for module in left for p in module.parameters() if p.ndim == 2}
    assert int8 == weights - sum(left_out.values())
    heads = {"output head", "task head, outside the base model"}
    bodies = [record for record in result.records if record.reason not in heads]
    coverage = sum(record.bytes_before for record in result.quantized) / sum(r.bytes_before for r in bodies)
    assert coverage > SMALL_COVERAGE.get(family, 0.95)
    assert (coverage < 0.95) == (family in SMALL_COVERAGE)


@families
def test_a_model_and_its_parts_say_their_float_dtype(family: str) -> None:
    # By their first float parameter, which decides what masks, caches and pixels are cast to.
    model: Any = quantize_model(FAMILIES[family]().model.bfloat16())
    parts = {name: part.dtype for name, part in model.named_modules() if isinstance(part, PreTrainedModel)}
    assert parts[""] == torch.bfloat16
    assert set(parts.values()) == {torch.bfloat16}, parts


@pytest.mark.parametrize("family", TIED)
def test_embeddings_stay_tied(family: str) -> None:
    model: Any = FAMILIES[family]().model
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    quantize_model(model)
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    assert type(head) is nn.Linear
    assert head.weight is embedding.weight
    assert head.weight.dtype == torch.float32


# As tests/checkpoint/test_load_round_trip.py has it of more families.
@pytest.mark.slow(quick=QUICK)
@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.complete]) for name in FAMILIES],
)
def test_reload_is_bit_equal(family: str, tmp_path: Path) -> None:
    example = FAMILIES[family]()
    quantize_model(example.model)
    save_quantized(example.model, tmp_path)
    reloaded = Example(load_quantized(tmp_path), example.inputs)
    before, after = example.model.state_dict(), reloaded.model.state_dict()
    assert list(after) == list(before)
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype, name
        assert torch.equal(after[name], tensor), name
    assert torch.equal(reloaded.output(), example.output())
    assert report(reloaded.model) == report(example.model)


def test_generate_runs_as_before() -> None:
    from transformers import LlamaForCausalLM

    example = FAMILIES["llama"]()
    assert isinstance(example.model, LlamaForCausalLM)
    quantize_model(example.model)
    # With and without the cache, the same tokens: rows are quantized one by one, whatever is in the batch beside them.
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    tokens = example.inputs["input_ids"]
    cached = example.model.generate(tokens, use_cache=True, **options)
    assert cached.shape == (2, tokens.shape[1] + 8)
    assert torch.equal(cached, example.model.generate(tokens, use_cache=False, **options))


def test_t5_in_bfloat16_quantizes_wo() -> None:
    # T5's forward casts to wo's dtype, unless that is int8.
    example = FAMILIES["t5"]()
    example.model.bfloat16()
    expected = example.output()
    quantize_model(example.model)
    assert isinstance(example.model.get_submodule("encoder.block.0.layer.1.DenseReluDense.wo"), QuantLinear)
    out = example.output()
    assert out.dtype == torch.bfloat16
    assert (out - expected).norm() / expected.norm() < 0.05


def test_t5_in_float16_keeps_wo_in_float32(tmp_path: Path) -> None:
    # Its sums leave float16's range in the trained models, which is why transformers loads it as float32.
    from transformers import T5ForConditionalGeneration

    example = FAMILIES["t5"]()
    example.model.save_pretrained(tmp_path)
    half = T5ForConditionalGeneration.from_pretrained(tmp_path, dtype=torch.float16).eval()
    quantize_model(half)
    kept = {record.name: record.reason for record in report(half).kept}
    assert kept.pop("lm_head") == "output head"
    assert set(kept.values()) == {"the model keeps it in float32"}
    assert {name.rpartition(".")[2] for name in kept} == {"wo"}
    assert len(kept) == 4
    assert Example(half, example.inputs).output().isfinite().all()
