"""from_pretrained and save_pretrained with qgemm, on random models of several families.

Two versions of transformers are meant: the oldest that qgemm takes, and the newest. For another than the installed one:

    pip install --no-deps --target FOLDER transformers==5.23.0
    PYTHONPATH=FOLDER python -m pytest tests/integrations
"""

from __future__ import annotations

import copy
import gc
import json
import re
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.rewriting import contents, edited
from families import ALIKE, FAMILIES, Example
from processes import run_code
from safetensors.torch import load_file
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    GPT2Config,
    GPT2Model,
    MarianConfig,
    MarianMTModel,
)

import qgemm
from integrations.folders import IDS, assert_same, load, load_int8, quantized_names, tensors
from qgemm.integrations.transformers import attach_quantizer
from qgemm.integrations.transformers.quantizing import QuantizeOnLoad


def stored_tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def same_values(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)


IN_HALF = ("gpt2", "llama", "t5")


@pytest.mark.slow(quick=["torch.float32-llama", "torch.float32-t5"])
@pytest.mark.parametrize(
    ("dtype", "family"),
    [
        pytest.param(dtype, family, marks=[] if chosen else pytest.mark.complete)
        for family in sorted(FAMILIES)
        for dtype, chosen in ((torch.float32, family not in ALIKE), (torch.bfloat16, family in IN_HALF))
    ],
    ids=str,
)
def test_families(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    example = FAMILIES[family]()
    cls = type(example.model)
    example.model.save_pretrained(tmp_path / "float")
    in_place = qgemm.quantize_model(cls.from_pretrained(tmp_path / "float", dtype=dtype))
    on_load = cls.from_pretrained(tmp_path / "float", dtype=dtype, quantization_config=qgemm.QGemmConfig("int8"))
    assert quantized_names(on_load)
    assert_same(on_load, in_place)
    assert qgemm.report(on_load).to_dict() == qgemm.report(in_place).to_dict()

    folders = [tmp_path / "in_place", tmp_path / "on_load"]
    for model, folder in zip((in_place, on_load), folders, strict=True):
        model.save_pretrained(folder, max_shard_size="20KB")
        assert len(list(folder.glob("*.safetensors"))) > 1
    # The same is stored, so that each way to load it is tried on one of the two.
    ours, theirs = (stored_tensors(folder) for folder in folders)
    assert ours.keys() == theirs.keys()
    assert all(same_values(ours[name], theirs[name]) for name in ours)
    configs = [contents(folder)["config.json"].decode() for folder in folders]
    assert configs[0] == configs[1]
    assert_same(cls.from_pretrained(folders[0]), on_load)
    assert_same(cls.from_pretrained(folders[1], device_map="cpu"), on_load)
    assert_same(qgemm.load_quantized(folders[1]), on_load)
    qgemm.save_quantized(on_load, tmp_path / "ours")
    reloaded = cls.from_pretrained(tmp_path / "ours")
    assert_same(reloaded, on_load)
    if dtype == torch.float32:
        assert torch.equal(Example(reloaded, example.inputs).output(), Example(in_place, example.inputs).output())
        # And once more, from what the other loader made.
        loaded = qgemm.load_quantized(tmp_path / "ours")
        loaded.save_pretrained(tmp_path / "again")
        assert_same(cls.from_pretrained(tmp_path / "again"), on_load)


@pytest.mark.slow(quick=["llama"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "bert", "t5"])
def test_base_model_of_a_quantized_folder(family: str, tmp_path: Path) -> None:
    model = qgemm.quantize_model(FAMILIES[family]().model).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "int8")
    base = AutoModel.from_pretrained(tmp_path / "int8")
    names = quantized_names(base)
    assert names
    body = model if family == "t5" else model.base_model
    shared = tensors(base).keys() & tensors(body).keys()  # all but BERT's pooler, which is new
    assert {f"{name}.weight" for name in names} <= shared
    for name in shared:
        assert torch.equal(tensors(base)[name], tensors(body)[name]), name
    base.save_pretrained(tmp_path / "base")
    assert_same(AutoModel.from_pretrained(tmp_path / "base"), base)
    assert_same(qgemm.load_quantized(tmp_path / "base"), base)
    # And back: the head is new, the rest is as it was.
    whole = type(model).from_pretrained(tmp_path / "base")
    body = whole if family == "t5" else whole.base_model
    assert quantized_names(body) == names


