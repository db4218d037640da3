"""What goes wrong with quantizers of transformers, one test each: dtypes, shapes, scales, skips, processes, disks."""

from __future__ import annotations

import json
import os
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.rewriting import edited
from families import FAMILIES
from processes import run_code
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    CamembertConfig,
    CamembertForCausalLM,
    CamembertForTokenClassification,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
)

import qgemm
from integrations.folders import IDS, assert_same, edit_weights, load, load_int8, quantized_names
from qgemm import QuantLinear
from qgemm.checkpoint.name_ranges import expand
from qgemm.checkpoint.refusal import REFUSAL
from qgemm.integrations.transformers import QGemmQuantizer
from qgemm.numerics.formats import INT8


def test_weights_arrive_as_floats(llama_folder: Path) -> None:
    # A loader that casts to an int8 weight's dtype before it is quantized would give zeros.
    layers = {n: m for n, m in load_int8(llama_folder).named_modules() if isinstance(m, QuantLinear)}
    assert len(layers) == 14  # of two blocks
    for name, layer in layers.items():
        assert layer.get_parameter("weight").abs().amax(dim=1).eq(INT8.high).all(), name


@pytest.mark.parametrize(
    ("shape", "leaf"), [((64, 32), "weight"), ((64, 64, 1), "weight"), ((32,), "weight_scale"), ((), "weight_scale")]
)
def test_wrong_shapes_are_refused(shape: tuple[int, ...], leaf: str, llama_folder: Path, tmp_path: Path) -> None:
    load_int8(llama_folder).save_pretrained(tmp_path / "int8")
    dtype = torch.int8 if leaf == "weight" else torch.float32
    edit_weights(tmp_path / "int8", **{f"model__layers__1__self_attn__q_proj__{leaf}": torch.ones(shape, dtype=dtype)})
    with pytest.raises(
        qgemm.CheckpointError, match=rf"model.safetensors: .*layers.1.self_attn.q_proj.{leaf} has shape"
    ):
        load(tmp_path / "int8")


def test_wrong_shape_of_a_float_weight(llama_folder: Path) -> None:
    edit_weights(llama_folder, model__layers__1__self_attn__q_proj__weight=torch.ones(64, 32))
    with pytest.raises(
        qgemm.CheckpointError, match=r"layers.1.self_attn.q_proj.weight has shape \[64, 32\] .*\[64, 64\]"
    ):
        load_int8(llama_folder)


@pytest.mark.parametrize("quantized", [True, False])
@pytest.mark.parametrize("device_map", [None, "cpu"])
def test_a_float_tensor_of_another_shape(
    quantized: bool, device_map: str | None, llama_folder: Path, tmp_path: Path
) -> None:
    # As with a float model. Up to 5.22, transformers compares no shapes if there is a quantizer.
    to_int8: dict[str, Any] = {"quantization_config": qgemm.QGemmConfig()}
    first, then = (to_int8, {}) if quantized else ({}, to_int8)
    LlamaForSequenceClassification.from_pretrained(llama_folder, num_labels=2, **first).save_pretrained(tmp_path)
    kwargs: dict[str, Any] = {**then, "num_labels": 5, "device_map": device_map}
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        LlamaForSequenceClassification.from_pretrained(tmp_path, **kwargs)
    model, found = LlamaForSequenceClassification.from_pretrained(
        tmp_path, **kwargs, ignore_mismatched_sizes=True, output_loading_info=True
    )
    assert len(quantized_names(model)) == 14
    assert [tuple(map(list, each[1:])) for each in found["mismatched_keys"]] == [([2, 64], [5, 64])]
    assert model.score.weight.isfinite().all()
    assert model(IDS).logits.shape == (len(IDS), 5)


@pytest.mark.parametrize("leaf", ["weight", "weight_scale"])
def test_missing_tensors_are_refused(leaf: str, llama_folder: Path, tmp_path: Path) -> None:
    load_int8(llama_folder).save_pretrained(tmp_path / "int8")
    edit_weights(tmp_path / "int8", **{f"model__layers__0__mlp__up_proj__{leaf}": None})
    with pytest.raises(qgemm.CheckpointError, match=rf"lacks tensor model.layers.0.mlp.up_proj.{leaf}"):
        load(tmp_path / "int8")
    edit_weights(llama_folder, model__layers__0__mlp__up_proj__weight=None)
    with pytest.raises(qgemm.CheckpointError, match=r"layers.0.mlp.up_proj.weight is not in the checkpoint.*skip="):
        load_int8(llama_folder)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes in folders here")
