"""Checkpoints of the compressed-tensors library (LLM Compressor, vLLM): int8 by int8, and packed 4-bit weights.

Here is format ``int-quantized``; ``pack_quantized.py`` has the packed one.

Reading: ``<layer>.weight`` int8 ``[N, K]``; ``<layer>.weight_scale`` in any float dtype, ``[N, 1]`` per channel or
``[1]`` per tensor; for static activations ``<layer>.input_scale`` ``[1]``. The files say which layers are quantized:
those with a ``weight_scale``. The config's targets, which may be anyone's regular expressions, are not evaluated;
instead every group must be something that qgemm computes.

Writing: the same, per channel, with scales in float32, so that none is rounded. transformers reads them in the model's
dtype, as if they had been stored in it; vLLM's are float32.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from qgemm.checkpoint import pack_quantized
from qgemm.checkpoint.contents import Contents
from qgemm.checkpoint.errors import CheckpointError
from qgemm.checkpoint.manifest import Manifest
from qgemm.checkpoint.pretrained import built_again, is_pretrained
from qgemm.checkpoint.safetensors_file import StoredTensor, unfit
from qgemm.checkpoint.tensors import FLOAT_DTYPES, split_name, transient_names
from qgemm.nn import LinearLayer, QuantLayer, QuantLinear, QuantMultiheadAttention, WeightOnlyLinear
from qgemm.nn.linear_layer import is_conv1d
from qgemm.numerics.formats import INT8
from qgemm.scheme import SCHEMES, TensorScheme

QUANT_METHOD = "compressed-tensors"
FORMAT = "int-quantized"
MIXED = "mixed-precision"
_ASYMMETRIC = "the zero point is not 0: the layer is quantized asymmetrically, which qgemm doesn't compute"


def read(quantization: dict[str, Any], stored: dict[str, StoredTensor], config_path: Path) -> Contents:
    """The contents of a checkpoint with ``quantization_config`` and tensors such as these.

    Raises ``CheckpointError``, naming group and layer, for what qgemm can't compute.
    """
    strategies, schemes = _check_groups(quantization, stored, config_path)
    contents = Contents(Manifest({}, {}), stored, dict(stored), is_foreign=True)
    for name, tensor in stored.items():
        layer, leaf = split_name(name)
        if leaf == "weight_packed":
            pack_quantized.note_layer(contents, layer, tensor, schemes)
        elif leaf == "weight_scale" and f"{layer}.weight_packed" not in stored:
            scheme = "int8-static" if f"{layer}.input_scale" in stored else "int8"
            if scheme not in schemes:
                said = "static" if scheme == "int8" else "dynamic"
                has = "no input_scale" if scheme == "int8" else "an input_scale"
                raise CheckpointError(f"{config_path}: activations are {said}, but layer {layer} has {has}")
            contents.manifest.layers[layer] = SCHEMES[scheme]
            _note_weight_scale(contents, layer, tensor, strategies)
        elif leaf == "input_scale":
            if f"{layer}.weight_scale" not in stored:
                raise CheckpointError(f"{tensor.path}: {layer} has an input_scale but no weight_scale")
            _check_scale(name, tensor, {(), (1,)})
            contents.convert(name, name, (), lambda value: value.float().reshape(()))
        elif leaf in ("weight_zero_point", "input_zero_point"):
            # Older versions store them for symmetric schemes as well.
            contents.must_be_zero(name, _ASYMMETRIC)
    return contents


def _note_weight_scale(contents: Contents, layer: str, scale: StoredTensor, strategies: set[str]) -> None:
    weight = contents.stored.get(f"{layer}.weight")
    if weight is None or weight.dtype != INT8.storage or len(weight.shape) != 2:
        found = "no weight" if weight is None else f"a weight of {weight}"
        raise CheckpointError(f"{scale.path}: layer {layer} has a weight_scale but {found}; it must be int8, [N, K]")
    n = weight.shape[0]
    shapes: set[tuple[int, ...]] = set()
    if "channel" in strategies:
        shapes |= {(n, 1), (n,)}
    if "tensor" in strategies:
        shapes |= {(1,), ()}
    name = f"{layer}.weight_scale"
    _check_scale(name, scale, shapes)
    contents.convert(name, name, (n,), lambda value: value.float().reshape(-1).expand(n).clone())


def _check_scale(name: str, scale: StoredTensor, shapes: set[tuple[int, ...]]) -> None:
    if scale.dtype not in FLOAT_DTYPES or scale.shape not in shapes:
        allowed = " or ".join(str(list(shape)) for shape in sorted(shapes))
        raise unfit(scale.path, name, scale, f"of a float dtype and {allowed}")


def _check_groups(
    quantization: dict[str, Any], stored: dict[str, StoredTensor], config_path: Path
) -> tuple[set[str], set[str]]:
    """The weights' granularities and the schemes in use; raises ``CheckpointError`` if qgemm doesn't know one."""
    status = quantization.get("quantization_status")
    if status != "compressed":
        raise CheckpointError(
            f"{config_path}: quantization_status is {status!r}; only 'compressed' files hold quantized values"
        )
    for feature in ("kv_cache_scheme", "transform_config"):
        if quantization.get(feature):
            raise CheckpointError(f"{config_path}: it has a {feature}, which qgemm doesn't compute")
    sparsity = quantization.get("sparsity_config")
    if sparsity and (not isinstance(sparsity, dict) or sparsity.get("format") != "dense"):
        raise CheckpointError(f"{config_path}: it has a sparsity_config, which qgemm doesn't read")
    groups = quantization.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise CheckpointError(f"{config_path}: config_groups must be an object of groups")
    strategies, schemes = set(), set()
    for name, group in groups.items():
        if not isinstance(group, dict):
            raise CheckpointError(f"{config_path}: config_groups.{name} must be an object")
        try:
            if (packed := pack_quantized.scheme_of_group(group, quantization.get("format"))) is not None:
                schemes.add(packed)
                continue
            weights, activations = _arguments(group, "weights"), _arguments(group, "input_activations")
            strategies.add(_weight_strategy(group, weights, quantization.get("format")))
            schemes.add(_activation_scheme(group, activations))
        except _Unsupported as problem:
            layer = _layer_with(problem.leaves, group, len(groups) == 1, stored)
            where = f"config_groups.{name}" + (f", such as layer {layer}," if layer else "")
            raise CheckpointError(f"{config_path}: {where} {problem}; {_SUPPORTED}") from None
    return strategies, schemes


_SUPPORTED = (
    f"qgemm runs {FORMAT} int8 weights, symmetric, per channel or tensor, with symmetric int8 activations, dynamic per "
    f"token or static per tensor; and {pack_quantized.FORMAT} int4 weights, symmetric, per channel or in groups of "
    f"{pack_quantized.GROUP_SIZE}, with activations in float"
)


class _Unsupported(Exception):
    """Something that qgemm doesn't compute. ``leaves``: the tensors by which a layer of that kind is known."""

    def __init__(self, text: str, *leaves: str) -> None:
        super().__init__(text)
        self.leaves = leaves


