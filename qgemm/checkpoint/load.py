"""``load_quantized``: reads what ``save_quantized`` or another library wrote, without making float weights.

The order ensures that nothing is half loaded: read the config; read the headers of all files; build the model with its
parameters on meta; compare every name, shape and dtype; read every tensor; and only then put them into the model.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from tqdm import tqdm
from typing_extensions import TypeVar

from qgemm.arguments import as_path, shown
from qgemm.checkpoint.contents import Contents, read_converted
from qgemm.checkpoint.errors import CheckpointError
from qgemm.checkpoint.formats import fit_to_model, read_contents
from qgemm.checkpoint.gguf import GgufModel, find_gguf, gguf_contents, read_gguf
from qgemm.checkpoint.layout import (
    CONFIG_FILE,
    GENERATION_CONFIG_FILE,
    adapter_note,
    checkpoint_file,
    name_with_id,
    parse_json,
    read_text,
    retry_while_saved,
    save_id,
    weights_file,
)
from qgemm.checkpoint.matching import match
from qgemm.checkpoint.pretrained import (
    build_pretrained,
    dtype_of,
    is_pretrained,
    parameters_on_meta,
    read_generation_config,
)
from qgemm.checkpoint.requantize import requantize
from qgemm.checkpoint.stored_report import parse_report, warn_without_report
from qgemm.checkpoint.tensors import (
    BIAS_DTYPES,
    dtype_name,
    forget_ties,
    get_tensor,
    named_tensors,
    set_tensor,
    unwrapped,
)
from qgemm.device import find_device
from qgemm.fusion import fuse as fuse_layers
from qgemm.fusion import unfuse
from qgemm.model.announce import announce_quantized
from qgemm.model.report import drop_reports
from qgemm.nn import QuantLayer
from qgemm.nn.attention import opened_attention
from qgemm.scheme import QuantScheme, resolve_scheme
from qgemm.warn import warn_user

Model = TypeVar("Model", bound=nn.Module, default=nn.Module)


def load_quantized(
    folder: str | Path,
    device: torch.device | str = "cpu",
    *,
    model: Model | Callable[[], Model] | None = None,
    scheme: str | QuantScheme | None = None,
    fuse: bool = False,
    dtype: torch.dtype | str | None = None,
) -> Model:
    """Loads the quantized model in ``folder``, on ``device``, in eval mode.

    The folder may be in the format of ``save_quantized``, or in that of another library
    (``docs/checkpoints/other_libraries.md`` lists them). It may also be a GGUF file. Weights are those in the files,
    bit for bit. Layers compute in the precision that the checkpoint is made for: int8, fp8, or float with weights of 4
    or 8 bits. A warning names what the checkpoint asks for but qgemm doesn't compute.

    - ``device``: the model's device, for example ``"cpu"``, ``"cuda"`` or ``"cuda:1"``.
    - ``model``: None builds a transformers model from its config. For any other model, pass the float model, which is a
      module (possibly on meta) that is changed in place, or a function that builds it; with a function, its parameters
      never take memory.
    - ``scheme``: a scheme to convert linear layers and experts to while loading, a few rows at a time, such as
      ``"int8"``; a scheme that needs data is only accepted if all layers have it already. None keeps the checkpoint's
      scheme.
    - ``fuse``: whether to fuse the layers, as ``qgemm.fuse`` does.
    - ``dtype``: the dtype of what isn't quantized, float32, float16 or bfloat16, of a model that is built. None keeps
      the checkpoint's; GGUF files state none, so for them it is bfloat16.

    Raises ``CheckpointError``, naming file and tensor, if anything is missing, damaged, or of another model;
    ``ValueError`` for an unknown scheme or dtype, for a scheme that the layers can't be converted to, or for a device
    that doesn't exist; ``TypeError`` if ``model`` is neither a module nor a function. Then nothing is loaded, and a
    module passed as ``model`` is unchanged.
    """
    device, folder = find_device(device), as_path("folder", folder)
    wanted = None if scheme is None else resolve_scheme(scheme)
    own_dtype = _as_dtype(dtype, model)
    inner = unwrapped(model) if isinstance(model, nn.Module) else model
    found, values = retry_while_saved(folder, lambda: _read(folder, inner, device, wanted, own_dtype))
    _put_in_place(found, values, device)
    if is_pretrained(found.model):
        announce_quantized(found.model, found.contents.manifest.save)
    if found.contents.lacks is not None:
        warn_without_report(folder, found.contents.lacks)
    for note in found.contents.notes:
        warn_user(f"{folder}: {note}")
    if fuse:
        fuse_layers(found.model)
    return cast(Model, model if isinstance(model, nn.Module) else found.model).eval()


def _as_dtype(dtype: torch.dtype | str | None, model: object) -> torch.dtype | None:
    if dtype is None:
        return None
    if model is not None:
        raise ValueError("dtype is for a model that is built; the given model has dtypes of its own")
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if found not in BIAS_DTYPES:
        raise ValueError(f"dtype is {shown(dtype)}; it must be one of {', '.join(map(dtype_name, BIAS_DTYPES))}")
    return found


def _read(
    folder: Path,
    model: nn.Module | Callable[[], nn.Module] | None,
    device: torch.device,
    scheme: QuantScheme | None,
    dtype: torch.dtype | None,
) -> tuple[Matching, dict[str, Tensor]]:
    found = find_matching(folder, model, scheme, dtype)
    values: dict[str, Tensor] = {}
    total = sum(tensor.nbytes for tensor in found.contents.stored.values())
    with tqdm(total=total, desc="load", unit="B", unit_scale=True, disable=None) as progress:
        owners = found.owners
        floats = {} if dtype is None else {n: t.dtype for n, t in named_tensors(found.model).items()}
        for target, value in read_converted(found.contents, device, progress.update):
            if target.name in owners:
                found.contents.check_value(target, *owners[target.name], value)
            elif value.is_floating_point():
                value = value.to(floats.get(target.name))
            target.put_into(values, value)
    return found, values


@dataclass(frozen=True)
class Matching:
    """A float model and the checkpoint that fits it: ``layers`` go into the model, ``extras`` become its attributes."""

    model: nn.Module
    layers: dict[str, QuantLayer]
    contents: Contents
    extras: dict[str, Any]

    @property
    def owners(self) -> dict[str, tuple[QuantLayer, str]]:
        """For each tensor whose values can be invalid: its layer, and the layer's name for it."""
        tied = self.contents.manifest.tied
        names = {f"{name}.{leaf}": (layer, leaf) for name, layer in self.layers.items() for leaf in layer.fixed_names}
        return {tied.get(name, name): owner for name, owner in names.items()}


