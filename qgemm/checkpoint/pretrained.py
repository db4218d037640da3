"""transformers models: the config that describes a model, and the model, without weights, for a config.

Only classes that transformers itself exports are built. Code from a checkpoint is never run.
"""

from __future__ import annotations

import copy
import json
import re
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode

from qgemm.checkpoint.errors import CheckpointError, UnknownModel, said_by
from qgemm.checkpoint.layout import (
    MLX_KEY,
    SETTINGS_KEYS,
    WEIGHTS_KEY,
    read_json,
    settings_of_mlx,
    weights_file,
)
from qgemm.checkpoint.refusal import FUSIONS_KEY, drop_refusal
from qgemm.checkpoint.safetensors_file import StoredTensor
from qgemm.checkpoint.tensors import FLOAT_DTYPES, dtype_name
from qgemm.nn.quant_layer import float_dtype

# Hooks on all modules and the default dtype are global to the process: one thread could reset what another one uses.
_building = threading.RLock()
_FLOAT_DTYPES_BY_NAME = {dtype_name(dtype): dtype for dtype in FLOAT_DTYPES}


def is_pretrained(model: nn.Module) -> bool:
    """Whether ``model`` is a transformers model."""
    transformers = sys.modules.get("transformers")  # if it isn't imported, no model can be a transformers model
    return transformers is not None and isinstance(model, transformers.PreTrainedModel)


def model_config(model: nn.Module) -> dict[str, Any]:
    """The config of a transformers model as JSON-ready values, with its class and float dtype; else nothing."""
    if not is_pretrained(model):
        return {}
    config: dict[str, Any] = json.loads(model.config.to_json_string(use_diff=False))  # type: ignore[union-attr,operator]
    _drop_of_a_machine(config)
    _drop_of_a_save(config)
    config["architectures"] = [type(model).__name__]
    config["dtype"] = dtype_name(model_dtype(model))
    return config


def model_dtype(model: Any) -> torch.dtype:
    """The dtype of a transformers model: ``float_dtype``, or the config's if everything in it is quantized."""
    if (found := float_dtype(model)) is not None:  # models call this in each forward
        return found
    return _FLOAT_DTYPES_BY_NAME.get(str(model.config.dtype).removeprefix("torch."), torch.float32)


def part_configs(model: nn.Module) -> dict[tuple[str, ...], Any]:
    """The configs inside that of ``model`` that its nested transformers models use, by their names from outside in."""
    if not is_pretrained(model):
        return {}
    kinds = {type(module.config) for module in model.modules() if is_pretrained(module)}
    found: dict[tuple[str, ...], Any] = {}
    waiting: list[tuple[tuple[str, ...], Any]] = [((), model.config)]
    while waiting:
        path, config = waiting.pop()
        for name, value in vars(config).items():
            if hasattr(value, "model_type"):
                inside = (*path, name)
                waiting.append((inside, value))
                if type(value) in kinds:
                    found[inside] = value
    return found


def generation_config(model: nn.Module) -> dict[str, Any] | None:
    """The generation config of a transformers model as JSON-ready values; None for a model that doesn't generate."""
    config = getattr(model, "generation_config", None)
    if config is None or not is_pretrained(model):
        return None
    values: dict[str, Any] = json.loads(config.to_json_string())
    return values


def read_generation_config(path: Path) -> Any:
    """Reads a ``GenerationConfig`` from a file."""
    import transformers

    values = read_json(path)
    try:
        return transformers.GenerationConfig.from_dict(values)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{path} is no generation config: {said_by(error)}") from error


def dtype_of(folder: Path, config: dict[str, Any], stored: Mapping[str, StoredTensor]) -> Any:
    """The dtype in the ``config`` of the checkpoint in ``folder``; without one, the dtype that from_pretrained finds.

    That is the index's, or that of the first float tensor in the first file. ``stored``: the tensors by name.
    """
    if said := config.get("dtype") or config.get("torch_dtype"):  # the latter is its name before transformers 5
        return said
    weights = weights_file(folder, config)
    metadata = read_json(weights).get("metadata") if weights.suffix == ".json" else None
    if isinstance(metadata, dict) and isinstance(metadata.get("dtype"), str):
        return metadata["dtype"]
    first = min((tensor.path for tensor in stored.values()), default=None)
    dtypes = (stored[name].dtype for name in sorted(stored) if stored[name].path == first)
    found = next(
        (dtype for dtype in dtypes if dtype is not None and dtype.is_floating_point and dtype.itemsize > 1), None
    )
    return dtype_name(found or torch.float32)


