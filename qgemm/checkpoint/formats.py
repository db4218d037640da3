"""Finds a checkpoint's format, and reads its contents in qgemm's terms."""

from __future__ import annotations

import os
import re
from collections.abc import Container
from pathlib import Path
from typing import Any

from torch import nn

from qgemm.checkpoint import (
    auto_round,
    awq,
    bitnet,
    bitsandbytes,
    compressed_tensors,
    eetq,
    fp8,
    gpt_oss,
    gptq,
    hqq,
    mlx,
    modelopt,
    quanto,
    quark,
    torchao,
)
from qgemm.checkpoint.contents import Contents
from qgemm.checkpoint.errors import CheckpointError, unsupported
from qgemm.checkpoint.layout import (
    INDEX_FILE,
    WEIGHTS_FILE,
    WEIGHTS_KEY,
    check_no_pickles,
    checkpoint_file,
    place_of,
    read_json,
    settings_of_mlx,
    stated_settings,
)
from qgemm.checkpoint.manifest import QUANT_METHOD, Manifest
from qgemm.checkpoint.model_names import fuse_experts, merge_float_experts, rename_as_model
from qgemm.checkpoint.recognition import Recognized, contradicts, recognize
from qgemm.checkpoint.requantize import requantize, restore_float
from qgemm.checkpoint.safetensors_file import StoredTensor, read_headers
from qgemm.checkpoint.stored_report import read_report
from qgemm.checkpoint.tensors import find_module, is_beyond, named_tensors, split_name
from qgemm.model.selection import listed
from qgemm.model.swap_rules import find_rule, modules_around
from qgemm.nn.float_experts import known_experts
from qgemm.nn.linear_layer import is_conv1d, is_float_linear, linear_weight
from qgemm.scheme import QuantScheme

_READERS = {
    compressed_tensors.QUANT_METHOD: compressed_tensors.read,
    bitsandbytes.QUANT_METHOD: bitsandbytes.read,
    gptq.QUANT_METHOD: gptq.read,
    awq.QUANT_METHOD: awq.read,
    auto_round.QUANT_METHOD: auto_round.read,
    auto_round.OLD_METHOD: auto_round.read,
    torchao.QUANT_METHOD: torchao.read,
    hqq.QUANT_METHOD: hqq.read,
    eetq.QUANT_METHOD: eetq.read,
    mlx.QUANT_METHOD: mlx.read,
    mlx.METAL: mlx.read_metal,
    fp8.QUANT_METHOD: fp8.read,
    fp8.FBGEMM: fp8.read_fbgemm,
    modelopt.QUANT_METHOD: modelopt.read,
    quark.QUANT_METHOD: quark.read,
    quanto.QUANT_METHOD: quanto.read,
    gpt_oss.QUANT_METHOD: gpt_oss.read,
    bitnet.QUANT_METHOD: bitnet.read,
}
# Files in which older libraries stored what is ``quantization_config`` today; ``config.json`` then has no such key.
_OWN_CONFIGS = {
    gptq.CONFIG_FILE: gptq.QUANT_METHOD,
    awq.CONFIG_FILE: awq.QUANT_METHOD,
    modelopt.CONFIG_FILE: modelopt.QUANT_METHOD,
    quanto.CONFIG_FILE: quanto.QUANT_METHOD,
}
# Keys of configs that name no method; each belongs to only one method.
_MARKS = {
    "checkpoint_format": gptq.QUANT_METHOD,
    "packing_format": auto_round.QUANT_METHOD,
    "quant_algo": modelopt.QUANT_METHOD,
    "config_groups": compressed_tensors.QUANT_METHOD,
    "activation_scheme": fp8.QUANT_METHOD,
    "activation_scale_ub": fp8.FBGEMM,
    "global_quant_config": quark.QUANT_METHOD,
}
# From compressed-tensors and AutoRound, and from GPTQModel, whose rotated models multiply activations, too.
_TRANSFORMS = ("transform_config", "rotation_config", "spinquant_config", "hadamard_config", "rotation", "adapter")
_NO_BIAS = "the bias is not 0, but the model's layer has none: see that config.json is the one of this checkpoint"
SUPPORTED = (
    "'qgemm', 'compressed-tensors', 'gptq' (4 and 8 bits), 'awq' (gemm), 'auto-round', "
    "'bitsandbytes' (int8, nf4, fp4), 'torchao' (int8, fp8, int4), 'hqq' (axis 1), 'eetq', 'metal', 'fp8', "
    "'fbgemm_fp8', 'modelopt', 'quark', 'quanto', 'mxfp4' (GPT-OSS), 'bitnet', and MLX's files"
)


