"""``quantize_checkpoint`` writes what ``from_pretrained``, ``quantize_model``, ``save_quantized`` would, to the bit."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from checkpoint.rewriting import contents
from cli.command import run
from families import FAMILIES
from safetensors.torch import load_file
from transformers import (
    FalconH1Config,
    FalconH1ForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

import qgemm
from qgemm import CheckpointError, quantize_checkpoint
from qgemm.calibration import MinMax
from qgemm.numerics.formats import FP8
from qgemm.streaming import convert
from qgemm.streaming.shard_plan import ShardPlan
from qgemm.streaming.shards import write_shard
from streaming.files import Stopped, assert_same_files, edit_tensors, quantize_whole, stop_after

# One of each way in which names, ties, dtypes or layouts differ.
CHOSEN = [
    "llama",
    "qwen3",
    "gpt2",
    "opt",
    "bert",
    "t5",
    "deepseek_v3",
    "falcon",
    "mamba",
    "whisper",
    "wav2vec2",
    "llava",
    "siglip",  # an nn.MultiheadAttention, whose weights files have packed
]


@pytest.mark.slow(quick=["llama", "t5"])
@pytest.mark.parametrize("family", CHOSEN)
def test_the_files_are_those_of_the_whole_model(family: str, tmp_path: Path) -> None:
    # In several files: layers are cut in two, their scales in one file and their weights in the next.
    FAMILIES[family]().model.save_pretrained(tmp_path / "float")
    model = quantize_whole(tmp_path / "float", tmp_path / "whole", max_shard_size="20KB")
    report = quantize_checkpoint(tmp_path / "float", tmp_path / "streamed", max_shard_size="20KB")
    assert_same_files(tmp_path / "whole", tmp_path / "streamed")
    assert report == qgemm.report(model)
    assert report.quantized


@pytest.mark.parametrize("scheme", ["int8", "int4-32", "nvfp4", "fp8-block"])
def test_experts_that_files_hold_one_by_one(scheme: str, tmp_path: Path) -> None:
    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = MixtralConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, num_local_experts=4)
    MixtralForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "float")
    stored = (tmp_path / "float" / "model.safetensors").read_bytes()
    assert b"experts.3.w1.weight" in stored
    assert b"gate_up_proj" not in stored
    quantize_whole(tmp_path / "float", tmp_path / "whole", max_shard_size="20KB", scheme=scheme)
    quantize_checkpoint(tmp_path / "float", tmp_path / "streamed", scheme, max_shard_size="20KB")
    assert_same_files(tmp_path / "whole", tmp_path / "streamed")


def test_a_buffer_that_is_no_mask_and_has_three_dimensions(tmp_path: Path) -> None:
    # Filled like the weights of experts, which aren't made, and then multiplied with what the config says.
    sizes = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "mamba_d_ssm": 64}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "mamba_n_heads": 4, "mamba_d_state": 8}
    config = FalconH1Config(**sizes, mamba_d_head=16, head_dim=16, ssm_multipliers=[0.5, 0.25, 2.0, 4.0, 3.0])
    FalconH1ForCausalLM(config).save_pretrained(tmp_path / "float")
    model = quantize_whole(tmp_path / "float", tmp_path / "whole")
    quantize_checkpoint(tmp_path / "float", tmp_path / "streamed")
    assert_same_files(tmp_path / "whole", tmp_path / "streamed")
    qgemm.save_quantized(model, tmp_path / "for-others", format="compressed-tensors")
    name = "model.layers.0.mamba.mup_vector"
    assert torch.equal(qgemm.load_quantized(tmp_path / "for-others").get_buffer(name), model.get_buffer(name))


@pytest.mark.slow(quick=["dtype0"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_layers_that_the_model_keeps_in_float32(dtype: torch.dtype, tmp_path: Path) -> None:
    # T5 keeps wo in float32 where the rest is float16.
    config = T5Config(vocab_size=97, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
    T5ForConditionalGeneration(config).to(dtype).save_pretrained(tmp_path / "float")
    quantize_whole(tmp_path / "float", tmp_path / "whole")
    report = quantize_checkpoint(tmp_path / "float", tmp_path / "streamed")
    assert_same_files(tmp_path / "whole", tmp_path / "streamed")
    assert any("keeps it in float32" in record.reason for record in report.kept) == (dtype == torch.float16)


def test_a_static_scheme_and_layers_to_skip(source: Path, tmp_path: Path) -> None:
    skip: list[Any] = ["model.layers.0.mlp", re.compile("k_proj$"), "*.v_proj"]
    model = quantize_whole(source, tmp_path / "dynamic", skip=skip)
    scales = {record.name: 0.01 * (1 + index) for index, record in enumerate(qgemm.report(model).quantized)}
    options: dict[str, Any] = {"scheme": "int8-static", "skip": skip, "input_scales": scales}
    quantize_whole(source, tmp_path / "whole", **options)
    quantize_checkpoint(source, tmp_path / "streamed", **options)
    assert_same_files(tmp_path / "whole", tmp_path / "streamed")


# What a Calibration holds is of a layer's input: each scheme makes its own scale of it.
@pytest.mark.parametrize("observer", ["min-max", "percentile", "mse"])
def test_a_calibration_is_one_whichever_way_it_goes(observer: str, source: Path, tmp_path: Path) -> None:
    schemes: dict[Any, str] = {"*.mlp.*": "fp8-static", "*.q_proj": "int8", "*": "int8-static"}
    float_model = transformers.Qwen3ForCausalLM.from_pretrained(source)
    # One that no batch reaches stays in float.
    with qgemm.calibrate(float_model, observer, skip="model.layers.1.mlp.down_proj") as calibration, torch.no_grad():
        float_model(torch.arange(7)[None])
    with pytest.warns(UserWarning, match=r"layers\.1\.mlp\.down_proj' saw no tokens"):
        model = quantize_whole(source, tmp_path / "whole", scheme=schemes, calibration=calibration)
    with pytest.warns(UserWarning, match=r"layers\.1\.mlp\.down_proj' saw no tokens"):
        report = quantize_checkpoint(source, tmp_path / "streamed", schemes, calibration=calibration)
    assert report == qgemm.report(model)
    assert_same_files(tmp_path / "whole", tmp_path / "streamed")
    calibration.save(tmp_path / "statistics.safetensors")
    by_pattern = [part for pattern, scheme in schemes.items() for part in ("--scheme", f"{pattern}={scheme}")]
    run("quantize", source, tmp_path / "command", *by_pattern, "--statistics", tmp_path / "statistics.safetensors")
    assert_same_files(tmp_path / "whole", tmp_path / "command")
    config = qgemm.QGemmConfig(schemes, calibration=calibration)  # type: ignore[arg-type]
    with pytest.warns(UserWarning, match=r"layers\.1\.mlp\.down_proj' saw no tokens"):
        loaded = transformers.Qwen3ForCausalLM.from_pretrained(source, quantization_config=config)
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name
    name = "model.layers.0.mlp.up_proj"
    assert model.get_submodule(name).input_scale == torch.tensor(calibration.statistics[name].scale(FP8))


@pytest.mark.parametrize("scheme", ["int8-static-hadamard", "int8-static-outliers-16"])
def test_a_calibration_of_what_is_not_the_input_is_refused(scheme: str, source: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a Calibration has no statistics of: pass batches as calibration to quanti"):
        quantize_checkpoint(source, tmp_path / "new", scheme, calibration=qgemm.Calibration(MinMax()))
    batches: Any = [{"input_ids": torch.arange(7)[None]}]
    with pytest.raises(TypeError, match=r"quantize_checkpoint runs no model: .* pass it to quantize_model"):
        quantize_checkpoint(source, tmp_path / "new", scheme, calibration=batches)


def test_a_scheme_that_changes_biases_is_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'int8-static-asymmetric' changes biases, which isn't possible from files to"):
        quantize_checkpoint(source, tmp_path / "new", "int8-static-asymmetric", calibration=qgemm.Calibration(MinMax()))


def test_weights_larger_than_what_is_read_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # 2^16 values are quantized at a time at least: the largest weights here take 5 and more pieces, an odd number of
    # rows each; what is copied is cut small.
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    monkeypatch.setattr("qgemm.streaming.shards._BYTES_AT_A_TIME", 1000)
    sizes = {"vocab_size": 97, "hidden_size": 264, "intermediate_size": 1001, "num_hidden_layers": 1}
    llama = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=4, head_dim=66))
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=97, n_positions=32, n_embd=264, n_layer=1, n_head=4, n_inner=1001))
    for name, model in (("llama", llama.to(torch.bfloat16)), ("gpt2", gpt2)):
        model.save_pretrained(tmp_path / name)
        quantize_whole(tmp_path / name, tmp_path / f"{name}-whole")
        quantize_checkpoint(tmp_path / name, tmp_path / f"{name}-streamed")
        assert_same_files(tmp_path / f"{name}-whole", tmp_path / f"{name}-streamed")


def test_what_it_writes_loads(source: Path, tmp_path: Path) -> None:
    model = quantize_whole(source, tmp_path / "whole")
    quantize_checkpoint(source, tmp_path / "streamed", max_shard_size="30KB")
    loaded = qgemm.load_quantized(tmp_path / "streamed")
    ids = torch.arange(7)[None]
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)


def test_the_tokenizer_goes_along_and_code_does_not(source: Path, tmp_path: Path) -> None:
    (source / "tokenizer.json").write_text("{}")
    (source / "modeling_qwen3.py").write_text("raise SystemExit")
    with pytest.warns(UserWarning, match=r"modeling_qwen3\.py in .* not copied"):
        quantize_checkpoint(source, tmp_path / "streamed")
    names = set(contents(tmp_path / "streamed"))
    written = {"config.json", "generation_config.json", "model.safetensors", "qgemm_report.json"}
    assert names == {*written, "tokenizer.json"}


def test_a_weight_with_nan_is_named(source: Path, tmp_path: Path) -> None:
    edit_tensors(source, model__layers__1__mlp__up_proj__weight=torch.full((96, 64), torch.nan).bfloat16())
    with pytest.raises(CheckpointError, match=r"weight of 'model\.layers\.1\.mlp\.up_proj' holds NaN or Inf.*skip"):
        quantize_checkpoint(source, tmp_path / "streamed")
    assert not (tmp_path / "streamed").exists()
    quantize_checkpoint(source, tmp_path / "streamed", skip="model.layers.1.mlp.up_proj", resume=False)


def test_a_layer_that_skip_does_not_match(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"skip: 'model\.layers\.7' matches no linear layer"):
        quantize_checkpoint(source, tmp_path / "streamed", skip="model.layers.7")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["float"]


def test_a_device_that_is_not_there(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for device in ("cuda:1", "cuda:99", "meta", "gpu"):
        with pytest.raises(ValueError, match=f'device is "{device}"; it must be "cpu", or "cuda"'):
            quantize_checkpoint(source, tmp_path / "streamed", device=device)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["float"]


def test_the_device_of_the_session(source: Path, tmp_path: Path, device: torch.device) -> None:
    # On a GPU the values are those of the CPU; sums in float64, of which the errors are made, may differ in a digit.
    whole = quantize_whole(source, tmp_path / "whole")
    report = quantize_checkpoint(source, tmp_path / "streamed", device=device)
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "streamed"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    errors = [[record.weight_error or 0 for record in r.records] for r in (report, qgemm.report(whole))]
    assert errors[0] == pytest.approx(errors[1], rel=1e-12)


def test_a_full_disk(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(convert.shutil, "disk_usage", lambda folder: usage)
    with pytest.raises(OSError, match=r"can't be written: [\d,]+ bytes must still be written.*only 1,000.*kept in"):
        quantize_checkpoint(source, tmp_path / "streamed")


def test_a_disk_that_fills_up(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, os.strerror(28))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        message = r"streamed can't be written: No space left on device\. .* kept in .*/streamed\.partial; run the same"
        with pytest.raises(OSError, match=message):
            quantize_checkpoint(source, tmp_path / "streamed")
    quantize_checkpoint(source, tmp_path / "streamed")


def test_a_disk_that_fails_once_all_is_published(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(folder: Path) -> None:
        if folder == tmp_path:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    quantize_whole(source, tmp_path / "whole")
    monkeypatch.setattr("qgemm.streaming.workspace.make_folder", lambda folder: folder.mkdir())
    monkeypatch.setattr("qgemm.streaming.workspace.sync_folder", fail)
    with pytest.raises(
        OSError, match=r"streamed is whole, but the system couldn't see its name safely to the disk: In"
    ):
        quantize_checkpoint(source, tmp_path / "streamed")
    assert_same_files(tmp_path / "whole", tmp_path / "streamed")
    assert not (tmp_path / "streamed.partial").exists()


def test_room_is_wanted_for_what_is_still_to_be_written(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qgemm.streaming.shards._BYTES_BETWEEN_NOTES", 1000)
    with monkeypatch.context() as patched:
        stop_after(10, patched)
        with pytest.raises(Stopped):
            quantize_checkpoint(source, tmp_path / "streamed")
    journal = json.loads((tmp_path / "streamed.partial" / "journal.json").read_text())
    (begun,) = journal["begun"].values()
    there = sum(size for size, _ in begun["written"].values())
    layout = json.loads(quantized_header(source, tmp_path / "whole"))
    total = max(entry["data_offsets"][1] for name, entry in layout.items() if name != "__metadata__")
    for free, fits in ((total - there - 1, False), (total - there, True)):
        usage = shutil.disk_usage(tmp_path)._replace(free=free)
        monkeypatch.setattr(convert.shutil, "disk_usage", lambda folder, usage=usage: usage)
        if fits:
            quantize_checkpoint(source, tmp_path / "streamed")
        else:
            with pytest.raises(OSError, match=rf"{total - there:,} bytes must still be written"):
                quantize_checkpoint(source, tmp_path / "streamed")


def quantized_header(source: Path, folder: Path) -> bytes:
    quantize_whole(source, folder)
    content = (folder / "model.safetensors").read_bytes()
    return content[8 : 8 + int.from_bytes(content[:8], "little")]


@pytest.mark.slow
def test_the_number_of_threads(tmp_path: Path, threads: Callable[[int], None]) -> None:
    # One thread works, whatever the number is before and afterwards, and it isn't seen in the files: 2^15 values and
    # more are summed by several threads.
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 97, "hidden_size": 512, "intermediate_size": 512, "num_hidden_layers": 1}
    LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4)).save_pretrained(tmp_path / "float")
    for count in (1, 2, 3):
        threads(count)
        quantize_whole(tmp_path / "float", tmp_path / f"whole-{count}")
    seen = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(
            convert, "write_shard", lambda *args: seen.append(torch.get_num_threads()) or write_shard(*args)
        )
        quantize_checkpoint(tmp_path / "float", tmp_path / "streamed")
    assert seen == [1]
    assert torch.get_num_threads() == 3
    for count in (1, 2, 3):
        assert_same_files(tmp_path / f"whole-{count}", tmp_path / "streamed")


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Sets the number of PyTorch's threads, until the test ends."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def test_threads_are_given_back_after_an_error(source: Path, tmp_path: Path, threads: Callable[[int], None]) -> None:
    threads(2)
    with pytest.raises(CheckpointError, match="is not a folder"):
        quantize_checkpoint(tmp_path / "nowhere", tmp_path / "streamed")
    assert torch.get_num_threads() == 2


def test_a_place_that_cannot_be_written(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(folder: Path) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match=r"destination is .*/file/streamed'.*file is a file: name a folder"):
        quantize_checkpoint(source, tmp_path / "file" / "streamed")
    monkeypatch.setattr("qgemm.streaming.workspace.make_folder", refuse)  # root, as which tests may run, may write
    with pytest.raises(PermissionError, match=r"streamed can't be written: Permission denied$"):
        quantize_checkpoint(source, tmp_path / "streamed")


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ({"drop": 3}, "drop holds 3; it takes names"),
        ({"drop": ["a", None]}, "drop holds None; it takes names"),
        ({"skip": 3}, "skip is 3; it takes names, globs"),
        ({"skip": [b"a"]}, "skip holds b'a'; it takes names, globs"),
        ({"workers": "2"}, "workers is '2', a str; it must be a number of processes, 1 or more"),
    ],
)
def test_arguments_of_a_wrong_type(source: Path, tmp_path: Path, argument: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        quantize_checkpoint(source, tmp_path / "streamed", **argument)


def test_progress_counts_the_bytes_that_are_read(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quantize_checkpoint(source, tmp_path / "shown", progress=True)
    stored = json.loads((source / "model.safetensors").read_bytes().split(b"}}")[0][8:] + b"}}")
    total = max(values["data_offsets"][1] for name, values in stored.items() if name != "__metadata__")
    shown = capsys.readouterr().err
    # The rotary frequencies, which no file holds, are written as well.
    assert re.search(rf"quantize: 100%.* {(total + 64) / 1000:.0f}k/{(total + 64) / 1000:.0f}k .*B/s", shown)
    quantize_checkpoint(source, tmp_path / "hidden", progress=False)
    assert capsys.readouterr().err == ""


def test_the_largest_files_are_made_first(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def record(file: Any, shard: ShardPlan, *others: Any) -> Any:
        sizes.append(shard.bytes_to_read)
        return write_shard(file, shard, *others)

    monkeypatch.setattr(convert, "write_shard", record)
    quantize_checkpoint(source, tmp_path / "int8", max_shard_size="20KB")
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > sizes[-1]


def test_a_file_that_does_not_reach_the_disk_ends_the_run(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(file: Any) -> None:
        raise OSError(errno.EIO, "the disk is broken")

    monkeypatch.setattr("qgemm.streaming.workspace.sync_file", fail)
    with pytest.raises(OSError, match="can't be written: the disk is broken"):
        quantize_checkpoint(source, tmp_path / "int8", max_shard_size="20KB")
    assert not (tmp_path / "int8").exists()
