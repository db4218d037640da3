"""What fused layers leave to the model: gradients, hooks, adapters, and layers that compute something else."""

from __future__ import annotations

import copy
import functools
import inspect
import warnings
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from families import FAMILIES, VOCABULARY, Example
from families.example import LATENT, language_model, random, tokens
from families.example import example as build_example
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from qgemm import fuse, fusion_report, quantize_model, unfuse
from qgemm.nn.blocks.binding import fused_of
from qgemm.nn.blocks.fused_module import warn_of_gradients
from tests.fusion.test_fuse import BOTH, fused_parts, products_in, quantized
from tests.operators import Operators


def test_training_and_gradients_are_left_to_the_model() -> None:
    example = quantized("llama")
    model: Any = fuse(example.model)
    model.train()
    loss = model(**example.inputs, labels=example.inputs["input_ids"]).loss
    loss.backward()
    assert model.get_input_embeddings().weight.grad.abs().sum() > 0
    model.gradient_checkpointing_enable()
    assert torch.equal(model(**example.inputs, labels=example.inputs["input_ids"]).loss, loss)


@pytest.mark.parametrize("scheme", ["int8", "nf4"])
def test_tangents_are_left_to_the_model(scheme: str) -> None:
    model: Any = quantize_model(FAMILIES["llama"]().model, scheme)
    model.set_attn_implementation("eager")  # PyTorch's own has no derivative in forward mode
    x, along = random(1, 5, 64), random(1, 5, 64).flip(1)
    expected = tangent(model, x, along)
    assert torch.equal(tangent(fuse(model), x, along), expected)


@torch.no_grad()
def tangent(model: Any, x: Tensor, along: Tensor) -> Tensor:
    run = lambda embeds: model(inputs_embeds=embeds, use_cache=False).logits  # noqa: E731
    result: Tensor = torch.func.jvp(run, (x,), (along,))[1]
    return result


def test_a_layer_with_another_forward_is_left_alone() -> None:
    example = quantized("llama")
    model: Any = example.model
    first, second = model.model.layers
    original = first.forward
    first.forward = lambda *args, **kwargs: original(*args, **kwargs)
    replaced = first.forward
    fuse(model)
    assert fused_parts(model) == ((), ("mlp",), BOTH)
    assert "forward was replaced" in fusion_report(model).records[0].reason
    assert first.forward is replaced
    # And one that is wrapped afterwards.
    expected, inner = example.output(), second.forward
    second.forward = lambda *args, **kwargs: inner(*args, **kwargs)
    assert torch.equal(example.output(), expected)
    unfuse(model)
    assert torch.equal(example.output(), expected)


@pytest.mark.parametrize(
    "place",
    ["model.layers.0.self_attn.k_proj", "model.layers.0.mlp", "model.layers.0.self_attn"]
    + ["model.layers.0.input_layernorm", "bert.encoder.layer.0.output.dropout"],
)
def test_hooks_are_called(place: str) -> None:
    example = quantized("llama" if place.startswith("model") else "bert")
    expected = example.output()
    fuse(example.model)
    products, called = products_in(example), []
    handle = example.model.get_submodule(place).register_forward_hook(lambda *_: called.append(1))
    assert torch.equal(example.output(), expected)
    assert called == [1]
    assert products_in(example) > products
    handle.remove()
    assert products_in(example) == products


@pytest.mark.parametrize("place", ["attn.resid_dropout", "attn", "mlp"])
def test_parts_in_training_drop_values(place: str) -> None:
    """As they do for estimates of uncertainty, where the rest of the model is in eval mode."""
    example = quantized("gpt2")
    part = example.model.get_submodule(f"transformer.h.0.{place}")

    def output() -> torch.Tensor:
        torch.manual_seed(0)
        return example.output()

    in_eval = output()
    part.train()
    expected = output()
    part.eval()
    fuse(example.model)
    assert torch.equal(output(), in_eval)
    part.train()
    assert torch.equal(output(), expected)
    assert not torch.equal(expected, in_eval)


def test_the_report_says_who_is_watched() -> None:
    example = quantized("llama")
    example.model.get_submodule("model.layers.0.input_layernorm").register_forward_hook(lambda *_: None)
    first, second = fusion_report(fuse(example.model)).records
    reason = "while input_layernorm has a hook or a forward of its own, the layer computes as its class"
    assert (first.parts, first.reason, second.reason) == (BOTH, reason, "")


