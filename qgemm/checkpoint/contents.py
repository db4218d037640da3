"""``Contents``: what a checkpoint of any format holds, in qgemm's terms: its layers, and names, shapes and dtypes.

A reader of a format makes it from the config and the headers of the files, before any value is read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from qgemm.checkpoint.errors import CheckpointError
from qgemm.checkpoint.manifest import Manifest
from qgemm.checkpoint.safetensors_file import StoredTensor


@dataclass(frozen=True)
class Conversion:
    """What becomes of a tensor in a file: its name in the model, and how its value is made.

    ``name`` is None for a tensor that is only looked at. ``convert`` raises ``ValueError`` for a value that can't be.
    ``place``: where it goes in a tensor of shape ``whole``, which several make; None if it is all of it.
    """

    name: str | None
    convert: Callable[[Tensor], Tensor]
    place: tuple[int | slice, ...] | None = None
    whole: tuple[int, ...] = ()


@dataclass
class Contents:
    """A checkpoint as the model will hold it.

    - ``manifest``: its quantized layers.
    - ``stored``: the tensors of its files, by their names there.
    - ``conversions``: for those that the model holds otherwise, how. The rest goes into the model as it is.
    - ``headers``: the tensors as the model holds them: names, shapes, dtypes.
    - ``report``: what ``qgemm.report`` shows, not checked, or None. ``lacks``: the name of a file that isn't there, and
      without which the model still loads.
    - ``is_foreign``: another library's, whose config doesn't say which layers are quantized and which tensors are tied.
    """

    manifest: Manifest
    stored: dict[str, StoredTensor]
    headers: dict[str, StoredTensor]
    conversions: dict[str, Conversion] = field(default_factory=dict)
    is_foreign: bool = False
    report: dict[str, Any] | None = None
    lacks: str | None = None
    # The name in the files of each tensor of the model that has another one there.
    _files: dict[str, str] = field(default_factory=dict)

    def convert(
        self, name: str, name_in_file: str, shape: tuple[int, ...], convert: Callable[[Tensor], Tensor]
    ) -> None:
        """Notes that the tensor ``name_in_file`` becomes the float32 tensor ``name`` of ``shape``.

        Raises ``CheckpointError`` if the files hold a tensor ``name`` as well.
        """
        if name != name_in_file and name in self.stored:
            raise CheckpointError(
                f"{self.stored[name].path} holds both {name_in_file} and {name}; only one of them can be the model's"
            )
        tensor = self.headers.pop(name_in_file)
        self.headers[name] = StoredTensor(tensor.path, shape, torch.float32)
        self.conversions[name_in_file] = Conversion(name, convert)
        self._files[name] = name_in_file

    def rename(self, names: dict[str, str]) -> None:
        """Gives the tensors of the model other names; raises ``CheckpointError`` if two would have one.

        ``names``: the new name of every tensor in ``headers``.
        """
        files, self._files = self._files, {}
        headers: dict[str, StoredTensor] = {}
        for old, new in names.items():
            if new in headers:
                raise CheckpointError(f"{headers[new].path} holds {old} and another tensor that is also {new}")
            headers[new] = self.headers[old]
            file_name = files.get(old, old)
            if new != file_name:
                self._redirect(file_name, name=new)
                self._files[new] = file_name
        self.headers = headers

    def merge(
        self,
        name: str,
        part: str,
        shape: tuple[int, ...],
        whole: tuple[int, ...],
        place: tuple[int | slice, ...],
    ) -> None:
        """Notes that the model's tensor ``part`` is a part of one called ``name``: where it goes, and their shapes.

        Raises ``CheckpointError`` unless there is such a part of that shape, with the dtype of the others.
        """
        tensor = self.headers.pop(part, None)
        if tensor is None:
            raise CheckpointError(f"no file holds {part}, from which {name} is made")
        if tensor.shape != shape:
            raise CheckpointError(f"{tensor.path}: {part} has shape {list(tensor.shape)}; the model's is {list(shape)}")
        known = self.headers.setdefault(name, StoredTensor(tensor.path, whole, tensor.dtype))
        if known.dtype != tensor.dtype or known.shape != whole:
            raise CheckpointError(f"{tensor.path}: {part} is {tensor.dtype}, and {name} {known.dtype}")
        self._redirect(self._files.pop(part, part), name=name, place=place, whole=whole)

    def _redirect(self, name_in_file: str, **changes: Any) -> None:
        self.conversions[name_in_file] = replace(self.conversion_of(name_in_file), **changes)

    def conversion_of(self, name_in_file: str) -> Conversion:
        """What becomes of a tensor in the files."""
        return self.conversions.get(name_in_file) or Conversion(name_in_file, lambda value: value)

    def look_at(self, name_in_file: str, convert: Callable[[Tensor], Tensor]) -> None:
        """Notes that the model doesn't hold the tensor ``name_in_file``, whose value ``convert`` checks."""
        del self.headers[name_in_file]
        self.conversions[name_in_file] = Conversion(None, convert)

    def must_be_zero(self, name_in_file: str, problem: str) -> None:
        """As ``look_at``, for a tensor in which anything but 0 is a ``problem``."""

        def check(value: Tensor) -> Tensor:
            if bool((value != 0).any()):
                raise ValueError(problem)
            return value

        self.look_at(name_in_file, check)
