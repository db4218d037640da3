"""Fused encoders: the same numbers as unfused ones, and what differs by little from their structures."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import transformers
from families import Example
from torch import nn

from fusion.activations import functions_rounding_once, rounding_once
from fusion.encoders import (
    CALLED,
    DECODERS_ALONE,
    LAYER_SCALES,
    NORMS_FIRST,
    OTHER_ATTENTION,
    PACKED,
    WITH_ENCODER,
    nllb,
)
from fusion.test_fuse import BOTH, fused_parts
from fusion.test_fuse import WITH_ENCODER as AND_CROSS
from qgemm import fuse, fusion_report, quantize_model
from qgemm.fusion.verify import MAX_ERROR
from qgemm.nn.blocks.binding import fused_of

ENCODERS = {**LAYER_SCALES, **NORMS_FIRST, **DECODERS_ALONE, **PACKED, **OTHER_ATTENTION, **CALLED, **WITH_ENCODER}
FUSED: dict[str, tuple[tuple[str, ...], ...]] = {
    **dict.fromkeys(ENCODERS, (BOTH, BOTH)),
    **dict.fromkeys(CALLED, (("mlp",), ("mlp",))),
    **dict.fromkeys(WITH_ENCODER, (BOTH, BOTH, AND_CROSS, AND_CROSS)),
    "moonshine": (BOTH, BOTH, AND_CROSS[:2], AND_CROSS[:2]),
}


def quantized(family: str, dtype: torch.dtype = torch.float32) -> Example:
    example = ENCODERS[family]()
    quantize_model(example.model.to(dtype))
    example.inputs = {name: x.to(dtype) if x.is_floating_point() else x for name, x in example.inputs.items()}
    return example


@pytest.mark.slow(quick=["dinov2-dtype0"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ENCODERS)
def test_a_fused_encoder_has_the_bits_of_the_model(family: str, dtype: torch.dtype) -> None:
    example = quantized(family, dtype)
    many = Example(example.model, {name: x.repeat(2, *[1] * (x.dim() - 1)) for name, x in example.inputs.items()})
    with rounding_once(example.model):
        expected, expected_of_many = example.output(), many.output()
    fuse(example.model, example.inputs)
    assert fused_parts(example.model) == FUSED[family]
    assert all(record.error is not None and record.error <= MAX_ERROR for record in fusion_report(example.model).fused)
    if (family, dtype) == ("pixtral", torch.float32):  # whose first norm, outside of layers, sums in another order
        torch.testing.assert_close(example.output(), expected)
        return
    with functions_rounding_once(example.model):
        assert torch.equal(example.output(), expected)
        assert torch.equal(many.output(), expected_of_many)


@pytest.mark.parametrize("family", WITH_ENCODER)
def test_decoders_generate_as_before(family: str) -> None:
    """With keys and values of the encoder in the cache."""
    found = quantized(family)
    model: Any = found.model
    given = {name: x for name, x in found.inputs.items() if not name.startswith("decoder")}
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "num_beams": 1}
    expected = model.generate(**given, **options)
    fuse(model, found.inputs)
    assert torch.equal(model.generate(**given, **options), expected)
    assert torch.equal(model.generate(**given, **options, use_cache=False), expected)


class _PlusOne(nn.Module):
    """A scale of zeros does nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.lambda1 = nn.Parameter(torch.zeros(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (1 + self.lambda1)


@pytest.mark.parametrize("change", ["other scale", "one more", "a number"])
def test_layers_with_other_parameters_are_left_alone(change: str) -> None:
    """Even if they do nothing to the values that they have now."""
    example = ENCODERS["dinov2"]()
    for layer in _layers(example.model, "Layer"):
        if change == "other scale":
            layer.layer_scale1 = _PlusOne()
            continue
        layer.gate = nn.Parameter(torch.ones(64 if change == "one more" else 1))
        own = type(layer)

        class Gated(own):  # type: ignore[misc, valid-type]
            @functools.wraps(own.forward)
            def forward(self, *args: Any, **named: Any) -> torch.Tensor:
                out: torch.Tensor = self.gate * super().forward(*args, **named)
                return out

        layer.__class__ = Gated
    quantize_model(example.model)
    fuse(example.model, example.inputs)
    name = "layer_scale1" if change == "other scale" else "gate"
    first = next(record for record in fusion_report(example.model).records if not record.name.endswith("mlp"))
    assert (first.parts, first.reason) == ((), f"it has {name}, which is unknown")


@pytest.mark.parametrize("gate", [_PlusOne(), nn.Parameter(torch.ones(64))], ids=["module", "parameter"])
@pytest.mark.parametrize("place", ["attention", "attention.output"])
def test_attention_in_a_module_with_more_is_left_alone(place: str, gate: Any) -> None:
    """Even if that does nothing yet."""
    example = ENCODERS["dpt"]()
    for layer in _layers(example.model, "ViTLayer"):
        layer.get_submodule(place).gate = gate
    quantize_model(example.model)
    fuse(example.model, example.inputs)
    assert fused_parts(example.model) == ((), ())
    assert fusion_report(example.model).records[0].reason == "its parts have unknown names"


@torch.no_grad()
def test_a_decoder_alone_generates_the_same_tokens_and_attends_to_what_it_is_given_later() -> None:
    example = quantized("bart_decoder")
    model: Any = example.model
    tokens, states = example.inputs["input_ids"], torch.randn(2, 5, 64)

    def outputs() -> tuple[torch.Tensor, torch.Tensor]:
        alone = model.generate(tokens, max_new_tokens=5, do_sample=False, eos_token_id=None, pad_token_id=0)
        return alone, model(tokens, encoder_hidden_states=states).logits

    expected = outputs()
    fuse(model)
    assert all(map(torch.equal, outputs(), expected))


def _layers(model: nn.Module, end: str) -> list[Any]:
    return [module for module in model.modules() if type(module).__name__.endswith(end)]


@pytest.mark.parametrize("family", ["dinov2", "beit"])
def test_a_layer_scale_is_read_as_it_is(family: str) -> None:
    """That of a model whose weights are loaded after it was fused, too."""
    example = quantized(family)
    fuse(example.model, example.inputs)
    with torch.no_grad():
        for name, parameter in example.model.named_parameters():
            if "lambda" in name:
                parameter.mul_(-2)
    found = example.output()
    assert all(fused_of(layer) is not None for layer in _layers(example.model, "Layer"))
    fuse(example.model, example.inputs)
    assert torch.equal(example.output(), found)


@torch.no_grad()
def test_mlps_that_are_told_more_are_left_alone() -> None:
    """What it is doesn't show in a forward without padding."""
    example = nllb(encoder_sparse_step=1, expert_capacity=64)
    model: Any = quantize_model(example.model)
    tokens = example.inputs["input_ids"]
    mask = torch.ones_like(tokens)
    mask[0, -3:] = 0
    encoder = model.get_encoder()
    expected = encoder(tokens, attention_mask=mask).last_hidden_state
    fuse(model, example.inputs)
    assert fusion_report(model).records[0].reason == "its ffn takes padding_mask, too"
    assert torch.equal(encoder(tokens, attention_mask=mask).last_hidden_state, expected)


def test_layers_that_are_called_by_other_names_of_arguments() -> None:
    """Those that Mllama's layers had before: what else the model has is fused."""
    example = ENCODERS["beit"]()
    for layer in _layers(example.model, "Layer"):
        own = type(layer).forward

        @functools.wraps(own)
        def forward(self: Any, *args: Any, own: Any = own, **others: Any) -> Any:
            return own(self, others.pop("old_name"), **others)

        layer.__class__ = type("Renamed", (type(layer),), {"forward": forward, "__call__": _by_old_name})
    quantize_model(example.model)
    expected = example.output()
    fuse(example.model, example.inputs)
    assert fused_parts(example.model) == ((), ("mlp",)) * 2
    assert torch.equal(example.output(), expected)


def _by_old_name(self: nn.Module, x: torch.Tensor, *args: Any, **others: Any) -> Any:
    return nn.Module.__call__(self, old_name=x, **others)


def _attention_of(name: str, change: str) -> Example:
    """A model of images whose attention does more, or less, than that of ``name``."""
    example = ENCODERS[name]()
    for layer in _layers(example.model, "Block"):
        own = type(layer.attn)

        class Changed(own):  # type: ignore[misc, valid-type]
            def forward(self, hidden_states: torch.Tensor, cu_seqlens: torch.Tensor, **others: Any) -> torch.Tensor:
                if change == "sees all":
                    cu_seqlens = cu_seqlens[[0, -1]]
                out: torch.Tensor = super().forward(hidden_states, cu_seqlens, **others)
                return out * 1.005 if change == "scaled" else out

        Changed.__module__ = own.__module__
        layer.attn.__class__ = Changed
        if change == "parameter":
            layer.attn.bias_of_scores = nn.Parameter(torch.zeros(1))
    return example


@pytest.mark.parametrize("change", ["sees all", "scaled", "parameter"])
def test_attention_to_sequences_one_behind_another_that_differs_is_called(change: str) -> None:
    """Of one sequence alone, what sees all others is right."""
    example = _attention_of("qwen2_vl", change)
    quantize_model(example.model)
    one = {"hidden_states": example.inputs["hidden_states"][:16], "grid_thw": example.inputs["grid_thw"][:1]}
    expected = example.output()
    fuse(example.model, one)
    assert fused_parts(example.model) == (("mlp",), ("mlp",))
    assert torch.equal(example.output(), expected)


def test_flash_attention_gets_all_sequences_at_once() -> None:
    """As the model hands them over, also after it was fused for another function."""
    example = quantized("qwen2_vl")
    fuse(example.model, example.inputs)
    told: list[Any] = []

    def flash(module: Any, q: torch.Tensor, k: Any, v: Any, **others: Any) -> tuple[torch.Tensor, None]:
        told.append(others["cu_seq_lens_q"].tolist())
        return q.transpose(1, 2), None

    transformers.AttentionInterface.register("flash_of_a_test", flash)
    example.model.config._attn_implementation = "flash_of_a_test"
    example.output()
    assert told == 2 * [[0, 16, 32]]


def test_sequences_that_were_not_there_when_a_layer_was_fused() -> None:
    example = quantized("qwen2_5_vl")
    expected = example.output()
    one = {"hidden_states": example.inputs["hidden_states"][:16], "grid_thw": example.inputs["grid_thw"][:1]}
    fuse(example.model, one)
    assert fused_parts(example.model) == (BOTH, BOTH)
    assert torch.equal(example.output(), expected)


def test_a_rotation_that_does_more_is_not_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the arguments of one that is known."""
    from transformers.models.qwen3_vl import modeling_qwen3_vl as there

    example, turn = quantized("qwen3_vl"), there.apply_rotary_pos_emb_vision

    def apply_rotary_pos_emb_vision(
        q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        q, k = turn(q, k, cos, sin)
        return torch.cat((0 * q[:1], q[1:])), k  # of [S, H, D]

    monkeypatch.setattr(there, "apply_rotary_pos_emb_vision", apply_rotary_pos_emb_vision)
    expected = example.output()
    fuse(example.model, example.inputs)
    assert fused_parts(example.model) == (("mlp",), ("mlp",))
    assert torch.equal(example.output(), expected)