def read_contents(folder: Path, config: dict[str, Any], config_path: Path) -> Contents:
    """Reads the contents of the checkpoint in ``folder``, by the format that ``config`` or the tensors show; no values.

    Raises ``CheckpointError`` for an unknown format, naming those supported, and for damaged files.
    """
    quantization = settings(folder, config)
    recognized = _recognized(folder, config) if quantization is None else None
    if recognized is not None:
        method, contents = recognized[0].format, _read_recognized(*recognized, config_path)
    elif not isinstance(quantization, dict) or quantization.get("quant_method") == QUANT_METHOD:
        return _read_own(folder, config, config_path)
    else:
        method, contents = _read_as_said(
            quantization, read_headers(folder, _with_old_name(config, folder)), config_path
        )
    if not contents.manifest.layers:
        check_no_pickles(folder)  # beside pickles, a file with another name isn't necessarily the model's
        raise CheckpointError(
            f"{folder} says that it is {method}, but no file holds a quantized layer of that format: if its weights "
            "are in float, take what says so out of its config, and call qgemm.quantize_model"
        )
    return contents


def method_of(quantization: dict[str, Any], found: Recognized | None) -> tuple[Any, Recognized | None]:
    """The ``quant_method`` of a ``quantization_config``; and ``found``, the tensors' format, if it contradicts that."""
    method = quantization.get("quant_method")
    if method is None and ("load_in_8bit" in quantization or "load_in_4bit" in quantization):
        method = bitsandbytes.QUANT_METHOD  # its first versions saved no quant_method
    if method in modelopt.OTHER_NAMES:
        method = modelopt.QUANT_METHOD
    if method is None and found is not None:
        marked = _marked(quantization)
        method = found.format if marked is None or contradicts(marked, found) else marked
    if found is None or not isinstance(method, str) or method not in _READERS:
        return method, None
    return method, found if contradicts(method, found) else None


def _refuse_transforms(quantization: dict[str, Any], config_path: Path) -> None:
    """Raises ``CheckpointError`` if any library's config asks for transforms of layers' inputs or outputs."""
    meta = quantization.get("meta")
    for place in (quantization, meta if isinstance(meta, dict) else {}):
        if (key := next((key for key in _TRANSFORMS if place.get(key)), None)) is not None:
            article = "an" if key == "adapter" else "a"
            raise unsupported(f"{config_path}: it has {article} {key}, which qgemm doesn't compute")


def _marked(quantization: dict[str, Any]) -> str | None:
    """The method to which alone these keys belong, whatever name the config states."""
    return next((method for key, method in _MARKS.items() if key in quantization), None)


def _read_as_said(
    quantization: dict[str, Any], stored: dict[str, StoredTensor], config_path: Path
) -> tuple[str, Contents]:
    """The format of files with this ``quantization_config``, and their contents; if they disagree, the files count."""
    _refuse_transforms(quantization, config_path)
    found = recognize(stored)
    method, other = method_of(quantization, found)
    if other is not None:
        if other.format == _marked(quantization):
            contents = _READERS[other.format](quantization, stored, config_path)
        else:
            said = f"says that quant_method is {method!r}"
            contents = _read_recognized(other, stored, config_path, said)
        contents.note(f"quant_method is {method!r}, but the tensors are {other.format}'s, as which they are read")
        return other.format, contents
    reader = _READERS.get(method) if isinstance(method, str) else None
    if quantization.get("quant_method") is None and found is not None:
        if reader is None or (found.unsaid and _marked(quantization) is None):
            said = "has a quantization_config without a quant_method"
            return method, _read_recognized(found, stored, config_path, said)
        if reader is gptq.read and "bits" not in quantization:
            return method, gptq.read_without_config(stored, config_path)
        quantization = {**found.quantization, **quantization}
    if reader is None:
        raise unsupported(f"{config_path}: quant_method is {method!r}; the formats supported are {SUPPORTED}")
    return method, reader(quantization, stored, config_path)