def _arguments(group: dict[str, Any], part: str) -> dict[str, Any]:
    values = group.get(part)
    if values is None:
        raise _Unsupported(f"leaves the {part} in float", "weight_packed")
    if not isinstance(values, dict):
        raise _Unsupported(f"has {part} that are no object")
    kind, bits = values.get("type", "int"), values.get("num_bits", 8)
    if kind != "int" or isinstance(bits, bool) or bits != INT8.bits:
        raise _Unsupported(f"has {part} of {bits} bits, {kind!r}", "weight_packed")
    if values.get("symmetric", True) is not True:
        leaf = "weight_zero_point" if part == "weights" else "input_zero_point"
        raise _Unsupported(f"has asymmetric {part}", leaf)
    return values


def _weight_strategy(group: dict[str, Any], weights: dict[str, Any], whole_format: object) -> str:
    stored_as = group.get("format") or whole_format
    if stored_as != FORMAT:
        raise _Unsupported(f"is stored as {stored_as!r}", "weight_packed")
    strategy = pack_quantized.strategy_of(weights)
    if strategy not in ("channel", "tensor"):
        raise _Unsupported(f"has weights scaled per {strategy}")
    if weights.get("dynamic", False) is not False:
        raise _Unsupported("has dynamic weights")
    return str(strategy)


def _activation_scheme(group: dict[str, Any], activations: dict[str, Any]) -> str:
    if group.get("output_activations") is not None:
        raise _Unsupported("quantizes output_activations", "output_scale")
    strategy, dynamic = activations.get("strategy") or "tensor", activations.get("dynamic", False)
    if strategy == "token" and dynamic is True:
        return "int8"
    if strategy == "tensor" and dynamic is False:
        return "int8-static"
    raise _Unsupported(f"has activations that are {'dynamic' if dynamic else 'static'} per {strategy}")


def _layer_with(
    leaves: tuple[str, ...], group: dict[str, Any], is_only: bool, stored: dict[str, StoredTensor]
) -> str | None:
    """A layer that is quantized in this way, if the files or the group's targets show one."""
    for name in stored:
        layer, leaf = split_name(name)
        if leaf in leaves or (is_only and leaf in ("weight_scale", "weight_packed")):
            return layer
    targets = group.get("targets")
    for target in targets if isinstance(targets, list) else []:
        if isinstance(target, str) and f"{target}.weight_scale" in stored:
            return target
    return None


