"""Fused models: the same numbers, tokens and files as unfused ones, and what becomes of each family."""

from __future__ import annotations

import copy
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, VOCABULARY, Example
from families.example import language_model
from families.mixtures import MIXTURES
from torch import nn

from fusion.activations import rounding_once
from fusion.structures import ENCODERS, STRUCTURES
from qgemm import fuse, fusion_report, load_quantized, quantize_model, save_quantized, unfuse
from qgemm.fusion.verify import MAX_ERROR
from qgemm.nn.blocks.layer import MAX_SMALL_ROWS
from tests.operators import Operators

BOTH = ("attention", "mlp")
MIXTURE = ("attention", "mixture")
# What is fused of the layers of each family, in order.
FUSED: dict[str, tuple[tuple[str, ...], ...]] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi", "phi3"), (BOTH, BOTH)),
    **dict.fromkeys(("olmo2", "stablelm", "cohere", "gpt2", "gpt_neox", "opt"), (BOTH, BOTH)),
    **dict.fromkeys(("deepseek_v3", *STRUCTURES), (BOTH, BOTH)),
    "gemma4": ((*BOTH, "layer input"),) * 4,
    "granite_hybrid": (("mixture",), ("mlp",), MIXTURE, ("mlp",)),
    # The first layer is a convolution, or linear attention.
    **dict.fromkeys(("lfm2", "qwen3_5", "kimi_linear"), (("mlp",), BOTH)),
    **dict.fromkeys(("falcon", "gpt_neo", "gptj", "mpt"), (("mlp",), ("mlp",))),
}
DECODERS = tuple(FUSED)
FUSED |= dict.fromkeys(("bert", "bert_classifier", "roberta", "distilbert", *ENCODERS), (BOTH, BOTH))
FUSED |= dict.fromkeys(("vit", "wav2vec2"), (BOTH, BOTH))  # whose norms have other names
WITH_ENCODER = ("attention", "cross attention", "mlp")
FUSED |= {
    "clip": (BOTH,) * 4,
    **dict.fromkeys(("bart", "whisper"), (BOTH, BOTH, WITH_ENCODER, WITH_ENCODER)),
    "bloom": (("mlp",), ("mlp",)),  # with attention of its own, which adds the residual
    "t5": (("attention",), ("mlp",)) * 2 + (("attention",), ("cross attention",), ("mlp",)) * 2,
    "mamba": (),
}
OF_MIXTURES: dict[str, tuple[tuple[str, ...], ...]] = {
    **dict.fromkeys(("mixtral", "qwen3_moe", "olmoe", "gpt_oss", "phimoe"), (MIXTURE, MIXTURE)),
    **dict.fromkeys(("granitemoe", "minimax_m2"), (MIXTURE, MIXTURE)),
    "lfm2_moe": (("mlp",), MIXTURE),
    "jamba": (("mixture",), MIXTURE),
    "gemma4_moe": ((*BOTH, "mixture"),) * 2,
    "hunyuan_v1_moe": (MIXTURE, ("mlp",)) * 2,
    # A branch in a layer.
    "nemotron_h": (("attention",), *(("mixture",), ("mlp",)) * 2),
    # With shared experts.
    "qwen2_moe": (MIXTURE, ("mlp",)) * 2,
    **dict.fromkeys(("deepseek_v3", "afmoe_sparse", "hy_v3"), (BOTH, MIXTURE, ("mlp",))),
    "llama4": (MIXTURE, ("mlp",)) * 2,
}
# A norm by PyTorch's operator, in place of the model's own formula, and Llama 4's products of complex numbers: in
# float32 the last bit of a value may differ.
OTHER_SUMS = {"cohere", "cohere2", "cohere_heads", "llama4"}
# Their attention isn't fused, or norms its heads in a way of its own.
WITHOUT_ROTATION = {"cohere_heads", "phi_heads", "stablelm_heads", "hunyuan"}
# Their attention takes no other; or it is as llama's.
NO_CACHE = {
    "granite_hybrid",
    "qwen3_5",
    "mpt",
    "lfm2",
    "deepseek_v2",
    "deepseek_v3",
    "kimi_linear",
    "minicpm3",
    "falcon",
    "gpt_neo",
    "gptj",
    "gpt2",
    "mistral",
    "qwen2",
    "nemotron",
    "ministral3",
    "starcoder2",
    "apertus",
}
# Layers as llama's, but for constants and norms: with a cache, they run with --complete alone.
AS_LLAMA = {"mistral", "qwen2", "nemotron", "ministral3", "starcoder2", "granite", "gemma", "olmo2", "glm", "apertus"}
OPTIONS: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


