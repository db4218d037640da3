"""What is written, what is refused, and what an interrupted save leaves behind."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from checkpoint.models import Net, quantized_net, swap_linears, tiny_llama
from checkpoint.rewriting import contents, save_of
from qgemm import QuantLinear
from qgemm.checkpoint import load_quantized, save, save_quantized
from qgemm.checkpoint.layout import parse_size, split_into_shards
from qgemm.checkpoint.name_ranges import expand
from qgemm.checkpoint.safetensors_file import DTYPE_CODES
from qgemm.checkpoint.safetensors_writer import write_safetensors
from qgemm.checkpoint.tensors import find_ties

UP = "model.layers.0.mlp.up_proj"
INDEX = "model.safetensors.index.json"


def files_of(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_files_and_config(tmp_path: Path) -> None:
    model = swap_linears(tiny_llama())
    model.config.name_or_path = "/home/someone/llama"  # where the float model was is nobody's business
    save_quantized(model, tmp_path / "new" / "folder")
    folder = tmp_path / "new" / "folder"
    assert files_of(folder) == {"config.json", "generation_config.json", "model.safetensors"}
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["model_type"] == "llama"
    assert "someone" not in json.dumps(config)
    assert config["dtype"] == "float32"
    quantization = config["quantization_config"]
    assert quantization["quant_method"] == "qgemm"
    assert quantization["format_version"] == 2
    assert set(quantization["schemes"]) == {"int8"}
    assert len(quantization["layers"]["int8"]) == 7
    assert "model.layers.[0-1].mlp.up_proj" in quantization["layers"]["int8"]
    assert len(expand(quantization["layers"]["int8"])) == 14
    assert quantization["tied"] == {"lm_head.weight": "model.embed_tokens.weight"}
    tensors = load_file(folder / "model.safetensors")
    assert tensors[f"{UP}.weight"].dtype == torch.int8
    assert tensors[f"{UP}.weight_scale"].dtype == torch.float32
    # Readable by whom the user's settings allow, like any other new file.
    (folder / "other").touch()
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {
        (folder / "other").stat().st_mode & 0o777
    }


def test_saving_changes_nothing_in_the_model(tmp_path: Path) -> None:
    model = swap_linears(tiny_llama())
    config, state = model.config.to_dict(), {name: tensor.clone() for name, tensor in model.state_dict().items()}
    save_quantized(model, tmp_path)
    assert model.config.to_dict() == config
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


def test_same_model_gives_the_same_bytes(tmp_path: Path) -> None:
    model = swap_linears(tiny_llama())
    save_quantized(model, tmp_path / "a", max_shard_size="10KB")
    save_quantized(model, tmp_path / "b", max_shard_size="10KB")
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert save_of(tmp_path / "a") != save_of(tmp_path / "b")


@pytest.mark.parametrize("dtype", DTYPE_CODES)
def test_the_library_reads_every_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    base = torch.arange(24).reshape(4, 6).to(dtype)
    tensors = {"odd": torch.arange(3, dtype=torch.int8)}  # what comes after it would be misaligned if order were kept
    tensors |= {"plain": base, "strided": base.t(), "part": base[1:, ::2], "none": base[:0], "one": base[1, 1]}
    counted = []
    with (tmp_path / "x.safetensors").open("wb") as file:
        write_safetensors(file, tensors, counted.append)
    read = load_file(tmp_path / "x.safetensors")
    assert set(read) == set(tensors)
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name].view(torch.uint8), tensor.contiguous().view(torch.uint8)) if tensor.ndim else True
        assert read[name].shape == tensor.shape
    assert read["one"].float() == tensors["one"].float()
    content = (tmp_path / "x.safetensors").read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    for name, tensor in tensors.items():
        assert header[name]["data_offsets"][0] % tensor.itemsize == 0, name
    assert sum(counted) == sum(tensor.nbytes for tensor in tensors.values())


@pytest.mark.parametrize(
    ("size", "parsed"),
    [(7, 7), ("7B", 7), ("5GB", 5 * 10**9), ("1.5 MB", 1_500_000), ("2GiB", 2 * 2**30), ("3kb", 3000), ("1TB", 10**12)]
    + [("9" * 400 + "B", int("9" * 400))],  # no float is as large
)
def test_sizes(size: int | str, parsed: int) -> None:
    assert parse_size(size) == parsed


@pytest.mark.parametrize("size", [0, -1, "5", "GB", "five GB", "-1GB", "0GB", 1.5, None])
def test_sizes_that_are_none(size: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="max_shard_size is"):
        save_quantized(quantized_net(), tmp_path, max_shard_size=size)
    assert not files_of(tmp_path)


def test_split_into_shards() -> None:
    names = {"a": 4, "b": 6, "c": 11, "d": 0, "e": 10, "f": 1}  # 4 + 6 fits exactly; c is too large for any
    shards = split_into_shards(names, 10)
    assert list(shards.values()) == [["a", "b"], ["c"], ["d", "e"], ["f"]]
    assert next(iter(shards)) == "model-00001-of-00004.safetensors"
    assert split_into_shards(names, 100) == {"model.safetensors": list(names)}


def test_tensors_without_memory_are_not_tied() -> None:
    # They all have the address 0. On meta only the same tensor is the same.
    meta = torch.ones(2, 2, device="meta")
    tensors = {"a": torch.empty(0, 3), "b": torch.empty(0, 3), "c": meta, "d": meta.clone(), "e": meta}
    assert find_ties(nn.Module(), tensors) == {"e": "c"}


def test_model_without_quantized_layers(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no quantized layer: quantize it with qgemm\.quantize_model"):
        save_quantized(tiny_llama(), tmp_path)
    with pytest.raises(ValueError, match=r"single quantized layer"):
        save_quantized(QuantLinear(2, 2), tmp_path)
    assert not files_of(tmp_path)


class Remembers(nn.Module):
    def get_extra_state(self) -> dict[str, int]:
        return {"calls": 3}


def without_input_scale() -> QuantLinear:
    layer = QuantLinear(24, 16, scheme="int8-static")
    layer.weight_scale.fill_(1)
    return layer


def refuse(change: Callable[[Any], Any], message: str) -> Any:
    return pytest.param(change, message, id=message)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        refuse(lambda model: model.head.to("meta"), r"head\.weight is on meta"),
        refuse(lambda model: model.add_module("log", Remembers()), r"log keeps extra state"),
        refuse(
            lambda model: model.register_buffer("z", torch.ones(2, dtype=torch.complex64)), r"z is a Tensor of torch\.c"
        ),
        refuse(lambda model: model.register_buffer("s", torch.eye(2).to_sparse()), r"s is a Tensor .*sparse_coo"),
        refuse(lambda model: model.double(), r"again\.bias is torch\.float64|block\.0\.bias is torch\.float64"),
        refuse(
            lambda model: model.block[0].weight_scale.fill_(float("nan")), r"again|block\.0\.weight_scale holds NaN"
        ),
        refuse(lambda model: model.block[3].weight_scale.data.__setitem__(1, -1), r"block\.3\.weight_scale holds NaN"),
        refuse(
            lambda model: model.block.__setitem__(3, QuantLinear(24, 16)),
            r"block\.3\.weight_scale holds NaN.*never set",
        ),
        refuse(lambda model: model.block.__setitem__(3, without_input_scale()), r"block\.3\.input_scale"),
    ],
)
def test_model_that_cannot_be_stored(change: Callable[[Any], Any], message: str, tmp_path: Path) -> None:
    model = quantized_net()
    change(model)
    with pytest.raises(ValueError, match=message):
        save_quantized(model, tmp_path)
    assert not files_of(tmp_path)


@pytest.mark.parametrize("name", ["__metadata__", "\ud800"])
def test_a_name_that_no_file_can_hold(name: str, tmp_path: Path) -> None:
    model = quantized_net()
    model.register_parameter(name, nn.Parameter(torch.ones(2)))
    with pytest.raises(ValueError, match="which a safetensors file can't hold: rename it"):
        save_quantized(model, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_model_that_its_config_does_not_build(tmp_path: Path) -> None:
    model = swap_linears(tiny_llama())
    model.adapter = nn.Linear(2, 2)
    with pytest.warns(
        UserWarning, match=r"LlamaForCausalLM was saved, but .*doesn't have: adapter\.weight, adapter\.bias"
    ):
        save_quantized(model, tmp_path)
    given = tiny_llama()
    given.adapter = nn.Linear(2, 2)
    assert torch.equal(load_quantized(tmp_path, model=given).adapter.weight, model.adapter.weight)


@pytest.mark.parametrize("held", ["config.json", "model.safetensors", "model-00001-of-00002.safetensors"])
def test_an_existing_checkpoint_is_kept(held: str, tmp_path: Path) -> None:
    # Such as the float model that was quantized, which may be the only copy.
    (tmp_path / held).write_text("precious")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(FileExistsError, match=f"already holds {held}; pass overwrite=True"):
        save_quantized(quantized_net(), tmp_path)
    assert files_of(tmp_path) == {held, "tokenizer.json"}
    assert (tmp_path / held).read_text() == "precious"


def test_overwrite_leaves_no_file_of_the_old_checkpoint(llama_folder: Path) -> None:
    (llama_folder / "tokenizer.json").write_text("{}")
    (llama_folder / "model-card.safetensors").write_text("not of a checkpoint")
    model = quantized_net()
    save_quantized(model, llama_folder, overwrite=True)
    own = {name.replace("model", f"model-{save_of(llama_folder)}") for name in ("model.safetensors", INDEX)}
    others = {"tokenizer.json", "model-card.safetensors"}
    assert files_of(llama_folder) == {"config.json", *own, *others}
    # The plain names are free again.
    save_quantized(model, llama_folder, overwrite=True)
    assert files_of(llama_folder) == {"config.json", "model.safetensors", *others}


def test_overwrite_of_a_link_leaves_its_target(llama_folder: Path, tmp_path: Path) -> None:
    target = (llama_folder / "config.json").rename(tmp_path / "shared.json")
    (llama_folder / "config.json").symlink_to(target)
    before = target.read_bytes()
    save_quantized(quantized_net(), llama_folder, overwrite=True)
    assert target.read_bytes() == before
    assert not (llama_folder / "config.json").is_symlink()


def fail_at(step: int, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Makes the ``step``-th thing that a save does to the disk fail; returns how many it has done."""
    done = 0

    def watch(place: Any, name: str) -> None:
        original = getattr(place, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            nonlocal done
            # Removing a temporary name is the tidying up after the failure; opening counts for new files only.
            if not (name == "unlink" and re.search(r"\.tmp-|\.lock$", args[0].name)) and (
                name != "open" or "xb" in args
            ):
                done += 1
                if done == step:
                    raise OSError(28, "No space left on device")
            return original(*args, **kwargs)

        monkeypatch.setattr(place, name, watched)

    for place, name in ((os, "fsync"), (os, "replace"), (Path, "unlink"), (Path, "open")):
        watch(place, name)
    original_write = save.write_safetensors

    def short_write(file: Any, *args: Any) -> None:
        # A full disk in the middle of a file.
        nonlocal done
        done += 1
        if done == step:
            file.write(b"some bytes")
            raise OSError(28, "No space left on device")
        original_write(file, *args)

    monkeypatch.setattr(save, "write_safetensors", short_write)
    return lambda: done


def steps_of_a_save(tmp_path: Path, old: Path) -> int:
    with pytest.MonkeyPatch.context() as monkeypatch:
        steps = fail_at(0, monkeypatch)
        folder = Path(shutil.copytree(old, tmp_path / "count"))
        save_quantized(other_llama(), folder, max_shard_size="10KB", overwrite=True)
    return steps()


def other_llama() -> nn.Module:
    # The same names and shapes as the old checkpoint's, so that only the values tell a mixture.
    torch.manual_seed(1)
    return swap_linears(tiny_llama())


@pytest.mark.parametrize("exists", [False, True])
def test_a_folder_that_stays_empty_is_removed_if_it_is_new(
    exists: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if exists:
        (tmp_path / "new").mkdir()
    model = other_llama()
    fail_at(1, monkeypatch)
    monkeypatch.setattr("qgemm.checkpoint.disk.sync_folder", lambda folder: None)
    with pytest.raises(OSError, match="No space left"):
        save_quantized(model, tmp_path / "new")
    assert [path.name for path in tmp_path.rglob("*")] == ["new"] * exists


@pytest.mark.slow
def test_a_failure_at_any_step_leaves_one_whole_checkpoint(llama_folder: Path, tmp_path: Path) -> None:
    old, new = load_quantized(llama_folder).state_dict(), other_llama()
    files, steps = contents(llama_folder), steps_of_a_save(tmp_path, llama_folder)
    outcomes = []
    for step in range(1, steps + 1):
        folder = Path(shutil.copytree(llama_folder, tmp_path / str(step)))
        with pytest.MonkeyPatch.context() as monkeypatch:
            fail_at(step, monkeypatch)
            with pytest.raises(OSError, match="No space left"):
                save_quantized(new, folder, max_shard_size="10KB", overwrite=True)
        assert not [name for name in files_of(folder) if ".tmp-" in name]
        state = load_quantized(folder).state_dict()
        matches = [all(torch.equal(state[n], t) for n, t in whole.items()) for whole in (old, new.state_dict())]
        assert any(matches), f"step {step} of {steps} leaves a mixture"
        outcomes.append(("old", "new")[matches.index(True)])
        if outcomes[-1] == "old":
            assert contents(folder) == files
        else:  # what is left of the old one goes with the next save
            save_quantized(new, folder, max_shard_size="10KB", overwrite=True)
            named = {"config.json", "generation_config.json", INDEX, *json_of(folder / INDEX)["weight_map"].values()}
            assert {re.sub(f"-{save_of(folder)}", "", name) for name in files_of(folder)} == named
    # First the old one, untouched; then the new one, of which only the tidying up failed.
    assert outcomes == sorted(outcomes, key=("old", "new").index)
    assert set(outcomes) == {"old", "new"}


def test_a_first_save_that_fails_leaves_nothing_or_all(tmp_path: Path) -> None:
    new = other_llama()
    with pytest.MonkeyPatch.context() as monkeypatch:
        count = fail_at(0, monkeypatch)
        save_quantized(new, tmp_path / "count")
    outcomes = []
    for step in range(1, count() + 1):
        folder = tmp_path / str(step)
        with pytest.MonkeyPatch.context() as monkeypatch:
            fail_at(step, monkeypatch)
            with pytest.raises(OSError, match="No space left"):
                save_quantized(new, folder)
        outcomes.append(bool(files_of(folder)) if folder.exists() else False)
        if outcomes[-1]:
            assert load_quantized(folder)
    assert outcomes == sorted(outcomes)
    assert set(outcomes) == {False, True}


@pytest.mark.parametrize("in_the_way", ["model.safetensors", "model-00001-of-00002.safetensors", INDEX])
def test_a_folder_in_the_way_stays(in_the_way: str, tmp_path: Path) -> None:
    (tmp_path / in_the_way / "inside").mkdir(parents=True)
    save_quantized(quantized_net(), tmp_path, max_shard_size=1500, overwrite=True)
    assert load_quantized(tmp_path, model=Net)
    assert (tmp_path / in_the_way / "inside").is_dir()


def test_a_folder_in_the_way_of_the_config(llama_folder: Path) -> None:
    for path in llama_folder.iterdir():
        path.unlink()
    (llama_folder / "config.json" / "inside").mkdir(parents=True)
    with pytest.raises(OSError, match=r"config\.json"):
        save_quantized(quantized_net(), llama_folder, overwrite=True)
    assert files_of(llama_folder) == {"config.json"}


def test_a_checkpoint_of_another_kind_keeps_its_config_to_itself(tmp_path: Path) -> None:
    # Such as a pickle of the float weights: until the end, what is beside it may not look like its weights.
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"precious")
    save_quantized(quantized_net(), tmp_path, overwrite=True)
    assert not (tmp_path / "model.safetensors").exists()
    assert load_quantized(tmp_path, model=Net)


def json_of(path: Path) -> Any:
    """The JSON in a file, or in that of the save that has its id in the names."""
    found = [path, *path.parent.glob(path.name.replace("model", "model-????????????????"))]
    return json.loads(next(each for each in found if each.exists()).read_text().replace(f"-{save_of(path.parent)}", ""))


def test_an_interrupt_also_tidies_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(save, "write_safetensors", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save_quantized(quantized_net(), tmp_path)
    assert not files_of(tmp_path)
