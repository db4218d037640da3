"""Broken checkpoints are refused or load rightly; what the fuzzer once found has a test of its own."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run_process
from safetensors.torch import load_file
from torch import Tensor

from checkpoint import fuzz
from checkpoint.fuzz_breaks import Case, Change
from checkpoint.fuzz_models import CONFIG, INDEX, FuzzNet, Good, make_good, output_of, quantized_fuzz_net
from checkpoint.rewriting import edited, rewrite_file
from qgemm.checkpoint import CheckpointError, layout, load_quantized, save_quantized
from qgemm.checkpoint.checksum import checksum
from qgemm.checkpoint.name_ranges import expand
from qgemm.checkpoint.safetensors_file import CHECKSUMS, DTYPE_CODES

CASES = {"own": 80, "foreign": 50}
"""A seed's first ones; ``python tests/checkpoint/fuzz.py --cases 10000`` runs more."""
COMPLETE_CASES = {"own": 1000, "foreign": 300}
"""With ``--complete``."""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="limits address space, and reads /proc to know how much is used")
@pytest.mark.parametrize("formats", CASES)
def test_broken_checkpoints(formats: str, pytestconfig: pytest.Config) -> None:
    cases = (COMPLETE_CASES if pytestconfig.getoption("--complete") else CASES)[formats]
    # A process of its own: the address space is limited, and a crash is a failure like others.
    options = ["--foreign"] if formats == "foreign" else []
    done = run_process(Path(fuzz.__file__), "--cases", cases, *options, transformers=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-5000:]
    counts = json.loads(done.stdout.splitlines()[-1])
    grown = counts.pop("peak_memory_grown")
    assert sum(counts.values()) == cases
    assert grown < fuzz.MEMORY
    # Were all refused, or all harmless, the cases would be poor ones.
    assert min(counts["refused"], 10 * counts["equal"], 50 * counts["other values"]) > cases / 2


@pytest.mark.slow
def test_the_fuzzer_sees_a_wrong_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loader that gave two layers each other's weight would be caught."""

    def load_wrongly(*args: Any, **kwargs: Any) -> Any:
        model = load_quantized(*args, **kwargs)
        model.layers[0], model.layers[2] = model.layers[2], model.layers[0]
        return model

    good = make_good(tmp_path / "good")[0]
    watch = fuzz.Watch()
    (tmp_path / "outside").mkdir()
    assert fuzz.run_case(Case(good, good.files, []), tmp_path, watch) == "equal"
    monkeypatch.setattr(fuzz, "load_quantized", load_wrongly)
    with pytest.raises(AssertionError, match="is not what its file holds"):
        fuzz.run_case(Case(good, good.files, []), tmp_path, watch)


@pytest.mark.slow
def test_the_fuzzer_knows_what_other_libraries_files_mean(tmp_path: Path) -> None:
    """All of a model's tensors, without asking the reader, but for those of formats that a check is for."""
    (tmp_path / "good").mkdir()
    goods = [one for one in fuzz.make_every_foreign(tmp_path / "good") if one.check is None]
    assert len(goods) == 21
    for good in goods:
        assert good.meaning is not None
        meant = good.meaning(fuzz.read_files(good.files, good.files))
        for name, tensor in good.state.items():
            tied = [other for other, value in good.state.items() if value.data_ptr() == tensor.data_ptr()]
            held = any(other in meant and fuzz.is_held(name, meant[other], tensor) for other in tied)
            assert held or name.startswith(("model.rotary_emb.", "warp")), name  # which are not stored


@pytest.mark.parametrize(("waits", "message"), [(False, "computed for"), (True, "still waiting")])
def test_the_fuzzer_sees_a_hang(waits: bool, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load_for_ever(*args: Any, **kwargs: Any) -> Any:
        while True:
            if waits:
                time.sleep(10)

    good = make_good(tmp_path / "good")[0]
    ((number, timer, _),) = fuzz.LIMITS[waits : waits + 1]
    monkeypatch.setattr(fuzz, "LIMITS", [(number, timer, 0.1)])
    monkeypatch.setattr(fuzz, "load_quantized", load_for_ever)
    with pytest.raises(AssertionError, match=f"Hang: {message}"):
        fuzz.run_case(Case(good, good.files, []), tmp_path, fuzz.Watch())


@pytest.mark.slow
def test_the_fuzzer_sees_a_file_outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load_and_peek(folder: Path, **kwargs: Any) -> Any:
        (tmp_path / "outside" / "x").read_text()
        return load_quantized(folder, **kwargs)

    good = make_good(tmp_path / "good")[0]
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "x").write_text("secret")
    monkeypatch.setattr(fuzz, "load_quantized", load_and_peek)
    with pytest.raises(AssertionError, match=r"opened .*outside/x"):
        fuzz.run_case(Case(good, good.files, []), tmp_path, fuzz.Watch())