def find_matching(
    folder: Path,
    model: nn.Module | Callable[[], nn.Module] | None = None,
    scheme: QuantScheme | None = None,
    dtype: torch.dtype | None = None,
) -> Matching:
    """Matches checkpoint and model without reading values: does all checks that ``load_quantized`` makes before that.

    ``scheme``: the scheme to convert layers to. ``dtype``: of the float part of a model that is built.
    """
    if (path := find_gguf(folder)) is not None:
        return match_gguf(read_gguf(path), model, scheme, dtype)
    if not os.path.lexists(folder / CONFIG_FILE):
        weights_file(folder, {})  # raises an error that tells what the folder is instead of a checkpoint
    config_path = checkpoint_file(folder, CONFIG_FILE)
    text = read_text(config_path)
    config = parse_json(text, config_path)
    contents = read_contents(folder, config, config_path)
    contents.notes += adapter_note(folder)
    if model is None:
        config["dtype"] = dtype_of(folder, config, contents.stored) if dtype is None else dtype_name(dtype)
        target = build_pretrained(config, config_path, contents.headers)
    else:
        target = _given(model)
    layers = _match(target, contents, scheme, config_path)
    extras = _extra_attributes(folder, target, contents, config)
    if read_text(config_path) != text:
        raise CheckpointError(f"{config_path} was replaced while the checkpoint was read: load it again")
    return Matching(target, layers, contents, extras)


