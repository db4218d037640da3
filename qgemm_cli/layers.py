"""The layers that a checkpoint's tensors form, according to names, shapes and dtypes: no model is built.

| format | a layer ``[N, K]`` in the files |
|---|---|
| qgemm, compressed-tensors | ``weight`` int8 with ``weight_scale`` ``[N]``, ``[N, 1]`` or ``[1]`` |
| qgemm, 4 bits | ``weight`` uint8 ``[N, 128 * ceil(K / 256)]`` with ``weight_scale`` ``[N, groups]`` |
| bitsandbytes | ``weight`` int8 with ``SCB`` ``[N]``; in 4 bits ``weight`` uint8 with ``weight.quant_state...`` |
| fp8 | ``weight`` float8 with ``weight_scale`` or, in blocks, ``weight_scale_inv`` |
| both, packed | ``weight_packed`` int32 ``[N, K * bits / 32]`` with ``weight_scale`` ``[N, groups]`` |
| fp4 | ``weight_packed`` or ``weight`` uint8 ``[N, K / 2]`` with ``weight_scale``; of experts ``..._blocks`` |
| GPTQ | ``qweight`` int32 ``[K * bits / 32, N]`` with ``scales`` ``[groups, N]`` and ``qzeros`` |
| AWQ | ``qweight`` int32 ``[K, N * bits / 32]`` with the same |
| EETQ | ``weight`` int8 ``[K, N]`` with ``weight_scales`` ``[N]`` |
| HQQ | ``W_q`` uint8 with ``scale``, ``zero`` and ``shape`` |
| quanto | ``weight._data`` int8 or float8 with ``weight._scale``; in 2 and 4 bits packed, as a reader knows |
| Quark | ``weight`` and ``weight_scale``, in groups transposed; of 4 bits int32 |
| GGUF | a tensor of a type of blocks; of experts, a tensor each |
| torchao | ``_weight_qdata`` int8 or float8 ``[N, K]`` with ``_weight_scale``; in 4 bits packed, as a reader knows |
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from qgemm.checkpoint.bitsandbytes_4bit import KINDS, STATE
from qgemm.checkpoint.contents import Contents
from qgemm.checkpoint.gguf import GgufModel
from qgemm.checkpoint.gguf_types import TYPES
from qgemm.checkpoint.safetensors_file import StoredTensor
from qgemm.checkpoint.tensors import FLOAT_DTYPES, split_name
from qgemm.numerics.formats import FORMATS, FP8_DTYPES
from qgemm.numerics.packing import packed_width
from qgemm_cli.checkpoint import Checkpoint, name_of_dtype

MATRICES = ("linear", "experts")
"""The kinds of layers that take part in matrix products, and so can be quantized."""

BLOCKS = frozenset(kind.name for kind in TYPES.values() if kind.is_quantized)
"""What GGUF calls its types of blocks."""

# Of bitsandbytes' 4 bits, and of quanto.
_PARTS_OF_WEIGHT = re.compile(
    r"(.*)\.(weight\.(?:(?:nested_)?absmax|(?:nested_)?quant_map|quant_state\..*|_data(?:\._data)?|_scale|_shift))"
)
_COMPANIONS = re.compile(r"(.*?)_(scale|scales|scale_inv|bias|blocks|zero_point|global_scale)")
# "embed_out" is an output head.
_EMBEDDING = re.compile(r"embed(?!_out)|embd|^wte$|^wpe$|^shared$|relative_attention_bias")


@dataclass(frozen=True)
class StoredLayer:
    """A layer, or another part of a module's tensors.

    - ``kind``: ``"linear"``, ``"experts"`` (the weights of all experts in one tensor), ``"embedding"`` or ``"other"``.
    - ``storage``: how its weight is stored: ``"int8"``, ``"fp8"``, ``"int4"``, one of ``BLOCKS``, or a float dtype.
    - ``shape``: of the weight in the product, ``[N, K]``, however it is packed.
    - ``tensors``: by the rest of their names after the layer's name.
    """

    name: str
    kind: str
    storage: str
    shape: tuple[int, ...]
    tensors: dict[str, StoredTensor]

    @property
    def is_quantized(self) -> bool:
        """Whether its weight is stored in fewer than 16 bits."""
        is_packed = self.storage in FORMATS or self.storage in BLOCKS or self.storage.startswith(("int", "uint"))
        return is_packed and self.kind in MATRICES

    @property
    def module(self) -> str:
        """The module that contains it: for experts, whose two weights are two layers, the name without the weight's."""
        return self.name.rpartition(".")[0] if self.kind == "experts" else self.name

    @property
    def nbytes(self) -> int:
        """The size of its tensors as they are stored, in bytes."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def weights(self) -> int:
        """The number of values in the weight."""
        return math.prod(self.shape)

    @property
    def scales(self) -> dict[str, StoredTensor]:
        """The tensors that multiply its weight, by their full names."""
        return {self.full_name(leaf): tensor for leaf, tensor in self.tensors.items() if is_scale(leaf)}

    def full_name(self, leaf: str) -> str:
        """The name of one of ``tensors`` in the files."""
        if self.kind == "experts":
            return self.name + leaf
        return f"{self.name}.{leaf}" if self.name else leaf


def is_scale(leaf: str) -> bool:
    """Whether a tensor with this name, without its layer's name, is a scale."""
    return leaf == "SCB" or leaf.endswith(("scale", "scales", "scale_inv", "absmax"))