@pytest.mark.slow
def test_the_fuzzer_sees_a_mixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loader that didn't ask of which save each file is would be caught."""
    good, watch = make_good(tmp_path / "good")[0], fuzz.Watch()
    assert good.other is not None
    (tmp_path / "outside").mkdir()
    shard = next(name for name in good.files if name.endswith(".safetensors"))
    mixed = {**good.files, shard: good.other.files[shard]}
    assert fuzz.run_case(Case(good, mixed, [], is_whole=True), tmp_path, watch) == "refused"
    assert fuzz.run_case(Case(good, good.other.files, [], is_whole=True), tmp_path, watch) == "other save"
    monkeypatch.setattr("qgemm.checkpoint.safetensors_file.check_save", lambda *args: None)
    with pytest.raises(AssertionError, match="a mixture of two saves"):
        fuzz.run_case(Case(good, mixed, [], is_whole=True), tmp_path, watch)


@pytest.mark.slow
def test_a_save_at_any_moment_of_a_load(tmp_path: Path) -> None:
    """It is loaded, old or new: a save that comes between is no reason to refuse."""
    good, watch = make_good(tmp_path / "good")[0], fuzz.Watch()
    (tmp_path / "outside").mkdir()
    outcomes = [
        fuzz.run_case(Case(good, good.files, [], [Change(step, good.overwriting[-1])], is_whole=True), tmp_path, watch)
        for step in range(60)
    ]
    assert set(outcomes) == {"equal", "other save"}
    assert outcomes == sorted(outcomes, reverse=True)


# What was found.


@pytest.fixture
def net_folder(tmp_path: Path) -> Path:
    save_quantized(quantized_fuzz_net(), tmp_path)
    return tmp_path


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    with edited(path) as values:
        change(values)


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    rewrite_file(folder / "model.safetensors", tensors)


def set_quantization(folder: Path, field: str, name: str, value: Any) -> None:
    edit(folder / CONFIG, lambda config: config["quantization_config"][field].update({name: value}))


@pytest.mark.parametrize("name", ["x" * 5000, "\ud800"])
def test_a_file_name_that_no_file_system_takes(name: str, tmp_path: Path) -> None:
    save_quantized(quantized_fuzz_net(), tmp_path, max_shard_size=500)
    edit(tmp_path / INDEX, lambda index: index["weight_map"].update({"norm.weight": name}))
    with pytest.raises(CheckpointError, match="has no file"):
        load_quantized(tmp_path, model=FuzzNet)


@pytest.mark.parametrize("shape", [(0,), (4,), (9,), (0, 8), (8, 1)])
def test_a_transient_vector_of_another_length(shape: tuple[int, ...], net_folder: Path) -> None:
    rewrite(net_folder, lambda tensors: tensors.update(warp=torch.ones(shape)))
    with pytest.raises(CheckpointError, match=r"warp has shape .*; the model's is \[8\]"):
        load_quantized(net_folder, model=FuzzNet)


def test_a_float_weight_tied_to_an_int8_one(net_folder: Path) -> None:
    set_quantization(net_folder, "tied", "head.weight", "layers.0.weight")
    with pytest.raises(CheckpointError, match=r"layers\.0\.weight, but that is torch\.int8; .* torch\.float32"):
        load_quantized(net_folder, model=FuzzNet)


def test_two_schemes_for_one_layer(tmp_path: Path) -> None:
    def build() -> FuzzNet:
        model = FuzzNet()
        model.again = model.layers[0]
        return model

    model = quantized_fuzz_net()
    model.again = model.layers[0]
    save_quantized(model, tmp_path)
    assert load_quantized(tmp_path, model=build)
    set_quantization(tmp_path, "layers", "int8-static", ["again"])
    names = expand(json.loads((tmp_path / CONFIG).read_text())["quantization_config"]["layers"]["int8"])
    set_quantization(tmp_path, "layers", "int8", [name for name in names if name != "again"])
    with pytest.raises(CheckpointError, match="two schemes to again"):
        load_quantized(tmp_path, model=build)


def test_a_scale_tied_to_what_is_none(net_folder: Path) -> None:
    def without_scale(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["layers.0.weight_scale"]
        tensors["norm.bias"].fill_(-1)

    rewrite(net_folder, without_scale)
    set_quantization(net_folder, "tied", "layers.0.weight_scale", "norm.bias")
    with pytest.raises(CheckpointError, match=r"norm\.bias holds NaN, Inf or a negative number"):
        load_quantized(net_folder, model=FuzzNet)


def test_a_bias_that_no_kernel_takes(net_folder: Path) -> None:
    rewrite(net_folder, lambda tensors: tensors.update({"layers.0.bias": tensors["layers.0.bias"].double()}))
    with pytest.raises(CheckpointError, match=r"layers\.0\.bias is torch\.float64; the model's is torch\.float32"):
        load_quantized(net_folder, model=FuzzNet)


def test_a_name_twice_in_json(net_folder: Path) -> None:
    config = net_folder / CONFIG
    config.write_text(config.read_text().replace('"layers":', '"layers": {"head": "int8"}, "layers":'))
    with pytest.raises(CheckpointError, match="'layers' appears twice"):
        load_quantized(net_folder, model=FuzzNet)


@pytest.mark.slow
def test_a_flipped_bit_in_any_value(net_folder: Path) -> None:
    path = net_folder / "model.safetensors"
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    for place in range(end, len(content), 7):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1 << place % 8]) + content[place + 1 :])
        with pytest.raises(CheckpointError, match=r"doesn't have the checksum|holds NaN, Inf"):
            load_quantized(net_folder, model=FuzzNet)


