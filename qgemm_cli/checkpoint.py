"""Opens a checkpoint of any format by its headers: its format, its contents, and its problems.

No values are read, and no model is built except for GGUF files, whose names aren't the model's. Files may come from
untrusted sources: names are only followed to files in the folder, and a damaged file is reported as a problem, so that
the rest is still shown.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from qgemm.checkpoint import fp8, modelopt, quark
from qgemm.checkpoint.contents import Contents
from qgemm.checkpoint.errors import CheckpointError
from qgemm.checkpoint.formats import method_of, read_contents, settings
from qgemm.checkpoint.gguf import FORMAT as GGUF
from qgemm.checkpoint.gguf import GgufModel, find_gguf, read_gguf
from qgemm.checkpoint.layout import (
    CONFIG_FILE,
    GENERATION_CONFIG_FILE,
    INDEX_FILE,
    WEIGHTS_FILE,
    WEIGHTS_KEY,
    adapter_note,
    check_no_adapter,
    checkpoint_file,
    checkpoint_files,
    hub_hint,
    read_json,
    retry_while_saved,
    weights_file,
)
from qgemm.checkpoint.load import Matching, find_matching, match_gguf
from qgemm.checkpoint.pretrained import model_config
from qgemm.checkpoint.quark_config import dtypes_in
from qgemm.checkpoint.recognition import recognize
from qgemm.checkpoint.safetensors_file import StoredTensor, read_header, read_headers
from qgemm.checkpoint.tensors import dtype_name
from qgemm.streaming.source import Source, open_source

FLOAT = "float"
UNKNOWN = "unknown"
_MOST_TYPES = 3  # that describe a GGUF file


@dataclass
class Checkpoint:
    """A checkpoint, as far as it can be read.

    - ``folder``: None for a single file. The ``config`` of a safetensors file is empty.
    - ``format``: ``"qgemm"``, ``"compressed-tensors"``, ``"bitsandbytes"``, ``"gptq"``, ``"awq"``, ``"fp8"``,
      ``"torchao"``, ``"gguf"``, ``"float"``, ``"unknown"``, or another ``quant_method`` that the config names.
    - ``variant``: a more detailed description, such as ``"int-quantized"`` or ``"4 bits"``; ``bits``: of packed
      weights.
    - ``contents``: as ``load_quantized`` reads it, or None with the ``refusal`` that it would raise.
    - ``gguf``: the model as it is in GGUF files, by their names; None for other formats. ``contents`` are then those
      that fit the model on meta, ``matching``.
    - ``problems``: what is wrong with the files.
    """

    path: Path
    folder: Path | None
    stored: dict[str, StoredTensor]
    config: dict[str, Any] = field(default_factory=dict)
    format: str = UNKNOWN
    variant: str = ""
    bits: int | None = None
    contents: Contents | None = None
    gguf: GgufModel | None = None
    matching: Matching | None = None
    refusal: str = ""
    problems: list[str] = field(default_factory=list)

    @property
    def files(self) -> list[Path]:
        """The files with tensors."""
        first = () if self.gguf is None else (self.gguf.path,)
        return sorted({*first, *(tensor.path for tensor in self.stored.values())})

    @property
    def place(self) -> Path | None:
        """What ``load_quantized`` gets; None for a single safetensors file."""
        return self.folder if self.gguf is None else self.gguf.path

    @property
    def is_foreign(self) -> bool:
        """Whether it is another library's, and can be read."""
        return self.contents is not None and self.contents.is_foreign and self.place is not None

    def match(self) -> Matching:
        """Matches it to its model, as ``load_quantized`` does; raises as that does."""
        if self.matching is None:
            assert self.folder is not None
            self.matching = find_matching(self.folder)
        return self.matching

    def storage_of(self, name: str) -> str:
        """How the values of a tensor in the files are stored: a dtype, or a type of GGUF's blocks."""
        if self.gguf is not None and self.gguf.types[name].is_quantized:
            return self.gguf.types[name].name
        return name_of_dtype(self.stored[name].dtype)

    @contextmanager
    def open_source(self) -> Iterator[Source]:
        """Opens the files to read values; raises ``CheckpointError`` for a single safetensors file."""
        if self.gguf is not None:
            with closing(Source(self.gguf.path.parent, self.stored, {})) as source:
                yield source
        elif self.folder is None:
            raise CheckpointError(f"{self.path} is a single file: give its folder")
        else:
            with open_source(self.folder) as source:
                yield source


