"""What the tensors of a GGUF file are called in a transformers model, and how their values differ there.

transformers has a table of names, and for some architectures a class that changes values: it reorders the rows of
queries and keys, subtracts 1 from the weights of norms, and so on. Reordered rows can stay packed: what becomes of a
matrix whose rows are numbered shows the order.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from qgemm.checkpoint.errors import unsupported
from qgemm.checkpoint.tensors import split_name

EXPERT = re.compile(r"(.*\.ffn_(gate|up|down)_exps)\.(\d+)\.weight")
"""The weight of a single expert, as ``GgufFile`` lists it."""

RowOrder = slice | Tensor
"""What indexes the rows of a matrix."""

_UNCHANGED = slice(None)
# How deep inside a model its names may begin: a file may be of a model that is a part of it.
_DEPTH = 2


class _Outer:
    """A model, as transformers' table of names looks at it, without the modules deep inside.

    For each module it makes gguf's table of all names anew, which for the hundreds of a model takes many seconds.
    """

    def __init__(self, module: nn.Module, depth: int = _DEPTH) -> None:
        self.config: Any = getattr(module, "config", None)
        self.state_dict = module.state_dict
        self._module, self._depth = module, depth

    def named_children(self) -> Iterator[tuple[str, _Outer]]:
        """As for a module."""
        for name, child in self._module.named_children() if self._depth else ():
            yield name, _Outer(child, self._depth - 1)


class ModelNames:
    """``by_name``: the names in ``model`` of the tensors in files of its architecture."""

    def __init__(self, path: Path, architecture: str, model: nn.Module, config: dict[str, Any]) -> None:
        """``config``: the model's, as derived from the file at ``path``. Raises ``CheckpointError`` without a table."""
        from transformers.modeling_gguf_pytorch_utils import (
            TENSOR_PROCESSORS,
            TensorProcessor,
            get_gguf_hf_weights_map,
        )

        self._processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=config)
        self._orders: dict[tuple[str, int, int], RowOrder | None] = {}
        try:
            self.by_name: dict[str, str] = get_gguf_hf_weights_map(_Outer(model), self._processor)
        except Exception as error:  # for models that gguf, the package, doesn't know
            raise unsupported(f"{path}: transformers has no names for {architecture}: {error}") from error

    def find(self, name: str) -> str | None:
        """The name in the model; None if it has no such tensor. Experts have layers of their own, by number."""
        if (expert := EXPERT.fullmatch(name)) is None:
            return self.by_name.get(name)
        fused = self.by_name.get(expert[1], self.by_name.get(f"{expert[1]}.weight"))
        return None if fused is None else f"{split_name(fused)[0]}.{expert[3]}.{expert[2]}_proj.weight"

    def row_order(self, name: str, N: int, K: int) -> RowOrder | None:
        """The rows of the weight ``name``, ``[N, K]`` in the file, in the model's order; None if more is changed.

        A layer that holds its weight as ``[K, N]`` has these rows as columns.
        """
        kind = re.sub(r"\d+", "", name), N, K
        if kind not in self._orders:
            self._orders[kind] = self._find_order(name, N, K)
        return self._orders[kind]

    def _find_order(self, name: str, N: int, K: int) -> RowOrder | None:
        if EXPERT.fullmatch(name):
            return _UNCHANGED
        import numpy as np

        numbers = np.broadcast_to(np.arange(N, dtype=np.float32)[:, None], (N, K))
        made = self._processed(name, numbers)
        if made is numbers:
            return _UNCHANGED
        if made.shape == (K, N) and (made == numbers.T).all():
            return _UNCHANGED
        if made.shape != (N, K) or not (made == made[:, :1]).all():
            return None
        order = torch.from_numpy(made[:, 0].astype(np.int64))
        return order if torch.equal(order.sort().values, torch.arange(N, device="cpu")) else None

    def changes(self, name: str, shape: tuple[int, ...]) -> bool:
        """Whether the values of the tensor ``name``, or their shape, differ in the model."""
        import numpy as np

        value = np.broadcast_to(np.float32(-1), shape)  # takes no memory, and has a logarithm once its sign is changed
        return EXPERT.fullmatch(name) is None and self._processed(name, value) is not value

    def changed(self, name: str, value: Tensor) -> Tensor:
        """The model's value of the tensor ``name``, float32."""
        import numpy as np

        made = np.ascontiguousarray(self._processed(name, value.float().cpu().numpy()))
        return torch.from_numpy(made).to(value.device)

    def _processed(self, name: str, value: Any) -> Any:
        # A processor may also put a value where it belongs by itself.
        parsed: dict[str, dict[str, Any]] = {"tensors": {}}
        made = self._processor.process(
            weights=value, name=name, tensor_key_mapping=self.by_name, parsed_parameters=parsed
        )
        return next((each.numpy() for each in parsed["tensors"].values()), made.weights)