def find_layers(checkpoint: Checkpoint) -> list[StoredLayer]:
    """The layers in ``checkpoint``, in its order; packed weights have 4 bits unless the config says otherwise."""
    if checkpoint.gguf is not None:
        return _layers_of_gguf(checkpoint, checkpoint.gguf)
    modules: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in checkpoint.stored.items():
        if match := _PARTS_OF_WEIGHT.fullmatch(name):
            module, leaf = match.groups()
        else:
            module, _, leaf = name.rpartition(".") if name.rfind(".") > 0 else ("", "", name)
        modules.setdefault(module, {})[leaf] = tensor
    bits, contents = checkpoint.bits or 4, checkpoint.contents
    return [layer for name, tensors in modules.items() for layer in _layers_of(name, tensors, bits, contents)]


def _layers_of_gguf(checkpoint: Checkpoint, source: GgufModel) -> list[StoredLayer]:
    """The layers by the names of the model that ``contents`` fit, if there are any; experts become one layer."""
    parts: dict[str, list[str]] = {}
    experts: dict[str, int] = {}
    for name in source.stored:
        targets = [] if checkpoint.contents is None else checkpoint.contents.conversion_of(name).targets
        target = next(filter(None, targets), None)
        own = name if target is None else target.name
        if target is not None and target.whole:
            own = own.removesuffix("_bias")
        parts.setdefault(own, []).append(name)
        if target is not None and len(target.whole) == 3:
            experts[own] = target.whole[0]
    modules: dict[str, dict[str, str]] = {}
    found = []
    for own, names in parts.items():
        if own in experts:
            found.append(_experts_of_gguf(own, experts[own], names, checkpoint, source))
        else:
            module, leaf = split_name(own)
            first, *others = sorted(names, key=lambda name: not name.endswith(".weight"))  # factors may precede it
            modules.setdefault(module, {}).update({leaf: first} | {name: name for name in others})
    return [*found, *(_module_of_gguf(module, names, checkpoint, source) for module, names in modules.items())]


def _experts_of_gguf(own: str, count: int, names: list[str], checkpoint: Checkpoint, source: GgufModel) -> StoredLayer:
    weights = [name for name in names if name.endswith(".weight")]
    total, K = sum(math.prod(source.shape(name)) for name in weights), source.shape(weights[0])[-1]
    whole = count, total // max(count * K, 1), K
    storage = ", ".join(dict.fromkeys(checkpoint.storage_of(name) for name in weights))
    return StoredLayer(own, "experts", storage, whole, {name: source.stored[name] for name in names})


def _module_of_gguf(module: str, names: dict[str, str], checkpoint: Checkpoint, source: GgufModel) -> StoredLayer:
    """``names``: those in the files, by the module's."""
    main = max(names.values(), key=lambda name: math.prod(source.shape(name)))
    shape, kind = source.shape(names.get("weight", main)), "other"
    if "weight" in names and len(shape) == 2:
        main, kind = names["weight"], "embedding" if _is_embedding(module) else "linear"
    tensors = {leaf: source.stored[name] for leaf, name in names.items()}
    return StoredLayer(module, kind, checkpoint.storage_of(main), shape, tensors)


def _is_embedding(module: str) -> bool:
    return _EMBEDDING.search(module.rpartition(".")[2]) is not None


def _layers_of(
    module: str, tensors: dict[str, StoredTensor], bits: int, contents: Contents | None
) -> Iterable[StoredLayer]:
    tensors = dict(tensors)
    if "expert" in module:
        shapes = {leaf: tensor.shape for leaf, tensor in tensors.items()}
        for leaf in [leaf for leaf, tensor in tensors.items() if _is_experts(leaf, tensor)]:
            base = leaf.removesuffix("_blocks")
            own = [one for one in tensors if one == leaf or ((m := _COMPANIONS.fullmatch(one)) and m[1] == base)]
            storage, shape = _own_experts(module, leaf, shapes, contents) or _experts_storage(leaf, tensors[leaf])
            name = f"{module}.{base}" if module else base
            yield StoredLayer(name, "experts", storage, shape, {one[len(base) :]: tensors.pop(one) for one in own})
    if not tensors:
        return
    if (linear := _known(module, tensors, contents) or _packed(tensors, bits) or _plain(module, tensors)) is not None:
        kind, storage, shape = linear
        yield StoredLayer(module, kind, storage, shape, tensors)
    else:
        largest = max(tensors.values(), key=lambda tensor: math.prod(tensor.shape))
        yield StoredLayer(module, "other", name_of_dtype(largest.dtype), largest.shape, tensors)


