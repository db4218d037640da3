"""The names of layers and tensors: what a folder of qgemm calls them, and what vLLM is to have.

vLLM merges layers (``q_proj``, ``k_proj`` and ``v_proj`` to ``qkv_proj``); its ``packed_modules_mapping`` says of which
parts. Files go to it but for these:

- Rotary frequencies and the like, which models make for themselves: qgemm stores them, vLLM doesn't know them.
- Biases into which a zero point is folded: vLLM drops biases of layers that have none, and keeps others in the model's
  dtype. They get a parameter of their own.
- Fused experts: vLLM reads those of many models expert by expert only.
- Mixtures that transformers has renamed to ``mlp``, as Mixtral's: vLLM has the old name.
- Weights of GPT-2, which vLLM transposes: it takes them for those of a ``Conv1D``, and qgemm stores ``[N, K]``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from qgemm.checkpoint.manifest import QUANT_METHOD, Manifest
from qgemm.nn.experts import split_leaf
from qgemm.nn.kinds import linear_class
from qgemm.scheme import QuantScheme

OLD_MIXTURE = ".block_sparse_moe."
"""What ``.mlp.`` was called in some models, and is in vLLM, with experts of ``w1``, ``w3`` and ``w2``."""

FOLDED_BIAS = "folded_bias"
"""The parameter for a bias that depends on the weight."""

STEP = "weight_step"
"""The parameter for what was found out of scales that are multiples of a step."""

# Buffers that transformers' models have and ``state_dict`` leaves out.
_MADE_BY_MODELS = re.compile(r"(^|\.)(rotary_\w*\.\w+|(original_)?inv_freq|embed_scale)$")

# Of GPT-2.
_CONV1D = re.compile(r"\.(c_attn|c_proj|c_fc)$")


def manifest_of(hf_config: Any) -> Manifest | None:
    """What a model's config says of a folder in qgemm's own format; None for others."""
    for holder in (hf_config, getattr(hf_config, "text_config", None)):
        found = getattr(holder, "quantization_config", None)
        if isinstance(found, dict) and found.get("quant_method") == QUANT_METHOD:
            return Manifest.from_config({"quantization_config": found}, Path("config.json"))
    return None


def scheme_of(name: str, layers: Mapping[str, QuantScheme], merged: Mapping[str, Sequence[str]]) -> QuantScheme | None:
    """The scheme of a layer of vLLM, which may be ``merged`` of several; None if it is in float.

    Raises ``ValueError`` if its parts differ.
    """
    for own in (name, name.replace(OLD_MIXTURE, ".mlp.")):
        if own in layers:
            return layers[own]
    head, _, last = name.rpartition(".")
    parts = [f"{head}.{part}" if head else part for part in merged.get(last, ())]
    schemes = {part: layers.get(part) for part in parts}
    first = next(iter(schemes.values()), None)
    if any(scheme != first for scheme in schemes.values()):
        shown = ", ".join(f"{part}: {scheme.name if scheme else 'float'}" for part, scheme in schemes.items())
        raise ValueError(
            f"vLLM computes {name} as one layer, but its parts are quantized differently ({shown}): give them one "
            "scheme, or leave all of them in float"
        )
    return first


def for_vllm(
    tensors: Iterable[tuple[str, Tensor]], manifest: Manifest, old_mixture: bool = False, transposes: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a folder under the names that vLLM is to have.

    ``old_mixture``: whether those of mixtures have their old names in its model. ``transposes``: whether its model
    transposes the weights of a ``Conv1D``.
    """
    folded = {layer for layer, scheme in manifest.layers.items() if scheme.has_zero_point}
    for name, tensor in tensors:
        layer, _, leaf = name.rpartition(".")
        if leaf == "bias" and layer in folded:
            yield f"{layer}.{FOLDED_BIAS}", tensor
        elif layer in manifest.layers and leaf.startswith(("gate_up_proj", "down_proj")):
            is_whole = split_leaf(leaf)[1] in linear_class(manifest.layers[layer]).whole_names
            parts = _of_each_expert(layer, leaf, tensor, _OLD_LEAVES if old_mixture else _LEAVES, is_whole)
            yield from ((_old(part) if old_mixture else part, value) for part, value in parts)
        elif transposes and leaf == "weight" and layer in manifest.layers and _CONV1D.search(layer):
            yield name, tensor.t()
        elif not _MADE_BY_MODELS.search(name):
            yield _old(name) if old_mixture else name, tensor


_LEAVES, _OLD_LEAVES = ("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")


def _old(name: str) -> str:
    return name.replace(".mlp.", OLD_MIXTURE)


def _of_each_expert(
    experts: str, leaf: str, tensor: Tensor, leaves: tuple[str, str, str], is_whole: bool
) -> Iterator[tuple[str, Tensor]]:
    """The rows of gates, ups or down of each expert, ``[E, N, K]``, and what belongs to them, as a layer each.

    ``is_whole``: whether an expert's value belongs to all of its rows, as a global scale does.
    """
    weight, own = split_leaf(leaf)
    parts = leaves[:2] if weight == "gate_up_proj" else leaves[2:]
    for expert, rows in enumerate(tensor):
        values = [rows] * len(parts) if is_whole else rows.chunk(len(parts))
        for part, value in zip(parts, values, strict=True):
            yield f"{experts}.{expert}.{part}.{own}", value