def test_files_without_checksums_load(net_folder: Path) -> None:
    before = output_of(load_quantized(net_folder, model=FuzzNet))
    rewrite(net_folder, lambda tensors: None)
    assert torch.equal(output_of(load_quantized(net_folder, model=FuzzNet)), before)


@pytest.mark.parametrize("text", ["", "[]", "{}", "[" * 100_000, '{"norm.weight": 3}'])
def test_checksums_that_are_none(text: str, net_folder: Path) -> None:
    tensors = load_file(net_folder / "model.safetensors")
    rewrite_file(net_folder / "model.safetensors", tensors, **{CHECKSUMS: text})
    with pytest.raises(CheckpointError, match=r"qgemm_checksums must be an object|doesn't have the checksum"):
        load_quantized(net_folder, model=FuzzNet)


@pytest.mark.parametrize("dtype", DTYPE_CODES)
@pytest.mark.parametrize("count", [0, 1, 7, 8, 33])
def test_checksum_is_the_sum_of_words(dtype: torch.dtype, count: int) -> None:
    values = torch.randint(0, 2, (count,)).to(dtype)
    content = values.view(torch.uint8).numpy().tobytes() if count else b""
    words = [int.from_bytes(content[i : i + 8], "little") for i in range(0, len(content), 8)]
    assert checksum(values) == sum(words) % 2**64
    assert checksum(torch.cat([values[:1], values])[min(count, 1) :]) == checksum(values)  # at an odd place in memory
    large = torch.full((count,), -1, dtype=torch.int64)
    assert checksum(large) == count * (2**64 - 1) % 2**64


def test_nan_in_a_config(net_folder: Path) -> None:
    edit(net_folder / CONFIG, lambda config: config.update(embed_dropout=float("nan")))
    with pytest.raises(CheckpointError, match="it holds NaN"):
        load_quantized(net_folder, model=FuzzNet)


def test_json_of_many_gigabytes_is_not_read(net_folder: Path) -> None:
    os.truncate(net_folder / CONFIG, 1 << 40)  # a hole: takes no room on the disk
    with pytest.raises(CheckpointError, match=f"the maximum for JSON is {layout.LARGEST_JSON}"):
        load_quantized(net_folder, model=FuzzNet)


@pytest.fixture(scope="module")
def transformers_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Good]:
    good = make_good(tmp_path_factory.mktemp("good"))
    return {json.loads(one.files[CONFIG]).get("model_type"): one for one in good}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "field", "value", "message"),
    [
        ("llama", "num_hidden_layers", 2**63, "num_hidden_layers is above"),
        ("llama", "num_labels", 10**9, "num_labels is above"),
        ("llama", "num_hidden_layers", 50_000, "far more parameters than the files hold"),
        ("llama", "head_dim", 2**36, "far larger than what the files hold|head_dim is above"),
        ("gpt_neo", "attention_types", [[["global"], 2**40]], "attention_types is above"),
        ("gpt_neo", "max_position_embeddings", 50_000, "buffers are far larger"),
        ("gpt_neo", "num_heads", -1, "num_heads is negative"),
        ("llama", "sliding_window", 2**63, r"sliding_window is beyond 2\^62"),
        ("llama", "pad_token_id", -(2**63), r"pad_token_id is beyond 2\^62"),
    ],
)
def test_a_config_of_another_size(
    family: str, field: str, value: Any, message: str, transformers_models: dict[str, Good], tmp_path: Path
) -> None:
    fuzz.write_files(transformers_models[family].files, tmp_path / "case", tmp_path)
    edit(tmp_path / "case" / CONFIG, lambda config: config.update({field: value}))
    with pytest.raises(CheckpointError, match=message):
        load_quantized(tmp_path / "case")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("attn_implementation", "kernels-community/flash-attn"),
        ("_attn_implementation", "owner/repository"),
        ("experts_implementation", "owner/repository"),
        ("attribute_map", {"num_hidden_layers": "x"}),
    ],
)
def test_what_transformers_would_act_on(
    field: str, value: Any, transformers_models: dict[str, Good], tmp_path: Path
) -> None:
    """Such as a kernel's name, which transformers fetches from the hub and runs."""
    good = transformers_models["gpt_neo"]
    fuzz.write_files(good.files, tmp_path / "case", tmp_path)
    edit(tmp_path / "case" / CONFIG, lambda config: config.update({field: value}))
    model = load_quantized(tmp_path / "case")
    assert "/" not in model.config._attn_implementation
    assert torch.equal(output_of(model), good.output)
