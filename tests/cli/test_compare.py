"""``qgemm compare``: errors as PyTorch computes them, whatever the formats and names."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path

import pytest
import torch
import transformers
from checkpoint.foreign import edit_tensors
from checkpoint.models import tiny_llama
from checkpoint.rewriting import edited
from checkpoint.samples import SAMPLES
from checkpoint.test_bitsandbytes import float_model, write_by_layout
from safetensors.torch import load_file, save_file

import qgemm
from cli.command import run, run_failing, run_json, write_checkpoint
from cli.gguf_models import write_gguf
from qgemm.checkpoint.contents import Contents
from qgemm.checkpoint.name_ranges import expand
from qgemm.checkpoint.tensor_file import TensorFile
from qgemm.numerics.formats import INT8
from qgemm_cli.logits import compare_logits
from qgemm_cli.pairing import match_names

UP = "model.layers.0.mlp.up_proj"
TEXT = " ".join("abcdefghijklmnop"[i * 7 % 16] for i in range(150))


def write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {chr(ord("a") + i): i for i in range(26)} | {"<unk>": 26}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(folder)


@torch.no_grad()
def relative_errors(float_folder: Path, model: torch.nn.Module) -> dict[str, float]:
    tensors = load_file(float_folder / "model.safetensors")
    errors = {}
    for name, module in model.named_modules():
        if isinstance(module, qgemm.QuantLinear):
            wanted, got = tensors[f"{name}.weight"].double(), module.dequantize().weight.double()
            errors[f"{name}.weight"] = float((got - wanted).norm() / wanted.norm())
    return errors


@pytest.mark.parametrize("values", [1 << 24, 100])  # the whole weight at a time; 3 rows of it, the last time fewer
def test_a_float_and_a_quantized_one(
    values: int, float_folder: Path, int8_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qgemm_cli.commands.compare._VALUES", values)
    found = run_json("compare", float_folder, int8_folder)
    wanted = relative_errors(float_folder, qgemm.load_quantized(int8_folder))
    quantized = {layer["name"]: layer for layer in found["layers"] if layer["quantized"]}
    assert quantized.keys() == wanted.keys()
    for name, layer in quantized.items():
        assert layer["relative_error"] == pytest.approx(wanted[name], rel=1e-5)
        assert (layer["stored_as_a"], layer["stored_as_b"]) == ("float32", "int8")
    assert found["largest_error"] == pytest.approx(max(wanted.values()), rel=1e-5)
    assert found["same"] == len(found["layers"]) - len(wanted)
    assert found["only_in_a"] == found["only_in_b"] == found["differences"] == []


def test_conv1d_is_compared_the_right_way_round(tmp_path: Path) -> None:
    model = float_model("gpt2")  # attn.c_proj is 32 x 32: its shape doesn't tell
    model.save_pretrained(tmp_path / "float")
    (tmp_path / "int8").mkdir()
    write_by_layout(model, tmp_path / "int8")
    found = run_json("compare", tmp_path / "float", tmp_path / "int8")
    wanted = relative_errors(tmp_path / "float", qgemm.load_quantized(tmp_path / "int8"))
    layers = {layer["name"]: layer for layer in found["layers"] if layer["quantized"]}
    assert {layer["transposed"] for layer in layers.values()} == {True}
    assert layers["transformer.h.0.attn.c_proj.weight"]["relative_error"] < 0.02
    for name, error in wanted.items():
        assert layers[name]["relative_error"] == pytest.approx(error, rel=1e-4)


def tiny_mixture(name: str) -> torch.nn.Module:
    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_experts_per_tok": 2}
    if name == "qwen3_moe":  # its files hold experts one by one, its module all of them
        config = transformers.Qwen3MoeConfig(**sizes, **heads, num_experts=4, moe_intermediate_size=16)
        return transformers.Qwen3MoeForCausalLM(config)
    config = transformers.GptOssConfig(**sizes, **heads, num_local_experts=4, layer_types=["full_attention"])
    return transformers.GptOssForCausalLM(config)  # transposed, gates and ups in turn, with biases


@pytest.mark.parametrize(
    ("name", "scheme", "stored_as", "most"),
    [
        ("qwen3_moe", "int8", "int8", 0.02),
        ("gpt_oss", "int8", "int8", 0.02),
        ("gpt_oss", "mxfp4", "fp4", 0.15),
        ("qwen3_moe", "nvfp4", "fp4", 0.15),
        ("gpt_oss", "*.experts=int8-weight+mxfp4", "int8 fp4", 0.15),
    ],
)
def test_experts_in_whatever_layout(name: str, scheme: str, stored_as: str, most: float, tmp_path: Path) -> None:
    tiny_mixture(name).save_pretrained(tmp_path / "float")
    run("quantize", tmp_path / "float", tmp_path / "quantized", "--scheme", scheme)
    inspected = run_json("inspect", tmp_path / "quantized")
    assert inspected["problems"] == []
    shapes = {layer["name"].rpartition(".")[2]: layer["shape"] for layer in inspected["layers"]}
    K = 16 if name == "qwen3_moe" else 48
    assert (shapes["gate_up_proj"], shapes["down_proj"]) == ([4, 2 * K, 32], [4, 32, K])
    found = run_json("compare", tmp_path / "float", tmp_path / "quantized", "--tolerance", most)
    experts = {layer["name"].rpartition(".")[2]: layer for layer in found["layers"] if "experts" in layer["name"]}
    for leaf, own in zip(("gate_up_proj", "down_proj"), (stored_as.split() * 2)[:2], strict=True):
        assert (experts[leaf]["kind"], experts[leaf]["stored_as_b"]) == ("experts", own)
        assert 0.001 < experts[leaf]["relative_error"] < most
    for leaf in experts.keys() - {"gate_up_proj", "down_proj"}:
        assert experts[leaf]["relative_error"] == 0  # biases
    assert len(experts) == (2 if name == "qwen3_moe" else 4)
    assert found["only_in_a"] == found["only_in_b"] == []


def test_experts_of_other_libraries(tmp_path: Path) -> None:
    tiny_mixture("qwen3_moe").save_pretrained(tmp_path / "float")
    run("quantize", tmp_path / "float", tmp_path / "own", "--scheme", "int4-16")
    run("convert", tmp_path / "own", tmp_path / "one by one", "--to", "compressed-tensors")
    run("convert", SAMPLES / "mxfp4-gpt-oss", tmp_path / "gpt-oss", "--to", "qgemm")
    for a, b in (("own", "one by one"), ("one by one", "own"), (SAMPLES / "mxfp4-gpt-oss", "gpt-oss")):
        found = run_json("compare", tmp_path / a, tmp_path / b, "--tolerance", 0)
        experts = [layer for layer in found["layers"] if layer["kind"] == "experts"]
        assert {layer["name"].rpartition(".")[2] for layer in experts} == {"gate_up_proj", "down_proj"}
        assert {layer["quantized"] for layer in experts} == {True}
        assert found["same"] == len(found["layers"])
        assert [name for name in found["only_in_a"] + found["only_in_b"] if "inv_freq" not in name] == []
    # With a float mixture, whose files have the same names, experts are compared one by one.
    found = run_json("compare", tmp_path / "float", tmp_path / "one by one", "--tolerance", 0.2)
    assert sum(".experts." in layer["name"] for layer in found["layers"]) == 12
    edit_tensors(
        tmp_path / "one by one",
        lambda tensors: tensors["model.layers.0.mlp.experts.2.up_proj.weight_scale"][0].mul_(1.01),
    )
    assert (
        "experts.gate_up_proj: relative error"
        in run("compare", tmp_path / "own", tmp_path / "one by one", "--tolerance", 0, exit_code=1).stderr
    )
    edit_tensors(
        tmp_path / "one by one",
        lambda tensors: tensors["model.layers.0.mlp.experts.2.up_proj.weight_scale"][0].fill_(torch.nan),
    )
    assert "experts.2.up_proj.weight_scale holds NaN" in run_failing(
        "compare", tmp_path / "own", tmp_path / "one by one"
    )


def test_a_weight_that_only_one_has_is_above_every_tolerance(float_folder: Path, int8_folder: Path) -> None:
    names = [name for name in load_file(float_folder / "model.safetensors") if "layers.1." in name]
    edit_tensors(float_folder, lambda tensors: [tensors.pop(name) for name in names])
    with edited(float_folder / "config.json") as config:
        config["num_hidden_layers"] = 1
    for a, b in ((float_folder, int8_folder), (int8_folder, float_folder)):
        found = run_json("compare", a, b, "--tolerance", 0.1, exit_code=1)
        weights = sorted(name for name in names if "proj" in name)
        assert sorted(found["differences"]) == [f"{name} is only in one of the two" for name in weights]
        run("compare", a, b)


def test_experts_that_both_hold_one_by_one(tmp_path: Path) -> None:
    tiny_mixture("qwen3_moe").save_pretrained(tmp_path / "float")
    tensors = load_file(tmp_path / "float" / "model.safetensors")
    name = "model.layers.0.mlp.experts.1.up_proj"
    scale = tensors[f"{name}.weight"].abs().amax(1, keepdim=True) / INT8.steps
    int8 = (tensors[f"{name}.weight"] / scale).round().to(torch.int8)
    wanted = float((int8 * scale - tensors[f"{name}.weight"]).norm() / tensors[f"{name}.weight"].norm())
    tensors |= {f"{name}.weight": int8, f"{name}.weight_scale": scale}
    other = write_checkpoint(tmp_path / "int8", tensors, {"quant_method": "compressed-tensors"})
    for a, b in ((tmp_path / "float", other), (other, tmp_path / "float")):
        found = {layer["name"]: layer for layer in run_json("compare", a, b)["layers"] if layer["quantized"]}
        assert list(found) == [f"{name}.weight"]
        assert found[f"{name}.weight"]["relative_error"] == pytest.approx(wanted, rel=1e-3)
        assert found[f"{name}.weight"]["kind"] == "linear"


@pytest.mark.slow
def test_scales_per_row_tensor_and_block(tmp_path: Path) -> None:
    torch.manual_seed(0)
    weight = torch.randn(200, 300)
    blocks = torch.rand(2, 3) + 0.5
    expanded = blocks.repeat_interleave(128, 0)[:200].repeat_interleave(128, 1)[:, :300]
    fp8 = (weight / expanded).to(torch.float8_e4m3fn)
    a = write_checkpoint(tmp_path / "a", {"x.layers.0.up.weight": weight})
    b = write_checkpoint(tmp_path / "b", {"x.layers.0.up.weight": fp8, "x.layers.0.up.weight_scale_inv": blocks})
    wanted = float((fp8.float() * expanded - weight).norm() / weight.norm())
    assert run_json("compare", a, b)["largest_error"] == pytest.approx(wanted, rel=1e-5)
    int8 = (weight * 20).round().to(torch.int8)
    tensors = {"x.layers.0.up.weight": int8, "x.layers.0.up.weight_scale": torch.tensor([0.05])}
    c = write_checkpoint(tmp_path / "c", tensors, {"quant_method": "compressed-tensors"})
    wanted = float((int8 * 0.05 - weight).norm() / weight.norm())
    assert run_json("compare", a, c)["largest_error"] == pytest.approx(wanted, rel=1e-5)


@pytest.mark.slow(quick=["gguf"])
@pytest.mark.parametrize("format", ["gptq", "gguf"])
def test_work_is_proportional_to_the_number_of_layers(
    format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work: Counter[str] = Counter()
    opened, conversion_of = TensorFile.__init__, Contents.conversion_of
    monkeypatch.setattr(TensorFile, "__init__", lambda *given: work.update(["files"]) or opened(*given))
    monkeypatch.setattr(Contents, "conversion_of", lambda *given: work.update(["names"]) or conversion_of(*given))
    found = []
    for layers in (1, 2, 3):
        path = tmp_path / f"{layers}.gguf"
        if format == "gguf":
            write_gguf(path, layers=layers)
        else:
            model = tiny_llama(layers=layers)
            qgemm.quantize_model(model, "int4-16")
            qgemm.save_quantized(model, path, format=format)
        work.clear()
        run("compare", path, path)
        found.append(Counter(work))
    assert found[0]["files"] == found[2]["files"]
    assert found[2]["names"] - found[1]["names"] == found[1]["names"] - found[0]["names"] > 0


def test_scales_of_static_activations_are_compared(tmp_path: Path) -> None:
    layer = {"x.layers.0.up.weight": torch.ones(4, 4, dtype=torch.int8), "x.layers.0.up.weight_scale": torch.ones(4, 1)}
    folders = []
    for index, scale in enumerate((torch.tensor(0.5), torch.tensor([0.5]), torch.tensor([0.6]))):
        tensors = {**layer, "x.layers.0.up.input_scale": scale}
        folders.append(write_checkpoint(tmp_path / str(index), tensors, {"quant_method": "compressed-tensors"}))
    run("compare", folders[0], folders[1], "--tolerance", 0)
    found = run_json("compare", folders[0], folders[2], "--tolerance", 0.01, exit_code=1)
    assert found["differences"] == [
        "1 of 2 tensors have a relative error above 0.01",
        "x.layers.0.up.input_scale: relative error 0.2",
    ]


def test_a_name_without_a_module(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "a", {"bias": torch.ones(2), ".bias": torch.ones(3), "x.y": torch.ones(4)})
    found = run_json("compare", folder, folder)
    assert {layer["name"]: layer["shape"] for layer in found["layers"]} == {"bias": [2], ".bias": [3], "x.y": [4]}


def test_experts_of_which_a_weight_is_missing(tmp_path: Path) -> None:
    experts = "model.layers.0.feed_forward.experts"
    tensors = {
        f"{experts}.gate_up_proj": torch.ones(2, 16, 32).to(torch.float8_e4m3fn),
        f"{experts}.gate_up_proj_scale": torch.ones(2, 1, 32),
        f"{experts}.down_proj_scale": torch.ones(2, 16, 1),
    }
    folder = write_checkpoint(tmp_path / "a", tensors, {"quant_method": "fbgemm_fp8"})
    found = run_json("compare", folder, folder)
    assert [layer["name"] for layer in found["layers"]] == [f"{experts}.down_proj_scale", f"{experts}.gate_up_proj"]


def test_a_prefix_on_all_names_is_seen_through() -> None:
    names = [f"layers.{i}.{leaf}.weight" for i in range(3) for leaf in ("up", "down")]
    inside = [f"model.{name}" for name in names]
    assert match_names(names, [*inside, "lm_head.weight"]) == dict(zip(names, inside, strict=True))
    assert match_names([*inside, "lm_head.weight"], names) == dict(zip(inside, names, strict=True))
    assert match_names(names, names) == {name: name for name in names}
    assert match_names(["a"], ["b"]) == {}


def test_names_with_prefixes_without_number() -> None:
    # Trying each on every name would take minutes.
    names = [f"{number}.weight" for number in range(40_000)]
    others = [f"part{number}.{names[10_000]}" for number in range(40_000)]
    assert match_names(names, others) == {names[10_000]: f"part0.{names[10_000]}"}


def test_tolerance_and_shapes_make_the_exit_code(float_folder: Path, int8_folder: Path) -> None:
    found = run_json("compare", float_folder, int8_folder, "--tolerance", 0.001, exit_code=1)
    errors = {layer["name"]: layer["relative_error"] for layer in found["layers"]}
    above = [name for name, error in errors.items() if error > 0.001]
    assert found["differences"][0] == f"{len(above)} of {len(errors)} tensors have a relative error above 0.001"
    result = run("compare", float_folder, int8_folder, "--tolerance", 0.001, exit_code=1)
    lines = result.stderr.splitlines()
    assert len(lines) == 1 + 7  # the seven linear layers of both of the model's layers
    largest = max(errors[name] for name in above if "up_proj" in name)
    assert f"qgemm: model.layers.{{0..1}}.mlp.up_proj.weight: relative error {largest:.4g}" in lines
    run("compare", float_folder, int8_folder, "--tolerance", 0.1)
    path = float_folder / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:5].clone()
    del tensors[f"{UP}.weight"]
    save_file(tensors, path, {"format": "pt"})
    found = run_json("compare", float_folder, int8_folder, exit_code=1)
    assert "model.norm.weight has shape [32], in A [5]" in found["differences"][0]
    assert f"{UP}.weight" in found["only_in_b"]


def test_a_weight_with_nan_is_above_every_tolerance(float_folder: Path, int8_folder: Path) -> None:
    path = float_folder / "model.safetensors"
    tensors = load_file(path)
    tensors[f"{UP}.weight"][3, 4] = torch.nan
    save_file(tensors, path, {"format": "pt"})
    found = run_json("compare", int8_folder, float_folder, "--tolerance", 100, exit_code=1)
    assert found["differences"][1:] == [f"{UP}.weight: relative error nan"]
    assert found["largest_error"] is None  # JSON has no NaN


def test_the_table_has_a_row_for_a_kind_of_layer(float_folder: Path, int8_folder: Path) -> None:
    shown = run("compare", float_folder, int8_folder).stdout
    assert "model.layers.{0..1}.mlp.up_proj.weight" in shown
    assert "model.norm.weight" not in shown  # the same
    assert "model.norm.weight" in run("compare", float_folder, int8_folder, "--all").stdout


@torch.no_grad()
def test_logits_over_a_text(float_folder: Path, int8_folder: Path, tmp_path: Path) -> None:
    write_tokenizer(int8_folder)
    path = float_folder / "model.safetensors"
    tensors = load_file(path)
    tensors["model.embed_tokens.weight"] *= 20  # so far apart that it matters which of them the divergence is from
    save_file(tensors, path, {"format": "pt"})
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    arguments = ("--text", text, "--window", 40, "--max-tokens", 100)
    found = run_json("compare", float_folder, int8_folder, *arguments)["text"]
    ids = torch.tensor([ord(word) - ord("a") for word in TEXT.split()][:100])
    models = (transformers.LlamaForCausalLM.from_pretrained(float_folder), qgemm.load_quantized(int8_folder))
    logs, losses = [], []
    for model in models:
        windows = [(model(part[None]).logits[0].double(), part) for part in ids.split(40)]
        logs.append(torch.cat([logits.log_softmax(-1) for logits, _ in windows]))
        entropies = [torch.nn.functional.cross_entropy(x[:-1], part[1:], reduction="none") for x, part in windows]
        losses.append(float(torch.cat(entropies).mean().exp()))
    divergence = torch.nn.functional.kl_div(logs[1], logs[0], log_target=True, reduction="none").sum(-1)
    assert found["tokens"] == 100
    assert found["window"] == 40
    assert divergence.mean() > 0.01
    assert found["mean_kl"] == pytest.approx(float(divergence.mean()), rel=1e-3)
    assert found["max_kl"] == pytest.approx(float(divergence.max()), rel=1e-3)
    assert found["top1_agreement"] == float((logs[0].argmax(-1) == logs[1].argmax(-1)).double().mean())
    assert (found["perplexity_a"], found["perplexity_b"]) == pytest.approx(losses, rel=1e-6)
    assert "perplexity: A" in run("compare", float_folder, int8_folder, *arguments).stdout
    same = run_json("compare", int8_folder, int8_folder, *arguments, "--max-kl", 0)["text"]
    assert (same["max_kl"], same["top1_agreement"]) == (0, 1)
    run("compare", float_folder, int8_folder, *arguments, "--max-kl", 1e-12, exit_code=1)


@pytest.mark.slow
def test_a_window_is_no_longer_than_either_model_can_see(float_folder: Path, int8_folder: Path, tmp_path: Path) -> None:
    write_tokenizer(int8_folder)
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    over = ("compare", float_folder, int8_folder, "--text", text)
    wide, whole = (run_json(*over, "--window", window)["text"] for window in (4096, 64))
    assert wide["tokens"] == 150
    assert wide["window"] == 64
    assert wide == whole
    models = [transformers.AutoModelForCausalLM.from_pretrained(float_folder) for _ in range(2)]
    models[1].config.max_position_embeddings = 16
    for a, b in (models, models[::-1]):
        assert compare_logits(a, b, torch.arange(20), 4096, lambda count: None)["window"] == 16


def test_a_model_that_is_sure_of_what_is_wrong(float_folder: Path) -> None:
    # Its perplexity is beyond any number, which is no error.
    model = transformers.AutoModelForCausalLM.from_pretrained(float_folder)
    with torch.no_grad():
        model.lm_head.weight.mul_(1e6)
    found = compare_logits(model, model, torch.tensor([1, 2, 3, 4]), 4, lambda count: None)
    assert found["perplexity_a"] == math.inf
    assert found["max_kl"] == 0


def test_what_cannot_be_compared(float_folder: Path, int8_folder: Path, tmp_path: Path) -> None:
    other = write_checkpoint(tmp_path / "other", {"something.else": torch.ones(3)})
    assert "have no tensor in common" in run_failing("compare", float_folder, other)
    (tmp_path / "text.txt").write_text("a b c")
    text = ("--text", tmp_path / "text.txt")
    assert "has no tokenizer: pass --tokenizer" in run_failing("compare", float_folder, int8_folder, *text)
    write_tokenizer(float_folder)
    (tmp_path / "text.txt").write_text("a")
    assert "has 1 tokens" in run_failing("compare", float_folder, int8_folder, *text)
    (tmp_path / "text.txt").write_text("a b c")
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    (damaged / "tokenizer.json").write_text("{")
    message = run_failing("compare", float_folder, int8_folder, *text, "--tokenizer", damaged)
    assert f"transformers can't make the tokenizer in {damaged} (" in message
    with edited(float_folder / "tokenizer_config.json") as config:
        known = dict(config)
        config.update(tokenizer_class="Own", auto_map={"AutoTokenizer": ["own.Own", None]})
    assert "(it needs code of its own, and qgemm runs no" in run_failing("compare", float_folder, int8_folder, *text)
    (float_folder / "tokenizer_config.json").write_text(json.dumps(known))
    (float_folder / "adapter_config.json").write_text('{"base_model_name_or_path": "/somewhere/else"}')
    assert "merge the adapter" in run_failing("compare", float_folder, int8_folder, *text)
    of_text = (("--max-kl", "0.1"), ("--tokenizer", float_folder), ("--window", 8), ("--max-tokens", 8))
    for option, value in of_text:  # else a check that passes untried
        assert f"{option} is for a text" in run_failing("compare", float_folder, int8_folder, option, value)
    for device in ("cuda:99", "gpu"):
        assert f'device is "{device}"' in run_failing("compare", float_folder, int8_folder, "--device", device)
    (tmp_path / "text.txt").write_bytes(b"\xff\xfe\xff")
    assert "no text in UTF-8" in run_failing("compare", float_folder, int8_folder, *text)
    packed = {f"{UP}.qweight": torch.zeros(3, 48, dtype=torch.int32), f"{UP}.scales": torch.ones(1, 48)}
    packed[f"{UP}.qzeros"] = torch.zeros(1, 5, dtype=torch.int32)
    gptq = write_checkpoint(tmp_path / "gptq", packed, {"quant_method": "gptq", "bits": 3})
    assert "is stored as int3" in run_failing("compare", float_folder, gptq)
    with edited(int8_folder / "config.json") as config:
        layers = config["quantization_config"]["layers"]
        layers["int8"] = [name for name in expand(layers["int8"]) if name != UP]
    assert "single file" in run_failing("compare", float_folder, next(int8_folder.glob("*.safetensors")))