def products_in(example: Example) -> int:
    with Operators() as counted:
        example.output()
    return counted.products


def with_cache(families: list[str]) -> list[Any]:
    return [pytest.param(name, marks=[pytest.mark.complete] if name in AS_LLAMA else []) for name in families]


def quantized(family: str, scheme: str = "int8") -> Example:
    build = {**MIXTURES, **STRUCTURES, **ENCODERS, **FAMILIES}[family]
    example = build()
    quantize_model(example.model, scheme)
    return example


def fused_parts(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    return tuple(record.parts for record in fusion_report(model).records)


@pytest.mark.slow(quick=["llama-dtype0"])
@pytest.mark.parametrize(
    ("family", "dtype"),
    [*((name, torch.bfloat16) for name in FUSED), ("llama", torch.float32), ("cohere", torch.float32)],
)
def test_a_fused_model_has_the_bits_of_the_model(family: str, dtype: torch.dtype) -> None:
    example = quantized(family)
    example.model.to(dtype)
    example.inputs = {name: x.to(dtype) if x.is_floating_point() else x for name, x in example.inputs.items()}
    many = Example(example.model, {name: x.repeat(2, *[1] * (x.dim() - 1)) for name, x in example.inputs.items()})
    if family in DECODERS:
        assert example.inputs["input_ids"].numel() <= MAX_SMALL_ROWS < many.inputs["input_ids"].numel()
    own, products = example.output(), products_in(example)
    with rounding_once(example.model):
        expected, expected_of_many = example.output(), many.output()
    state = torch.get_rng_state()
    fuse(example.model, None if "input_ids" in example.inputs and len(example.inputs) == 1 else example.inputs)
    # The forward of wav2vec2 draws which layers to drop in training.
    assert torch.equal(torch.get_rng_state(), state) or family == "wav2vec2"
    assert fused_parts(example.model) == FUSED[family]
    assert all(record.error is not None and record.error <= MAX_ERROR for record in fusion_report(example.model).fused)
    if family in OTHER_SUMS:
        assert (example.output() - expected).norm() / expected.norm() < MAX_ERROR
    else:
        assert torch.equal(example.output(), expected)
        assert torch.equal(many.output(), expected_of_many)
    if any("attention" in parts for parts in FUSED[family]) and not family.startswith(
        ("phi3", "gpt", "glm", "modernbert")
    ):
        assert products_in(example) < products
    unfuse(example.model)
    assert products_in(example) == products
    assert torch.equal(example.output(), own)


@pytest.mark.parametrize(
    ("family", "scheme"),
    [
        ("llama", "int4-32"),
        ("llama", "fp8"),
        ("qwen2", "int4-32-asymmetric"),
        ("gemma2", "int8-weight"),
        ("gpt_neox", "mxfp4"),
        ("phi3", "fp8-weight"),
        ("bert", "nf4"),
    ],
)
def test_layers_with_quantized_weights_alone(family: str, scheme: str) -> None:
    example = FAMILIES[family]()
    quantize_model(example.model, scheme)
    expected = example.output()
    fuse(example.model, example.inputs)
    assert fused_parts(example.model) == FUSED[family]
    torch.testing.assert_close(example.output(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "cohere", "gemma2"])
def test_layers_of_fp8_share_rows(family: str) -> None:
    """As those of int8: the norms and activations ahead of products give quantized rows."""
    example = FAMILIES[family]()
    quantize_model(example.model, "fp8")
    expected, layers = example.output(), example.model.config.num_hidden_layers
    fuse(example.model)
    with Operators() as counted:
        out = example.output()
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    assert counted.names.count("qgemm.activation_quantize") == layers
    assert counted.names.count("qgemm.norm_quantize") + counted.names.count("qgemm.add_norm_quantize") >= layers
    assert counted.names.count("qgemm.quant_linear") == layers  # that of attention's output


def test_layers_with_quantized_weights_alone_take_no_more_operators_than_int8() -> None:
    counts = []
    for scheme in ("int8", "int4-32"):
        example = FAMILIES["llama"]()
        quantize_model(example.model, scheme, fuse=True)
        with Operators() as counted:
            example.output()
        counts.append(len(counted.names))
    assert counts[1] <= counts[0]


def test_layers_with_scales_of_blocks() -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 2, "num_key_value_heads": 2}
    example = language_model("LlamaForCausalLM", vocab_size=VOCABULARY, num_hidden_layers=2, **sizes)()
    quantize_model(example.model, "fp8-block")
    expected = example.output()
    fuse(example.model)
    assert fused_parts(example.model) == FUSED["llama"]
    with Operators() as counted:
        torch.testing.assert_close(example.output(), expected, rtol=1e-4, atol=1e-5)
    assert counted.names.count("qgemm.block_scaled_linear") == 2 * 4  # of seven layers each
    # Queries, keys and values of less than a block can't be multiplied together.
    small = FAMILIES["llama"]()
    quantize_model(small.model, "fp8-block")
    expected = small.output()
    fuse(small.model)
    assert "whole blocks of 128" in str(fusion_report(small.model))
    torch.testing.assert_close(small.output(), expected, rtol=1e-4, atol=1e-5)


