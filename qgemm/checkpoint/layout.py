"""The files of a checkpoint, and how they are found.

The names are those of transformers' ``save_pretrained``: ``config.json``, then ``model.safetensors``, or shards
``model-00001-of-00003.safetensors`` with ``model.safetensors.index.json``, which tells where each tensor is. A save
into a folder that already has such files adds its id to its own file names (``model-<id>-00001-of-00003.safetensors``),
with an index that ``transformers_weights`` in its ``config.json`` names. Config and index may come from untrusted
sources, so a name in them is only followed to a file directly in the folder.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from fractions import Fraction
from pathlib import Path
from typing import Any, TypeVar

from qgemm.arguments import shortened
from qgemm.checkpoint.disk import check_regular, open_regular, reading
from qgemm.checkpoint.errors import CheckpointError

CONFIG_FILE = "config.json"
GENERATION_CONFIG_FILE = "generation_config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
REPORT_FILE = "qgemm_report.json"

WEIGHTS_KEY = "transformers_weights"
"""The config key for the file with the weights, or their index, if it has another name; it is transformers' own key."""

SETTINGS_KEYS = ("quantization_config", "compression_config")
"""The config keys that tell how weights are quantized; the latter is from compressed-tensors' first versions."""

MLX_KEY = "quantization"
"""The key in whose value MLX tells that, beside ``quantization_config`` or, in older files, instead of it."""

SAVE_KEY = "save"
"""The key in a ``quantization_config`` of any format for the id of the save that wrote it."""

# The longest JSON file that is read. The largest models' index has a few MB; parsed JSON takes several times its size.
LARGEST_JSON = 100_000_000

_ID = "-[0-9a-f]{16}"
_WEIGHTS = rf"model({_ID})?(-\d{{5}}-of-\d{{5}})?\.safetensors"
_TEXTS = rf"config\.json|model({_ID})?\.safetensors\.index\.json|(qgemm_report|generation_config)({_ID})?\.json"
_FILES = re.compile(f"{_WEIGHTS}|{_TEXTS}")
# Names that every save would use, except config.json.
_SHARED = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json|qgemm_report\.json")
MOST_RETRIES = 10
"""How often to read again while a checkpoint is being replaced."""

ADAPTER_FILE = "adapter_config.json"
"""PEFT's config: the adapter that it describes is beside it, and transformers adds that to a model while loading."""

_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_OF_OTHER_LIBRARIES = (".gguf", ".ggml", ".onnx", ".h5", ".msgpack", ".tflite")
# Files that indicate a folder around models, and what to pass instead.
_AROUND = {
    ADAPTER_FILE: "an adapter of PEFT: merge it into its model, with merge_and_unload(), and save that",
    "model_index.json": "a pipeline of diffusers: take the folder of a part that is a transformers model",
    "modules.json": "a model of sentence-transformers: take the folder of its first module",
    "snapshots": "a download of the Hugging Face hub: take the folder in its folder snapshots",
}

T = TypeVar("T")

_SIZE = re.compile(r"(\d+(?:\.\d+)?) *([KMGT]?)(i?)B", re.IGNORECASE)


def is_checkpoint_file(name: str) -> bool:
    """Whether a file with this name belongs to a checkpoint."""
    return _FILES.fullmatch(name) is not None


def checkpoint_files(folder: Path) -> list[str]:
    """The names of the files in ``folder`` that belong to a checkpoint, complete or not."""
    return sorted(path.name for path in folder.iterdir() if is_checkpoint_file(path.name))


def name_with_id(name: str, save_id: str) -> str:
    """``name`` with the id ``save_id``: ``model-<id>.safetensors`` for ``model.safetensors``."""
    return re.sub("^(model|qgemm_report|generation_config)", lambda match: f"{match[1]}-{save_id}", name)