def test_parameters_that_transformers_does_not_save(tmp_path: Path) -> None:
    # Marian's positions: building the model makes them, but load_quantized builds it without values.
    sizes = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    config = MarianConfig(vocab_size=97, d_model=32, pad_token_id=0, decoder_start_token_id=0, **sizes)
    MarianMTModel(config).save_pretrained(tmp_path / "float")
    model = MarianMTModel.from_pretrained(
        tmp_path / "float", dtype=torch.bfloat16, quantization_config=qgemm.QGemmConfig()
    )
    model.save_pretrained(tmp_path / "int8")
    assert_same(MarianMTModel.from_pretrained(tmp_path / "int8"), model)
    assert_same(qgemm.load_quantized(tmp_path / "int8"), model)


def test_folder_of_another_model(llama_folder: Path, tmp_path: Path) -> None:
    load_int8(llama_folder).save_pretrained(tmp_path / "int8")
    with pytest.raises(qgemm.CheckpointError, match="GPT2Model has none of the quantized layers"):
        GPT2Model.from_pretrained(tmp_path / "int8", config=with_quantization(tmp_path / "int8"))


def with_quantization(folder: Path) -> GPT2Config:
    values = json.loads((folder / "config.json").read_text())["quantization_config"]
    return GPT2Config(n_layer=1, n_embd=16, n_head=2, quantization_config=values)


def test_both_writers_store_the_same(llama_folder: Path, tmp_path: Path) -> None:
    model = load_int8(llama_folder)
    model.save_pretrained(tmp_path / "theirs")
    qgemm.save_quantized(model, tmp_path / "ours")
    theirs, ours = (load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "ours"))
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[name], ours[name]) for name in ours)
    configs = [json.loads(contents(tmp_path / name)["config.json"]) for name in ("theirs", "ours")]
    assert configs[1]["quantization_config"].pop("report") == "qgemm_report.json"  # which theirs have in their metadata
    assert configs[0]["quantization_config"] == configs[1]["quantization_config"]
    assert configs[0]["fusion_config"] == configs[1]["fusion_config"]


def test_auto_class_device_map_and_generation(llama_folder: Path, tmp_path: Path) -> None:
    config = qgemm.QGemmConfig(scheme="int8", skip=["*.o_proj"])
    model = AutoModelForCausalLM.from_pretrained(llama_folder, quantization_config=config, device_map="auto")
    model.save_pretrained(tmp_path / "int8", max_shard_size="50KB")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "int8", device_map="auto")
    assert_same(again, model)
    settings = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    tokens = again.generate(IDS.to(again.device), **settings)
    assert tokens.shape == (1, 10)
    in_place = qgemm.quantize_model(load(llama_folder), skip="*.o_proj").to(again.device)
    assert torch.equal(tokens, in_place.generate(IDS.to(again.device), **settings))
    static = again.generate(IDS.to(again.device), **settings, cache_implementation="static")
    assert torch.equal(tokens, static)


def test_static_scheme(llama_folder: Path, tmp_path: Path) -> None:
    scales = {name: 0.02 + 0.01 * i for i, name in enumerate(sorted(quantized_names(load_int8(llama_folder))))}
    config = qgemm.QGemmConfig("int8-static", input_scales=scales)
    model = load(llama_folder, quantization_config=config)
    assert_same(model, qgemm.quantize_model(load(llama_folder), "int8-static", input_scales=scales))
    model.save_pretrained(tmp_path / "int8")
    assert_same(load(tmp_path / "int8"), model)


def test_float_weights_go_one_at_a_time(llama_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    quantize = QuantizeOnLoad.quantize_weight

    def spy(self: Any, model: nn.Module, name: str, value: torch.Tensor) -> None:
        linears = [m for m in model.modules() if type(m) is nn.Linear and m is not model.lm_head]
        seen.append(sum(linear.weight.device.type != "meta" for linear in linears))
        quantize(self, model, name, value)

    monkeypatch.setattr(QuantizeOnLoad, "quantize_weight", spy)
    load_int8(llama_folder)
    assert seen == [0] * 14  # two blocks of seven layers: no float weight is there when the next one comes


def test_model_changed_after_loading_is_saved_as_it_is(llama_folder: Path, tmp_path: Path) -> None:
    model = load_int8(llama_folder)
    attention = model.model.layers[0].self_attn
    attention.q_proj = attention.q_proj.dequantize()
    model.save_pretrained(tmp_path / "int8")
    again = load(tmp_path / "int8")
    assert "model.layers.0.self_attn.q_proj" not in quantized_names(again)
    assert_same(again, model)


def test_copies_and_moved_models_are_saved(llama_folder: Path, tmp_path: Path) -> None:
    model = copy.deepcopy(qgemm.quantize_model(load(llama_folder))).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "int8")
    # .to rounds the rotary frequencies too, which no float checkpoint would hold.
    assert_same(load(tmp_path / "int8"), model)