@pytest.mark.parametrize("quantized", [True, False])
def test_no_shard_and_a_pipe_as_one(quantized: bool, llama_folder: Path, tmp_path: Path) -> None:
    # Whoever opened it, would wait forever for somebody who writes.
    (load_int8 if quantized else load)(llama_folder).save_pretrained(tmp_path / "shards", max_shard_size="30KB")
    shard = sorted((tmp_path / "shards").glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(qgemm.CheckpointError, match=f"{shard.name} can't be read: No such file[a-z ]*$"):
        (load if quantized else load_int8)(tmp_path / "shards")
    os.mkfifo(shard)
    with pytest.raises(qgemm.CheckpointError, match=f"{shard.name} is a pipe; only regular files are read"):
        (load if quantized else load_int8)(tmp_path / "shards")


@pytest.mark.parametrize(
    "values",
    [
        {"scheme": 3},
        {"scheme": None},
        {"scheme": []},
        {"scheme": ["int8"]},
        {"scheme": [[[], "int8"]]},
        {"scheme": {"*": 8}},
        {"scheme": "int3"},
        {"skip": 3},
        {"include": [None]},
        {"input_scales": 3},
        {"input_scales": ["a"]},
        {"shceme": "int8"},
        {"layers": 3},
        {"format_version": 1, "schemes": {"int8": 3}, "layers": {}, "tied": {}},
        {"format_version": 1, "schemes": {"int8": [None]}, "layers": {}, "tied": {}},
        {"format_version": 1, "schemes": {"a": {"name": 3, "weight": {}, "activation": 3}}, "layers": {}, "tied": {}},
    ],
    ids=json.dumps,
)
def test_a_config_of_other_types(values: dict[str, Any]) -> None:
    with pytest.raises(qgemm.CheckpointError):
        qgemm.QGemmConfig.from_dict({"quant_method": "qgemm", **values})


def test_missing_scale_in_a_state_dict_is_refused(llama_folder: Path) -> None:
    # Without files to look into beforehand, a scale that never came is uninitialised memory.
    model = load_int8(llama_folder)
    state = {name: tensor for name, tensor in model.state_dict().items() if "0.mlp.up_proj.weight_scale" not in name}
    with pytest.raises(qgemm.CheckpointError, match=r"model.layers.0.mlp.up_proj.weight_scale was not loaded"):
        LlamaForCausalLM.from_pretrained(None, config=LlamaConfig.from_dict(model.config.to_dict()), state_dict=state)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -1.0])
def test_bad_scales_are_refused(bad: float, llama_folder: Path, tmp_path: Path) -> None:
    load_int8(llama_folder).save_pretrained(tmp_path / "int8")
    edit_weights(tmp_path / "int8", model__layers__0__mlp__up_proj__weight_scale=torch.full((96,), bad))
    with pytest.raises(qgemm.CheckpointError, match=r"model.layers.0.mlp.up_proj.weight_scale holds NaN, Inf or"):
        load(tmp_path / "int8")


@pytest.mark.parametrize("leaf", ["mlp.up_proj.weight", "mlp.up_proj.weight_scale", "input_layernorm.weight"])
def test_a_flipped_bit_is_found(leaf: str, llama_folder: Path, tmp_path: Path) -> None:
    name = f"model.layers.1.{leaf}"
    load_int8(llama_folder).save_pretrained(tmp_path / "int8", max_shard_size="20KB")
    places = json.loads((tmp_path / "int8" / "model.safetensors.index.json").read_text())["weight_map"]
    path = tmp_path / "int8" / places[name]
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    start += json.loads(content[8:start])[name]["data_offsets"][0]
    path.write_bytes(content[:start] + bytes([content[start] ^ 1]) + content[start + 1 :])
    loaders = [load, qgemm.load_quantized]
    if "_proj" not in name:
        loaders.remove(load)  # which leaves float parts to transformers
    for loader in loaders:
        with pytest.raises(qgemm.CheckpointError, match=rf"tensor {name} doesn't have the checksum"):
            loader(tmp_path / "int8")


def test_float_weight_where_int8_is_wanted(llama_folder: Path, tmp_path: Path) -> None:
    load_int8(llama_folder).save_pretrained(tmp_path / "int8")
    edit_weights(tmp_path / "int8", model__layers__0__mlp__up_proj__weight=torch.rand(96, 64))
    with pytest.raises(
        qgemm.CheckpointError, match=r"up_proj.weight is torch.float32; a quantized layer's is torch.int8"
    ):
        load(tmp_path / "int8")