def test_a_replaced_layer_is_called() -> None:
    example = quantized("llama")
    model: Any = fuse(example.model)
    attention = model.model.layers[0].self_attn
    attention.v_proj = copy.deepcopy(attention.v_proj)
    with torch.no_grad():
        attention.v_proj.get_parameter("weight_scale").mul_(2)
    copied = Example(unfuse(copy.deepcopy(model)), example.inputs)
    assert torch.equal(example.output(), copied.output())


def test_lora_on_a_part() -> None:
    peft = pytest.importorskip("peft")
    example = quantized("llama")
    fuse(example.model)
    config = peft.LoraConfig(target_modules=["v_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(example.model, config).eval()
    found = Example(adapted, example.inputs).output()
    unfuse(adapted)
    assert torch.equal(Example(adapted, example.inputs).output(), found)


def test_a_layer_that_computes_something_else_is_left_alone() -> None:
    example = quantized("llama")
    model: Any = example.model
    layer = model.model.layers[1]
    layer.mlp.act_fn = nn.ReLU()
    original = type(layer).forward

    class Doubled(type(layer)):  # type: ignore[misc]
        def forward(self, hidden_states: torch.Tensor, **others: Any) -> torch.Tensor:
            out: torch.Tensor = 2 * original(self, hidden_states, **others)
            return out

    layer.__class__ = Doubled
    expected = example.output()
    fuse(model)
    first, second, its_mlp = fusion_report(model).records
    assert first.parts == BOTH
    assert second.parts == ()
    assert its_mlp.parts == ("mlp",)
    assert "something else" in second.reason
    assert fused_of(layer) is None
    assert torch.equal(example.output(), expected)


_NEW = {"vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
_NEW |= {"intermediate_size": 96, "initializer_range": 0.1, "pad_token_id": 0, "max_position_embeddings": 64}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "settings", "value"),
    [
        # Of the residuals, where others have a scale of what is added.
        ("DogeForCausalLM", {"num_key_value_heads": 2, "head_dim": 16}, "residual"),
        # A bias that attention returns beside its output, for the layer to add.
        ("GPTNeoXJapaneseForCausalLM", {"intermediate_multiple_size": 2}, "dense_bias"),
    ],
)
def test_values_that_do_nothing_yet_count_later(name: str, settings: dict[str, Any], value: str) -> None:
    """Ones and zeros of a new model: it is fused ahead of the weights that it gets."""
    cls = getattr(transformers, name)
    example = build_example(cls, cls.config_class(**_NEW, **settings), input_ids=tokens())
    model = quantize_model(example.model)
    own = [each for called, each in model.named_parameters() if value in called]
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        [each.fill_(value == "residual") for each in own]
        before = [each.clone() for each in own]
        fuse(model)
        assert all(map(torch.equal, own, before))
        [each.add_(torch.rand(each.shape, generator=generator)) for each in own]
    found = example.output()
    unfuse(model)
    assert torch.equal(example.output(), found)


def test_a_model_in_training_is_verified_in_eval_mode() -> None:
    model = quantized("bert").model.train()
    fuse(model)
    assert fused_parts(model) == (BOTH, BOTH)
    assert all(module.training for module in model.modules())


def test_a_layer_that_returns_what_the_next_one_needs_is_left_alone() -> None:
    """The biases of positions that WavLM's first layer makes."""
    config = transformers.WavLMConfig(
        vocab_size=32, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, conv_dim=[32],
        conv_kernel=[10], conv_stride=[5], num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4,
    )  # fmt: skip
    example = build_example(transformers.WavLMForCTC, config, input_values=random(2, 400))
    quantize_model(example.model)
    expected = example.output()
    fuse(example.model, example.inputs)
    first = fusion_report(example.model).records[0]
    assert (first.parts, "it returns a bias for the next layer" in first.reason) == ((), True)
    assert torch.equal(example.output(), expected)


@torch.no_grad()
def test_attention_weights_that_a_layer_returns_unasked() -> None:
    """Those of Pix2Struct's encoder, where attention computes them."""
    config = transformers.Pix2StructVisionConfig(
        hidden_size=64, patch_embed_hidden_size=48, d_ff=96, d_kv=16, num_hidden_layers=2, num_attention_heads=4,
        initializer_range=0.1,
    )  # fmt: skip
    patches = torch.cat((torch.arange(1, 5).repeat(2, 1)[..., None].repeat(1, 1, 2), random(2, 4, 48)), -1)
    example = build_example(transformers.Pix2StructVisionModel, config, flattened_patches=patches)
    model: Any = quantize_model(example.model)
    fuse(model, example.inputs)
    assert fused_parts(model) == (("mlp",), ("mlp",))
    model.set_attn_implementation("eager")
    found = model(**example.inputs, output_attentions=True).attentions
    unfuse(model)
    expected = model(**example.inputs, output_attentions=True).attentions
    assert all(map(torch.equal, found, expected))


_LATENT = {
    **{"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 64, "initializer_range": 0.1},
    **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, **LATENT},
}


def test_an_indexer_chooses_keys_of_long_inputs() -> None:
    # As many keys as fuse compares layers on.
    of_index = {"index_topk": 8, "index_head_dim": 16, "index_n_heads": 2}
    settings = {**_LATENT, **of_index, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 2}
    example = language_model("DeepseekV32ForCausalLM", **settings)()
    quantize_model(example.model)
    example.inputs = {"input_ids": tokens(24)}
    expected = example.output()
    fuse(example.model)
    assert (
        "DeepseekV32Attention has more than projections and norms: indexer"
        in fusion_report(example.model).records[0].reason
    )
    assert torch.equal(example.output(), expected)


def test_projections_of_other_names_groups_of_none_and_attention_that_is_none() -> None:
    other = language_model("AXK2ForCausalLM", **_LATENT, index_head_dim=16, index_n_heads=2)()
    no_groups = language_model("DeepseekV2ForCausalLM", **_LATENT, first_k_dense_replace=0)()
    linear = language_model("MiniMaxForCausalLM", **_LATENT, head_dim=16, layer_types=2 * ["linear_attention"])()
    for example, parts in ((other, set()), (no_groups, {"mixture"}), (linear, set())):
        expected = Example(quantize_model(example.model), example.inputs).output()
        fuse(example.model)
        assert {part for record in fusion_report(example.model).records for part in record.parts} >= parts
        assert torch.equal(example.output(), expected)


def test_layers_that_accelerate_moves_are_left_alone() -> None:
    accelerate = pytest.importorskip("accelerate")
    example = quantized("llama")
    expected = example.output()
    fuse(example.model)
    layer = example.model.get_submodule("model.layers.0")
    accelerate.cpu_offload(example.model, torch.device("cpu"))
    assert torch.equal(example.output(), expected)
    fused = fused_of(layer)
    assert fused is not None
    assert all(merged._operands is None for merged in fused.products)  # which would hold the memory
    other = quantized("llama")
    accelerate.cpu_offload(other.model, torch.device("cpu"))
    fuse(other.model)
    assert set(fused_parts(other.model)) == {()}
    assert "accelerate moves the weight" in fusion_report(other.model).records[0].reason
    assert torch.equal(other.output(), expected)


@pytest.mark.slow
def test_a_model_is_fused_before_fsdp_shards_it(fsdp_mesh: Any) -> None:
    example = quantized("llama")
    wanted = example.output()
    late = copy.deepcopy(example.model)
    fully_shard(late, mesh=fsdp_mesh)
    with pytest.raises(ValueError, match=r"q_proj.* is sharded among processes, by FSDP: call fuse before"):
        fuse(late)
    fuse(example.model)
    fully_shard(example.model, mesh=fsdp_mesh)
    assert torch.equal(example.output(), wanted)


def test_a_router_that_accelerate_moves_is_left_alone() -> None:
    accelerate = pytest.importorskip("accelerate")
    example = quantized("gpt_oss")  # whose router has a bias
    expected = example.output()
    accelerate.cpu_offload(example.model, torch.device("cpu"))
    fuse(example.model)
    assert "while mlp.router has a hook" in fusion_report(example.model).records[0].reason
    assert torch.equal(example.output(), expected)


def test_gradients_of_norms_adapters_and_prefixes_are_those_of_the_model() -> None:
    """With inputs that need no gradient themselves, in a model that isn't training."""
    peft = pytest.importorskip("peft")
    embeddings = torch.randn(1, 5, 64, generator=torch.Generator().manual_seed(0))

    def norms(is_fused: bool) -> nn.Module:
        model: Any = quantized("llama").model
        if is_fused:
            fuse(model)
        model(inputs_embeds=embeddings[..., : model.config.hidden_size]).logits.square().sum().backward()
        return model

    def adapted(config: Any, is_fused: bool) -> nn.Module:
        example = quantized("llama")
        torch.manual_seed(0)
        model: Any = peft.get_peft_model(example.model, config).eval()
        if is_fused:
            fuse(model)
        model(**example.inputs, labels=example.inputs["input_ids"]).loss.backward()
        return model

    lora = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    prefix = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    for make in (norms, partial(adapted, lora), partial(adapted, prefix)):
        found, expected = (
            {name: p.grad for name, p in make(is_fused).named_parameters() if p.grad is not None}
            for is_fused in (True, False)
        )
        assert expected
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_frozen_model_is_fused_with_gradients_on() -> None:
    example = quantized("llama")
    fuse(example.model).requires_grad_(False)
    with Operators() as counted:
        example.model(**example.inputs)
    assert counted.products == products_in(example)


def test_a_call_with_gradients_that_may_not_be_needed_is_a_warning_once() -> None:
    example = quantized("llama")
    fuse(example.model)
    warn_of_gradients.cache_clear()
    with pytest.warns(UserWarning, match=r"called with gradients on.*torch\.inference_mode\(\)") as seen:
        example.model(**example.inputs)
    assert [warning.filename for warning in seen] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        example.model(**example.inputs)
        warn_of_gradients.cache_clear()
        example.model.train()(**example.inputs)
        with torch.no_grad():
            example.model.eval()(**example.inputs)


def test_a_replaced_branch_is_called() -> None:
    """A mixture, which isn't fused itself, in a layer whose attention is."""
    example = quantized("mixtral")
    model: Any = fuse(example.model)
    model.model.layers[0].mlp = nn.Identity()
    found = example.output()
    unfuse(model)
    assert torch.equal(found, example.output())


def test_hooks_on_all_modules_are_called() -> None:
    example = quantized("llama")
    fuse(example.model)
    called: list[str] = []
    handle = nn.modules.module.register_module_forward_hook(lambda module, *_: called.append(type(module).__name__))
    try:
        example.output()
    finally:
        handle.remove()
    assert called.count("QuantLinear") == 14


def test_inputs_that_the_model_does_not_take() -> None:
    model = fuse(quantized("llama").model, {"pixels": torch.ones(2)})
    assert all(record.parts == () for record in fusion_report(model).records)
    assert "the model can't take the inputs passed (" in fusion_report(model).records[0].reason


def test_attention_with_a_parameter_of_its_own_is_left_alone() -> None:
    model: Any = quantized("llama").model
    model.model.layers[1].self_attn.temperature = nn.Parameter(torch.ones(1))
    fuse(model)
    assert fused_parts(model)[:2] == (BOTH, ("mlp",))
    assert "LlamaAttention has more than projections and norms: temperature" in fusion_report(model).records[1].reason


def test_attention_with_a_projection_of_another_name_is_left_alone() -> None:
    model: Any = quantized("llama").model
    attention = model.model.layers[1].self_attn
    attention.to_queries = attention._modules.pop("q_proj")
    attention.__class__ = type("Renamed", (type(attention),), {"q_proj": property(lambda self: self.to_queries)})
    fuse(model)
    assert fused_parts(model)[:2] == (BOTH, ("mlp",))
    assert "the projections of Renamed are unknown" in fusion_report(model).records[1].reason


def test_attention_that_takes_a_number_is_left_alone() -> None:
    """It may be that of a layer in the cache, as Hrm-Text's is: a call without a cache doesn't show that."""
    model: Any = quantized("llama").model
    attention = model.model.layers[1].self_attn
    own = type(attention)

    class Counted(own):  # type: ignore[misc, valid-type]
        @functools.wraps(own.forward)
        def forward(self, *args: Any, **others: Any) -> Any:
            return super().forward(*args, **others)

    signature = inspect.signature(own.forward)
    more = inspect.Parameter("offset", inspect.Parameter.KEYWORD_ONLY, default=0)
    *known, last = signature.parameters.values()
    Counted.forward.__signature__ = signature.replace(parameters=[*known, more, last])  # type: ignore[attr-defined]
    attention.__class__ = Counted
    fuse(model)
    assert fused_parts(model)[:2] == (BOTH, ("mlp",))
    assert "Counted takes offset, too" in fusion_report(model).records[1].reason


def test_an_mlp_with_more_parts_is_called_as_it_is() -> None:
    """Such as Kosmos-2.5's norm between its layers; dropout and the like aside."""
    model: Any = quantized("llama").model
    model.model.layers[0].mlp.dropout = nn.Dropout(0.1)
    model.model.layers[1].mlp.norm = nn.LayerNorm(96)
    fuse(model)
    assert fused_parts(model) == (BOTH, ("attention",))
    assert fusion_report(model).records[1].reason == "mlp: it has norm, which is unknown"


def test_an_mlp_that_takes_anything_is_fused() -> None:
    example = quantized("llama")
    model: Any = example.model
    mlp = model.model.layers[0].mlp
    plain = type(mlp).forward
    mlp.__class__ = type("OpenMLP", (type(mlp),), {"forward": lambda self, x, **others: plain(self, x)})
    fuse(model)
    assert fused_parts(model)[:2] == (BOTH, BOTH)
