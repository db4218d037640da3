"""The tokenizer of a model: that in its folder, or what transformers makes of a GGUF file's settings."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from qgemm.checkpoint.gguf import GgufModel
from qgemm_cli.output import bars_on_a_terminal

_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
_SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
# What llama.cpp begins a text with, where settings don't say: kinds of tokenizers, and of their splitting.
_KINDS_WITH_BOS = ("llama", "llama3", "llama-v3", "llama-bpe")


def read_text(path: Path, most: int = -1) -> str:
    """The first ``most`` characters of a text file, or all; raises ``ValueError`` if it isn't in UTF-8."""
    try:
        with path.open(encoding="utf-8") as file:
            return file.read(most)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text in UTF-8: save it in UTF-8") from error


def has_tokenizer(folder: Path) -> bool:
    """Whether there is a tokenizer in ``folder``."""
    return any((folder / name).is_file() for name in _FILES)


def load_tokenizer(
    folders: list[Path], way_out: str = "save the tokenizer there", gguf: GgufModel | None = None
) -> Any:
    """The first tokenizer in ``folders``, or else that of the files ``gguf``.

    Raises ``ValueError``, with the way out, if there is none.
    """
    from transformers import AutoTokenizer

    for folder in filter(has_tokenizer, folders):
        try:
            return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # whatever transformers and Rust raise for damaged files
            said = " ".join(f"{type(error).__name__}: {error}".split())
            if "trust_remote_code" in said:
                said = "it needs code of its own, and qgemm runs no code of a checkpoint"
            raise ValueError(f"transformers can't make the tokenizer in {folder} ({said})") from error
    if gguf is None:
        raise ValueError(f"{folders[0]} has no tokenizer: {way_out}")
    try:
        return tokenizer_of_gguf(gguf)
    except ValueError as error:
        raise ValueError(f"{error}: {way_out}") from error


def tokenizer_of_gguf(source: GgufModel) -> Any:
    """The tokenizer that transformers makes of a GGUF file, whatever lies beside it, with the file's special tokens.

    Raises ``ValueError`` if it can't.
    """
    from transformers import AutoTokenizer

    path = source.path
    with tempfile.TemporaryDirectory() as folder, bars_on_a_terminal():
        Path(folder, path.name).symlink_to(path.resolve())
        try:
            made = AutoTokenizer.from_pretrained(
                folder, gguf_file=path.name, local_files_only=True, trust_remote_code=False
            )
            _set_special_tokens(made, source.settings)
        except BaseException as error:  # transformers' code may raise anything for unexpected values, and Rust's panics
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            said = " ".join(f"{type(error).__name__}: {error}".split())
            raise ValueError(f"transformers can't make the tokenizer of {path} ({said})") from error
    return made


def _set_special_tokens(tokenizer: Any, settings: dict[str, Any]) -> None:
    """Sets what transformers 5.17 gets wrong: for some architectures the end is the beginning, or of another model."""
    for ours, theirs in _SPECIAL.items():
        number = settings.get(f"tokenizer.ggml.{theirs}_token_id")
        if type(number) is int and 0 <= number < len(tokenizer):
            setattr(tokenizer, f"{ours}_token", tokenizer.convert_ids_to_tokens(number))
    kinds = settings.get("tokenizer.ggml.model"), settings.get("tokenizer.ggml.pre")
    adds = settings.get("tokenizer.ggml.add_bos_token", any(kind in _KINDS_WITH_BOS for kind in kinds))
    if adds and tokenizer.bos_token_id is not None and tokenizer("a")["input_ids"][:1] != [tokenizer.bos_token_id]:
        tokenizer.add_bos_token = True