def test_nan_weight_is_refused(llama_folder: Path) -> None:
    edit_weights(llama_folder, model__layers__0__mlp__up_proj__weight=torch.full((96, 64), torch.nan))
    with pytest.raises(qgemm.CheckpointError, match=r"model.layers.0.mlp.up_proj: weight holds NaN or Inf"):
        load_int8(llama_folder)
    config = qgemm.QGemmConfig(skip="model.layers.0.mlp.up_proj")
    assert len(quantized_names(load(llama_folder, quantization_config=config))) == 13


def test_truncated_shard_is_refused(llama_folder: Path, tmp_path: Path) -> None:
    load_int8(llama_folder).save_pretrained(tmp_path / "int8", max_shard_size="50KB")
    shard = sorted((tmp_path / "int8").glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-8])
    with pytest.raises(qgemm.CheckpointError, match=re.escape(str(shard))):
        load(tmp_path / "int8")


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert"])
def test_nothing_of_a_layer_requires_a_gradient(family: str, tmp_path: Path) -> None:
    model = FAMILIES[family]().model
    model.save_pretrained(tmp_path / "float")
    model = type(model).from_pretrained(tmp_path / "float", quantization_config=qgemm.QGemmConfig())
    model.save_pretrained(tmp_path / "int8")
    for loaded in (model, type(model).from_pretrained(tmp_path / "int8")):
        frozen = [p for m in loaded.modules() if isinstance(m, QuantLinear) for p in m.parameters()]
        assert frozen
        assert not any(parameter.requires_grad for parameter in frozen)


def test_casts_leave_scales_alone(llama_folder: Path) -> None:
    model = load_int8(llama_folder)
    layer = model.model.layers[0].mlp.up_proj
    weight, scale = layer.weight.clone(), layer.weight_scale.clone()
    model.to(torch.bfloat16)
    assert model.dtype == torch.bfloat16
    assert torch.equal(layer.weight, weight)
    assert torch.equal(layer.weight_scale, scale)


def test_skip_adds_to_the_defaults(tmp_path: Path) -> None:
    # Heads with a bias too, which a list of default names misses.
    model = FAMILIES["bert_classifier"]().model
    model.save_pretrained(tmp_path)
    config = qgemm.QGemmConfig(skip=["bert.encoder.layer.0", re.compile("pooler")])
    names = quantized_names(type(model).from_pretrained(tmp_path, quantization_config=config))
    assert names
    assert all(name.startswith("bert.encoder.layer.1.") for name in names)


def test_heads_with_a_bias_stay_in_float(tmp_path: Path) -> None:
    model = FAMILIES["bert_classifier"]().model
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, quantization_config=qgemm.QGemmConfig())
    assert type(loaded.classifier) is nn.Linear
    assert torch.equal(loaded.classifier.weight, model.classifier.weight)


def test_skipping_one_layer_is_not_skipping_eleven(tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=17, hidden_size=16, intermediate_size=16, num_hidden_layers=12, num_attention_heads=2
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "float")
    model = load(tmp_path / "float", quantization_config=qgemm.QGemmConfig(skip="model.layers.1"))
    model.save_pretrained(tmp_path / "int8")
    for names in (quantized_names(model), quantized_names(load(tmp_path / "int8"))):
        assert {int(name.split(".")[2]) for name in names} == set(range(12)) - {1}


def test_a_pattern_that_matches_nothing(llama_folder: Path) -> None:
    with pytest.raises(ValueError, match=r"'model.layers.9' matches no linear layer"):
        load(llama_folder, quantization_config=qgemm.QGemmConfig(skip="model.layers.9"))


def test_the_folder_says_how_it_is_quantized(llama_folder: Path, tmp_path: Path) -> None:
    model = load(llama_folder, quantization_config=qgemm.QGemmConfig(skip="*.o_proj"))
    model.save_pretrained(tmp_path / "int8")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a config that asks for nothing else goes without transformers' warning
        assert_same(load_int8(tmp_path / "int8"), model)