# In one dtype and the other; in both with --complete.
@pytest.mark.slow(quick=["mixtral"])
@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        pytest.param(name, dtype, marks=[] if (number + place) % 2 or name == "llama4" else [pytest.mark.complete])
        for number, name in enumerate(OF_MIXTURES)
        for place, dtype in enumerate((torch.float32, torch.bfloat16))
    ],
    ids=str,
)
def test_mixtures(family: str, dtype: torch.dtype) -> None:
    build = MIXTURES[family]
    example = build()
    quantize_model(example.model.to(dtype))
    expected = example.output()
    fuse(example.model)
    assert fused_parts(example.model) == OF_MIXTURES[family]
    if family in OTHER_SUMS and dtype == torch.float32:
        assert (example.output() - expected).norm() / expected.norm() < MAX_ERROR
    else:
        assert torch.equal(example.output(), expected)


@pytest.mark.slow(quick=["llama"])
@pytest.mark.parametrize("family", with_cache([*DECODERS, "llama4", "jamba"]))
def test_generate_gives_the_same_tokens(family: str) -> None:
    example = quantized(family)
    model: Any = example.model
    tokens = example.inputs["input_ids"]
    mask = torch.ones_like(tokens)
    mask[0, :2] = 0
    options = {**OPTIONS, "attention_mask": mask}
    caches = ("dynamic", "static") if family != "llama4" else ("dynamic",)  # transformers can't make it another
    expected = [model.generate(tokens, cache_implementation=cache, **options) for cache in caches]
    fuse(model)
    for cache, wanted in zip(caches, expected, strict=True):
        assert torch.equal(model.generate(tokens, cache_implementation=cache, **options), wanted), cache


@pytest.mark.parametrize("family", ["mpt", "bloom", "falcon", "lfm2", "qwen3_5", "granite_hybrid"])
def test_what_is_called_has_the_cache(family: str) -> None:
    """By the name that it has there."""
    example = quantized(family)
    model, tokens = example.model, example.inputs["input_ids"]

    def step() -> torch.Tensor:
        with torch.no_grad():
            cache = model(tokens[:, :4], use_cache=True).past_key_values
            out: torch.Tensor = model(tokens[:, 4:5], past_key_values=cache, use_cache=True).logits
            return out

    expected = step()
    fuse(model)
    assert torch.equal(step(), expected)


@pytest.mark.parametrize("family", ["bart", "whisper"])
def test_generate_with_an_encoder_gives_the_same_tokens(family: str) -> None:
    """Its keys and values are computed once, and a layer that is called without any computes as before."""
    example = quantized(family)
    model: Any = example.model
    source = {name: x for name, x in example.inputs.items() if name != "decoder_input_ids"}
    decoder = model.get_decoder()
    tokens = torch.arange(6).reshape(2, 3)
    found, products = [], []
    for is_fused in (False, True):
        if is_fused:
            fuse(model, example.inputs)
        with Operators() as counted, torch.no_grad():
            outputs = [
                model.generate(**source, cache_implementation=cache, **OPTIONS) for cache in ("dynamic", "static")
            ]
        with torch.no_grad():
            found.append((*outputs, decoder(tokens).last_hidden_state))
        products.append(counted.products)
    assert all(map(torch.equal, *found))
    assert products[1] < products[0]


