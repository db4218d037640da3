"""GGUF files by every command: shown by the model's names, converted with their tokenizer, compared, and refused."""

from __future__ import annotations

import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoint.foreign import logits, same_tensors
from checkpoint.gguf_files import entry, random_tensors, setting, text, whole, write_file
from checkpoint.gguf_mixtures import write_gpt_oss
from checkpoint.gguf_models import float_model, settings_of

import qgemm
from cli.command import run, run_failing, run_json
from cli.gguf_models import EXPERTS, HIDDEN, TOKENS, write_gguf
from qgemm_cli import checkpoint
from qgemm_cli.commands.bench import shapes_of


@pytest.fixture(scope="session")
def _files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gguf")
    write_gguf(folder / "llama.gguf")
    write_gguf(folder / "experts.gguf", "qwen3moe", {"ffn_up": "Q8_0"})
    return folder


@pytest.fixture
def llama(_files: Path, tmp_path: Path) -> Path:
    """Alone in a folder."""
    (tmp_path / "llama").mkdir()
    return Path(shutil.copy(_files / "llama.gguf", tmp_path / "llama" / "tiny.gguf"))


@pytest.fixture
def experts(_files: Path) -> Path:
    """With another type for the ups than for the gates."""
    return _files / "experts.gguf"


def test_inspect_shows_the_model_and_the_types_of_the_file(llama: Path) -> None:
    found = run_json("inspect", llama)
    assert (found["format"], found["variant"], found["architecture"]) == (
        "gguf",
        "Q8_0, Q4_0, Q6_K",
        "LlamaForCausalLM",
    )
    assert (found["loads"], found["refusal"], found["coverage"], found["problems"]) == (True, None, 1, [])
    assert found["files"] == [{"name": "tiny.gguf", "bytes": llama.stat().st_size}]
    assert found["bytes"]["memory"] == sum(each.nbytes for each in qgemm.load_quantized(llama).parameters())
    assert found["bytes"]["tensors"] == sum(found["dtypes"].values()) == sum(each["bytes"] for each in found["layers"])
    layers = {layer["name"]: layer for layer in found["layers"]}
    assert layers["model.layers.1.self_attn.q_proj"] == {
        **{"name": "model.layers.1.self_attn.q_proj", "kind": "linear", "storage": "Q4_K", "quantized": True},
        **{"scheme": "int4-32-float-zeros", "shape": [HIDDEN, HIDDEN], "bytes": HIDDEN * 144},
    }
    embedding = layers["model.embed_tokens"]
    assert (embedding["kind"], embedding["storage"], embedding["scheme"]) == ("embedding", "Q8_0", None)
    assert (layers["model.norm"]["kind"], layers["model.norm"]["storage"]) == ("other", "float32")
    assert found["verified"]["tensors"] == 15  # of quantized layers
    shown = " ".join(run("inspect", llama.parent).stdout.split())
    assert "gguf (Q8_0, Q4_0, Q6_K), LlamaForCausalLM" in shown
    assert "model.layers.{0..1}.self_attn.v_proj 2 linear Q6_K as int8-weight-16 256 x 256" in shown