def test_what_transformers_looks_for_after_an_in_place_swap(llama_folder: Path) -> None:
    model = qgemm.quantize_model(load(llama_folder))
    assert isinstance(model.hf_quantizer, QGemmQuantizer)
    assert model.hf_quantizer.pre_quantized
    assert model.hf_quantizer.is_serializable()
    assert model.hf_quantizer.is_compileable
    assert model.quantization_method == "qgemm"
    layers = model.config.quantization_config.to_dict()["layers"]
    assert set(expand(layers["int8"])) == quantized_names(model)
    assert len(layers["int8"]) == 7
    model.half()  # stays possible


def test_a_float_model_from_the_same_config(tmp_path: Path) -> None:
    model = FAMILIES["llama"]().model
    config = model.config
    qgemm.quantize_model(model)
    parts = {id(module.config) for module in model.modules() if hasattr(module, "config")}
    assert parts == {id(model.config)}
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    assert not quantized_names(load(tmp_path))


@pytest.mark.slow
def test_a_process_that_only_loads(llama_folder: Path, tmp_path: Path) -> None:
    # qgemm first, which is the order that needs the import hook.
    load_int8(llama_folder).save_pretrained(tmp_path / "int8")
    code = """
import sys
import qgemm
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
assert sum(isinstance(m, qgemm.QuantLinear) for m in model.modules()) == 14
"""
    run_code(code, tmp_path / "int8")


WITHOUT_QGEMM = """
import sys
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, LlamaModel
assert "qgemm" not in sys.modules
for folder in sys.argv[2:]:
    for cls in (AutoModelForCausalLM, AutoModel, LlamaModel):
        for options in ({}, {"dtype": torch.bfloat16, "ignore_mismatched_sizes": True}, {"device_map": "cpu"},
                        {"config": AutoConfig.from_pretrained(folder)}):
            try:
                cls.from_pretrained(folder, **options)
            except ValueError as error:
                assert "qgemm, which must be imported before this checkpoint is loaded" in str(error), error
            else:
                raise AssertionError(f"{folder} was loaded by {cls}, {options}")
AutoModelForCausalLM.from_pretrained(sys.argv[1])
"""


@pytest.mark.slow
def test_a_process_without_qgemm_is_refused(llama_folder: Path, tmp_path: Path) -> None:
    # transformers has no way for a package to announce itself.
    folders = []
    for scheme in ("int8", "int4"):
        model = load(llama_folder, quantization_config=qgemm.QGemmConfig(scheme))
        folders += [tmp_path / f"{scheme} theirs", tmp_path / f"{scheme} ours"]
        model.save_pretrained(folders[-2])
        qgemm.save_quantized(model, folders[-1])
    folders.append(tmp_path / "streamed")
    qgemm.quantize_checkpoint(llama_folder, folders[-1])
    # What was quantized once can be float again.
    model.dequantize()
    model.save_pretrained(tmp_path / "float")
    run_code(WITHOUT_QGEMM, tmp_path / "float", *folders, transformers=True)


def test_a_config_that_is_none(llama_folder: Path, tmp_path: Path) -> None:
    # An automatic class then takes the config that says how it is quantized for none.
    model = load_int8(llama_folder)
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="before this checkpoint is loaded, without quantization_config=None"):
        AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=None)
    assert_same(LlamaForCausalLM.from_pretrained(tmp_path, quantization_config=None), model)
    # The name that was there before.
    with edited(tmp_path / "config.json") as config:
        config["fusion_config"] = {"qgemm, which must be imported before this checkpoint is loaded": True}
    for loaded in (load(tmp_path), qgemm.load_quantized(tmp_path)):
        assert list(loaded.config.fusion_config) == [REFUSAL]


@pytest.mark.slow
def test_fusions_of_the_model_stay(llama_folder: Path, tmp_path: Path) -> None:
    model = load_int8(llama_folder)
    assert list(model.config.fusion_config) == [REFUSAL]
    model.config.fusion_config = {"patch_embeddings": False}
    model.save_pretrained(tmp_path / "theirs")
    qgemm.save_quantized(model, tmp_path / "ours")
    for folder in (tmp_path / "theirs", tmp_path / "ours"):
        for loaded in (load(folder), qgemm.load_quantized(folder)):
            assert loaded.config.fusion_config == {"patch_embeddings": False, REFUSAL: True}
    qgemm.save_quantized(model, tmp_path / "for others", format="compressed-tensors")
    assert json.loads((tmp_path / "for others" / "config.json").read_text())["fusion_config"] == {
        "patch_embeddings": False
    }
    model.dequantize()
    assert model.config.fusion_config == {"patch_embeddings": False}


