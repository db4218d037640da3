"""A call of ``generate`` in the form for the loop, or the reason why the loop doesn't cover it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, GenerationConfig, PreTrainedModel
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.logits_process import LogitsProcessor
from transformers.generation.stopping_criteria import StoppingCriteria
from transformers.generation.utils import (  # type: ignore[attr-defined]
    GenerationMixin,
    is_deepspeed_zero3_enabled,
    is_fsdp_managed_module,
)

from qgemm.integrations.transformers.cache import ARGUMENT, reads_stored_keys
from qgemm.integrations.transformers.generate.covered import NotCovered
from qgemm.integrations.transformers.generate.sampling import Sampler
from qgemm.integrations.transformers.generate.stopping import Stops

# What transformers passes to the loop besides the settings. Other inputs belong to images, sounds and the like.
_KNOWN = ("attention_mask", "position_ids", ARGUMENT, "use_cache", "logits_to_keep")
_OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
_CACHES = (None, "dynamic", "static")


@dataclass(frozen=True)
class Request:
    """``input_ids`` [B, S] are the prompts; ``new`` of their tokens aren't in ``cache``, which is None for a new one.

    ``attention_mask`` [B, cached + new] is None without padding, ``position_ids`` are [..., B, new]. ``steps`` is the
    maximum number of new tokens.
    """

    input_ids: Tensor
    new: int
    steps: int
    cache: Cache | None
    attention_mask: Tensor | None
    position_ids: Tensor
    keeps_last: bool
    stops: Stops
    sampler: Sampler

    @property
    def batch(self) -> int:
        """The number of sequences."""
        return self.input_ids.shape[0]

    @property
    def prompt(self) -> Tensor:
        """The new tokens."""
        return self.input_ids[:, self.input_ids.shape[1] - self.new :]


def check_model(model: PreTrainedModel) -> None:
    """Raises ``NotCovered`` for models that the loop can't run."""
    if model.config.is_encoder_decoder:
        raise NotCovered("the model has an encoder and a decoder")
    if getattr(model, "_is_stateful", False):
        raise NotCovered("the model keeps a state besides keys and values")
    if type(model)._sample is not GenerationMixin._sample:  # type: ignore[attr-defined]
        raise NotCovered(f"{type(model).__name__} decodes in a way of its own")
    if not (model._supports_attention_backend or model._can_compile_fullgraph):
        raise NotCovered(f"{type(model).__name__} has an attention of its own")
    if getattr(model.config, "alibi", False):  # its bias is as long as the tokens, and masks for a static cache aren't
        raise NotCovered(f"{type(model).__name__} adds ALiBi to masks")
    if reads_stored_keys(model.config):
        raise NotCovered(f"{type(model).__name__} reads keys of its cache by itself")
    if "prepare_inputs_for_generation" in vars(model):  # PEFT's, which adds a prefix
        raise NotCovered("the model's inputs are prepared by something else than its class")
    if len(set(getattr(model, "hf_device_map", {}).values())) > 1:
        raise NotCovered("the model is spread over several devices")
    if is_deepspeed_zero3_enabled() or is_fsdp_managed_module(model):
        raise NotCovered("the model's parameters are sharded")
    if model.device.type not in ("cpu", "cuda"):
        raise NotCovered(f"it runs on a CPU or a GPU of CUDA's, and the model is on {model.device.type}")
    if torch.is_autocast_enabled(model.device.type):
        raise NotCovered("autocast is on")


