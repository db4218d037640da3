"""Opens a checkpoint of any format by its headers: its format, its contents, and its problems.

No model is built and no values are read. Files may come from untrusted sources: names are only followed to files in the
folder, and a damaged file is reported as a problem, so that the rest is still shown.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qgemm.checkpoint import fp8, modelopt
from qgemm.checkpoint.contents import Contents
from qgemm.checkpoint.errors import CheckpointError
from qgemm.checkpoint.formats import method_of, read_contents, settings
from qgemm.checkpoint.layout import (
    CONFIG_FILE,
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
from qgemm.checkpoint.recognition import recognize
from qgemm.checkpoint.safetensors_file import StoredTensor, read_header, read_headers

FLOAT = "float"
UNKNOWN = "unknown"


@dataclass
class Checkpoint:
    """A checkpoint, as far as it can be read.

    - ``folder``: None for a single file, whose ``config`` is empty.
    - ``format``: ``"qgemm"``, ``"compressed-tensors"``, ``"bitsandbytes"``, ``"gptq"``, ``"awq"``, ``"fp8"``,
      ``"torchao"``, ``"float"``, ``"unknown"``, or another ``quant_method`` that the config names.
    - ``variant``: a more detailed description, such as ``"int-quantized"`` or ``"4 bits"``; ``bits``: of packed
      weights.
    - ``contents``: as ``load_quantized`` reads it, or None with the ``refusal`` that it would raise.
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
    refusal: str = ""
    problems: list[str] = field(default_factory=list)

    @property
    def files(self) -> list[Path]:
        """The files with tensors."""
        return sorted({tensor.path for tensor in self.stored.values()})


def open_checkpoint(path: Path) -> Checkpoint:
    """Opens the checkpoint at ``path``: a folder, its index, or a single safetensors file.

    Raises ``CheckpointError`` if there is none, or if nothing of it can be read.
    """
    if path.name == INDEX_FILE and not path.is_dir():
        path = path.parent
    return retry_while_saved(path, lambda: _open(path))


def _open(path: Path) -> Checkpoint:
    if os.path.isdir(path):
        checkpoint = _open_folder(path)
    elif not os.path.isfile(path):
        raise CheckpointError(f"{path} is neither a folder nor a file{hub_hint(path)}")
    elif path.suffix != ".safetensors":
        raise CheckpointError(
            f"{path} is not a safetensors file; qgemm opens a folder, {INDEX_FILE} or FILE.safetensors"
        )
    else:
        checkpoint = Checkpoint(path, None, read_header(path))
        checkpoint.refusal = "it is a single file, without the config of its folder"
    _identify(checkpoint)
    if checkpoint.folder is not None and not checkpoint.problems:
        _read_as_qgemm_does(checkpoint, checkpoint.folder)
    return checkpoint


def _open_folder(folder: Path) -> Checkpoint:
    checkpoint = Checkpoint(folder, folder, {})
    if (folder / CONFIG_FILE).exists():
        try:
            checkpoint.config = read_json(checkpoint_file(folder, CONFIG_FILE))
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
    if method == "compressed-tensors":
        checkpoint.variant = str(quantization.get("format") or "")
    elif method == modelopt.QUANT_METHOD:
        checkpoint.variant = str(quantization.get("quant_algo") or "")
    elif method == fp8.QUANT_METHOD:
        checkpoint.variant = "blocks" if quantization.get("weight_block_size") else ""
    elif method == "bitsandbytes":
        four_bits = str(quantization.get("bnb_4bit_quant_type") or "4 bits")
        checkpoint.variant = "int8" if quantization.get("load_in_8bit") is True else four_bits
    elif checkpoint.bits is not None:
        group = quantization.get("group_size", quantization.get("q_group_size"))
        groups = f", groups of {group}" if isinstance(group, int) and group > 0 else ""
        checkpoint.variant = f"{checkpoint.bits} bits{groups}"


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
        checkpoint.contents = read_contents(folder, checkpoint.config, config_path)
        checkpoint.contents.notes += adapter_note(folder)
    except CheckpointError as error:
        checkpoint.refusal = str(error)
        if checkpoint.format == "qgemm":
            checkpoint.problems.append(str(error))
        return
    if checkpoint.contents.lacks is not None:
        checkpoint.problems.append(f"{folder} has no {checkpoint.contents.lacks}; it loads without")
