"""Matches a model's names to files written by another class: the whole model that it is a part of, or a part of it.

Files of a quantized model have its own names, and a part's names differ from them by a prefix:
``model.language_model.norm.weight`` is ``norm.weight`` in the language model. transformers only knows the names of
original files, and those of a base model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from qgemm.checkpoint.errors import CheckpointError
from qgemm.checkpoint.safetensors_file import read_header_and_metadata
from qgemm.checkpoint.tensors import get_tensor


@dataclass(frozen=True)
class Renaming:
    """The prefix that names in files have (``removed``) or lack (``added``), each with its dot."""

    removed: str = ""
    added: str = ""

    @classmethod
    def find(cls, model: nn.Module, in_files: Iterable[str]) -> Renaming:
        """The one that gives most parameters of ``model`` a name that is ``in_files``; none if two are equally good."""
        stored, own = set(in_files), {name for name, _ in model.named_parameters(remove_duplicate=False)}
        counts = Counter({cls(): len(stored & own)})
        counts.update(cls(removed=front) for name in stored for front, rest in _cuts(name) if rest in own)
        counts.update(cls(added=front) for name in own for front, rest in _cuts(name) if rest in stored)
        most = max(counts.values())
        best = [renaming for renaming, count in counts.items() if count == most]
        return best[0] if len(best) == 1 else cls()

    def names(self, name: str) -> tuple[str, str]:
        """Possible names of the tensor or module ``name`` in files; transformers keeps names that don't match."""
        return self.added + name.removeprefix(self.removed), name

    def name_in(self, model: nn.Module, name: str) -> str | None:
        """The one of ``names`` that is in ``model``; None if none is."""
        for candidate in self.names(name):
            try:
                if get_tensor(model, candidate) is not None:
                    return candidate
            except AttributeError:
                continue
        return None

    def conversions(self) -> list[Any]:
        """The same renaming for transformers."""
        from transformers.core_model_loading import PrefixChange

        if self.removed:
            return [PrefixChange(prefix_to_remove=self.removed[:-1])]
        return [PrefixChange(prefix_to_add=self.added[:-1])] if self.added else []


def _cuts(name: str) -> Iterator[tuple[str, str]]:
    """``"a.b.c"`` as ``("a.", "b.c")`` and ``("a.b.", "c")``."""
    at = name.find(".") + 1
    while at:
        yield name[:at], name[at:]
        at = name.find(".", at) + 1


def check_files(model: nn.Module, files: Iterable[Path]) -> None:
    """Raises ``CheckpointError`` if values of quantized layers in ``files`` would become float weights of ``model``."""
    dtypes: dict[str, torch.dtype | None] = {}
    for file in files:
        if file.suffix == ".safetensors":
            try:
                tensors, _ = read_header_and_metadata(file)
            except CheckpointError:
                return  # transformers will report what is wrong with it
            dtypes.update((name, tensor.dtype) for name, tensor in tensors.items())
    check_dtypes(model, dtypes)


def check_dtypes(model: nn.Module, dtypes: Mapping[str, torch.dtype | None]) -> None:
    """Raises ``CheckpointError`` as ``check_files`` does, for tensors of these ``dtypes`` by name."""
    values = [
        name
        for name, dtype in dtypes.items()
        if f"{name}_scale" in dtypes and dtype is not None and dtype.itemsize == 1
    ]
    if not values:
        return
    renaming, own = Renaming.find(model, dtypes), dict(model.named_parameters(remove_duplicate=False))
    for name in values:
        weight = own.get(renaming.name_in(model, name) or "")
        if weight is not None and weight.is_floating_point() and weight.dtype.itemsize > 1:
            raise CheckpointError(
                f"{name} holds values of a quantized layer, which would be float weights of {type(model).__name__}, "
                "since its config has no quantization_config: leave out config=, or load the class that was saved. A "
                "part of a model that was saved by itself, by an older qgemm, has to be saved again"
            )
