"""Maps the names of layers and tensors in a folder of qgemm to those that vLLM expects.

vLLM merges layers (``q_proj``, ``k_proj`` and ``v_proj`` to ``qkv_proj``); its ``packed_modules_mapping`` lists their
parts. Tensors are passed to it unchanged, with these exceptions:

- Rotary frequencies and the like, which models compute themselves: qgemm stores them, vLLM doesn't know them.
- Biases into which a zero point is folded: vLLM drops the bias of a layer that has none, and keeps others in the
  model's dtype. They get a parameter of their own.
- Fused experts, whose layout and biases every model in vLLM reads in a different way: layers load them directly.
- Mixtures that transformers has renamed to ``mlp``, such as Mixtral's: vLLM uses the old name.
- Weights of GPT-2, which vLLM transposes, because it takes them for a ``Conv1D``'s; qgemm stores ``[N, K]``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from qgemm.checkpoint.manifest import QUANT_METHOD, Manifest
from qgemm.scheme import QuantScheme

OLD_MIXTURE = ".block_sparse_moe."
"""The former name of ``.mlp.`` in some models, which vLLM still uses, with experts named ``w1``, ``w3`` and ``w2``."""

FOLDED_BIAS = "folded_bias"
"""The parameter for a bias that depends on the weight."""

STEP = "weight_step"
"""The parameter for the steps of scales that are multiples of a step."""

# Buffers of transformers' models that ``state_dict`` leaves out.
_MADE_BY_MODELS = re.compile(r"(^|\.)(rotary_\w*\.\w+|(original_)?inv_freq|embed_scale)$")

# Layers of GPT-2.
_CONV1D = re.compile(r"\.(c_attn|c_proj|c_fc)$")


def manifest_of(hf_config: Any) -> Manifest | None:
    """The manifest in the config of a model in qgemm's own format; None for others."""
    for holder in (hf_config, getattr(hf_config, "text_config", None)):
        found = getattr(holder, "quantization_config", None)
        if isinstance(found, dict) and found.get("quant_method") == QUANT_METHOD:
            return Manifest.from_config({"quantization_config": found}, Path("config.json"))
    return None


def key_of(name: str, layers: Mapping[str, Any]) -> str:
    """The key in ``layers`` of an unmerged layer that vLLM calls ``name``."""
    return name if name in layers else name.replace(OLD_MIXTURE, ".mlp.")


def scheme_of(name: str, layers: Mapping[str, QuantScheme], merged: Mapping[str, Sequence[str]]) -> QuantScheme | None:
    """The scheme of a layer of vLLM, which may be ``merged`` from several; None if it is in float.

    Raises ``ValueError`` if its parts differ.
    """
    if (own := key_of(name, layers)) in layers:
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
    tensors: Iterable[tuple[str, Tensor]],
    manifest: Manifest,
    experts: Mapping[str, Callable[[str, Tensor], None]] | None = None,
    old_mixture: bool = False,
    transposes: bool = False,
) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors of a folder under the names that vLLM expects.

    ``experts``: the functions that load parameters of fused experts, by their names in the files; parameters of other
    experts belong to another rank. ``old_mixture``: whether mixtures have their old names in vLLM's model.
    ``transposes``: whether vLLM's model transposes the weights of a ``Conv1D``.
    """
    folded = {layer for layer, scheme in manifest.layers.items() if scheme.has_zero_point}
    for name, tensor in tensors:
        layer, _, leaf = name.rpartition(".")
        if layer in manifest.layers and leaf.startswith(("gate_up_proj", "down_proj")):
            if experts is not None and layer in experts:
                experts[layer](leaf, tensor)
        elif leaf == "bias" and layer in folded:
            yield f"{layer}.{FOLDED_BIAS}", tensor
        elif transposes and leaf == "weight" and layer in manifest.layers and _CONV1D.search(layer):
            yield name, tensor.t()
        elif not _MADE_BY_MODELS.search(name):
            yield name.replace(".mlp.", OLD_MIXTURE) if old_mixture else name, tensor
