"""Real text without a network: the sources and documentation of the Python standard library (PSF licence).

``python -m benchmarks.accuracy.corpus FILE`` writes the corpus of this Python to an xz-compressed JSON file, for a
machine whose Python comes without its tests, which are half of the text.

A document is a file. Every document belongs to one split, chosen by a hash of its name: a model is trained on
``"train"``, its checkpoint chosen by ``"validation"``, and what is reported was measured on ``"held-out"``.
"""

from __future__ import annotations

import argparse
import builtins
import hashlib
import json
import lzma
import os
import sys
import sysconfig
from collections.abc import Iterator
from importlib import import_module
from inspect import getdoc
from pathlib import Path
from typing import Literal

Split = Literal["train", "validation", "held-out"]

_SKIPPED_FOLDERS = frozenset({"site-packages", "__pycache__", "lib-dynload", "encodings", "cjkencodings", "pydoc_data"})
"""Other people's packages, caches, tables of characters, and pydoc's topics as one literal: they are read apart."""
_SKIPPED_PREFIXES = ("_sysconfigdata", "config-")
"""What describes the machine that Python was built on."""
_MAX_BYTES = 400_000
_MIN_CHARACTERS = 200


def documents() -> dict[str, str]:
    """The text of every document by name, sorted by name; no two texts are the same.

    Documents are the ``*.py``, ``*.rst`` and ``*.txt`` files under the standard library's folder that are UTF-8, the
    help topics of ``pydoc``, and the docstrings of modules written in C.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    found = {path.relative_to(root).as_posix(): text for path in _files(root) if (text := _read(path)) is not None}
    topics: dict[str, str] = import_module("pydoc_data.topics").topics
    found |= {f"pydoc/{topic}": text for topic, text in topics.items()}
    found |= {f"docstrings/{name}": _docstrings(name) for name in sys.builtin_module_names}
    unique: dict[str, str] = {}
    for name in sorted(found):
        if len(found[name]) >= _MIN_CHARACTERS:
            unique.setdefault(found[name], name)
    return {name: text for text, name in unique.items()}


def split_of(name: str) -> Split:
    """The split of the document called ``name``: 92 % are for training, 2 % for validation, 6 % held out."""
    share = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") / 2**64
    return "held-out" if share < 0.06 else "validation" if share < 0.08 else "train"


def texts_of(corpus: dict[str, str], split: Split) -> list[str]:
    """The texts of one split, in an order that depends on the names alone, and doesn't follow the alphabet."""
    names = [name for name in corpus if split_of(name) == split]
    return [corpus[name] for name in sorted(names, key=lambda name: hashlib.sha256(f"order:{name}".encode()).digest())]


def save_corpus(corpus: dict[str, str], path: Path) -> None:
    """Writes a corpus for ``load_corpus``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(lzma.compress(json.dumps(corpus).encode()))


def load_corpus(path: Path) -> dict[str, str]:
    """The corpus that ``save_corpus`` wrote."""
    corpus: dict[str, str] = json.loads(lzma.decompress(path.read_bytes()))
    return corpus


def _files(root: Path) -> Iterator[Path]:
    """The files under a folder that belong to the corpus by their names."""
    for folder, folders, names in os.walk(root):
        folders[:] = [
            name for name in folders if name not in _SKIPPED_FOLDERS and not name.startswith(_SKIPPED_PREFIXES)
        ]
        for name in names:
            if name.endswith((".py", ".rst", ".txt")) and not name.startswith(_SKIPPED_PREFIXES):
                yield Path(folder, name)


def _read(path: Path) -> str | None:
    """The text of a file, or None for one that is too large or no text."""
    if not path.is_file() or path.stat().st_size > _MAX_BYTES:
        return None
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return None


def _docstrings(module_name: str) -> str:
    """The docstrings of a module, of its functions and classes, and of their methods, each once."""
    try:
        module = builtins if module_name == "builtins" else import_module(module_name)
    except ImportError:
        return ""
    found: dict[str, None] = {}
    for thing in (module, *_members(module)):
        for part in (thing, *(_members(thing) if isinstance(thing, type) else ())):
            if text := getdoc(part):
                found[text] = None
    return "\n\n".join(found)


def _members(thing: object) -> list[object]:
    return [value for name, value in sorted(vars(thing).items()) if callable(value) and not name.startswith("_")]


def main() -> None:
    """Writes the corpus of this Python to the file that the command line names."""
    parser = argparse.ArgumentParser(description="Write the corpus of this Python's standard library to a file.")
    parser.add_argument("file", type=Path, help="where to write, as xz-compressed JSON")
    path = parser.parse_args().file
    corpus = documents()
    save_corpus(corpus, path)
    for split in ("train", "validation", "held-out"):
        texts = texts_of(corpus, split)
        print(f"{split}: {len(texts)} documents, {sum(map(len, texts)) / 1e6:.1f} million characters")


if __name__ == "__main__":
    main()
