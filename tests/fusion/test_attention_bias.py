"""Fused attention whose scores have a bias added: by positions, as in T5 and MPNet, and by a mask of floats."""

from __future__ import annotations

import copy
import inspect
import sys
import textwrap
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from families import FAMILIES, VOCABULARY, Example
from families.example import language_model
from torch import Tensor

from fusion.encoders import OPERATORS
from fusion.test_fuse import BOTH, fused_parts
from qgemm import fuse, fusion_report, load_quantized, quantize_model, save_quantized
from qgemm.fusion.fuse import _why_not_returned
from tests.operators import Operators

LAYER = (("attention",), ("mlp",))
DECODER_LAYER = (("attention",), ("cross attention",), ("mlp",))
_SIZES = {"vocab_size": VOCABULARY, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4}
BY_LAYER: dict[str, Callable[[], Example]] = {
    # The first layer hands its bias on.
    "t5": FAMILIES["t5"],
    # Each layer has its own.
    "umt5": language_model("UMT5ForConditionalGeneration", **_SIZES),
}


def build(family: str, scheme: str = "int8", dtype: torch.dtype = torch.float32) -> Any:
    """A quantized model whose biases are as large as scores; new ones are next to nothing."""
    torch.manual_seed(0)
    model = {**BY_LAYER, **OPERATORS}[family]().model.to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "relative_attention_bias" in name:
                parameter.normal_()
    return quantize_model(model, scheme)


def inputs(rows: int, length: int, padding: int = 0, decoder: int = 0) -> dict[str, Tensor]:
    """Of which the last row has ``padding``."""
    found = {"input_ids": torch.arange(rows * length).reshape(rows, length) * 7 % 90 + 5}
    if padding:
        found["attention_mask"] = torch.ones(rows, length, dtype=torch.long)
        found["attention_mask"][-1, -padding:] = 0
    return found | ({"decoder_input_ids": found["input_ids"][:, :decoder]} if decoder else {})


@pytest.mark.slow(quick=["t5-int8"])
@torch.no_grad()
@pytest.mark.parametrize(("family", "scheme"), [("t5", "int8"), ("umt5", "int8"), ("t5", "int4"), ("umt5", "fp8")])
def test_biases_of_layers_have_the_bits_of_the_model(family: str, scheme: str) -> None:
    model = build(family, scheme)
    fused: Any = fuse(copy.deepcopy(model), inputs(2, 7, decoder=3))
    assert fused_parts(fused) == LAYER * 2 + DECODER_LAYER * 2
    for each in (inputs(1, 1, decoder=1), inputs(2, 7, 3, decoder=2), inputs(3, 40, 9, decoder=5)):
        with Operators() as counted:
            found = fused(**each).logits
        assert torch.equal(found, model(**each).logits)
        # Norms go with what quantizes their rows, or, of 4-bit weights, with what hands them floats.
        assert counted.names.count("qgemm.norm_quantize") + counted.names.count("qgemm.add_norm") == 5 * 2 + 2


@pytest.mark.slow(quick=["t5-static"])
@torch.no_grad()
@pytest.mark.parametrize(("family", "cache"), [("t5", "static"), ("umt5", "dynamic")])
def test_tokens_behind_others_have_the_bias_of_their_positions(family: str, cache: str) -> None:
    model = build(family)
    fused = fuse(copy.deepcopy(model), inputs(2, 7, decoder=3))
    options = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    options |= {"return_dict_in_generate": True, "output_logits": True, "decoder_start_token_id": 0}
    options |= {"cache_implementation": "static"} if cache == "static" else {}
    expected = model.generate(**inputs(2, 7, 3), **options).logits
    with Operators() as counted:
        found = fused.generate(**inputs(2, 7, 3), **options).logits
    assert counted.names.count("qgemm.norm_quantize") == 2 * 2 + len(found) * 2 * 3
    assert len(found) == 5
    assert all(map(torch.equal, found, expected))


def test_gradients_of_a_bias_and_what_is_returned_beside_it() -> None:
    model = build("t5")
    fused: Any = fuse(copy.deepcopy(model), inputs(2, 7, decoder=3))
    for each in (model, fused):
        each(**inputs(2, 7, 3, decoder=3)).logits.square().mean().backward()
    name = "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    expected, found = (each.get_parameter(name).grad for each in (model, fused))
    assert expected.abs().max() > 0
    assert torch.equal(found, expected)
    layer, x = fused.encoder.block[0].layer[0], torch.randn(2, 7, 64)
    given = torch.randn(1, 4, 7, 7)
    with torch.no_grad():
        own = type(layer).forward(layer, x)
        for bias, wanted in ((None, own[1]), (given, given)):
            out = layer(x, position_bias=bias)
            assert torch.equal(out[1], wanted)
            assert out[2:] == (None,)


@pytest.mark.slow
@torch.no_grad()
def test_compiled_saved_and_loaded(tmp_path: Any) -> None:
    model = fuse(build("t5"), inputs(2, 7, decoder=3))
    each = inputs(2, 7, 3, decoder=3)
    expected = model(**each).logits
    block = model.encoder.block[0]
    compiled: Any = torch.compile(block, backend="eager", fullgraph=True)
    x = torch.randn(2, 7, 64)
    assert torch.equal(compiled(x)[0], block(x)[0])
    save_quantized(model, tmp_path / "model")
    loaded: Any = load_quantized(tmp_path / "model", fuse=True)
    assert fused_parts(loaded) == fused_parts(model)
    assert torch.equal(loaded(**each).logits, expected)