@pytest.mark.slow(quick=["qwen3"])
@pytest.mark.parametrize(
    "family", with_cache([name for name in (*DECODERS, "mixtral", "gpt_oss") if name not in NO_CACHE])
)
def test_a_cache_that_takes_rotated_keys(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from qgemm import KeyValueCache

    example = quantized(family)
    model: Any = example.model
    model.set_attn_implementation("qgemm")
    tokens, found = example.inputs["input_ids"], []
    stored = []
    rotate_and_store = KeyValueCache.rotate_and_store
    monkeypatch.setattr(
        KeyValueCache,
        "rotate_and_store",
        lambda *args: stored.append(1) or rotate_and_store(*args),  # type: ignore
    )
    for is_fused in (False, True):
        if is_fused:
            fuse(model)
        for dtype in (None, torch.int8):
            cache = KeyValueCache(model.config, max_batch=2, max_length=16, dtype=dtype)
            found.append(
                model.generate(tokens, past_key_values=cache, attention_mask=torch.ones_like(tokens), **OPTIONS)
            )
            assert bool(stored) == (is_fused and family not in WITHOUT_ROTATION)
    assert torch.equal(found[2], found[0])
    assert torch.equal(found[3], found[1])


def test_what_is_saved_is_the_model(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    example = quantized("llama")
    model: Any = example.model
    save_quantized(model, tmp_path / "unfused")
    values = {name: value.clone() for name, value in model.state_dict().items()}
    fuse(model)
    assert list(model.state_dict()) == list(values)
    save_quantized(model, tmp_path / "fused")
    model.save_pretrained(tmp_path / "pretrained")
    sizes = {name: (tmp_path / name / "model.safetensors").stat().st_size for name in ("fused", "unfused")}
    assert sizes["fused"] == sizes["unfused"]
    loaded = (load_quantized(tmp_path / "fused"), AutoModelForCausalLM.from_pretrained(tmp_path / "pretrained"))
    for each in loaded:
        state = each.state_dict()
        assert list(state) == list(values)
        assert all(torch.equal(state[name], value) for name, value in values.items())
        assert torch.equal(Example(fuse(each), example.inputs).output(), example.output())


@pytest.mark.parametrize("scheme", ["int8", "fp8"])
def test_a_copy_and_a_pickled_model_compute_the_same(scheme: str, tmp_path: Path) -> None:
    example = quantized("llama", scheme)
    fuse(example.model)
    expected, products = example.output(), products_in(example)
    copied = Example(copy.deepcopy(example.model), example.inputs)
    assert torch.equal(copied.output(), expected)
    assert products_in(copied) == products
    torch.save(example.model, tmp_path / "model.pt")
    for again in (torch.load(tmp_path / "model.pt", weights_only=False), pickle.loads(pickle.dumps(example.model))):
        for loaded in (Example(again, example.inputs), Example(copy.deepcopy(again), example.inputs)):
            assert torch.equal(loaded.output(), expected)
            assert products_in(loaded) == products


@pytest.mark.parametrize("family", ["llama", "bert"])
def test_a_replica_computes_with_its_own_parameters(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # As nn.DataParallel makes one for each GPU; here the GPU is the CPU.
    def copies(tensors: list[torch.Tensor], devices: list[int], buffer_size: int = 0) -> list[list[torch.Tensor]]:
        return [[tensor.detach().clone() for tensor in tensors] for _ in devices]

    monkeypatch.setattr("torch.nn.parallel.comm.broadcast_coalesced", copies)
    monkeypatch.setattr(sys.modules[nn.parallel.replicate.__module__], "_get_device_index", lambda *_: 0)
    example = quantized(family)
    fuse(example.model)
    expected = example.output()
    replica = nn.parallel.replicate(example.model, [0], detach=True)[0]
    for parameter in example.model.parameters():
        parameter.data.zero_()
    assert torch.equal(Example(replica, example.inputs).output(), expected)


@pytest.mark.parametrize("family", ["llama", "gpt2"])  # gpt2's layers aren't told what is asked for
def test_hidden_states_and_attention_weights_are_there(family: str) -> None:
    example = quantized(family)
    model: Any = example.model
    model.set_attn_implementation("eager")
    options = {"output_hidden_states": True, "output_attentions": True}
    with torch.no_grad():
        expected = model(**example.inputs, **options)
        fuse(model)
        with Operators() as fused:
            model(**example.inputs)
        found = model(**example.inputs, **options)
    assert len(found.attentions) == 2
    for kind in ("hidden_states", "attentions"):
        assert all(torch.equal(x, y) for x, y in zip(found[kind], expected[kind], strict=True))
    # What transformers leaves on a module to record attention does no harm later.
    with Operators() as again:
        example.output()
    assert again.names == fused.names


def test_layers_of_other_schemes_are_named() -> None:
    example = FAMILIES["llama"]()
    quantize_model(example.model, {"*.0.self_attn.k_proj": None, "*.1.mlp.up_proj": "int8-hadamard", "*": "int8"})
    expected = example.output()
    fuse(example.model)
    first, second = fusion_report(example.model).records
    assert first.parts == ("mlp",)
    assert "of class Linear, which isn't a quantized layer's" in first.reason
    assert second.parts == ("attention",)
    assert "model.layers.1.mlp.gate_proj is int8, model.layers.1.mlp.up_proj int8-hadamard" in second.reason
    assert "model.layers.1.mlp.up_proj" in str(fusion_report(example.model))
    assert torch.equal(example.output(), expected)


def test_layers_of_one_input_in_modules_that_are_called() -> None:
    example = quantized("gpt_neo")
    products = products_in(example)
    fuse(example.model, example.inputs)
    found = {record.name: record.parts for record in fusion_report(example.model).others}
    assert found["transformer.h.0.attn.attention"] == ("products",)
    assert products_in(example) == products - 2 * 2


@pytest.mark.parametrize(
    "scheme",
    ["int8-static", "int8-hadamard", "int8-static-hadamard", "int8-static-asymmetric", "int8-outliers-16"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_schemes_with_more_parameters(scheme: str, dtype: torch.dtype) -> None:
    example = FAMILIES["llama"]()
    example.model.to(dtype)
    quantize_model(example.model, scheme, calibration=None if scheme == "int8-hadamard" else [example.inputs])
    expected = example.output()
    fuse(example.model)
    assert fused_parts(example.model) == (BOTH, BOTH)
    assert torch.equal(example.output(), expected)


def test_a_compiled_model_is_one_graph() -> None:
    example = quantized("qwen3")
    expected = example.output()
    fuse(example.model)
    called: list[str] = []

    def see(graph: Any, inputs: Any) -> Any:
        called.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    compiled: Any = torch.compile(example.model, backend=see, fullgraph=True)
    assert torch.equal(Example(compiled, example.inputs).output(), expected)
    assert any("qgemm.rotate" in name for name in called)  # which only fused attention calls


def test_as_an_option_of_what_makes_quantized_models(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    import qgemm

    example = FAMILIES["llama"]()
    model: Any = example.model
    model.save_pretrained(tmp_path / "float")
    quantize_model(model, fuse=True)
    save_quantized(model, tmp_path / "quantized")
    loaded = load_quantized(tmp_path / "quantized", fuse=True)
    config = qgemm.QGemmConfig(fuse=True)
    pretrained = AutoModelForCausalLM.from_pretrained(tmp_path / "float", quantization_config=config)
    assert "fuse" not in pretrained.config.quantization_config.to_dict()
    for each in (model, loaded, pretrained):
        assert fused_parts(each) == (BOTH, BOTH)
        assert torch.equal(Example(each, example.inputs).output(), example.output())


def test_an_exported_program_has_the_models_parameters() -> None:
    example = quantized("llama")
    model: Any = fuse(example.model)
    model.config.use_cache = False
    program = torch.export.export(model, (), example.inputs, strict=False)
    assert set(program.state_dict) >= set(dict(model.named_parameters()))
    assert sum("weight" in name for name in program.constants) == 0
    assert torch.equal(program.module()(**example.inputs).logits, example.output())


def test_a_model_without_values_waits_for_them() -> None:
    with torch.device("meta"):
        example = FAMILIES["llama"]()
    quantize_model(example.model, fuse=True)
    assert all(record.parts == () for record in fusion_report(example.model).records)
    assert "has values" in fusion_report(example.model).records[0].reason


def test_a_model_without_layers() -> None:
    model = nn.Sequential(nn.Linear(32, 32))
    with pytest.raises(ValueError, match="holds no quantized layer"):
        fuse(model)
    with pytest.raises(ValueError, match="wasn't fused"):
        fusion_report(model)
    quantize_model(model)
    assert fusion_report(fuse(model)).records == ()
    assert str(fusion_report(model)).endswith("0 of 0 layers fused")
