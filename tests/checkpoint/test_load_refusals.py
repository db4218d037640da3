"""Every way in which a folder can fail to be this model's checkpoint: one clear error, and nothing loaded."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from families.schemes import quantized_layer
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from checkpoint.models import Net, quantized_net, swap_linears, tiny_llama
from checkpoint.rewriting import edited, rewrite_file
from qgemm.checkpoint import CheckpointError, load_quantized, save_quantized
from qgemm.checkpoint.name_ranges import expand
from qgemm.checkpoint.pretrained import _config_class

CONFIG, INDEX, GENERATION = "config.json", "model.safetensors.index.json", "generation_config.json"
UP = "model.layers.0.mlp.up_proj"
NORM = "model.norm.weight"
Damage = Callable[[Path], Any]


def in_json(file: str, *path: str, value: Any) -> Damage:
    """Sets what lies at ``path`` in a JSON file; ``...`` removes it."""

    def damage(folder: Path) -> None:
        with edited(folder / file) as place:
            for key in path[:-1]:
                place = place[key]
            place[path[-1]] = value
            if value is ...:
                del place[path[-1]]

    return damage


def quantization(*path: str, value: Any) -> Damage:
    return in_json(CONFIG, "quantization_config", *path, value=value)


def unlisted(layer: str) -> Damage:
    """Leaves a layer out of those that are quantized."""

    def damage(folder: Path) -> None:
        config = json.loads((folder / CONFIG).read_text())["quantization_config"]
        names = [name for name in expand(config["layers"]["int8"]) if name != layer]
        quantization("layers", "int8", value=names)(folder)

    return damage


def text(file: str, content: str | bytes) -> Damage:
    return lambda folder: (folder / file).write_bytes(content.encode() if isinstance(content, str) else content)


def shard_of(folder: Path, name: str) -> str:
    return str(json.loads((folder / INDEX).read_text())["weight_map"][name])


def rewrite(folder: Path, shard: str, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / shard)
    change(tensors)
    rewrite_file(folder / shard, tensors)


def in_shard(name: str, change: Callable[[Tensor], Tensor]) -> Damage:
    """Replaces a tensor in its file."""
    return lambda folder: rewrite(folder, shard_of(folder, name), lambda t: t.update({name: change(t[name])}))


def without(name: str) -> Damage:
    """Removes a tensor from file and index."""

    def damage(folder: Path) -> None:
        rewrite(folder, shard_of(folder, name), lambda tensors: tensors.pop(name))
        in_json(INDEX, "weight_map", name, value=...)(folder)

    return damage


def with_foreign(name: str) -> Damage:
    """Adds a tensor to the first file and the index."""

    def damage(folder: Path) -> None:
        shard = shard_of(folder, NORM)
        rewrite(folder, shard, lambda tensors: tensors.update({name: torch.zeros(97, 32)}))
        in_json(INDEX, "weight_map", name, value=shard)(folder)

    return damage


def in_wrong_shard(folder: Path) -> None:
    last = shard_of(folder, NORM)
    in_json(INDEX, "weight_map", NORM, value=shard_of(folder, f"{UP}.weight"))(folder)
    assert last != shard_of(folder, NORM)


def in_two_shards(folder: Path) -> None:
    rewrite(folder, shard_of(folder, f"{UP}.weight"), lambda tensors: tensors.update({NORM: torch.ones(32)}))


def first_shard(change: Callable[[bytes], bytes]) -> Damage:
    def damage(folder: Path) -> None:
        shard = sorted(folder.glob("model-*.safetensors"))[0]
        shard.write_bytes(change(shard.read_bytes()))

    return damage


def linked_outside(folder: Path) -> None:
    shard = folder / shard_of(folder, NORM)
    target = shutil.move(shard, folder.parent / "elsewhere.safetensors")
    shard.symlink_to(target)


def header(*offsets: int) -> bytes:
    values = json.dumps({"x": {"dtype": "F32", "shape": [1 << 40], "data_offsets": offsets}}).encode()
    return len(values).to_bytes(8, "little") + values


def broken_scale(value: float) -> Damage:
    def change(scale: Tensor) -> Tensor:
        scale[3] = value
        return scale

    return in_shard(f"{UP}.weight_scale", change)


DAMAGES: dict[str, tuple[Damage, str]] = {
    # The files as such.
    "not a folder": (shutil.rmtree, r"is not a folder"),
    "no config": (lambda folder: (folder / CONFIG).unlink(), r"no file config\.json"),
    "config is a folder": (lambda folder: ((folder / CONFIG).unlink(), (folder / CONFIG).mkdir()), r"is a folder"),
    "an adapter alone": (
        lambda folder: ([file.unlink() for file in folder.iterdir()], text("adapter_config.json", "{}")(folder)),
        r"has no model\.safetensors\. It is an adapter of PEFT: merge it",
    ),
    "no index": (lambda folder: (folder / INDEX).unlink(), r"no file model\.safetensors"),
    "no shard": (lambda folder: (folder / shard_of(folder, NORM)).unlink(), r"no file model-0000\d-of"),
    "config not JSON": (text(CONFIG, "{"), r"config\.json is not valid JSON"),
    "config not text": (text(CONFIG, b"{\xff}"), r"config\.json is not valid JSON: byte 1 is no UTF-8; save it in"),
    "config marked": (text(CONFIG, b"\xef\xbb\xbf{}"), r"config\.json .* a byte order mark; save it in UTF-8 without"),
    "config says twice": (text(CONFIG, '{"a": 1, "a": 2}'), r"config\.json is not valid JSON: 'a' appears twice$"),
    "config too deep": (text(CONFIG, "[" * 100_000), r"config\.json is not valid JSON"),
    "config a list": (text(CONFIG, "[]"), r"config\.json holds a JSON list"),
    "index not JSON": (text(INDEX, "nothing"), r"index\.json is not valid JSON"),
    "generation config not JSON": (text(GENERATION, "{"), r"generation_config\.json is not valid JSON"),
    "generation config absurd": (
        text(GENERATION, '{"cache_config": 3, "max_new_tokens": "many"}'),
        r"generation config",
    ),
    # What the config says of the quantization.
    "not quantized": (in_json(CONFIG, "quantization_config", value=...), r"config\.json has no quantization_config"),
    "other method": (quantization("quant_method", value="vptq"), r"quant_method is 'vptq'; the formats supported"),
    "no method": (quantization("quant_method", value=...), r"a quantization_config without a quant_method"),
    "newer version": (
        quantization("format_version", value=3),
        r"format_version is 3; this qgemm reads",
    ),
    "version is text": (quantization("format_version", value="1"), r"format_version is '1'"),
    "version is a flag": (quantization("format_version", value=True), r"format_version is True"),
    "layers a list": (quantization("layers", value=[UP]), r"layers must map"),
    "layer's scheme a number": (quantization("layers", "int8", value=8), r"layers must map"),
    "no ties": (quantization("tied", value=...), r"tied must map"),
    "schemes a list": (quantization("schemes", value=[]), r"schemes must map"),
    "scheme a number": (quantization("schemes", "int8", value=3), r"schemes has one"),
    "unknown scheme": (quantization("schemes", "int8", "name", value="int3"), r"schemes has one .*int3"),
    "altered scheme": (quantization("schemes", "int8", "weight", "dtype", value="int4"), r"schemes has one .*int4"),
    "undefined scheme": (quantization("layers", value={"int5": [UP]}), rf"layer {UP} has scheme 'int5'"),
    "unknown layer": (
        quantization("layers", "int8", value=["model.layers.9.up"]),
        r"'model\.layers\.9\.up', which the model",
    ),
    "the model as a layer": (quantization("layers", "int8", value=[""]), r"layers names ''"),
    "layer not linear": (quantization("layers", "int8", value=["model.embed_tokens"]), r"is a Embedding, not linear"),
    "layer named twice": (quantization("layers", "int8", value=[UP, UP]), rf"layers has {UP} twice"),
    "layers without end": (
        quantization("layers", "int8", value=["model.layers.[0-4999].[0-4999]"]),
        r"over 500000 names",
    ),
    "ranges of nothing": (quantization("layers", "int8", value=["model.layers.[1-0].mlp"]), r"isn't a list of ranges"),
    "save a number": (quantization("save", value=1), r"save must be the id of a save"),
    "save a path": (quantization("save", value="../../../model/x"), r"save must be the id of a save"),
    "report a list": (quantization("report", value=[1]), r"report must be the name of a file"),
    "report elsewhere": (quantization("report", value="../report.json"), r"not a plain file name"),
    "weights elsewhere": (in_json(CONFIG, "transformers_weights", value="../x.safetensors"), r"not a plain file name"),
    "weights a pickle": (in_json(CONFIG, "transformers_weights", value="x.bin"), r"must be the name of a file"),
    "weights a list": (in_json(CONFIG, "transformers_weights", value=[]), r"must be the name of a file"),
    "weights missing": (in_json(CONFIG, "transformers_weights", value="x.safetensors"), r"no file x\.safetensors"),
    "tie of nothing": (quantization("tied", "model.x", value=NORM), r"the model has no model\.x"),
    "tie to nothing": (quantization("tied", "lm_head.weight", value="model.x"), r"no file holds model\.x"),
    "tie of other shapes": (quantization("tied", "lm_head.weight", value=NORM), r"shapes are \[97, 32\] and \[32\]"),
    # What it says of the model.
    "no architecture": (in_json(CONFIG, "architectures", value=...), r"pass the float model"),
    "architecture a number": (in_json(CONFIG, "architectures", value=[3]), r"pass the float model"),
    "architecture a module": (in_json(CONFIG, "architectures", value=["modeling_utils"]), r"which is no model class"),
    "architecture not a model": (in_json(CONFIG, "architectures", value=["LlamaConfig"]), r"which is no model class"),
    "architecture unknown": (in_json(CONFIG, "architectures", value=["EvilModel"]), r"'EvilModel', which is no model"),
    "architecture abstract": (in_json(CONFIG, "architectures", value=["PreTrainedModel"]), r"which is no model class"),
    "other model type": (in_json(CONFIG, "model_type", value="bert"), r"model_type is 'bert'"),
    "dtype not float": (in_json(CONFIG, "dtype", value="int8"), r"dtype is 'int8'.* 'bfloat16': write it there"),
    "impossible size": (in_json(CONFIG, "hidden_size", value=-1), r"LlamaForCausalLM can't be built"),
    "size a text": (in_json(CONFIG, "num_hidden_layers", value="two"), r"LlamaForCausalLM can't be built"),
    "size a long list": (in_json(CONFIG, "hidden_size", value=[1] * 5000), r"LlamaForCausalLM can't be built.*\.\.\.$"),
    "more layers": (in_json(CONFIG, "num_hidden_layers", value=3), r"lacks tensors of the model: model\.layers\.2\."),
    # The index.
    "no weight map": (in_json(INDEX, "weight_map", value=...), r"weight_map must be an object"),
    "weight map a list": (in_json(INDEX, "weight_map", value=[]), r"weight_map must be an object"),
    "file a number": (in_json(INDEX, "weight_map", NORM, value=1), r"weight_map must be an object"),
    "file above": (in_json(INDEX, "weight_map", NORM, value="../x.safetensors"), r"not a plain file name"),
    "file absolute": (in_json(INDEX, "weight_map", NORM, value="/etc/hostname"), r"not a plain file name"),
    "file below": (in_json(INDEX, "weight_map", NORM, value="sub/x.safetensors"), r"not a plain file name"),
    "file on a drive": (in_json(INDEX, "weight_map", NORM, value="C:x.safetensors"), r"not a plain file name"),
    "file above, Windows": (in_json(INDEX, "weight_map", NORM, value="..\\x.safetensors"), r"not a plain file name"),
    "file with NUL": (in_json(INDEX, "weight_map", NORM, value="x\0.safetensors"), r"not a plain file name"),
    "file is the folder": (in_json(INDEX, "weight_map", NORM, value="."), r"not a plain file name"),
    "file a link": (linked_outside, r"is a link to .*elsewhere\.safetensors, outside"),
    "wrong shard": (in_wrong_shard, rf"holds tensor {NORM}, which .* puts in model-"),
    "two shards": (in_two_shards, rf"tensor {NORM} is in two files"),
    "not in its shard": (
        lambda f: rewrite(f, shard_of(f, NORM), lambda t: t.pop(NORM)),
        rf"has no tensor {NORM}, which",
    ),
    "not in the index": (in_json(INDEX, "weight_map", f"{UP}.weight", value=...), r"puts in no file"),
    "index and single file": (
        lambda f: save_file({"x": torch.ones(1)}, f / "model.safetensors"),
        r"holds .* and .*index",
    ),
    # The safetensors files.
    "truncated": (first_shard(lambda content: content[:-1]), r"model-00001.* is truncated or no safetensors"),
    "truncated in the header": (first_shard(lambda content: content[:20]), r"is truncated or no safetensors"),
    "longer": (first_shard(lambda content: content + b"\0"), r"is truncated or no safetensors"),
    "empty": (first_shard(lambda content: b""), r"is truncated or no safetensors"),
    "a pickle": (first_shard(lambda content: b"\x80\x04\x95" + content), r"is truncated or no safetensors"),
    "huge header": (first_shard(lambda content: b"\xff" * 7 + b"\x7f" + content), r"is truncated or no safetensors"),
    "huge tensor": (first_shard(lambda content: header(0, 1 << 42)), r"is truncated or no safetensors"),
    "shape beyond the bytes": (first_shard(lambda content: header(0, 4) + b"1234"), r"is truncated or no safetensors"),
    # The tensors.
    "wrong shape": (
        in_shard(f"{UP}.weight", lambda t: t[:-1].clone()),
        rf"{UP}\.weight has shape \[47, 32\].*\[48, 32\]",
    ),
    "transposed": (in_shard(f"{UP}.weight", lambda t: t.t().contiguous()), rf"{UP}\.weight has shape \[32, 48\]"),
    "scales in columns": (in_shard(f"{UP}.weight_scale", lambda t: t[:, None]), r"weight_scale has shape \[48, 1\]"),
    "weight is float": (in_shard(f"{UP}.weight", Tensor.float), rf"{UP}\.weight is torch\.float32; .* torch\.int8"),
    "weight is unsigned": (in_shard(f"{UP}.weight", lambda t: t.to(torch.uint8)), rf"{UP}\.weight is torch\.uint8"),
    "scale is half": (in_shard(f"{UP}.weight_scale", Tensor.half), r"weight_scale is torch\.float16; .*float32"),
    "norm is int": (in_shard(NORM, lambda t: t.to(torch.int32)), rf"{NORM} is torch\.int32"),
    "norm of unknown dtype": (in_shard(NORM, lambda t: t.to(torch.uint32)), rf"{NORM} is None|{NORM} is torch.uint32"),
    "missing weight": (without(f"{UP}.weight"), rf"lacks tensors of the model: {UP}\.weight$"),
    "missing scale": (without(f"{UP}.weight_scale"), rf"lacks tensors of the model: {UP}\.weight_scale$"),
    "missing norm": (without(NORM), rf"lacks tensors of the model: {NORM}$"),
    "foreign": (
        with_foreign("model.norm.bias"),
        r"model-0.* holds tensors that the model doesn't have: model\.norm\.bias$",
    ),
    "layer not listed": (unlisted(UP), rf"doesn't have: {UP}\.weight_scale$"),
    "tied and stored": (with_foreign("lm_head.weight"), r"holds tensor lm_head\.weight, which config\.json ties"),
    "NaN scale": (broken_scale(float("nan")), rf"model-0.*: {UP}\.weight_scale holds NaN, Inf or"),
    "infinite scale": (broken_scale(float("inf")), rf"{UP}\.weight_scale holds NaN, Inf"),
    "negative scale": (broken_scale(-1), rf"{UP}\.weight_scale holds NaN, Inf or"),
}


@pytest.mark.parametrize("case", DAMAGES)
def test_damaged_checkpoint(case: str, llama_folder: Path) -> None:
    damage, message = DAMAGES[case]
    given = tiny_llama()
    before = {name: tensor.clone() for name, tensor in given.state_dict().items()}
    assert load_quantized(llama_folder)
    damage(llama_folder)
    with pytest.raises(CheckpointError, match=message) as refusal:
        load_quantized(llama_folder)
    assert "\n" not in str(refusal.value)
    assert len(str(refusal.value)) < 2000
    if "architecture" in case or case in UNREAD_WITH_MODEL:
        return
    with pytest.raises(CheckpointError):
        load_quantized(llama_folder, model=given)
    after = given.state_dict()
    assert list(after) == list(before)
    for name, tensor in before.items():
        assert torch.equal(after[name], tensor), name
    assert type(given.get_submodule(UP)) is nn.Linear
    assert given.training


UNREAD_WITH_MODEL = {
    *("other model type", "no dtype", "dtype not float", "impossible size", "size a text", "size a long list"),
    "more layers",
}


def test_static_scale_is_checked(tmp_path: Path) -> None:
    save_quantized(swap_linears(tiny_llama(), "int8-static"), tmp_path)
    for scale in (torch.nan, torch.inf, 0.0, -1.0):
        rewrite(tmp_path, "model.safetensors", lambda t, s=scale: t.update({f"{UP}.input_scale": torch.tensor(s)}))
        with pytest.raises(CheckpointError, match=rf"{UP}\.input_scale is not finite"):
            load_quantized(tmp_path)


LARGEST = 2**63 - 1


@pytest.mark.parametrize(
    "columns",
    [
        [*range(15), 9999],
        [*range(15), 32],  # K is 32
        [-1, *range(15)],
        [*range(15, -1, -1)],
        [*range(15), 14],
        [0, LARGEST, -LARGEST - 1, -1, *range(12)],  # the differences of neighbours, wrapped around, are above 0
    ],
    ids=["far too large", "too large", "negative", "descending", "twice", "wrapping around"],
)
def test_outlier_columns_are_checked(columns: list[int], tmp_path: Path) -> None:
    model = tiny_llama()
    model.model.layers[0].mlp.up_proj = quantized_layer(model.model.layers[0].mlp.up_proj, "int8-outliers-16")
    save_quantized(model, tmp_path)
    assert load_quantized(tmp_path)
    rewrite(tmp_path, "model.safetensors", lambda t: t.update({f"{UP}.outlier_columns": torch.tensor(columns)}))
    with pytest.raises(
        CheckpointError, match=rf"{UP}\.outlier_columns must be ascending columns of a weight that has 32"
    ):
        load_quantized(tmp_path)


def test_model_of_another_library_needs_model(tmp_path: Path) -> None:
    save_quantized(quantized_net(), tmp_path)
    assert set(json.loads((tmp_path / CONFIG).read_text())) == {"quantization_config"}
    with pytest.raises(CheckpointError, match="pass the float model"):
        load_quantized(tmp_path)
    with pytest.raises(TypeError, match=r"model\(\) returned a int"):
        load_quantized(tmp_path, model=lambda: 3)
    with pytest.raises(TypeError, match=r"meta.*pass the float model itself, model=build\(\)"):
        load_quantized(tmp_path, model=lambda: Net().to("cpu"))


def test_long_lists_are_cut(tmp_path: Path) -> None:
    save_quantized(quantized_net(), tmp_path)
    with pytest.raises(CheckpointError, match=r"lacks tensors of the model: \S+, \S+, \S+, \S+, \S+ and \d+ more$"):
        load_quantized(tmp_path, model=type("Larger", (Net,), {"__init__": larger}))


def larger(self: Any) -> None:
    Net.__init__(self)
    self.more = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))


def test_nothing_is_unpickled(llama_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("pickle", "_pickle"):
        for name in ("load", "loads", "Unpickler"):
            monkeypatch.delattr(f"{module}.{name}")
    assert load_quantized(llama_folder)


def test_a_file_that_changes_while_it_is_read(llama_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from qgemm.checkpoint import load

    def match_then_change(*args: Any) -> Any:
        layers = match(*args)
        in_shard(NORM, lambda tensor: tensor.half())(llama_folder)
        return layers

    match = load.match
    monkeypatch.setattr(load, "match", match_then_change)
    with pytest.raises(CheckpointError, match=r"replaced while the checkpoint was read|changed while it was read"):
        load_quantized(llama_folder)


def test_a_name_of_the_hub_is_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=r"downloaded first: hf download org/model --local-dir model$"):
        load_quantized("org/model")
    (tmp_path / "org").mkdir()  # a mistaken path, then
    for name in ("org/model", "model", str(tmp_path / "model")):
        with pytest.raises(CheckpointError, match=r"give the folder of a quantized model, or a GGUF file$"):
            load_quantized(name)


def test_types_that_are_configs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """With models of another type; transformers lists one by its name, or several."""
    from transformers.models.auto import modeling_auto

    part_of_the_name = type("Model", (), {"config_class": transformers.BertConfig})
    assert _config_class(part_of_the_name, "gpt-sw3") is None
    assert _config_class(transformers.GPT2Model, "gpt-sw3") is transformers.GPT2Config
    monkeypatch.setattr(modeling_auto, "MODEL_MAPPING_NAMES", {"gpt-sw3": ("Other", "GPT2Model")})
    assert _config_class(transformers.GPT2Model, "gpt-sw3") is transformers.GPT2Config