def are_names_free(folder: Path, files: Collection[str]) -> bool:
    """Whether a save into ``folder``, which has checkpoint ``files``, can use plain names before it is finished.

    It can't if an existing config would find the new files, including any file that transformers reads.
    """
    if any(_SHARED.fullmatch(name) for name in files):
        return False
    if CONFIG_FILE not in files:
        return True
    try:
        return read_json(folder / CONFIG_FILE).get(WEIGHTS_KEY) is not None
    except CheckpointError:
        return False


def _is_of_one_file(folder: Path) -> bool:
    """Whether the index in ``folder`` puts all tensors into the file beside it, as MLX's does."""
    names = read_json(checkpoint_file(folder, INDEX_FILE)).get("weight_map")
    return isinstance(names, dict) and bool(names) and all(name == WEIGHTS_FILE for name in names.values())


def weights_file(folder: Path, config: dict[str, Any]) -> Path:
    """The file with the tensors of the checkpoint in ``folder``, or the index of several; ``config``: its config.

    Raises ``CheckpointError`` if it is missing, or can't be determined.
    """
    name = config.get(WEIGHTS_KEY)
    if name is None:
        if not os.path.lexists(folder / INDEX_FILE):
            _check_is_of_one_model(folder)
            return checkpoint_file(folder, WEIGHTS_FILE)
        if os.path.lexists(folder / WEIGHTS_FILE) and not _is_of_one_file(folder):
            raise CheckpointError(
                f"{folder} holds {WEIGHTS_FILE} and {INDEX_FILE}: remove the one that doesn't belong to this model"
            )
        return checkpoint_file(folder, INDEX_FILE)
    if not isinstance(name, str) or not name.endswith((".safetensors", ".safetensors.index.json")):
        raise CheckpointError(
            f"{folder / CONFIG_FILE}: {WEIGHTS_KEY} is {name!r}; it must be the name of a file in the folder, "
            "*.safetensors or *.safetensors.index.json"
        )
    return checkpoint_file(folder, name)