def _read_own(folder: Path, config: dict[str, Any], config_path: Path) -> Contents:
    manifest = Manifest.from_config(config, config_path)
    stored = read_headers(folder, config)
    contents = Contents(manifest, stored, dict(stored))
    try:
        contents.report = read_report(folder, manifest, (tensor.path for tensor in stored.values()))
    except FileNotFoundError:
        contents.lacks = str(manifest.report)
    return contents


def is_foreign(folder: Path, config: dict[str, Any]) -> bool:
    """Whether the checkpoint in ``folder`` is another library's, according to ``config`` or its tensors."""
    quantization = settings(folder, config)
    if quantization is None:
        found = _recognized(folder, config)
        return found is not None and found[0].format != QUANT_METHOD
    return isinstance(quantization, dict) and quantization.get("quant_method") != QUANT_METHOD


def _recognized(folder: Path, config: dict[str, Any]) -> tuple[Recognized, dict[str, StoredTensor]] | None:
    """The format that the tensors in ``folder`` show; None if they are in float, or can't be read."""
    try:
        stored = read_headers(folder, _with_old_name(config, folder))
    except CheckpointError:
        return None
    found = recognize(stored)
    return None if found is None else (found, stored)


def _read_recognized(
    found: Recognized,
    stored: dict[str, StoredTensor],
    config_path: Path,
    said: str = "has no quantization_config",
) -> Contents:
    """The contents of files whose config says nothing, or names another format. ``said``: what it says, for errors.

    Raises ``CheckpointError`` for what the tensors don't tell either.
    """
    if found.unsaid:
        raise CheckpointError(
            f"{config_path} {said}, and the tensors, which are {found.format}'s, don't tell "
            f"{found.unsaid}: put the quantization_config there that their library wrote"
        )
    if found.format == gptq.QUANT_METHOD:
        return gptq.read_without_config(stored, config_path)
    return _READERS[found.format](found.quantization, stored, config_path)