def match_gguf(
    source: GgufModel,
    model: nn.Module | Callable[[], nn.Module] | None = None,
    scheme: QuantScheme | None = None,
    dtype: torch.dtype | None = None,
) -> Matching:
    """As ``find_matching``, for a GGUF file whose headers have been read."""
    config = source.config(dtype_name(dtype or torch.bfloat16))
    target = build_pretrained(config, source.path, source.stored) if model is None else _given(model)
    contents = gguf_contents(source, target, config)
    return Matching(target, _match(target, contents, scheme, source.path), contents, {})


def _match(
    model: nn.Module, contents: Contents, scheme: QuantScheme | None, config_path: Path
) -> dict[str, QuantLayer]:
    """The layers to put into ``model``, as ``matching.match`` makes them, converted to ``scheme``, if given."""
    if contents.is_foreign:
        fit_to_model(contents, model, config_path, scheme)
    with opened_attention(model, contents.manifest.layers):
        if scheme is not None and not contents.is_foreign:
            requantize(contents, model, scheme)
        return match(model, contents.manifest, contents.headers, config_path)


def _given(model: nn.Module | Callable[[], nn.Module]) -> nn.Module:
    if isinstance(model, nn.Module):
        return model
    if not callable(model):
        raise TypeError(f"model is {shown(model)}; it must be the float nn.Module, or a function that builds it")
    try:
        with parameters_on_meta():
            built = model()
    except NotImplementedError as error:  # "Cannot copy out of meta tensor", mostly
        raise TypeError(
            f"model() failed ({error}): parameters have no values while it runs, so if it moves or reads them, pass "
            "the float model itself, model=build() instead of model=build"
        ) from error
    if not isinstance(built, nn.Module):
        raise TypeError(f"model() returned a {type(built).__name__}; it must build the float nn.Module")
    return built


def _extra_attributes(folder: Path, model: nn.Module, contents: Contents, config: dict[str, Any]) -> dict[str, Any]:
    extras: dict[str, Any] = {}
    if is_pretrained(model) and (generation := _generation_config(folder, config)) is not None:
        extras["generation_config"] = generation
    if contents.report is not None:
        extras["_qgemm_report"] = parse_report(contents.report, contents.manifest, folder)
    return extras


def _generation_config(folder: Path, config: dict[str, Any]) -> Any:
    """The generation config of the model in ``folder`` with this ``config``; None if there is none."""
    if (save := save_id(config, folder / CONFIG_FILE)) is not None:
        # A save keeps the file under this name until its config is in place. If it is killed then, the name remains.
        pending = name_with_id(GENERATION_CONFIG_FILE, save)
        if os.path.lexists(folder / pending):
            try:
                return read_generation_config(checkpoint_file(folder, pending))
            except CheckpointError:
                if os.path.lexists(folder / pending):
                    raise
    if not os.path.lexists(folder / GENERATION_CONFIG_FILE):
        return None
    return read_generation_config(checkpoint_file(folder, GENERATION_CONFIG_FILE))


def _put_in_place(found: Matching, values: dict[str, Tensor], device: torch.device) -> None:
    model, tied = found.model, found.contents.manifest.tied
    unfuse(model)  # a given model may be quantized and fused
    drop_reports(model)
    with opened_attention(model, found.layers):
        for name, layer in found.layers.items():
            model.set_submodule(name, layer)
    placed = {name: _put(model, name, value) for name, value in values.items()}
    for alias, name in tied.items():
        _put(model, alias, placed[name])
    for name, tensor in named_tensors(model).items():
        if name not in placed and name not in tied:
            _put(model, name, tensor.to(device))
    forget_ties(model, found.layers, tied)
    for layer in found.layers.values():
        layer.settle()
    for name, extra in found.extras.items():
        setattr(model, name, extra)


def _put(model: nn.Module, name: str, value: Tensor) -> Tensor:
    old = get_tensor(model, name)
    if not isinstance(old, nn.Parameter):
        value = value.detach()
    elif not isinstance(value, nn.Parameter):
        value = nn.Parameter(value, requires_grad=old.requires_grad and value.is_floating_point())
    set_tensor(model, name, value)
    return value