def test_tied_by_hand(llama_folder: Path, tmp_path: Path) -> None:
    model = qgemm.quantize_model(load(llama_folder))
    model.model.norm.weight = model.model.layers[0].input_layernorm.weight
    model.save_pretrained(tmp_path / "int8")
    again = load(tmp_path / "int8")
    assert again.model.norm.weight is again.model.layers[0].input_layernorm.weight
    assert_same(again, model)


def test_model_inside_of_another_module(llama_folder: Path, tmp_path: Path) -> None:
    outer = nn.ModuleDict({"text": load(llama_folder)})
    qgemm.quantize_model(outer)
    outer["text"].save_pretrained(tmp_path / "int8")
    assert_same(load(tmp_path / "int8"), outer["text"])


def test_dequantize(llama_folder: Path, tmp_path: Path) -> None:
    model = load_int8(llama_folder)
    layer, calls = model.model.layers[0].mlp.up_proj, []
    expected = layer.dequantize().weight
    handle = layer.register_forward_hook(lambda *args: calls.append(args))
    model.dequantize()
    assert not quantized_names(model)
    model(IDS)
    handle.remove()
    model(IDS)
    assert len(calls) == 1
    model.save_pretrained(tmp_path / "float")
    again = load(tmp_path / "float")
    assert not hasattr(again.config, "quantization_config")
    assert torch.equal(again.model.layers[0].mlp.up_proj.weight, expected)


def test_nothing_is_left_of_a_dequantized_model(llama_folder: Path) -> None:
    model = load_int8(llama_folder)
    first, second = (each.mlp for each in model.model.layers)
    second.down_proj = first.down_proj
    qgemm.fuse(model)
    layer = weakref.ref(first.up_proj)
    model.dequantize()
    assert second.down_proj is first.down_proj
    gc.collect()
    assert layer() is None, "a fused layer keeps it"
    with pytest.raises(ValueError, match="holds no quantized layer"):
        qgemm.report(model)
    with pytest.raises(ValueError, match="wasn't fused"):
        qgemm.fusion_report(model)
    qgemm.quantize_model(model.model.layers[0], "int4")
    assert {record.action for record in qgemm.report(model).records} == {"int4"}


@torch.no_grad()
def test_a_dequantized_conv1d_is_one_again(tmp_path: Path) -> None:
    example = FAMILIES["gpt2"]()
    kinds = {name: type(module) for name, module in example.model.named_modules()}
    model: Any = qgemm.quantize_model(example.model, "int4")
    layer = model.transformer.h[0].attn.c_attn
    expected = layer.float_linear()
    model.dequantize()
    assert {name: type(module) for name, module in model.named_modules()} == kinds
    c_attn = model.transformer.h[0].attn.c_attn
    assert torch.equal(c_attn.weight, expected.weight.t())
    assert torch.equal(c_attn.bias, expected.bias)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert torch.equal(again(IDS).logits, model(IDS).logits)


@pytest.mark.parametrize("way", ["quantized", "loaded", "loaded by transformers", "converted", "while loading"])
@torch.no_grad()
def test_a_conv1d_that_is_put_back_by_hand(way: str, tmp_path: Path) -> None:
    model: Any = FAMILIES["gpt2"]().model
    if way == "while loading":
        model.save_pretrained(tmp_path)
        model = type(model).from_pretrained(tmp_path, quantization_config=qgemm.QGemmConfig("int4"))
    else:
        qgemm.quantize_model(model, "int4")
    if way in ("loaded", "loaded by transformers", "converted"):
        qgemm.save_quantized(model, tmp_path)
        options = {"quantization_config": qgemm.QGemmConfig("int8")} if way == "converted" else {}
        load = qgemm.load_quantized if way == "loaded" else type(model).from_pretrained
        model = load(tmp_path, **options)
    attention = model.transformer.h[0].attn
    attention.c_proj = attention.c_proj.dequantize()
    assert attention.c_proj.weight.shape[0] == attention.c_proj.weight.shape[1]  # no shape shows a transposed weight
    for save in (type(model).save_pretrained, qgemm.save_quantized):
        save(model, tmp_path / save.__name__)
        again = type(model).from_pretrained(tmp_path / save.__name__)
        assert torch.equal(again(IDS).logits, model(IDS).logits)


