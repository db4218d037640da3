"""``Contents``: what a checkpoint of any format holds, in qgemm's terms: its layers, and names, shapes and dtypes.

A reader of a format makes it from the config and the headers of the files, before any value is read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from qgemm.checkpoint.errors import CheckpointError
from qgemm.checkpoint.manifest import Manifest
from qgemm.checkpoint.safetensors_file import StoredTensor


@dataclass(frozen=True)
class Conversion:
    """What becomes of a tensor in a file: its name in the model, and how its value is made.

    ``name`` is None for a tensor that is only looked at. ``convert`` raises ``ValueError`` for a value that can't be.
    """

    name: str | None
    convert: Callable[[Tensor], Tensor]


@dataclass
class Contents:
    """A checkpoint as the model will hold it.

    - ``manifest``: its quantized layers.
    - ``stored``: the tensors of its files, by their names there.
    - ``conversions``: for those that the model holds otherwise, how. The rest goes into the model as it is.
    - ``headers``: the tensors as the model holds them: names, shapes, dtypes.
    - ``is_foreign``: another library's, whose config doesn't say which layers are quantized and which tensors are tied.
    """

    manifest: Manifest
    stored: dict[str, StoredTensor]
    headers: dict[str, StoredTensor]
    conversions: dict[str, Conversion] = field(default_factory=dict)
    is_foreign: bool = False

    def convert(
        self, name: str, name_in_file: str, shape: tuple[int, ...], convert: Callable[[Tensor], Tensor]
    ) -> None:
        """Notes that the tensor ``name_in_file`` becomes the float32 tensor ``name`` of ``shape``.

        Raises ``CheckpointError`` if the files hold a tensor ``name`` as well.
        """
        if name != name_in_file and name in self.stored:
            raise CheckpointError(
                f"{self.stored[name].path} holds both {name_in_file} and {name}; only one can be meant"
            )
        tensor = self.headers.pop(name_in_file)
        self.headers[name] = StoredTensor(tensor.path, shape, torch.float32)
        self.conversions[name_in_file] = Conversion(name, convert)

    def look_at(self, name_in_file: str, convert: Callable[[Tensor], Tensor]) -> None:
        """Notes that the model doesn't hold the tensor ``name_in_file``, whose value ``convert`` checks."""
        del self.headers[name_in_file]
        self.conversions[name_in_file] = Conversion(None, convert)