def check_settings(settings: GenerationConfig, inputs: dict[str, Any], synced: bool) -> None:
    """Raises ``NotCovered`` for settings that ``generate`` supports but the loop doesn't."""
    mode = settings.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise NotCovered(f"it is {mode.value.replace('_', ' ')}")
    for name in _OUTPUTS:
        if getattr(settings, name):
            raise NotCovered(f"{name} is asked for")
    if settings.cache_implementation not in _CACHES:
        raise NotCovered(f"cache_implementation is {settings.cache_implementation!r}")
    if settings.prefill_chunk_size is not None:
        raise NotCovered("prefill_chunk_size is set")
    if settings.is_assistant or synced:
        raise NotCovered("other models wait for this one")
    if not inputs.get("use_cache", True):
        raise NotCovered("use_cache is False")
    for name, value in inputs.items():
        empty = value is None or (isinstance(value, dict) and not value)  # such as outputs of unused image encoders
        if name not in _KNOWN and not empty:
            raise NotCovered(f"{name} is passed")


def check_prepared(model: PreTrainedModel, input_ids: Tensor, inputs: dict[str, Any]) -> None:
    """Raises ``NotCovered`` if the model's class changes a prompt's positions from those given."""
    prepare = type(model).prepare_inputs_for_generation  # type: ignore[attr-defined]
    positions = inputs.get("position_ids")
    if prepare is GenerationMixin.prepare_inputs_for_generation or positions is None:
        return
    given = {name: value.clone() if isinstance(value, Tensor) else value for name, value in inputs.items()}
    made = prepare(model, input_ids, is_first_iteration=True, **given).get("position_ids")
    if (
        made is None
        or made.shape[:-1] != positions.shape[:-1]
        or not torch.equal(made, positions[..., positions.shape[-1] - made.shape[-1] :])
    ):
        raise NotCovered(f"{type(model).__name__} makes positions of its own")


def read_request(
    input_ids: Tensor,
    given: Sequence[LogitsProcessor],
    criteria: Sequence[StoppingCriteria],
    settings: GenerationConfig,
    inputs: dict[str, Any],
) -> Request:
    """The request for a call that transformers has prepared. Raises ``NotCovered``."""
    cache = inputs.get(ARGUMENT)
    cached = 0 if cache is None else int(cache.get_seq_length())
    if isinstance(cache, DynamicCache):
        if cached or getattr(cache, "_is_user_defined", False):  # otherwise generate made it
            raise NotCovered(f"{ARGUMENT} is a cache that grows; a StaticCache can be continued")
        cache = None
    mask = inputs.get("attention_mask")
    length = input_ids.shape[1]
    # With a cache, input_ids are all tokens, or only the new ones; the mask covers all of them.
    whole = length == (mask.shape[1] if mask is not None else getattr(settings, "_mask_length", -1))
    new = length - cached if whole else length
    if new < 1:
        raise NotCovered("there is no new token to begin with")
    positions: Tensor | None = inputs.get("position_ids")
    if positions is None:
        raise NotCovered("the model takes no position_ids")
    if positions.shape[-2] == 1:
        positions = positions.expand(*positions.shape[:-2], input_ids.shape[0], -1)
    padding = settings._pad_token_tensor
    stops = Stops(criteria, input_ids.device)
    max_length = settings.max_length if stops.max_length is None else stops.max_length
    return Request(
        input_ids=input_ids,
        new=new,
        steps=max(1, max_length - length),  # criteria are only checked after a token
        cache=cache,
        attention_mask=_left_padding(mask),
        position_ids=positions[..., positions.shape[-1] - new :],
        keeps_last="logits_to_keep" in inputs,
        stops=stops,
        sampler=Sampler(given, stops, length, settings.do_sample, None if padding is None else int(padding)),
    )


def _left_padding(mask: Tensor | None) -> Tensor | None:
    """``mask`` [B, L], or None if nothing is masked."""
    if mask is None:
        return None
    if mask.ndim != 2:
        raise NotCovered(f"attention_mask has {mask.ndim} dimensions")
    kept = mask.bool()
    whole, left = torch.stack([kept.all(), (kept[:, 1:] | ~kept[:, :-1]).all()]).tolist()
    if whole:
        return None
    if not left:
        raise NotCovered("attention_mask has zeros after a one: only padding on the left is covered")
    return kept