def build_pretrained(config: dict[str, Any], path: Path, stored: Mapping[str, StoredTensor]) -> nn.Module:
    """Builds the transformers model that ``config``, read from ``path``, describes: parameters on meta, real buffers.

    ``stored``: the tensors in the model's files, by name; building stops if the model becomes far larger than these.
    Raises ``CheckpointError`` if ``config`` names no class of transformers, or if the class can't be built from it.
    """
    cls, config_class = _find_classes(config, path)
    dtype = _FLOAT_DTYPES_BY_NAME.get(str(config.get("dtype")))
    if dtype is None:
        raise CheckpointError(
            f"{path}: dtype is {config.get('dtype')!r}; it must be a float dtype such as 'bfloat16': write it there"
        )
    if (absurd := _absurd_count(config)) is not None:
        raise CheckpointError(f"{path}: {absurd}")
    try:
        # The class may build anything from these values; whatever goes wrong there, the file is the cause.
        values = config_class._decode_special_floats(config)  # a copy
        _drop_controls(values)
        _drop_of_a_save(values)  # so that the config is the one that was saved
        own_config = config_class(**values)
        with parameters_on_meta(BuildLimits(stored)), _default_dtype(dtype):
            model: nn.Module = cls(own_config)
    except Exception as error:
        raise CheckpointError(
            f"{path}: {config['architectures'][0]} can't be built from it: {said_by(error)}"
        ) from error
    for name, module in model.named_modules():
        top_k, experts = vars(module).get("top_k"), vars(module).get("num_experts")
        # No tensor has the number of chosen experts as a size, so no other check would find a wrong one.
        if isinstance(top_k, int) and isinstance(experts, int) and not 0 <= top_k <= experts:
            raise CheckpointError(f"{path}: {name} would choose {top_k} of {experts} experts")
    return model


def _find_classes(config: dict[str, Any], path: Path) -> tuple[Any, Any]:
    """transformers' classes of the model and of its config that ``config`` names; raises as ``build_pretrained``."""
    names = config.get("architectures")
    if "model_type" not in config or not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise UnknownModel(f"{path} does not describe a transformers model")
    try:
        import transformers
    except ImportError as error:
        raise ImportError(
            f'{path} describes a transformers model: pip install "transformers>=5.17", '
            "or pass the float model as model="
        ) from error
    cls = getattr(transformers, names[0], None)
    if not isinstance(cls, type) or not issubclass(cls, transformers.PreTrainedModel) or cls.config_class is None:
        raise UnknownModel(
            f"{path}: architectures names {names[0]!r}, which is no model class of transformers "
            f"{transformers.__version__}"
        )
    config_class = _config_class(cls, config["model_type"])
    if config_class is None:
        raise UnknownModel(
            f"{path}: model_type is {config['model_type']!r}, but {names[0]} is of {cls.config_class.model_type!r}"
        )
    return cls, config_class


def _config_class(cls: Any, model_type: Any) -> Any:
    """The config class of ``model_type`` from which models of ``cls`` are made; None if there is none."""
    if cls.config_class.model_type == model_type:
        return cls.config_class
    from transformers.models.auto import configuration_auto, modeling_auto

    # Some types only have a config, and use the models of another type.
    for name, classes in vars(modeling_auto).items():
        found = classes.get(model_type, ()) if name.endswith("_MAPPING_NAMES") and isinstance(model_type, str) else ()
        if cls.__name__ in ((found,) if isinstance(found, str) else found):
            config_class = configuration_auto.CONFIG_MAPPING[model_type]
            # A config with several parts may serve its text model.
            return config_class if config_class.sub_configs.keys() == cls.config_class.sub_configs.keys() else None
    return None


def built_again(model: nn.Module) -> Any:
    """Builds a float model with the class and config of ``model``, a transformers model: parameters on meta."""
    with parameters_on_meta():
        return type(model)(copy.deepcopy(model.config))


# Numbers of layers, heads, labels and the like: transformers' configs make lists of that length before there is a
# model.
_COUNTS = re.compile("layer|block|depth|stage|head|expert|group|label|types")
_NO_COUNT = "vocab"  # Gemma 4's vocab_size_per_layer_input
_LARGEST_COUNT = 100_000
# For numbers with any name. Above 2^63 a number fits no tensor, and a model that makes one of that size fails.
_LARGEST_NUMBER = 2**62
# Not all names in _COUNTS: -2, for example, means the last layer but one.
_NEVER_NEGATIVE = re.compile(r"\b(num|n)_(\w+_)?(layers?|heads?|experts?|blocks?)$")


def _absurd_count(values: Any, name: str = "") -> str | None:
    """A number in ``values`` that is negative, or too large for what it counts or any use; None if there is none."""
    if isinstance(values, dict):
        # What is said about quantization builds no model.
        own = ((key, value) for key, value in values.items() if key not in SETTINGS_KEYS)
        found = (_absurd_count(value, f"{name}.{key}" if name else key) for key, value in own)
    elif isinstance(values, list):
        found = (_absurd_count(value, name) for value in values)
    else:
        counts = _COUNTS.search(name.lower()) and _NO_COUNT not in name.lower()
        if isinstance(values, int) and values > _LARGEST_COUNT and counts:
            return f"{name} is above {_LARGEST_COUNT}"
        if isinstance(values, int) and abs(values) >= _LARGEST_NUMBER:
            return f"{name} is beyond 2^62"
        if isinstance(values, int) and values < 0 and _NEVER_NEGATIVE.search(name):
            return f"{name} is negative"
        return None
    return next((one for one in found if one is not None), None)


