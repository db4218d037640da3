"""What the tensors of a GGUF file are called in a transformers model, and how their values differ there.

transformers has a table of names, and for some architectures a class that changes values: it reorders the rows of
queries and keys, subtracts 1 from the weights of norms, and so on. Reordered rows can stay packed: what becomes of a
matrix whose rows are numbered shows the order.
"""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from qgemm.checkpoint.errors import CheckpointError, said_by, unsupported
from qgemm.checkpoint.gguf_architectures import ARCHITECTURES
from qgemm.checkpoint.gguf_config import OWN_CONFIGS
from qgemm.checkpoint.gguf_qwen import QWENS, changed, order_of_columns, own_name
from qgemm.checkpoint.tensors import split_name

EXPERT = re.compile(r"(.*)\.ffn_(gate|up|down)(?:_exps)?\.(\d+)\.(weight|bias)")
"""A tensor of a single expert, as ``GgufFile`` lists it, or as old files of Mixtral hold it."""

RowOrder = slice | Tensor
"""What indexes the rows of a matrix."""

_UNCHANGED = slice(None)
# What has another name in the table, or none.
_ROUTER_SCALE = re.compile(r"model\.layers\.(\d+)\.router\.scale")
_CORRECTION = re.compile(r"model\.layers\.(\d+)\.mlp\.gate\.e_score_correction_bias")
_GATES_AND_UPS = re.compile(r"model\.layers\.(\d+)\.(?:mlp\.)?experts\.gate_up_proj")


class ModelNames:
    """``by_name``: the names in ``model`` of the tensors in files of its ``architecture``."""

    def __init__(self, path: Path, architecture: str, model: nn.Module, config: dict[str, Any]) -> None:
        """``config``: the model's, as derived from the file at ``path``. Raises ``CheckpointError`` without a table."""
        from transformers.modeling_gguf_pytorch_utils import (
            TENSOR_PROCESSORS,
            TensorProcessor,
            get_gguf_hf_weights_map,
        )

        own = ARCHITECTURES.get(architecture)
        rows_as = "llama" if own is not None and own.rows_as_llama else architecture
        self._processor = TENSOR_PROCESSORS.get(rows_as, TensorProcessor)(config=config)
        self._path, self._config, self.architecture = path, config, architecture
        self._orders: dict[tuple[str, int, int], RowOrder | None] = {}
        try:
            # Mixtral's files say llama, and have its names.
            kind = architecture if architecture == "llama" or architecture in OWN_CONFIGS else None
            self.by_name: dict[str, str] = get_gguf_hf_weights_map(_outermost(model), self._processor, kind)
        except Exception as error:  # for models that gguf, the package, doesn't know
            raise unsupported(f"{path}: transformers has no names for {architecture}: {said_by(error)}") from error
        for name in model.state_dict():
            if match := _ROUTER_SCALE.fullmatch(name):
                self.by_name[f"blk.{match[1]}.ffn_gate_inp.scale"] = name
            if self.architecture in QWENS and (own_here := own_name(name)) is not None:
                self.by_name[own_here] = name
            if match := _CORRECTION.fullmatch(name):
                self.by_name[f"blk.{match[1]}.exp_probs_b.bias"] = name
            if match := _GATES_AND_UPS.fullmatch(name):
                for part in ("gate", "up"):
                    self.by_name.setdefault(f"blk.{match[1]}.ffn_{part}_exps", name)

    def find(self, name: str) -> str | None:
        """The name in the model; None if it has no such tensor. Experts have layers of their own, by number."""
        if (expert := EXPERT.fullmatch(name)) is None:
            return self._known(name)
        block, kind, number, leaf = expert.groups()
        fused = self._known(f"{block}.ffn_{kind}_exps.weight")
        return None if fused is None else f"{split_name(fused)[0]}.{number}.{kind}_proj.{leaf}"

    def _known(self, name: str) -> str | None:
        # What isn't called weight in the model is in files.
        return self.by_name.get(name, self.by_name.get(name.removesuffix(".weight")))

    def row_order(self, name: str, N: int, K: int) -> RowOrder | None:
        """The rows of the weight ``name``, ``[N, K]`` in the file, in the model's order; None if more is changed.

        A layer that holds its weight as ``[K, N]`` has these rows as columns.
        """
        kind = re.sub(r"\d+", "", name), N, K
        if kind not in self._orders:
            self._orders[kind] = self._find_order(name, N, K)
        return self._orders[kind]

    def _find_order(self, name: str, N: int, K: int) -> RowOrder | None:
        if EXPERT.fullmatch(name) or K == 0:
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

    def column_order(self, name: str, N: int, K: int) -> Tensor | None:
        """As ``row_order``, of the columns; None if it is the file's."""
        try:
            return order_of_columns(self.architecture, name, K, self._config) if N > 0 else None
        except ValueError as error:
            raise self._misfit(name, (N, K), error) from error

    def _misfit(self, name: str, shape: tuple[int, ...], error: Exception) -> CheckpointError:
        return CheckpointError(f"{self._path}: settings don't fit tensor {name}, {list(shape)}: {error!r}")

    def changed_shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...] | None:
        """The shape in the model of the tensor ``name``; None if neither shape nor values differ from the file's."""
        import numpy as np

        value = np.broadcast_to(np.float32(-1), shape)  # takes no memory, and has a logarithm once its sign is changed
        if EXPERT.fullmatch(name) or (made := self._processed(name, value)) is value:
            return None
        return tuple(made.shape)

    def changed(self, name: str, value: Tensor) -> Tensor:
        """The model's value of the tensor ``name``, float32."""
        import numpy as np

        made = np.ascontiguousarray(self._processed(name, value.float().cpu().numpy()))
        return torch.from_numpy(made).to(value.device)

    def _processed(self, name: str, value: Any) -> Any:
        # A processor may also put a value where it belongs by itself.
        parsed: dict[str, dict[str, Any]] = {"tensors": {}}
        try:
            if self.architecture in QWENS:
                return changed(self.architecture, name, value, self._config)
            made = self._processor.process(
                weights=value, name=name, tensor_key_mapping=self.by_name, parsed_parameters=parsed
            )
        except (ValueError, KeyError, IndexError, ZeroDivisionError) as error:
            raise self._misfit(name, value.shape, error) from error
        return next((each.numpy() for each in parsed["tensors"].values()), made.weights)


def _outermost(module: nn.Module, depth: int = 1) -> Any:
    """What transformers asks of a module when it looks for names, with children down to ``depth`` alone.

    A base model may have been converted by itself, which has names of its own. transformers also makes the table of
    names for each module inside, which takes 50 seconds for 80 layers.
    """
    children = [(name, _outermost(child, depth - 1)) for name, child in module.named_children()] if depth else []
    config = getattr(module, "config", None)
    return SimpleNamespace(config=config, state_dict=module.state_dict, named_children=lambda: children)