@pytest.mark.parametrize("cast", [None, torch.float32, torch.float16])
@torch.no_grad()
def test_dequantized_weights_have_the_dtype_of_the_rest(cast: torch.dtype | None, llama_folder: Path) -> None:
    # Which the config doesn't say of a model that was cast, before it was quantized or since then.
    model = qgemm.quantize_model(load(llama_folder, dtype=torch.float32).to(torch.bfloat16))
    model = model if cast is None else model.to(cast)
    model.dequantize()
    assert {parameter.dtype for parameter in model.parameters()} == {cast or torch.bfloat16}
    assert model(IDS).logits.dtype == (cast or torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float16, "float16"], ids=str)
def test_dequantize_to_a_dtype(dtype: torch.dtype | str, llama_folder: Path) -> None:
    model = load_int8(llama_folder)
    expected = model.model.layers[0].mlp.up_proj.dequantize(torch.float16).weight
    model.dequantize(dtype)
    weight = model.model.layers[0].mlp.up_proj.weight
    assert weight.dtype == torch.float16
    assert torch.equal(weight, expected)


# The config.


def test_config_shows_and_copies() -> None:
    config = qgemm.QGemmConfig("int8", skip=["a", re.compile("b+")], include="lm_head")
    assert config.to_dict() == {
        "quant_method": "qgemm",
        "scheme": "int8",
        "skip": ["a", "re:b+"],
        "include": ["lm_head"],
        "input_scales": None,
        "recipe": None,
    }
    assert dict(config) == config.to_dict() == json.loads(config.to_json_string())
    assert '"scheme": "int8"' in repr(config)
    assert copy.deepcopy(config).to_dict() == config.to_dict()
    with pytest.raises(ValueError, match="int9"):
        qgemm.QGemmConfig("int9")


def test_a_call_may_ask_for_the_config_of_the_decoder() -> None:
    # As encoder-decoders do when they make a cache.
    model: Any = qgemm.quantize_model(FAMILIES["whisper"]().model)

    def add_layers(x: torch.Tensor) -> torch.Tensor:
        return x + model.config.get_text_config(decoder=True).num_hidden_layers

    compiled = torch.compile(add_layers, backend="eager", fullgraph=True)
    assert compiled(torch.zeros(1)).item() == model.config.decoder_layers
    stored = model.config.quantization_config
    copied = copy.deepcopy(model.config).quantization_config
    assert copied is not stored
    assert copied.to_dict() == stored.to_dict() == stored.manifest.to_dict()


def test_config_of_schemes_by_pattern() -> None:
    config = qgemm.QGemmConfig({"z.*": "int4", re.compile("^b"): None, "*": "int8"}, skip=re.compile("c"))
    # transformers sorts the keys of what it writes: the order of patterns counts.
    text = json.dumps(config.to_dict(), sort_keys=True)
    again = qgemm.QGemmConfig.from_dict(json.loads(text))
    assert list(again.quantization.schemes.items()) == list(config.quantization.schemes.items())
    nothing = qgemm.QGemmConfig({"*": None})
    assert qgemm.QGemmConfig.from_dict(nothing.to_dict()).quantization.schemes == {"*": None}
    assert (again.quantization, again.to_dict()) == (config.quantization, config.to_dict())


def test_config_of_a_folder(llama_folder: Path, tmp_path: Path) -> None:
    load_int8(llama_folder).save_pretrained(tmp_path / "int8")
    config = AutoConfig.from_pretrained(tmp_path / "int8")
    values = qgemm.QGemmConfig.from_dict(config.quantization_config).to_dict()
    assert values == config.quantization_config
    with edited(tmp_path / "int8" / "config.json") as written:
        written["quantization_config"]["format_version"] = 99
    with pytest.raises(qgemm.CheckpointError, match="format_version is 99"):
        load(tmp_path / "int8")


def test_config_that_names_qgemm_but_no_layers(llama_folder: Path) -> None:
    with edited(llama_folder / "config.json") as config:
        config["quantization_config"] = {"quant_method": "qgemm"}
    with pytest.raises(qgemm.CheckpointError, match="doesn't say which layers"):
        load(llama_folder)


@pytest.mark.slow
def test_lazy_name() -> None:
    assert "QGemmConfig" in dir(qgemm)
    with pytest.raises(AttributeError, match="no attribute 'QGemConfig'"):
        qgemm.QGemConfig  # noqa: B018
    code = """
import sys
sys.modules["transformers"] = None
import qgemm
for use in (lambda: qgemm.QGemmConfig, lambda: qgemm.fast_generate(None)):
    try:
        use()
    except ImportError as error:
        assert 'pip install "transformers>=5.17"' in str(error)
    else:
        raise AssertionError
"""
    run_code(code)


def test_nothing_to_attach() -> None:
    model = FAMILIES["llama"]().model
    attach_quantizer(model)
    assert getattr(model, "hf_quantizer", None) is None