@pytest.mark.slow(quick=["mpnet"])
@torch.no_grad()
@pytest.mark.parametrize("family", OPERATORS)
def test_attention_by_operators_is_as_exact_as_the_model(family: str) -> None:
    """In bfloat16, compared with the same layers in float32; there the two differ by roundings alone.

    Which rows of int8 would turn into other numbers.
    """
    own = OPERATORS[family]().inputs
    images = "pixel_values" in own
    model = build(family, "int8-weight")
    with_float = fuse(copy.deepcopy(model), own)
    rounded = copy.deepcopy(model).bfloat16()
    fused = fuse(copy.deepcopy(rounded), {name: x.bfloat16() if images else x for name, x in own.items()})
    assert fused_parts(with_float) == fused_parts(fused) == (BOTH, BOTH)
    for each in [own] if images else [inputs(2, 7, 3), inputs(3, 30), inputs(1, 1)]:
        exact = model(**each)[0]
        with Operators() as counted:
            torch.testing.assert_close(with_float(**each)[0], exact, rtol=1e-5, atol=1e-5)
        assert counted.names.count("aten._softmax") == 0
        each = {name: x.bfloat16() if images else x for name, x in each.items()}
        expected, found = ((m(**each)[0].float() - exact).norm() for m in (rounded, fused))
        assert found <= 1.2 * expected


def changed(family: str, old: str, new: str) -> Any:
    """A new model of ``family`` whose attention has ``new`` in the place of ``old`` in its code."""
    model: Any = {**BY_LAYER, **OPERATORS}[family]().model
    for module in model.modules():
        own = type(module)
        if not own.__name__.endswith("Attention") or not hasattr(module, "q"):
            continue
        code = textwrap.dedent(inspect.getsource(own.forward))
        assert code.count(old) == 1
        made: dict[str, Any] = {"__module__": own.__module__}
        exec(code.replace(old, new), vars(sys.modules[own.__module__]), made)
        module.__class__ = type("Changed", (own,), made)
        if table := getattr(module, "relative_attention_bias", None):
            table.weight.data.mul_(0.01)
    return model


OTHERS = {
    "doubled": ("mpnet", "+= position_bias", "+= position_bias * 2", "something else than its names say"),
    "mask": ("mpnet", "+ attention_mask", "+ attention_mask * 2", "something else than its names say"),
    "operator": ("mpnet", "attention_scores, dim", "attention_scores.roll(0), dim", "doesn't call an attention"),
    "number": ("mpnet", "attention_scores, dim", "attention_scores * 1.0, dim", "doesn't call an attention"),
    "layer": ("umt5", "=position_bias,", "=position_bias * 1.5,", "something else than its names say"),
}


@pytest.mark.parametrize("change", OTHERS)
def test_attention_that_does_something_else_is_called(change: str) -> None:
    """In new models without padding, whose biases and masks do next to nothing."""
    family, old, new, reason = OTHERS[change]
    model = quantize_model(changed(family, old, new))
    fuse(model, inputs(2, 7, decoder=3 if family in BY_LAYER else 0))
    first = fusion_report(model).records[0]
    assert ("attention" in first.parts, reason in first.reason) == (False, True), first.reason


@pytest.mark.parametrize("returns_bias", [True, False])
def test_a_bias_without_weights_is_returned_by_what_has_one(returns_bias: bool) -> None:
    bias = torch.randn(1, 2, 3, 3)
    call: Any = SimpleNamespace(output=(torch.zeros(1, 3, 8), bias), others={"position_bias": bias})
    fused: Any = SimpleNamespace(returns_bias=returns_bias)
    assert _why_not_returned(fused, call, 2) == ("" if returns_bias else "it returns a bias for the next layer")


def test_weights_that_a_layer_returns_unasked() -> None:
    example = OPERATORS["mpnet"]()
    layers: Any = example.model.mpnet.encoder.layer  # type: ignore[union-attr]
    own = type(layers[0])

    def forward(self: Any, x: Tensor, attention_mask: Any = None, position_bias: Any = None, **others: Any) -> Any:
        return own.forward(self, x, attention_mask, position_bias, output_attentions=True)

    for layer in layers:
        layer.__class__ = type("Changed", (own,), {"forward": forward})
    quantize_model(example.model)
    fuse(example.model, example.inputs)
    assert "it returns the weights of attention" in fusion_report(example.model).records[0].reason


def test_a_bias_of_other_arguments_is_unknown() -> None:
    example = BY_LAYER["t5"]()
    for module in example.model.modules():
        own: Any = type(module)
        if own.__name__ == "T5Attention":
            module.__class__ = type("Changed", (own,), {"compute_bias": _compute_bias, "__module__": own.__module__})
    quantize_model(example.model)
    fuse(example.model, example.inputs)
    assert "bias of positions of an unknown kind" in fusion_report(example.model).records[0].reason


def _compute_bias(self: Any, *sizes: int, **others: Any) -> Tensor:
    from transformers.models.t5.modeling_t5 import T5Attention

    bias: Tensor = T5Attention.compute_bias(self, *sizes, **others)
    return bias