def test_inspect_counts_biases_of_experts_with_them(tmp_path: Path) -> None:
    write_gpt_oss(tmp_path / "a.gguf")
    layers = {layer["name"]: layer for layer in run_json("inspect", tmp_path)["layers"]}
    assert "model.layers.0.mlp.experts" not in layers
    experts = layers["model.layers.0.mlp.experts.down_proj"]
    assert (experts["kind"], experts["storage"], experts["shape"]) == ("experts", "MXFP4", [4, 64, 96])
    assert experts["bytes"] == 4 * 64 * (96 // 32 * 17 + 4)


def test_inspect_counts_factors_with_the_layers_that_they_multiply(tmp_path: Path) -> None:
    factors = {f"blk.0.attn_q.{leaf}": np.ones(1, "f4") for leaf in ("input_scale", "scale")}
    tensors = random_tensors(float_model("llama"), "llama", "NVFP4")
    write_file(tmp_path / "a.gguf", "llama", settings_of("llama"), factors | tensors)
    found = run_json("inspect", tmp_path)
    (layer,) = (each for each in found["layers"] if each["name"] == "model.layers.0.self_attn.q_proj")
    assert (layer["kind"], layer["storage"], layer["scheme"], layer["shape"]) == ("linear", "NVFP4", "nvfp4", [64, 64])
    assert layer["bytes"] == 64 * 36 + 4
    assert found["problems"] == []


def test_inspect_without_the_packages_shows_the_names_of_the_file(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: object) -> None:
        raise ImportError("pip install gguf")

    monkeypatch.setattr(checkpoint, "match_gguf", refuse)
    found = run_json("inspect", llama)
    assert (found["loads"], found["refusal"], found["architecture"]) == (False, "pip install gguf", "llama")
    kinds = {layer["name"]: (layer["kind"], layer["storage"]) for layer in found["layers"]}
    assert kinds["token_embd"] == ("embedding", "Q8_0")
    assert kinds["blk.1.attn_v"] == ("linear", "Q6_K")
    assert found["bytes"]["memory"] is None
    assert "install gguf" in run_failing("compare", llama, llama)
    assert "install gguf" in run_failing("convert", llama, llama.parent / "out", "--to", "qgemm")


def test_what_is_wrong_with_a_file(llama: Path) -> None:
    content = llama.read_bytes()
    place = checkpoint.open_checkpoint(llama).stored["blk.0.attn_k.weight"].start
    llama.write_bytes(content[:place] + struct.pack("<H", 0x7E00) + content[place + 2 :])
    (problem,) = run_json("inspect", llama, exit_code=1)["problems"]
    assert "tiny.gguf: blk.0.attn_k.weight holds NaN or Inf" in problem
    llama.write_bytes(content[:-1000])
    assert "tiny.gguf is truncated or no GGUF file: tensor" in run_failing("inspect", llama)
    write_gguf(llama, types={"ffn_up": "Q8_1"})
    found = run_json("inspect", llama)
    assert "blk.0.ffn_up.weight is of type Q8_1, which qgemm doesn't read" in found["refusal"]
    assert found["refusal"] in run_failing("compare", llama, llama)


def _write_header(path: Path, entries: bytes, tensors: int, other: bytes = setting("x", 0, b"\0")) -> None:
    architecture = setting("general.architecture", 8, text("\x1b[31m"))
    path.write_bytes(whole(architecture, other, entries, settings=2, tensors=tensors))


def _entry(name: str, *shape: int) -> bytes:
    """A tensor of Q8_0."""
    return entry(name, shape, kind=8)


def test_a_file_cannot_hold_up_the_command_or_write_to_a_terminal(tmp_path: Path) -> None:
    path = tmp_path / "bad.gguf"
    _write_header(path, _entry("a\u202e.weight", 0) + _entry("b\x1b[31m\n.weight", 32), 2)
    for command, code in (("inspect", 0), ("compare", 2), ("convert", 2)):
        other = {"inspect": (), "compare": (path,), "convert": (tmp_path / "out", "--to", "gptq")}[command]
        output = run(command, path, *other, exit_code=code).output
        assert "\x1b" not in output
        assert "\u202e" not in output
    _write_header(path, b"", 10**6)
    assert "it has 1000000 tensors, more than 65536" in run_failing("inspect", path)
    _write_header(path, b"", 0, setting("x", 9, struct.pack("<IQ", 0, 10**9)))
    assert "its lists have 1000000000 values, more than 4194304" in run_failing("inspect", path)
    _write_header(path, b"".join(_entry(f"{each}_exps.weight", 1 << 16, 0, 32) for each in range(5)), 5)
    assert "it has more than 262144 tensors" in run_failing("inspect", path)


def test_convert_makes_a_complete_checkpoint_of_the_same_bits(llama: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    out, text = tmp_path / "out", tmp_path / "text.txt"
    (llama.parent / "README.md").write_text("About it.")
    found = run_json("convert", llama.parent, out, "--to", "qgemm")
    assert (found["from"], found["layers"], found["bytes_before"]) == ("gguf", 15, llama.stat().st_size)
    tokenizer_files = ["chat_template.jinja", "tokenizer.json", "tokenizer_config.json"]
    assert sorted(found["copied"]) == ["README.md", *tokenizer_files]
    model, again = qgemm.load_quantized(llama), qgemm.load_quantized(out)
    assert same_tensors(model, again)
    assert torch.equal(logits(model), logits(again))
    assert again.generation_config.eos_token_id == 2
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<s>", "</s>")
    assert tokenizer("ab")["input_ids"] == [1, TOKENS.index("\u2581a"), TOKENS.index("b")]
    # And as the command itself sees it, by the tokenizer inside the file.
    text.write_text("abba aa bb")
    compared = run_json("compare", llama, llama, "--text", text)
    assert (compared["text"]["max_kl"], compared["text"]["tokens"]) == (0, len(tokenizer("abba aa bb")["input_ids"]))
    compared = run_json("compare", llama, out, "--tolerance", 0)
    assert compared["same"] == len(compared["layers"]) == 21
    assert {layer["stored_as_a"] for layer in compared["layers"]} >= {"Q4_K", "Q6_K", "Q8_0", "Q4_0"}


def test_convert_to_other_libraries(llama: Path, tmp_path: Path) -> None:
    message = run("convert", llama, tmp_path / "out", "--to", "compressed-tensors", exit_code=2).stderr
    assert "has the scheme 'int4-32-float-zeros', which compressed-tensors can't store" in message
    write_gguf(llama, types={"attn_q": "Q4_0", "attn_v": "Q8_0"})
    run("convert", llama, tmp_path / "out", "--to", "compressed-tensors")
    assert torch.equal(logits(qgemm.load_quantized(tmp_path / "out")), logits(qgemm.load_quantized(llama)))


def test_experts_of_two_types_need_a_scheme(experts: Path, tmp_path: Path) -> None:
    refusal = run_json("inspect", experts)["refusal"]
    assert "qgemm's experts of a module have one scheme" in refusal
    assert "such as --scheme 'int8'" in run_failing("convert", experts, tmp_path / "out", "--to", "qgemm")
    run("convert", experts, tmp_path / "out", "--to", "qgemm", "--scheme", "int8")
    assert same_tensors(qgemm.load_quantized(tmp_path / "out"), qgemm.load_quantized(experts, scheme="int8"))


def test_experts_whose_downs_have_a_type_of_their_own(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "experts.gguf", "qwen3moe", tokens=TOKENS[:3])
    layers = {layer["name"]: layer for layer in run_json("inspect", path)["layers"]}
    found = layers["model.layers.0.mlp.experts.gate_up_proj"]
    assert (found["kind"], found["storage"], found["scheme"]) == ("experts", "Q4_0", "int4-32")
    assert (found["shape"], found["bytes"]) == ([EXPERTS, 2 * HIDDEN, HIDDEN], EXPERTS * 2 * HIDDEN * 144)
    assert layers["model.layers.0.mlp.experts.down_proj"]["storage"] == "Q8_0"
    compared = run_json("compare", path, path, "--tolerance", 0)
    assert {"model.layers.1.mlp.experts.down_proj", "model.layers.1.mlp.gate.weight"} <= {
        layer["name"] for layer in compared["layers"]
    }


def test_a_tokenizer_that_transformers_cannot_make(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda *_, **__: {}["merges"])
    result = run("convert", llama, tmp_path / "out", "--to", "qgemm")
    assert "warning: transformers can't make the tokenizer of " in result.stderr
    assert "(KeyError: 'merges'): save the tokenizer of the float model in the new folder" in result.stderr
    assert "wrote" in result.stdout
    text = tmp_path / "text.txt"
    text.write_text("abba")
    assert "(KeyError: 'merges'): pass --tokenizer FOLDER" in run_failing("compare", llama, llama, "--text", text)


def test_quantize_and_bench(llama: Path, tmp_path: Path) -> None:
    for source in (llama, llama.parent):
        assert "is a GGUF file, and quantize starts from a float model" in run_failing(
            "quantize", source, tmp_path / "out"
        )
    sizes = {(each.N, each.K): each.count for each in shapes_of(llama)}
    assert sizes == {(HIDDEN, HIDDEN): 14, (len(TOKENS), HIDDEN): 1}