def _is_experts(leaf: str, tensor: StoredTensor) -> bool:
    if leaf.endswith("_blocks"):
        return tensor.dtype == torch.uint8 and len(tensor.shape) == 4
    return len(tensor.shape) == 3 and not is_scale(leaf) and not leaf.endswith(("_bias", "_zero_point"))


def _own_experts(
    module: str, leaf: str, shapes: dict[str, tuple[int, ...]], contents: Contents | None
) -> tuple[str, tuple[int, ...]] | None:
    """For packed experts in qgemm's own format: the length of rows follows from the rows of the other weight."""
    first, second = (shapes.get(name) for name in ("gate_up_proj", "down_proj"))
    scheme = None if contents is None else contents.manifest.layers.get(module)
    weight = None if scheme is None else scheme.of(leaf).weight
    if weight is None or weight.format.bits != 4 or first is None or second is None:
        return None
    if leaf == "gate_up_proj":
        return weight.dtype, (*first[:2], second[1])
    # Half of them if there are gates and ups.
    fitting = [K for K in (first[1] // 2, first[1]) if packed_width(K) == second[2]]
    return None if not fitting else (weight.dtype, (*second[:2], fitting[0]))


def _experts_storage(leaf: str, tensor: StoredTensor) -> tuple[str, tuple[int, ...]]:
    if leaf.endswith("_blocks"):  # gpt-oss: two 4-bit values per byte
        experts, n, groups, half = tensor.shape
        return "fp4", (experts, n, 2 * groups * half)
    return _value_name(tensor.dtype), tensor.shape


def _known(
    module: str, tensors: dict[str, StoredTensor], contents: Contents | None
) -> tuple[str, str, tuple[int, ...]] | None:
    """A layer with packed rows whose length a reader knows."""
    if contents is None:
        return None
    manifest, weight, shape = contents.manifest, tensors.get("weight"), contents.shapes.get(module)
    if module in manifest.in_features and weight is not None and len(weight.shape) == 2:
        shape = weight.shape[0], manifest.in_features[module]
    kind = "embedding" if _is_embedding(module) else "linear"
    return None if shape is None else (kind, manifest.layers[module].weight.dtype, shape)


def _packed(tensors: dict[str, StoredTensor], bits: int) -> tuple[str, str, tuple[int, ...]] | None:
    per_word = 32 / bits
    if (packed := tensors.get("weight_packed")) is not None and len(packed.shape) == 2:
        if packed.dtype == torch.uint8:
            return "linear", "fp4", (packed.shape[0], 2 * packed.shape[1])
        return "linear", f"int{bits}", (packed.shape[0], int(packed.shape[1] * per_word))
    qweight, scales = tensors.get("qweight"), tensors.get("scales")
    if qweight is None or len(qweight.shape) != 2:
        return None
    rows, columns = qweight.shape
    if scales is not None and scales.shape[-1:] == (columns,):  # GPTQ; AWQ packs along N
        return "linear", f"int{bits}", (columns, int(rows * per_word))
    return "linear", f"int{bits}", (int(columns * per_word), rows)


def _plain(module: str, tensors: dict[str, StoredTensor]) -> tuple[str, str, tuple[int, ...]] | None:
    weight = tensors.get("weight", tensors.get("_weight_qdata"))
    if weight is None:
        return None
    for leaf in tensors:
        if f".{leaf}".startswith(STATE):
            kind = f".{leaf}".removeprefix(STATE)
            return "linear", KINDS[kind].name if kind in KINDS else kind, (2 * math.prod(weight.shape),)
    if len(weight.shape) != 2:
        return None
    if weight.dtype == torch.uint8 and any(map(is_scale, tensors)):
        return "linear", "fp4", (weight.shape[0], 2 * weight.shape[1])
    if weight.dtype in (torch.int8, *FP8_DTYPES):
        return "linear", _value_name(weight.dtype), weight.shape
    if weight.dtype in FLOAT_DTYPES:
        (n, k), bias = weight.shape, tensors.get("bias")
        if bias is not None and bias.shape == (k,) != (n,):
            n, k = k, n  # transformers' Conv1D stores its float weight as [K, N]
        return "embedding" if _is_embedding(module) else "linear", name_of_dtype(weight.dtype), (n, k)
    return None


def _value_name(dtype: torch.dtype | None) -> str:
    return "fp8" if dtype in FP8_DTYPES else name_of_dtype(dtype)


def coverage(layers: Iterable[StoredLayer]) -> float | None:
    """The quantized fraction of the weights of linear layers and experts, 0 to 1; None if there are none."""
    matrices = [layer for layer in layers if layer.kind in MATRICES]
    total = sum(layer.weights for layer in matrices)
    return sum(layer.weights for layer in matrices if layer.is_quantized) / total if total else None