def _with_old_name(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """``config`` with the name of the only file of tensors, if an older library gave it a name of its own."""
    if WEIGHTS_KEY in config or any(os.path.lexists(folder / name) for name in (WEIGHTS_FILE, INDEX_FILE)):
        return config
    names = [path.name for path in folder.glob("*.safetensors")]
    return {**config, WEIGHTS_KEY: names[0]} if len(names) == 1 else config


def settings(folder: Path, config: dict[str, Any]) -> Any:
    """What ``config``, or an older library's own file in ``folder``, says about quantization; None if nothing does."""
    for _, stated in stated_settings(config):
        return stated
    for name, method in _OWN_CONFIGS.items():
        if os.path.lexists(folder / name):
            own = read_json(checkpoint_file(folder, name))
            return {"quant_method": method, **({quanto.MAP: own} if method == quanto.QUANT_METHOD else own)}
    return settings_of_mlx(config)


def fit_to_model(
    contents: Contents,
    model: nn.Module,
    config_path: Path,
    scheme: QuantScheme | None,
    may_have_fewer_layers: bool = False,
) -> None:
    """Matches another library's checkpoint to ``model``: renames tensors, checks layers, notes which tensors are tied.

    ``scheme``: the scheme to convert layers to. ``may_have_fewer_layers``: whether ``model`` may lack the last ones, as
    with ``num_hidden_layers=2``. A layer that can't run quantized is restored to float if it is the
    ``weight`` of its module, such as a router. Raises ``CheckpointError`` for any other layer that is neither linear in
    ``model`` nor part of its experts.
    """
    rename_as_model(contents, model)
    _leave_out(contents, model)
    if may_have_fewer_layers:
        _leave_out_last_layers(contents, model)
    quanto.ungroup(contents, model, config_path)
    _check_shapes(contents, model, config_path)
    for layer in list(contents.manifest.layers):
        module = find_module(model, layer)
        if module is not None and _why_not(contents, model, layer, module):
            restore_float(contents, layer, module)
    if scheme is not None:
        requantize(contents, model, scheme)
    fused = fuse_experts(contents, model, config_path)
    merge_float_experts(contents, model)
    for layer in contents.manifest.layers:
        module = find_module(model, layer)
        if module is None:
            raise CheckpointError(
                f"{place_of(config_path)} holds a quantized layer {layer!r}, which the model doesn't have"
            )
        if reason := _why_not(contents, model, layer, module, fused):
            raise CheckpointError(f"{place_of(config_path)} quantizes {layer}, {reason}")
    if contents.restored:
        names = listed(contents.restored, show=str)
        contents.note(f"layers that qgemm can't run quantized are restored to float as they are loaded: {names}")
    contents.manifest.tied.update(_ties(model, contents.headers))


def _why_not(contents: Contents, model: nn.Module, layer: str, module: nn.Module, fused: Container[str] = ()) -> str:
    """Why ``module`` of ``model``, called ``layer``, can't run as a quantized layer; empty if it can.

    ``fused``: the names of experts that were put together.
    """
    is_linear = type(module) is nn.Linear or is_conv1d(module) or type(module).__name__ == "FalconLinear"
    if not is_linear and layer not in fused:
        experts = known_experts(module)
        if experts is None or experts.is_interleaved != contents.interleaves_experts:
            return f"a {type(module).__name__}, which qgemm can't compute"
    if (rule := find_rule(modules_around(model, layer))) is not None:
        return f"which qgemm can't run quantized: {rule.reason}"
    return ""


def _check_shapes(contents: Contents, model: nn.Module, config_path: Path) -> None:
    """Raises ``CheckpointError`` for a packed layer of another shape than the model's; parameters don't show it."""
    for layer, shape in contents.shapes.items():
        module = find_module(model, layer)
        if is_float_linear(module):
            wanted = tuple(linear_weight(module).shape)
            if shape != wanted:
                raise CheckpointError(
                    f"{place_of(config_path)}: layer {layer} has the shape {list(shape)}; the model's is {list(wanted)}"
                )


def _leave_out(contents: Contents, model: nn.Module) -> None:
    """Leaves out tensors that models don't have: old libraries' positions and biases of zeros, unused layers.

    transformers lists the layers that it skips, such as those for multi-token prediction.
    """
    ignored = [*(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()), r"rotary_emb\.inv_freq$"]
    known = named_tensors(model)
    for name in [name for name in contents.headers if name not in known]:
        layer, leaf = split_name(name)
        if leaf == "bias" and layer in contents.manifest.layers and find_module(model, layer) is not None:
            # A bias of its own, or what a zero point adds to the product, which layers without a bias have too.
            source = next((each for each in contents.sources_of(name) if split_name(each)[1] == "bias"), None)
            if source is not None and contents.manifest.layers[layer].has_zero_point:
                contents.must_be_zero(source, _NO_BIAS)
            elif source is not None:
                contents.leave_out(name, _NO_BIAS)
        elif find_module(model, layer) is None or layer not in contents.manifest.layers:
            if any(re.search(pattern, name) for pattern in ignored):
                contents.leave_out(name)
                contents.manifest.layers.pop(layer, None)


def _leave_out_last_layers(contents: Contents, model: nn.Module) -> None:
    for name in [name for name in contents.headers if is_beyond(model, name)]:
        contents.leave_out(name)
        layer = split_name(name)[0]
        contents.manifest.layers.pop(layer, None)
        contents.shapes.pop(layer, None)
        contents.grouped.discard(layer)


def _ties(model: nn.Module, headers: dict[str, StoredTensor]) -> dict[str, str]:
    pairs = (getattr(model, "all_tied_weights_keys", None) or {}).items()
    # Either of the two may be the stored one; if the files contain both, each keeps its own.
    found = {alias: name for alias, name in pairs if alias not in headers and name in headers}
    return found | {name: alias for alias, name in pairs if alias in headers and name not in headers}