def name_of_dtype(dtype: torch.dtype | None) -> str:
    """``"bfloat16"`` for ``torch.bfloat16``; ``"unknown"`` for a dtype that PyTorch doesn't have."""
    return "unknown" if dtype is None else dtype_name(dtype)


def open_checkpoint(path: Path) -> Checkpoint:
    """Opens the checkpoint at ``path``: a folder, its index, a GGUF file, or a single safetensors file.

    Raises ``CheckpointError`` if there is none, or if nothing of it can be read.
    """
    if path.name == INDEX_FILE and not path.is_dir():
        path = path.parent
    return retry_while_saved(path, lambda: _open(path))


def _open(path: Path) -> Checkpoint:
    if not os.path.isdir(path) and not os.path.isfile(path):
        raise CheckpointError(f"{path} is neither a folder nor a file{hub_hint(path)}")
    if (gguf := find_gguf(path)) is not None:
        return _open_gguf(path, gguf)
    if os.path.isdir(path):
        checkpoint = _open_folder(path)
    elif path.suffix != ".safetensors":
        raise CheckpointError(
            f"{path} is not a safetensors file; qgemm opens a folder, {INDEX_FILE}, FILE.safetensors or FILE.gguf"
        )
    else:
        checkpoint = Checkpoint(path, None, read_header(path))
        checkpoint.refusal = "it is a single file, without the config of its folder"
    _identify(checkpoint)
    if checkpoint.folder is not None and not checkpoint.problems:
        _read_as_qgemm_does(checkpoint, checkpoint.folder)
    return checkpoint


def _open_gguf(path: Path, file: Path) -> Checkpoint:
    source = read_gguf(file)
    folder = path if path.is_dir() else None
    checkpoint = Checkpoint(path, folder, source.stored, {}, GGUF, _types_of(source), gguf=source)
    checkpoint.config["architectures"] = [source.settings.get("general.architecture")]
    try:
        found = checkpoint.matching = match_gguf(source)
        checkpoint.contents = found.contents
        checkpoint.config = model_config(found.model)
    except (CheckpointError, ImportError) as error:
        checkpoint.refusal = str(error)
    return checkpoint


def _types_of(source: GgufModel) -> str:
    """The types that hold most bytes; those of blocks, if there are any."""
    sizes: Counter[str] = Counter()
    has_blocks = any(kind.is_quantized for kind in source.types.values())
    for name, kind in source.types.items():
        if kind.is_quantized == has_blocks:
            sizes[kind.name] += source.stored[name].nbytes
    return ", ".join(name for name, _ in sizes.most_common(_MOST_TYPES))


def _open_folder(folder: Path) -> Checkpoint:
    checkpoint = Checkpoint(folder, folder, {})
    if (folder / CONFIG_FILE).exists():
        try:
            checkpoint.config = read_json(checkpoint_file(folder, CONFIG_FILE))
        except CheckpointError as error:
            checkpoint.problems.append(str(error))
    if os.path.lexists(folder / GENERATION_CONFIG_FILE):
        try:
            read_json(checkpoint_file(folder, GENERATION_CONFIG_FILE))
        except CheckpointError as error:
            checkpoint.problems.append(str(error))
    try:
        checkpoint.stored = read_headers(folder, checkpoint.config)
    except CheckpointError as error:
        checkpoint.stored, damages = _salvage(folder)
        if not checkpoint.stored:
            raise
        if WEIGHTS_KEY in checkpoint.config or (folder / INDEX_FILE).exists() or (folder / WEIGHTS_FILE).exists():
            checkpoint.problems += [str(error), *(damage for damage in damages if damage != str(error))]
    return checkpoint