@pytest.mark.slow
def test_registering_again() -> None:
    # As a notebook's autoreload does. In a process of its own, where nothing else holds the old classes.
    code = """
import importlib, sys
import qgemm
import qgemm.integrations.transformers as package
old = qgemm.QGemmConfig
for module in (package.config, package.quantizer, package):
    importlib.reload(module)
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING
from qgemm.numerics.formats import INT8
assert qgemm.QGemmConfig is not old
assert AUTO_QUANTIZATION_CONFIG_MAPPING["qgemm"] is qgemm.QGemmConfig
assert AUTO_QUANTIZER_MAPPING["qgemm"] is package.QGemmQuantizer
from transformers import LlamaConfig, LlamaModel
sizes = {"vocab_size": 8, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
model = LlamaModel(LlamaConfig(**sizes))
count = model.num_parameters()
assert qgemm.quantize_model(model, "int4").num_parameters() == count
"""
    run_code(code, transformers=True)


def test_disk_is_refused_where_weights_are_quantized(llama_folder: Path) -> None:
    with pytest.raises(ValueError, match=r'"disk".*quantize and save the model first'):
        load_int8(llama_folder, device_map={"model": "cpu", "lm_head": "disk"}, offload_folder="unused")


def test_quantized_folder_from_disk(llama_folder: Path, tmp_path: Path) -> None:
    model = load_int8(llama_folder)
    model.save_pretrained(tmp_path / "int8")
    device_map = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk"}
    device_map |= {"model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    offloaded = load(tmp_path / "int8", device_map=device_map, offload_folder=tmp_path / "offload")
    with torch.no_grad():
        assert torch.equal(offloaded(IDS).logits, model(IDS).logits)
    offloaded.save_pretrained(tmp_path / "again")
    assert_same(load(tmp_path / "again"), model)


def test_a_tied_head_that_gets_a_weight_of_its_own(tmp_path: Path) -> None:
    # What the guide says: quantized, and the table no longer read by anything else.
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    config = LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2, tie_word_embeddings=True)
    model: Any = LlamaForCausalLM(config).eval()
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    model.config.tie_word_embeddings = False
    qgemm.quantize_model(model, include="lm_head")
    assert isinstance(model.lm_head, qgemm.QuantLinear)
    assert model.model.embed_tokens.weight.dtype == torch.float32
    ids = torch.arange(5)[None]
    qgemm.save_quantized(model, tmp_path)
    for loaded in (qgemm.load_quantized(tmp_path), LlamaForCausalLM.from_pretrained(tmp_path)):
        assert torch.equal(loaded(ids).logits, model(ids).logits)


def test_another_class_finds_a_table_that_a_head_shares(tmp_path: Path) -> None:
    # The head comes first in this model, and isn't there in the other.
    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    model: Any = qgemm.quantize_model(CamembertForCausalLM(CamembertConfig(**sizes, num_attention_heads=2)))
    model.save_pretrained(tmp_path / "theirs")
    qgemm.save_quantized(model, tmp_path / "ours")
    for folder in ("theirs", "ours"):
        other = CamembertForTokenClassification.from_pretrained(tmp_path / folder)
        assert torch.equal(other.get_input_embeddings().weight, model.get_input_embeddings().weight)


class _OfTwoNames(LlamaForCausalLM):
    """As detection models have it of their heads: a layer of the decoder that the model holds too."""

    _tied_weights_keys = None

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.again, self.last = self.model.layers[0].mlp.down_proj, self.model.norm
        # One as files name it, and one the other way round.
        self._tied_weights_keys = {"again": "model.layers.0.mlp.down_proj", "model.norm": "last"}
        self.post_init()

    def is_custom_code(self) -> bool:
        return False  # of which transformers looks for modules that are shared


def test_a_layer_of_two_names(tmp_path: Path) -> None:
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    config = LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2, tie_word_embeddings=True)
    model: Any = qgemm.quantize_model(_OfTwoNames(config).eval())
    nn.init.normal_(model.last.weight)
    assert isinstance(model.again, QuantLinear)
    model.save_pretrained(tmp_path / "ours")
    loaded = _OfTwoNames.from_pretrained(tmp_path / "ours")
    assert_same(loaded, model)
    assert loaded.again is loaded.model.layers[0].mlp.down_proj
    with pytest.warns(UserWarning, match="_OfTwoNames"):
        qgemm.save_quantized(model, tmp_path / "theirs", format="compressed-tensors")
    assert_same(qgemm.load_quantized(tmp_path / "theirs", model=lambda: _OfTwoNames(config)), model)