def _drop_controls(values: dict[str, Any]) -> None:
    """Removes settings of how transformers works, which don't describe the model; no config that it saves has these.

    An implementation named ``"owner/repository"`` would make it download a kernel from the hub and run it.
    """
    controls = ("attn_implementation", "experts_implementation", "attribute_map", "sub_configs")
    for key in [key for key in values if key.lstrip("_") in controls]:
        del values[key]
    for value in values.values():
        if isinstance(value, dict):
            _drop_controls(value)


def _drop_of_a_machine(values: dict[str, Any]) -> None:
    """Removes the folder that the float model came from, and what isn't a setting of a single part.

    The parts of DBRX's config don't accept such arguments.
    """
    values.pop("_name_or_path", None)
    for part in values.values():
        if isinstance(part, dict):
            _drop_of_a_machine(part)
            if part.get("output_attentions") is False:
                del part["output_attentions"]


def _drop_of_a_save(config: dict[str, Any]) -> None:
    """Removes what belongs to the checkpoint that the config was read from or will be written to, not to the model."""
    for key in (*SETTINGS_KEYS, WEIGHTS_KEY):
        config.pop(key, None)
    if settings_of_mlx(config) is not None:
        del config[MLX_KEY]
    if (fusions := drop_refusal(config.pop(FUSIONS_KEY, None))) is not None:
        config[FUSIONS_KEY] = fusions
    for part in config.values():
        if isinstance(part, dict):
            _drop_of_a_save(part)


class BuildLimits:
    """Limits the size of a model while it is built for the tensors in ``stored``.

    Models register some parameters twice, and have tensors that no file contains, such as masks; a config that was
    tampered with asks for a thousand times as much.
    """

    def __init__(self, stored: Mapping[str, StoredTensor]) -> None:
        """Allows twice as many parameters and four times the bytes, both with some margin."""
        self._parameters_left = 1000 + 2 * len(stored)
        self._bytes_left = (256 << 20) + 4 * sum(tensor.nbytes for tensor in stored.values())

    def count_parameter(self) -> None:
        """Counts one parameter. Raises ``CheckpointError`` if there are now too many."""
        self._parameters_left -= 1
        if self._parameters_left < 0:
            raise CheckpointError("the model has far more parameters than the files hold")

    def count_bytes(self, nbytes: int) -> None:
        """Counts a tensor that is about to be made. Raises ``CheckpointError`` if that exceeds the limit."""
        self._bytes_left -= nbytes
        if self._bytes_left < 0:
            raise CheckpointError("the model's buffers are far larger than what the files hold")


@contextmanager
def parameters_on_meta(limits: BuildLimits | None = None) -> Iterator[None]:
    """Modules that this thread builds inside have their parameters on meta: shapes without memory.

    Buffers are computed, on the CPU, because checkpoints don't contain masks and positions. If one ends up on meta
    after all, ``match`` finds it if the checkpoint doesn't contain it. ``limits`` apply, if given. Other threads wait.
    """
    thread = threading.get_ident()

    def to_meta(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
        if threading.get_ident() != thread:
            return None
        if limits is not None:
            limits.count_parameter()
        if parameter.device.type == "meta" or type(parameter) is not nn.Parameter:
            return None
        return nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)

    # PyTorch types the hook as returning None; if it returns a parameter, that is registered.
    with _building:
        hook = register_module_parameter_registration_hook(to_meta)  # type: ignore[arg-type]
        try:
            with torch.device("cpu"), _WeightsOnMeta(limits):
                yield
        finally:
            hook.remove()


class _WeightsOnMeta(TorchFunctionMode):
    """Tensors that will become weights take no memory before that either: one layer's experts can be gigabytes.

    Weights start as ``torch.empty``; those of experts may also be filled. Filled vectors and matrices, with or without
    extra dimensions of size one, may be masks, so they are made, within ``limits``. Random initialization of weights is
    skipped, because PyTorch takes a quarter of a millisecond per weight even if it fills nothing.
    """

    def __init__(self, limits: BuildLimits | None) -> None:
        super().__init__()
        self._limits = limits

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # PyTorch calls the functions in nn.init, which transformers replaces during this time.
        if func is nn.init.normal_ and (weight := kwargs.get("tensor")) is not None and weight.is_meta:
            return weight
        if func is torch.empty or func in _FILLED or (self._limits is not None and func in _COUNTED):
            out = func(*args, **{**kwargs, "device": "meta"})
            if func is torch.empty or (func in _FILLED and _is_of_experts(out)):
                return out
            if self._limits is not None:
                self._limits.count_bytes(out.nbytes)
        return func(*args, **kwargs)


def _is_of_experts(filled: Tensor) -> bool:
    return sum(length > 1 for length in filled.shape) > 2 and filled.is_floating_point()


_FILLED = (torch.zeros, torch.ones, torch.full, torch.rand, torch.randn)
_COUNTED = (torch.arange, torch.linspace, torch.eye)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
