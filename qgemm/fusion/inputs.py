"""Inputs on which fused layers are verified: a few tokens, and random images and sounds of the sizes in the configs.

A model of texts and images that gets tokens alone doesn't call the layers that read images. So each part that is a
model itself, such as a vision tower, is called alone if the whole model left out some of its layers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from qgemm.fusion.probe import normal

_MAX_PATCHES = 56
"""Along a side, as in Swin. Images of more patches, as in SAM, would take a CPU minutes."""

_FEW_PATCHES = 8
_SIZE = 224  # of an image, where the config doesn't tell
_FRAMES, _SAMPLES = 64, 3200
_CHANNELS = ("num_channels", "in_channels", "in_chans")
_BINS = ("feature_projection_input_dim", "num_mel_bins", "input_feat_per_channel", "feature_size", "n_mels")
_OPTIONAL = {"pixel_attention_mask", "image_sizes", "input_features_mask"}
_VISION, _AUDIO = ("vision_config",), ("audio_config", "encoder_config")
_OF_PART = {"pixel_values": _VISION, "input_features": _AUDIO, "input_values": _AUDIO}


def tokens(model: Any) -> dict[str, Any]:
    """transformers' dummy inputs of ``model``, on its device."""
    return _placed(model, model.dummy_inputs)


def call_parts(model: nn.Module, layers: Collection[nn.Module], calls: Mapping[Any, Any]) -> None:
    """Calls ``model`` and its parts with made inputs, as long as some of ``layers`` in them have none of ``calls``."""
    has_encoder = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    for part in model.modules():
        # A decoder alone wouldn't call its attention to the encoder.
        is_decoder = has_encoder and part is not model and "encoder_hidden_states" in _parameters(part)
        if not _is_model(part) or is_decoder:
            continue
        own = {*layers} & {*part.modules()}
        with suppress(Exception):  # a third-party config may contain anything
            for inputs in made_inputs(part) if own - {*calls} else ():
                if _accepts(part, inputs) or own <= {*calls}:
                    break


def made_inputs(part: Any) -> Iterator[dict[str, Any]]:
    """Tokens, images or sounds that ``part``, a model, may accept, as keyword arguments of its forward."""
    parameters = _parameters(part)
    text = part.dummy_inputs if "input_ids" in parameters else {}
    decoder = {"decoder_input_ids": text.get("input_ids", _ones(1, 3))} if "decoder_input_ids" in parameters else {}
    name = next((name for name in _MAKE if name in parameters), "")
    parts = (getattr(part.config, own, None) for own in _OF_PART.get(name, ()))
    config = next(filter(None, parts), part.config)
    for made in _MAKE[name](config) if name else ():
        known = {own: value for own, value in made.items() if own in parameters}
        if {*made} - {*known} <= _OPTIONAL:
            for others in ({**text, **decoder}, decoder) if text else (decoder,):
                yield _placed(part, {**others, **known})
    if text:
        yield _placed(part, {**text, **decoder})


def _parameters(module: nn.Module) -> Collection[str]:
    return inspect.signature(module.forward).parameters


def _accepts(part: nn.Module, inputs: Mapping[str, Any]) -> bool:
    try:
        part(**inputs)
    except Exception:  # a model may raise anything
        return False
    return True


def _is_model(module: nn.Module) -> bool:
    """Whether ``module`` is one of transformers' models, which have a config."""
    return all(hasattr(module, name) for name in ("config", "main_input_name", "dummy_inputs"))


def _images(config: Any) -> Iterator[dict[str, Any]]:
    channels, patch = _number(config, _CHANNELS, 3), _number(config, ("patch_size",), 0)
    size = _number(config, ("image_size",), 0)
    if patch:
        # As patches, in models of images of any size.
        shapes = {"spatial_shapes": torch.tensor([[4, 4]], device="cpu")}
        mask = {"pixel_attention_mask": _ones(1, 16)}
        yield {"pixel_values": _random(1, 16, channels * patch**2), **shapes, **mask}
        few = patch * _FEW_PATCHES
        sizes = {"image_sizes": torch.tensor([[few, few]], device="cpu")}
        few_pixels = {"pixel_values": _random(1, channels, few, few)}
        if few < size:
            yield {**few_pixels, "interpolate_pos_encoding": True}
        yield {**few_pixels, **sizes}
    size = size or _SIZE
    if size <= (patch * _MAX_PATCHES or _SIZE):
        yield {"pixel_values": _random(1, channels, size, size)}


def _patches(config: Any) -> Iterator[dict[str, Any]]:
    """Patches of two images, one after another, with the images' sizes."""
    channels, patch = _number(config, _CHANNELS, 3), _number(config, ("patch_size",), 0)
    side = 2 * _number(config, ("spatial_merge_size",), 2)
    grid = torch.tensor([[1, side, side], [1, side, side]], device="cpu")
    columns = channels * patch**2
    for frames in (_number(config, ("temporal_patch_size",), 1), 1):
        yield {"hidden_states": _random(2 * side**2, columns * frames), "grid_thw": grid}


def _features(config: Any) -> Iterator[dict[str, Any]]:
    bins, length = _number(config, _BINS, 80), _number(config, ("max_source_positions",), 0)
    frames = 2 * length or _FRAMES
    yield {"input_features": _random(1, bins, frames), "input_features_mask": _ones(1, frames)}
    yield {"input_features": _random(1, _FRAMES, bins), "input_features_mask": _ones(1, _FRAMES)}


def _samples(config: Any) -> Iterator[dict[str, Any]]:
    length, bins = _number(config, ("max_length",), 0), _number(config, _BINS, 0)
    if length and bins:
        yield {"input_values": _random(1, length, bins)}
    yield {"input_values": _random(1, _SAMPLES)}


_MAKE: dict[str, Callable[[Any], Iterator[dict[str, Any]]]] = {
    "pixel_values": _images,
    "input_features": _features,
    "input_values": _samples,
    "grid_thw": _patches,
}


def _number(config: Any, names: Collection[str], default: int) -> int:
    """The first attribute of ``config`` with one of ``names``: a number, or a pair of the same number twice."""
    for name in names:
        value = getattr(config, name, None)
        value = value[0] if isinstance(value, list | tuple) and len({*value}) == 1 else value
        if isinstance(value, int):
            return value
    return default


def _random(*shape: int) -> Tensor:
    return normal(shape, torch.Generator().manual_seed(0))


def _ones(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.int64, device="cpu")


def _placed(model: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """``inputs`` on the device of ``model``, floats in its dtype, without a cache."""
    # For an offloaded model, accelerate moves the inputs.
    device = "cpu" if model.device.type == "meta" else model.device
    placed = {
        name: value.to(device, model.dtype if value.is_floating_point() else None)
        if isinstance(value, Tensor)
        else value
        for name, value in inputs.items()
    }
    return {**placed, "use_cache": False} if "use_cache" in _parameters(model) else placed