def tensors_to_write(
    model: nn.Module, layers: dict[str, QuantLayer], tensors: dict[str, Tensor], ties: dict[str, str]
) -> dict[str, Tensor]:
    """The tensors of ``model`` as the library's files hold them.

    Of two that are ``ties`` only those that transformers ties by itself are left out, and buffers that ``state_dict``
    leaves out. Raises ``ValueError`` for layers that transformers builds as ``Conv1D``, which the library doesn't know,
    for experts, of which its files have one layer each, for projections of an ``nn.MultiheadAttention``, and for
    schemes that it has no form for.
    """
    if fused := [name for name, layer in layers.items() if not isinstance(layer, LinearLayer)]:
        raise ValueError(
            f"{fused[0]} holds fused experts, which can't be written for compressed-tensors yet: save the model with "
            'format="qgemm"'
        )
    for name, layer in layers.items():
        is_packed = isinstance(layer, WeightOnlyLinear) and layer.scheme.name in ("int4", "int4-channel")
        if type(layer) is not QuantLinear and not is_packed:
            raise ValueError(
                f"{name} has the scheme {layer.scheme.name!r}, which compressed-tensors can't store: save it with "
                'format="qgemm"'
            )
    if packed := [name for name, module in model.named_modules() if isinstance(module, QuantMultiheadAttention)]:
        raise ValueError(
            f"{packed[0]} was an nn.MultiheadAttention, whose packed weights compressed-tensors can't store: pass "
            'it in skip, or save the model with format="qgemm"'
        )
    if transposed := _conv1d_names(model, layers):
        raise ValueError(
            f"{transposed[0]} is a Conv1D in {type(model).__name__}, and compressed-tensors supports only nn.Linear: "
            'save it with format="qgemm"'
        )
    known_ties = getattr(model, "all_tied_weights_keys", None)
    known = dict(known_ties) if isinstance(known_ties, dict) else {}
    left_out = transient_names(model) | {alias for alias, name in ties.items() if known.get(alias) == name}
    written = {name: tensor for name, tensor in tensors.items() if name not in left_out}
    for name, layer in layers.items():
        if isinstance(layer, WeightOnlyLinear):
            del written[f"{name}.weight"]
            written.update(pack_quantized.tensors_to_write(name, layer))
        elif isinstance(layer, QuantLinear):
            written[f"{name}.weight_scale"] = layer.weight_scale.detach()[:, None]
            if layer.input_scale is not None:
                written[f"{name}.input_scale"] = layer.input_scale.detach().reshape(1)
    return written


def _conv1d_names(model: nn.Module, layers: dict[str, QuantLayer]) -> list[str]:
    if not is_pretrained(model):
        return []
    try:
        plain = built_again(model)
        return [name for name in layers if is_conv1d(plain.get_submodule(name))]
    except Exception:  # a class of one's own, built in another way: save_quantized warns of those
        return []


def quantization_config(model: nn.Module, layers: dict[str, QuantLayer]) -> dict[str, Any]:
    """The ``quantization_config`` of ``model``, whose quantized layers are ``layers``."""
    used = {layer.scheme.name: layer.scheme for layer in layers.values()}
    groups: dict[str, dict[str, Any]] = {}
    for index, scheme in enumerate(used.values()):
        names = [name for name, layer in layers.items() if layer.scheme == scheme]
        targets = ["Linear"] if len(used) == 1 else names
        is_packed = scheme.activation is None
        groups[f"group_{index}"] = {
            "format": pack_quantized.FORMAT if is_packed else FORMAT,
            "targets": targets,
            "weights": pack_quantized.to_arguments(scheme.weight) if is_packed else _to_arguments(scheme.weight),
            "input_activations": None if scheme.activation is None else _to_arguments(scheme.activation),
            "output_activations": None,
        }
    modules = model.named_modules(remove_duplicate=False)
    formats = {group["format"] for group in groups.values()}
    return {
        "quant_method": QUANT_METHOD,
        "format": formats.pop() if len(formats) == 1 else MIXED,
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": [name for name, module in modules if name and _is_target(module)],
        "kv_cache_scheme": None,
    }


def _is_target(module: nn.Module) -> bool:
    """Whether the library or vLLM would take a float module for a target ``Linear``, which vLLM does with routers."""
    if isinstance(module, LinearLayer):
        return False
    is_router = re.search(r"Router|Gating|Gate(?![a-z])", type(module).__name__) is not None
    return is_router or any(cls.__name__ in ("Linear", "LinearBase") for cls in type(module).__mro__)


def _to_arguments(scheme: TensorScheme) -> dict[str, Any]:
    how = {"symmetric": scheme.symmetric, "strategy": scheme.granularity, "dynamic": scheme.dynamic}
    return {"num_bits": scheme.format.bits, "type": "int", **how}