def stated_settings(config: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """What ``config`` says about quantization, with the key that says it.

    For a model with images, this may be in the config of the text model.
    """
    of_text = config.get("text_config")
    for holder in (config, of_text if isinstance(of_text, dict) else {}):
        yield from ((key, holder[key]) for key in SETTINGS_KEYS if holder.get(key) is not None)


def settings_of_mlx(config: dict[str, Any]) -> dict[str, Any] | None:
    """What ``config`` says about quantization if MLX wrote it; what its ``quantization_config`` says may be older."""
    own = config.get(MLX_KEY)
    return own if isinstance(own, dict) and "group_size" in own else None


def adapter_note(folder: Path) -> list[str]:
    """A note about an adapter beside the model in ``folder``, if only the model is loaded; empty without one."""
    if not os.path.lexists(folder / ADAPTER_FILE):
        return []
    return [f"it has an adapter, {ADAPTER_FILE}: add it with load_adapter of the model"]


def check_no_adapter(folder: Path) -> None:
    """Raises ``CheckpointError`` if ``folder`` has an adapter beside the model, which transformers would load."""
    if os.path.lexists(folder / ADAPTER_FILE):
        raise CheckpointError(
            f"{folder} has an adapter, {ADAPTER_FILE}, which transformers adds to the model as it loads: merge the "
            "adapter into the float model, with PEFT's merge_and_unload(), or move that file away to do without it"
        )


def _check_is_of_one_model(folder: Path) -> None:
    """Raises ``CheckpointError`` if ``folder`` contains something else instead of a file with weights."""
    if os.path.lexists(folder / WEIGHTS_FILE) or not folder.is_dir():
        return
    if (what := next((what for name, what in _AROUND.items() if (folder / name).exists()), None)) is not None:
        raise CheckpointError(f"{folder} has no {WEIGHTS_FILE}. It is {what}")
    check_no_pickles(folder)
    names = sorted(path.name for path in folder.iterdir())
    if found := next((name for name in names if name.lower().endswith(_OF_OTHER_LIBRARIES)), None):
        reads = "qgemm reads safetensors files alone"
        if found.lower().endswith(".gguf"):
            reads = "qgemm.load_quantized reads GGUF files of language models; what is quantized is safetensors"
        raise CheckpointError(
            f"{folder} holds {found}, and no {WEIGHTS_FILE}: {reads}. Start from the model as transformers saves it"
        )
    if any(_SHARED.fullmatch(name) for name in names):
        return  # one of several shards whose index is missing
    if found := next((name for name in names if name.endswith(".safetensors")), None):
        raise CheckpointError(
            f"{folder} holds {found}, and neither {WEIGHTS_FILE} nor {INDEX_FILE}: if a transformers model's tensors "
            f"are in that file alone, rename it to {WEIGHTS_FILE}; else load the model and save it with "
            "save_pretrained"
        )


def check_no_pickles(folder: Path) -> None:
    """Raises ``CheckpointError`` if ``folder`` contains pickles instead of the file that is looked for."""
    if os.path.lexists(folder / WEIGHTS_FILE) or not folder.is_dir():
        return
    if pickles := sorted(path.name for path in folder.iterdir() if path.suffix in _PICKLES):
        raise CheckpointError(
            f"{folder} holds {pickles[0]}, a pickle, and no {WEIGHTS_FILE}. Loading a pickle runs the code in it, so "
            "qgemm doesn't: convert it to safetensors first, a float model with transformers' from_pretrained and "
            "save_pretrained, any other with safetensors.torch.save_file(torch.load(pickle, weights_only=True), "
            f"{WEIGHTS_FILE!r}) if it holds plain tensors; where they are of a library's own classes, such as "
            "torchao's, take the float model and quantize that"
        )


def parse_size(size: int | str, argument: str = "max_shard_size") -> int:
    """Bytes from an int, or from text such as ``"5GB"`` (10^9) or ``"5GiB"`` (2^30), the argument ``argument``."""
    if isinstance(size, str) and (match := _SIZE.fullmatch(size.strip())):
        number, prefix, binary = match.groups()
        size = int(Fraction(number) * (1024 if binary else 1000) ** " KMGT".index(prefix.upper() or " "))
    if not isinstance(size, int) or isinstance(size, bool) or size <= 0:
        raise ValueError(f'{argument} is {size!r}; it must be a number of bytes above 0, or text like "5GB"')
    return size


def split_into_shards(sizes: dict[str, int], max_shard_size: int) -> dict[str, list[str]]:
    """Tensor names by file, in order; each file has at most ``max_shard_size`` bytes if its tensors allow.

    A larger tensor gets a file of its own.
    """
    shards: list[list[str]] = []
    room = 0
    for name, size in sizes.items():
        if size > room or not shards:
            shards.append([])
            room = max_shard_size
        shards[-1].append(name)
        room -= size
    if len(shards) == 1:
        return {WEIGHTS_FILE: shards[0]}
    return {f"model-{i:05d}-of-{len(shards):05d}.safetensors": names for i, names in enumerate(shards, start=1)}


def hub_hint(path: Path) -> str:
    """For an error about the missing ``path``: how to download a model of that name from the Hugging Face hub.

    Empty if the path doesn't look like ``OWNER/MODEL``.
    """
    if path.is_absolute() or len(path.parts) != 2 or path.parent.exists():
        return ""
    return f". A model of the Hugging Face hub is downloaded first: hf download {path} --local-dir {path.name}"


def checkpoint_file(folder: Path, name: str) -> Path:
    """The file ``name`` of the checkpoint in ``folder``.

    Raises ``CheckpointError`` if it is missing or isn't a regular file, or if the name or a link leads out of the
    folder. Links into the ``blobs`` folder of a Hugging Face cache are followed, because the hub's client stores
    downloads that way.
    """
    if not os.path.isdir(folder):
        raise CheckpointError(
            f"{folder} is not a folder; give the folder of a quantized model, or a GGUF file{hub_hint(folder)}"
        )
    # Both separators and Windows drives are refused on every system, so that the result doesn't depend on the system.
    if name in ("", ".", "..") or any(c in name for c in "/\\:\0"):
        raise CheckpointError(f"{folder}: {name!r} is not a plain file name; files must lie directly in the folder")
    path, real_folder = folder / name, folder.resolve()
    # Path.is_file would raise OSError before Python 3.14 for a name that is too long for the file system.
    if not os.path.isfile(path):
        if os.path.exists(path):
            with suppress(OSError):  # in case it was removed meanwhile
                check_regular(path)
        raise CheckpointError(f"{folder} has no file {name}: the checkpoint is incomplete; copy or download it again")
    real_path = path.resolve()
    if real_path.parent not in (real_folder, *_hub_blobs(real_folder)):
        raise CheckpointError(
            f"{path} is a link to {real_path}, outside of the folder: copy that file to where the link is"
        )
    return path


def place_of(config_path: Path) -> Path:
    """What a checkpoint is called in errors: the folder of its config, or the file that holds all of it."""
    return config_path.parent if config_path.name == CONFIG_FILE else config_path


def retry_while_saved(folder: Path, read: Callable[[], T]) -> T:
    """Returns what ``read`` reads from the checkpoint in ``folder``; it raises ``CheckpointError`` if it can't.

    ``read`` is called again, a few times, if ``config.json`` has changed meanwhile, because a save took place.
    """
    for _ in range(MOST_RETRIES):
        before = _config_or_none(folder)
        try:
            return read()
        except CheckpointError:
            if _config_or_none(folder) == before:
                raise
    return read()


def _config_or_none(folder: Path) -> bytes | None:
    try:
        return read_text(checkpoint_file(folder, CONFIG_FILE))
    except CheckpointError:
        return None


def _hub_blobs(folder: Path) -> list[Path]:
    """The hub cache's folder that links in ``folder``, a snapshot or a folder in one, lead to."""
    snapshots = (ancestor.parent for ancestor in (folder, folder.parent))
    return [snapshot.parent / "blobs" for snapshot in snapshots if snapshot.name == "snapshots"]


def save_id(config: dict[str, Any], path: Path) -> str | None:
    """The id of the save that wrote ``config``, which was read from ``path``; None if it has no id."""
    quantization = config.get("quantization_config")
    found = quantization.get(SAVE_KEY) if isinstance(quantization, dict) else None
    if found is not None and not (isinstance(found, str) and re.fullmatch("[0-9a-f]{16}", found)):
        raise CheckpointError(f"{path}: {SAVE_KEY} must be the id of a save, 16 hexadecimal digits")
    return found


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object from a file; raises ``CheckpointError`` for anything else, a repeated name, and NaN."""
    return parse_json(read_text(path), path)


def read_text(path: Path) -> bytes:
    """Reads a JSON file; raises ``CheckpointError`` if it can't be read, or is too long."""
    with reading(path), open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > LARGEST_JSON:
            raise CheckpointError(f"{path} has {size} bytes; the maximum for JSON is {LARGEST_JSON}")
        return file.read(size)


def parse_json(text: bytes | str, path: Path) -> dict[str, Any]:
    """Parses the JSON object ``text``, which was read from ``path``; raises as ``read_json`` does."""
    try:
        text = text if isinstance(text, str) else text.decode()
        if text.startswith("\ufeff"):
            raise ValueError("it begins with a byte order mark; save it in UTF-8 without one")
        values = json.loads(text, object_pairs_hook=unique_names, parse_constant=_constant)
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is not valid JSON: byte {error.start} is no UTF-8; save it in UTF-8") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} holds a JSON {type(values).__name__}; it must be an object")
    return values


def _constant(name: str) -> float:
    # Not valid JSON, but older configs contain infinities. NaN has no meaning there, and would pass every range check.
    if name == "NaN":
        raise ValueError("it holds NaN")
    return float(name)


def unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A mapping from parsed JSON or YAML; raises ``ValueError`` if a name appears twice."""
    # Nobody knows which of the two is meant, and readers differ.
    values = dict(pairs)
    if len(values) < len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise ValueError(f"{shortened(name, 200)} appears twice")
            seen.add(name)
    return values
