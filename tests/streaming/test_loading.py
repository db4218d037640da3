"""Which tensors of the files go where, and what is refused: as ``from_pretrained`` has it, without its guesses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.rewriting import edited
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertForMaskedLM, BertModel, MarianConfig, MarianMTModel

from qgemm import CheckpointError, load_quantized, quantize_checkpoint
from streaming.files import assert_same_files, edit_tensors, quantize_whole

BERT: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": 97,
}
EMBEDDING = "model.embed_tokens.weight"
NORM = "model.norm.weight"
UP_PROJ = "model.layers.0.mlp.up_proj.weight"


def edit_config(folder: Path, **changes: Any) -> None:
    """Sets fields, or removes those that are None."""
    with edited(folder / "config.json") as config:
        config.update(changes)
        for key in [key for key, value in config.items() if value is None]:
            del config[key]


def assert_as_the_whole_model(source: Path, **options: Any) -> dict[str, torch.Tensor]:
    """Also returns the tensors."""
    folder = source.parent
    quantize_whole(source, folder / "whole")
    quantize_checkpoint(source, folder / "streamed", **options)
    assert_same_files(folder / "whole", folder / "streamed")
    return load_file(folder / "streamed" / "model.safetensors")


def test_two_tied_tensors_of_which_the_other_is_stored(source: Path) -> None:
    stored = load_file(source / "model.safetensors")
    edit_tensors(source, lm_head__weight=stored[EMBEDDING], model__embed_tokens__weight=None)
    assert EMBEDDING in assert_as_the_whole_model(source)


def test_two_tied_tensors_that_are_both_stored_and_equal(source: Path) -> None:
    stored = load_file(source / "model.safetensors")
    edit_tensors(source, lm_head__weight=stored[EMBEDDING].clone())
    assert "lm_head.weight" not in assert_as_the_whole_model(source)


def test_two_tied_tensors_that_are_both_stored_and_differ(source: Path) -> None:
    # In the last value only.
    other = load_file(source / "model.safetensors")[EMBEDDING].clone()
    other[-1, -1] += 1
    edit_tensors(source, lm_head__weight=other)
    written = assert_as_the_whole_model(source)
    assert torch.equal(written["lm_head.weight"], other)


def test_files_of_the_base_model_without_its_prefix(tmp_path: Path) -> None:
    # As the first checkpoints of BERT are; and with names that nobody uses any more.
    BertForMaskedLM(BertConfig(**BERT)).save_pretrained(tmp_path / "float")
    path = tmp_path / "float" / "model.safetensors"
    renamed = {
        name.removeprefix("bert.").replace("LayerNorm.weight", "LayerNorm.gamma").replace(".bias", ".bias"): value
        for name, value in load_file(path).items()
    }
    assert any(name.endswith("gamma") for name in renamed)
    save_file(renamed, path, metadata={"format": "pt"})
    assert_as_the_whole_model(tmp_path / "float")


def test_a_head_that_the_model_has_and_the_files_do_not(tmp_path: Path) -> None:
    BertModel(BertConfig(**BERT), add_pooling_layer=False).save_pretrained(tmp_path / "float")
    edit_config(tmp_path / "float", architectures=["BertForMaskedLM"])
    with pytest.raises(CheckpointError, match=r"lacks tensors of BertForMaskedLM.*random numbers: cls\.predictions"):
        quantize_checkpoint(tmp_path / "float", tmp_path / "streamed")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["float"]


def test_tensors_that_the_model_has_no_place_for(source: Path) -> None:
    edit_tensors(source, model__mtp__proj__weight=torch.zeros(3, 4), extra__bias=torch.zeros(4))
    with pytest.raises(CheckpointError, match=r"doesn't have: extra\.bias, model\.mtp\.proj\.weight\. .*in drop"):
        quantize_checkpoint(source, source.parent / "streamed")
    with pytest.raises(CheckpointError, match=r"doesn't have: extra\.bias\. "):
        quantize_checkpoint(source, source.parent / "streamed", drop="model.mtp.*")
    assert_as_the_whole_model(source, drop=["model.mtp.*", "extra.bias"])


def test_buffers_that_used_to_be_stored(source: Path) -> None:
    # Each layer of older checkpoints has its rotary frequencies.
    edit_tensors(source, model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(8))
    assert_as_the_whole_model(source)


def test_parameters_that_the_model_computes(tmp_path: Path) -> None:
    # Marian's files don't hold its sinusoidal positions, which are parameters.
    sizes = {"vocab_size": 97, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "max_position_embeddings": 32}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "pad_token_id": 0}
    config = MarianConfig(**sizes, **heads, encoder_ffn_dim=48, decoder_ffn_dim=48, decoder_start_token_id=0)
    MarianMTModel(config).save_pretrained(tmp_path / "float")
    assert "model.encoder.embed_positions.weight" not in load_file(tmp_path / "float" / "model.safetensors")
    assert "model.encoder.embed_positions.weight" in assert_as_the_whole_model(tmp_path / "float")


def test_a_tensor_of_another_shape(source: Path) -> None:
    edit_tensors(source, model__layers__0__mlp__up_proj__weight=torch.zeros(96, 63))
    with pytest.raises(CheckpointError, match=r"layers\.0\.mlp\.up_proj\.weight has shape \[96, 63\].*\[96, 64\]"):
        quantize_checkpoint(source, source.parent / "streamed")


def test_experts_that_cannot_be_put_together(tmp_path: Path) -> None:
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    config = MixtralConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, num_local_experts=2)
    MixtralForCausalLM(config).save_pretrained(tmp_path / "float")
    experts = "model.layers.0.block_sparse_moe.experts"
    path = tmp_path / "float" / "model.safetensors"
    stored = load_file(path)
    for name, value, message in (
        (f"{experts}.1.w2.weight", torch.zeros(32, 47), r"experts\.\d\.w2.* can't be combined into .*down_proj"),
        (f"{experts}.1.w3.weight", None, r"can't be combined into .*gate_up_proj"),
    ):
        changed = {key: tensor for key, tensor in {**stored, name: value}.items() if tensor is not None}
        save_file(changed, path, metadata={"format": "pt"})
        with pytest.raises(CheckpointError, match=message):
            quantize_checkpoint(tmp_path / "float", tmp_path / "streamed")


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_config_with_another_dtype_than_the_files(dtype: str, source: Path) -> None:
    edit_config(source, dtype=dtype)
    written = assert_as_the_whole_model(source)
    assert written[EMBEDDING].dtype == getattr(torch, dtype)


def test_a_config_that_says_no_dtype(source: Path) -> None:
    edit_config(source, dtype=None)
    assert assert_as_the_whole_model(source)[EMBEDDING].dtype == torch.bfloat16


def test_a_config_of_transformers_4(source: Path) -> None:
    edit_config(source, dtype=None, torch_dtype="float16", transformers_version="4.40.0")
    assert assert_as_the_whole_model(source)[EMBEDDING].dtype == torch.float16


def test_a_checkpoint_without_a_generation_config(source: Path) -> None:
    (source / "generation_config.json").unlink()
    assert_as_the_whole_model(source)


def test_how_a_model_generates_is_kept(source: Path) -> None:
    (source / "generation_config.json").write_text(json.dumps({"temperature": 0.5, "do_sample": True, "top_k": 7}))
    assert_as_the_whole_model(source)
    assert load_quantized(source.parent / "streamed").generation_config.top_k == 7


@pytest.mark.parametrize("method", ["qgemm", "gptq"])
def test_a_checkpoint_that_is_quantized(method: str, source: Path) -> None:
    settings = {"quantization_config": {"quant_method": method}}
    for changes in (settings, {"quantization_config": None, "text_config": settings}):
        edit_config(source, **changes)
        with pytest.raises(CheckpointError, match=r"has a quantization_config.*quantized already.*float checkpoint"):
            quantize_checkpoint(source, source.parent / "streamed")


@pytest.mark.parametrize("drop", ["*_scale_inv", ()])
def test_a_checkpoint_that_only_its_tensors_show_to_be_quantized(drop: Any, source: Path) -> None:
    # Whose fp8 values look like floats: without the scales they would be other weights.
    weight = load_file(source / "model.safetensors")[UP_PROJ].to(torch.float8_e4m3fn)
    name = UP_PROJ.replace(".", "__")
    edit_tensors(source, **{name: weight, f"{name}_scale_inv": torch.ones(1, 1)})
    with pytest.raises(CheckpointError, match=r"quantized already, by its tensors \(fp8\), such as .*_scale_inv"):
        quantize_checkpoint(source, source.parent / "streamed", drop=drop)


def test_an_adapter_beside_the_model(source: Path) -> None:
    # from_pretrained adds it, and would look for it beside the quantized model, too.
    (source / "adapter_config.json").write_text("{}")
    with pytest.raises(
        CheckpointError, match=r"has an adapter, adapter_config\.json.*merge the adapter into .*or move that file"
    ):
        quantize_checkpoint(source, source.parent / "streamed")


def test_a_model_that_transformers_does_not_have(source: Path) -> None:
    edit_config(source, architectures=["RemoteForCausalLM"], auto_map={"AutoModel": "modeling_remote.Remote"})
    message = (
        r"'RemoteForCausalLM', which is no model class of transformers [\d.]+: load .* and call qgemm\.quantize_mo"
    )
    with pytest.raises(CheckpointError, match=message):
        quantize_checkpoint(source, source.parent / "streamed")


def test_two_tensors_that_are_the_same_one_of_the_model(source: Path) -> None:
    # With the prefix and without. from_pretrained takes the one or the other.
    edit_tensors(source, norm__weight=torch.full((load_file(source / "model.safetensors")[NORM].numel(),), 7.0))
    with pytest.raises(CheckpointError, match=r"tensor norm\.weight is model\.norm\.weight.*remove one"):
        quantize_checkpoint(source, source.parent / "streamed")


def test_integers_where_the_model_has_floats(source: Path) -> None:
    # A quantized checkpoint whose config doesn't say so: its values aren't weights.
    stored = load_file(source / "model.safetensors")
    edit_tensors(source, model__layers__0__mlp__up_proj__weight=stored[UP_PROJ].to(torch.int8))
    with pytest.raises(CheckpointError, match=r"up_proj\.weight is torch\.int8.*quantized already"):
        quantize_checkpoint(source, source.parent / "streamed")
