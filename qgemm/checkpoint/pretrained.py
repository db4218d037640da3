"""transformers models: the config that says what a model is, and the model that a config describes, without weights.

Only classes that transformers itself exports are built. No code from a checkpoint is ever run.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode

from qgemm.checkpoint.errors import CheckpointError
from qgemm.checkpoint.layout import read_json
from qgemm.checkpoint.tensors import FLOAT_DTYPES
from qgemm.nn import QuantLinear


def is_pretrained(model: nn.Module) -> bool:
    """Whether ``model`` is a transformers model."""
    transformers = sys.modules.get("transformers")  # where it isn't imported, no model can be one of its own
    return transformers is not None and isinstance(model, transformers.PreTrainedModel)


def model_config(model: nn.Module) -> dict[str, Any]:
    """The config of a transformers model as JSON-ready values, with its class and float dtype; else nothing."""
    if not is_pretrained(model):
        return {}
    config: dict[str, Any] = json.loads(model.config.to_json_string(use_diff=False))  # type: ignore[union-attr,operator]
    config.pop("_name_or_path", None)  # the folder that the float model came from, on the machine that saved it
    config["architectures"] = [type(model).__name__]
    config["dtype"] = str(_float_dtype(model)).removeprefix("torch.")
    return config


def generation_config(model: nn.Module) -> dict[str, Any] | None:
    """How a transformers model generates, as JSON-ready values; None for a model that doesn't."""
    config = getattr(model, "generation_config", None)
    if config is None or not is_pretrained(model):
        return None
    values: dict[str, Any] = json.loads(config.to_json_string())
    return values


def read_generation_config(path: Path) -> Any:
    """The ``GenerationConfig`` in a file."""
    import transformers

    values = read_json(path)
    try:
        return transformers.GenerationConfig.from_dict(values)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{path} is no generation config: {error}") from error


def build_pretrained(config: dict[str, Any], path: Path) -> nn.Module:
    """The transformers model that ``config``, read from ``path``, describes: parameters on meta, buffers computed.

    Raises ``CheckpointError`` if ``config`` names no class of transformers or if the class can't be built from it.
    """
    names = config.get("architectures")
    if "model_type" not in config or not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise CheckpointError(
            f"{path} does not describe a transformers model; "
            "pass the float model, or a function that builds it, as model="
        )
    try:
        import transformers
    except ImportError as error:
        raise ImportError(
            f'{path} describes a transformers model: pip install "qgemm[transformers]", '
            "or pass the float model as model="
        ) from error
    cls = getattr(transformers, names[0], None)
    if not isinstance(cls, type) or not issubclass(cls, transformers.PreTrainedModel) or cls.config_class is None:
        raise CheckpointError(
            f"{path}: architectures names {names[0]!r}, which is no model class of transformers "
            f"{transformers.__version__}; pass the float model, or a function that builds it, as model="
        )
    if cls.config_class.model_type != config["model_type"]:
        raise CheckpointError(
            f"{path}: model_type is {config['model_type']!r}, but {names[0]} is of {cls.config_class.model_type!r}"
        )
    dtype = {str(dtype).removeprefix("torch."): dtype for dtype in FLOAT_DTYPES}.get(str(config.get("dtype")))
    if dtype is None:
        raise CheckpointError(f"{path}: dtype is {config.get('dtype')!r}; it must be a float dtype such as 'bfloat16'")
    try:
        # The class may build anything from these values; whatever goes wrong there, the file is at fault.
        own_config = cls.config_class.from_json_file(path)  # which also undoes how transformers writes infinities
        vars(own_config).pop("quantization_config", None)  # so that the config is again the one that was saved
        with parameters_on_meta(), _default_dtype(dtype):
            model: nn.Module = cls(own_config)
    except Exception as error:
        raise CheckpointError(f"{path}: {names[0]} can't be built from it: {error}") from error
    return model


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Modules built inside, by this thread, have their parameters on meta: shapes without memory.

    Buffers are computed as ever, since masks and positions are in no checkpoint. Should one end on meta all the same,
    ``match`` finds it if the checkpoint doesn't hold it.
    """
    thread = threading.get_ident()

    def to_meta(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
        if threading.get_ident() != thread or parameter.device.type == "meta" or type(parameter) is not nn.Parameter:
            return None
        return nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)

    # PyTorch types the hook as returning None; a parameter that it returns is what gets registered.
    hook = register_module_parameter_registration_hook(to_meta)  # type: ignore[arg-type]
    try:
        with _WeightsOnMeta():
            yield
    finally:
        hook.remove()


class _WeightsOnMeta(TorchFunctionMode):
    """Tensors that are about to become weights take no memory before either: one layer's experts can be gigabytes.

    Weights start as ``torch.empty``, those of experts also filled. Filled vectors and matrices may be masks, so they
    are made.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.empty or func in _FILLED:
            out = func(*args, **{**kwargs, "device": "meta"})
            if func is torch.empty or (out.ndim > 2 and out.is_floating_point()):
                return out
        return func(*args, **kwargs)


_FILLED = (torch.zeros, torch.ones, torch.full, torch.rand, torch.randn)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _float_dtype(model: nn.Module) -> torch.dtype:
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            # The scales of a quantized layer are float32 in a model of any dtype.
            if parameter.dtype in FLOAT_DTYPES and not (isinstance(module, QuantLinear) and name != "bias"):
                return parameter.dtype
    return torch.float32
