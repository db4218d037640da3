"""Makes transformers handle separate parts of quantized models, for which it doesn't ask a quantizer.

transformers loads with a quantizer if the config has a ``quantization_config``, and saves with the model's quantizer.
The quantized model has both, but its parts have neither: the class of a part (``CLIPVisionModel``) extracts its config
from the whole model's, and ``model.vision_model.save_pretrained`` doesn't know ``model``. Quantized values would become
weights of float layers, without an error.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from qgemm.checkpoint.manifest import QUANT_METHOD
from qgemm.checkpoint.pretrained import part_configs
from qgemm.checkpoint.refusal import FUSIONS_KEY, drop_refusal
from qgemm.integrations.transformers.config import QGemmConfig
from qgemm.integrations.transformers.quantizer import QGemmQuantizer
from qgemm.integrations.transformers.renaming import check_dtypes, check_files
from qgemm.nn import LinearLayer
from qgemm.nn.quant_layer import has_quant_layers, quant_layers


def tell_parts(get_config_dict: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps transformers' ``get_config_dict``: the config of a part gets the whole model's quantization settings."""

    @functools.wraps(get_config_dict)
    def get_with_part(cls: type[PreTrainedConfig], *args: Any, **kwargs: Any) -> tuple[dict[str, Any], Any]:
        values, unused = get_config_dict(cls, *args, **kwargs)
        quantization = values.get("quantization_config")
        if isinstance(quantization, dict) and quantization.get("quant_method") == QUANT_METHOD:
            for part in values.values():
                # AutoConfig has no type, nor have parts without a model of their own, which may not accept the
                # argument.
                if isinstance(part, dict) and cls.model_type and part.get("model_type") == cls.model_type:
                    part["quantization_config"] = quantization
                    part["architectures"] = values.get("architectures")  # the class that was saved
        return values, unused

    return get_with_part


def save_parts(save_pretrained: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps transformers' ``save_pretrained``: what has quantized layers has a quantizer, and what has none doesn't."""

    signature = inspect.signature(save_pretrained)

    @functools.wraps(save_pretrained)
    def save_with_quantizer(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        with _quantizer_lent(self) if has_quant_layers(self) else _marks_hidden(self):
            quantizer: Any = getattr(self, "hf_quantizer", None)
            if not isinstance(quantizer, QGemmQuantizer):
                return save_pretrained(self, *args, **kwargs)
            quantizer.given_state = signature.bind(self, *args, **kwargs).arguments.get("state_dict")
            try:
                return save_pretrained(self, *args, **kwargs)
            finally:
                quantizer.given_state = None

    return save_with_quantizer


def dequantize_parts(dequantize: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps transformers' ``dequantize``: gives a quantizer, which this removes again, to such a model."""

    @functools.wraps(dequantize)
    def dequantize_with_quantizer(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        if getattr(self, "hf_quantizer", None) is not None or not has_quant_layers(self):
            return dequantize(self, *args, **kwargs)
        self.hf_quantizer = QGemmQuantizer(QGemmConfig(), pre_quantized=True)  # type: ignore[assignment]
        try:
            return dequantize(self, *args, **kwargs)
        except BaseException:
            del self.hf_quantizer
            raise

    return dequantize_with_quantizer


def keep_quantized_heads(resize: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps transformers' ``resize_token_embeddings``: raises ``ValueError`` before anything changes.

    transformers resizes the embedding first, and then refuses a head that is no ``nn.Linear``.
    """
    signature = inspect.signature(resize)

    @functools.wraps(resize)
    def resize_floats(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(self, *args, **kwargs).arguments
        head: Any = self.get_output_embeddings()
        if isinstance(head, LinearLayer):
            entries = given.get("new_num_tokens") or head.out_features
            if multiple := given.get("pad_to_multiple_of"):
                entries = -(-entries // multiple) * multiple
            if entries != head.out_features:
                raise ValueError(
                    f"{head.layer_name or 'the output head'} is quantized and can't get {entries} rows instead of "
                    f"{head.out_features}: resize the float model, or first put a float head into this one, with "
                    "model.set_output_embeddings(model.get_output_embeddings().dequantize())"
                )
        return resize(self, *args, **kwargs)

    return resize_floats


def count_as_float(num_parameters: Callable[..., int]) -> Callable[..., int]:
    """Wraps transformers' ``num_parameters``: a quantized layer counts as its float one, not by bytes and scales."""
    num_parameters = getattr(num_parameters, "_counts_bytes", num_parameters)  # a notebook's autoreload wraps it again
    signature = inspect.signature(num_parameters)

    @functools.wraps(num_parameters)
    def count(self: PreTrainedModel, *args: Any, **kwargs: Any) -> int:
        total = num_parameters(self, *args, **kwargs)
        if signature.bind(self, *args, **kwargs).arguments.get("only_trainable"):
            return total
        layers = {layer.stored(layer.weight_names[0]): layer for layer in quant_layers(self).values()}
        for layer in layers.values():
            if layer.shard is None:  # transformers counts the whole of what is split
                total += layer.float_numel - sum(parameter.numel() for parameter in layer.parameters(recurse=False))
        return total

    count._counts_bytes = num_parameters  # type: ignore[attr-defined]
    return count


@contextmanager
def _configs_restored(model: PreTrainedModel) -> Iterator[list[dict[str, Any]]]:
    """The configs of ``model`` and its parts, of which what a save changes is restored: they may be a whole model's."""
    configs = [vars(config) for config in (model.config, *part_configs(model).values())]
    keys = ("quantization_config", FUSIONS_KEY)
    before = [{key: config[key] for key in keys if key in config} for config in configs]
    try:
        yield configs
    finally:
        for config, values in zip(configs, before, strict=True):
            for key in keys:
                config.pop(key, None)
            config.update(values)


@contextmanager
def _quantizer_lent(model: PreTrainedModel) -> Iterator[None]:
    """Inside, ``model`` has a quantizer."""
    if getattr(model, "hf_quantizer", None) is not None:
        yield
        return
    with _configs_restored(model):
        model.hf_quantizer = QGemmQuantizer(QGemmConfig(), pre_quantized=True)  # type: ignore[assignment]
        try:
            yield
        finally:
            del model.hf_quantizer


@contextmanager
def _marks_hidden(model: PreTrainedModel) -> Iterator[None]:
    """Inside, ``model``, which is float, has nothing of the quantized one that it is or was a part of."""
    with _configs_restored(model) as configs:
        for config in configs:
            if isinstance(config.get("quantization_config"), QGemmConfig):
                del config["quantization_config"]
            if (fusions := drop_refusal(config.pop(FUSIONS_KEY, None))) is not None:
                config[FUSIONS_KEY] = fusions
        own = {name: each for name, each in vars(model).items() if isinstance(each, QGemmQuantizer)}
        for name in own:
            delattr(model, name)
        try:
            yield
        finally:
            vars(model).update(own)


def refuse_values(load: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps transformers' ``_load_pretrained_model``; raises ``CheckpointError`` for values that no quantizer reads."""

    signature = inspect.signature(load)

    @functools.wraps(load)
    def load_checked(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        model: Any = given.get("model")
        config: Any = given.get("load_config")
        # Later versions may name the arguments differently, which must not prevent models from loading.
        if model is not None and hasattr(config, "hf_quantizer") and config.hf_quantizer is None:
            if (state := given.get("state_dict")) is not None:
                check_dtypes(model, {name: tensor.dtype for name, tensor in state.items()})
            else:
                check_files(model, map(Path, given.get("checkpoint_files") or ()))
        return load(*args, **kwargs)

    return load_checked
