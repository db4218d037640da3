"""Everything in qgemm that writes files, each with an old state, what replaces it, and how to tell the two apart."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from families import FAMILIES
from torch import Tensor

from checkpoint.models import Net, quantized_net, swap_linears, tiny_llama
from qgemm import quantize_model
from qgemm.calibration import GPTQ, Calibration, MinMax, Recipe, SmoothQuant
from qgemm.checkpoint import load_quantized, save_quantized
from qgemm.streaming import quantize_checkpoint
from qgemm.streaming.companions import CHAT_TEMPLATES
from qgemm_cli.commands.convert import convert


@dataclass(frozen=True)
class Writer:
    """``prepare`` fills a folder with the old state, ``write`` replaces it, ``outcome`` tells what is there.

    ``outcome``: "new", or ``before``, which is "nothing" where there was nothing; or an error of any kind.
    """

    name: str
    prepare: Callable[[Path], object]
    write: Callable[[Path], object]
    outcome: Callable[[Path], str]
    before: str = "old"

    def folder(self, work: Path) -> Path:
        """The folder ``work``, made anew in the old state."""
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir()
        self.prepare(work)
        return work


def _calibration(value: float) -> Calibration:
    return Calibration(MinMax(), {name: MinMax().update(torch.full((2, 8), value)) for name in ("a", "b")})


def _calibration_of(folder: Path) -> str:
    found = Calibration.load(folder / "x.safetensors").statistics["a"].amax
    return {1.0: "old", 2.0: "new"}[found]


def _recipe_of(folder: Path) -> str:
    return {"smoothquant": "old", "gptq": "new"}[Recipe.load(folder / "x.yaml").methods[0].name]


@cache
def net(seed: int) -> Net:
    """The same names and shapes for every seed, so that only values tell a mixture."""
    torch.manual_seed(seed)
    return quantized_net()


def _net_of(folder: Path) -> str:
    state = load_quantized(folder, model=Net).state_dict()
    found = [all(torch.equal(state[key], value) for key, value in net(seed).state_dict().items()) for seed in (0, 1)]
    assert any(found), "a mixture"
    return ("old", "new")[found.index(True)]


def _save_net(folder: Path, seed: int) -> None:
    save_quantized(net(seed), folder, max_shard_size=1500, overwrite=True)


@cache
def _temporary_folder(name: str) -> Path:
    folder = Path(tempfile.mkdtemp(prefix=f"qgemm-{name}-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@cache
def _llama_to_stream() -> Path:
    """A float checkpoint, with what should become of it in the folder ``whole`` beside it."""
    torch.manual_seed(1)
    folder = _temporary_folder("stream")
    tiny_llama().save_pretrained(folder / "float")
    (folder / "float" / CHAT_TEMPLATES).mkdir()
    (folder / "float" / CHAT_TEMPLATES / "x.jinja").write_text("{}")
    quantize_checkpoint(folder / "float", folder / "whole", progress=False)
    return folder / "float"


def _stream(folder: Path) -> None:
    quantize_checkpoint(_llama_to_stream(), folder / "out", max_shard_size="12KB", progress=False)


def _streamed(folder: Path) -> str:
    if not (folder / "out").exists():
        return "nothing"
    whole = load_quantized(_llama_to_stream().parent / "whole").state_dict()
    state = load_quantized(folder / "out").state_dict()
    assert (folder / "out" / CHAT_TEMPLATES / "x.jinja").read_text() == "{}"
    assert state.keys() == whole.keys()
    assert all(torch.equal(state[name], value) for name, value in whole.items())
    return "new"


def _streamed_in_the_end(folder: Path) -> str:
    """As ``_streamed``; and where there is nothing, the next run makes all of it."""
    found = _streamed(folder)
    if found == "nothing":
        _stream(folder)
        assert _streamed(folder) == "new"
    return found


def _quantize_blocks(folder: Path) -> dict[str, Tensor]:
    example = FAMILIES["llama"]()
    recipe, data = [SmoothQuant()], [example.inputs]
    model = quantize_model(
        example.model, "int8-static", recipe=recipe, calibration=data, resume_folder=folder / "run", progress=False
    )
    return model.state_dict()


@cache
def _blocks_at_once() -> dict[str, Tensor]:
    return _quantize_blocks(_temporary_folder("resume"))


def _resumed(folder: Path) -> str:
    """The next run makes all of it."""
    state, whole = _quantize_blocks(folder), _blocks_at_once()
    assert all(torch.equal(state[name], value) for name, value in whole.items())
    return "new"


@cache
def _llama_to_convert() -> Path:
    """A checkpoint with a tokenizer's file beside it."""
    torch.manual_seed(1)
    folder = _temporary_folder("convert")
    save_quantized(swap_linears(tiny_llama()), folder)
    (folder / "tokenizer.json").write_text("new")
    return folder


def _convert(folder: Path) -> None:
    convert(_llama_to_convert(), folder / "out", "compressed-tensors", "5GB", overwrite=True)


def _save_old_llama(folder: Path) -> None:
    torch.manual_seed(0)
    save_quantized(swap_linears(tiny_llama()), folder / "out", max_shard_size="20KB")
    (folder / "out" / "tokenizer.json").write_text("old")


def _converted(folder: Path) -> str:
    folder = folder / "out"
    if not (folder / "config.json").exists():
        return "nothing"
    value = float(load_quantized(folder).lm_head.weight.detach()[3, 5])
    tokenizer = (folder / "tokenizer.json").read_text()
    assert tokenizer in ("old", "new")
    is_new = value == float(load_quantized(_llama_to_convert()).lm_head.weight.detach()[3, 5])
    # Where there was nothing, the tokenizer comes first.
    assert is_new or tokenizer == "old"
    return "new" if is_new else "old"


CALIBRATION = Writer(
    "calibration",
    lambda folder: _calibration(1.0).save(folder / "x.safetensors"),
    lambda folder: _calibration(2.0).save(folder / "x.safetensors", overwrite=True),
    _calibration_of,
)
RECIPE = Writer(
    "recipe",
    lambda folder: Recipe([SmoothQuant()]).save(folder / "x.yaml"),
    lambda folder: Recipe([GPTQ()]).save(folder / "x.yaml"),
    _recipe_of,
)
SAVE = Writer("save", lambda folder: _save_net(folder, 0), lambda folder: _save_net(folder, 1), _net_of)
CONVERT = Writer("convert", _save_old_llama, _convert, _converted)
CONVERT_ANEW = Writer("convert anew", lambda folder: None, _convert, _converted, "nothing")
STREAM = Writer("stream", lambda folder: None, _stream, _streamed, "nothing")
STREAM_AND_RESUME = Writer("stream and resume", lambda folder: None, _stream, _streamed_in_the_end, "nothing")
RESUME = Writer("resume", lambda folder: None, _quantize_blocks, _resumed, "new")
ALL = (SAVE, CALIBRATION, RECIPE, CONVERT, CONVERT_ANEW, STREAM, STREAM_AND_RESUME, RESUME)
WRITERS = {writer.name: writer for writer in ALL}