def _salvage(folder: Path) -> tuple[dict[str, StoredTensor], list[str]]:
    """The tensors of all files that can be read, and the problems of the others."""
    stored: dict[str, StoredTensor] = {}
    problems = []
    names = [name for name in checkpoint_files(folder) if name.endswith(".safetensors")]
    if not names:  # there may be a file with another name
        others = sorted(path.name for path in folder.glob("*.safetensors"))
        names = others if len(others) == 1 else []
    for name in names:
        try:
            for tensor_name, tensor in read_header(checkpoint_file(folder, name)).items():
                stored.setdefault(tensor_name, tensor)
        except CheckpointError as error:
            problems.append(str(error))
    return stored, problems


def _identify(checkpoint: Checkpoint) -> None:
    quantization = None
    if checkpoint.folder is not None:
        try:
            quantization = settings(checkpoint.folder, checkpoint.config)
        except CheckpointError as error:
            checkpoint.problems.append(str(error))
    if not isinstance(quantization, dict):
        checkpoint.format, checkpoint.variant = _format_of_tensors(checkpoint.stored)
        return
    method, other = method_of(quantization, recognize(checkpoint.stored))
    if other is not None:
        checkpoint.format, checkpoint.variant = other.format, other.variant
        return
    checkpoint.format = method if isinstance(method, str) and method else UNKNOWN
    checkpoint.bits = _bits(quantization)
    checkpoint.variant = _variant(method, quantization, checkpoint.bits)


def _variant(method: object, quantization: dict[str, Any], bits: int | None) -> str:
    if method == "compressed-tensors":
        return str(quantization.get("format") or "")
    if method == modelopt.QUANT_METHOD:
        return str(quantization.get("quant_algo") or "")
    if method == quark.QUANT_METHOD:
        return dtypes_in(quantization)
    if method == fp8.QUANT_METHOD:
        return "blocks" if quantization.get("weight_block_size") else ""
    if method == "bitsandbytes":
        four_bits = str(quantization.get("bnb_4bit_quant_type") or "4 bits")
        return "int8" if quantization.get("load_in_8bit") is True else four_bits
    if bits is None:
        return ""
    group = quantization.get("group_size", quantization.get("q_group_size"))
    groups = f", groups of {group}" if isinstance(group, int) and group > 0 else ""
    return f"{bits} bits{groups}"


def _bits(quantization: dict[str, Any]) -> int | None:
    """The bits of packed weights according to the config; None if it doesn't say, or the value is impossible."""
    groups = quantization.get("config_groups")
    found = [quantization.get("bits"), quantization.get("w_bit")]
    for group in groups.values() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        found.append(weights.get("num_bits") if isinstance(weights, dict) else None)
    return next((bits for bits in found if type(bits) is int and 1 <= bits <= 16), None)


def _format_of_tensors(stored: dict[str, StoredTensor]) -> tuple[str, str]:
    if (found := recognize(stored)) is not None:
        return found.format, found.variant
    dtypes = {tensor.dtype for tensor in stored.values()}
    is_float = all(dtype is not None and (dtype.is_floating_point or dtype.itemsize > 1) for dtype in dtypes)
    return (FLOAT, "") if is_float else (UNKNOWN, "")


def _read_as_qgemm_does(checkpoint: Checkpoint, folder: Path) -> None:
    try:
        if checkpoint.format == FLOAT:
            weights_file(folder, checkpoint.config)
            check_no_adapter(folder)
            checkpoint.refusal = "it is not quantized: qgemm quantize makes a checkpoint that is"
            return
        config_path = checkpoint_file(folder, CONFIG_FILE)
        contents = read_contents(folder, checkpoint.config, config_path)
        if contents.grouped:  # only the model tells the shapes of layers
            contents = checkpoint.match().contents
        contents.notes += adapter_note(folder)
        checkpoint.contents = contents
    except (CheckpointError, ImportError) as error:
        checkpoint.refusal = str(error)
        if checkpoint.format == "qgemm":
            checkpoint.problems.append(str(error))
        return
    if checkpoint.contents.lacks is not None:
        checkpoint.problems.append(f"{folder} has no {checkpoint.contents.lacks}; it loads without")
