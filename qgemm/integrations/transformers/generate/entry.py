"""Takes a call of ``generate`` to the loop, or to transformers' own if the loop doesn't cover it."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import threading
from collections.abc import Iterator
from types import MethodType
from typing import Any

import torch
from torch import Tensor, distributed, nn
from transformers import Cache, GenerationConfig, PreTrainedModel
from transformers.generation.logits_process import LogitsProcessorList
from transformers.generation.stopping_criteria import StoppingCriteriaList, StopStringCriteria
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GENERATION_MODES_MAPPING, GenerateDecoderOnlyOutput, GenerationMixin

from qgemm.integrations.transformers.batching import use_in_batches
from qgemm.integrations.transformers.cache import ARGUMENT, check_cache_dtype
from qgemm.integrations.transformers.generate.contexts import Attention, Context, make_context, use_context
from qgemm.integrations.transformers.generate.covered import NotCovered
from qgemm.integrations.transformers.generate.decoder import Decoder, Decoders
from qgemm.integrations.transformers.generate.loop import AHEAD, Loop
from qgemm.integrations.transformers.generate.request import (
    Request,
    check_model,
    check_prepared,
    check_settings,
    read_request,
)
from qgemm.integrations.transformers.tensor_parallel import process_group
from qgemm.integrations.transformers.tokens import UnfitAttentionError
from qgemm.replay.snapshot import Snapshot, UnfitModelError
from qgemm.warn import warn_user

# The attribute of a model for what it keeps between calls, and of a cache for its decoder.
_KEPT = "_qgemm_generate"
# The attention that a call uses, which it sets by itself.
_OF_A_CALL = ("_attn_implementation_internal",)
# What generate called the cache before transformers 5.24, which warns of it at the line of the call: one of ours, here.
_FORMER = "past_key_values"


class _Kept:
    """What a model keeps between calls. A copy of the model starts without it."""

    def __init__(self) -> None:
        self.decoders: Decoders | None = None
        self.snapshot: Snapshot | None = None
        """The state of the model that the decoders' graphs were captured from."""
        self.implementation: str | None = None
        self.cache_dtype: torch.dtype | None = None
        self.running = threading.Lock()
        self.attention = Attention()
        self.told: set[str] = set()
        self.unfit = ""
        """Why the model's attention doesn't fit a ``KeyValueCache``, once that is known."""

    def __deepcopy__(self, memo: dict[int, Any]) -> _Kept:
        copied = _Kept()
        copied.cache_dtype = self.cache_dtype
        return copied

    def __reduce__(self) -> tuple[type[_Kept], tuple[()]]:
        return _Kept, ()

    def tell(self, message: str) -> None:
        """Warns, once per message."""
        if message not in self.told:
            self.told.add(message)
            warn_user(message)


def fast_generate(model: nn.Module, enabled: bool, cache_dtype: torch.dtype | None) -> None:
    """Sends ``generate`` through the loop, and batches through qgemm's attention; or undoes that, and frees memory."""
    base: Any = model
    if hasattr(model, "get_base_model"):  # PEFT's models call their base model's generate
        base = base.get_base_model()
    if not isinstance(base, PreTrainedModel) or not type(base).can_generate():
        raise TypeError(
            f"model is a {type(model).__name__}, and fast_generate takes models of transformers with generate"
        )
    check_cache_dtype("cache_dtype", cache_dtype)
    attributes = vars(base)
    use_in_batches(base, enabled, cache_dtype)
    if enabled:
        attributes["generate"] = MethodType(_generate, base)
        _kept(base).cache_dtype = cache_dtype
        return
    attributes.pop(_KEPT, None)
    if getattr(attributes.get("generate"), "__func__", None) is _generate:
        del attributes["generate"]


@functools.wraps(GenerationMixin.generate)
def _generate(model: Any, *arguments: Any, **options: Any) -> Any:
    if _FORMER in options and ARGUMENT not in options:
        options[ARGUMENT] = options.pop(_FORMER)
    try:
        return _through_loop(model, *arguments, **options)
    except NotCovered as reason:
        _tell(model, reason)
    with _kept(model).attention.call():
        return type(model).generate(model, *arguments, **options)


def generate(model: PreTrainedModel, input_ids: Tensor, cache_dtype: torch.dtype | None, **prepared: Any) -> Any:
    """For ``custom_generate=``: sends what transformers has prepared through the loop, or back to transformers."""
    check_cache_dtype("cache_dtype", cache_dtype)
    try:
        return decode(model, input_ids, cache_dtype=cache_dtype, **prepared)
    except NotCovered as reason:
        _tell(model, reason)
        mode = prepared["generation_config"].get_generation_mode()
        if "/" in GENERATION_MODES_MAPPING[mode]:
            raise ValueError(f"custom_generate=qgemm.generate can't do {mode.value}: leave it out") from reason
        method = getattr(type(model), GENERATION_MODES_MAPPING[mode])
        if "inputs_tensor" in inspect.signature(method).parameters:
            prepared["inputs_tensor"] = input_ids
        with _kept(model).attention.call():
            return method(model, input_ids, **prepared)


def _tell(model: PreTrainedModel, reason: NotCovered) -> None:
    _kept(model).tell(f"generate runs transformers' own loop, not qgemm's: {reason}")


def _kept(model: PreTrainedModel) -> _Kept:
    kept: _Kept = vars(model).setdefault(_KEPT, _Kept())
    return kept


def _through_loop(model: Any, *arguments: Any, **options: Any) -> Any:
    options = _by_name(model, arguments, options)
    if options.get("custom_generate") is not None:
        return type(model).generate(model, **options)
    if options.get("assistant_model") is not None:
        raise NotCovered("assistant_model is passed")
    if options.get("synced_gpus"):
        raise NotCovered("synced_gpus is set")
    check_model(model)
    # A custom_generate gets neither the streamer nor the tokenizer of its stop strings.
    streamer = options.pop("streamer", None)
    _add_stop_strings(model, options)
    options["custom_generate"] = functools.partial(decode, streamer=streamer, cache_dtype=_kept(model).cache_dtype)
    return type(model).generate(model, **options)


def _by_name(model: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any]:
    """All arguments of a call, by their names in the class of ``model``."""
    signature = inspect.signature(type(model).generate)
    named = dict(signature.bind_partial(model, *arguments, **options).arguments)
    del named["self"]
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            named.update(named.pop(parameter.name, {}))
    return named


def _add_stop_strings(model: PreTrainedModel, options: dict[str, Any]) -> None:
    """Replaces the stop strings and the tokenizer in ``generate``'s ``options`` by a stopping criterion."""
    if _setting("token_healing", model, options):
        raise NotCovered("token_healing is on")
    strings = _setting("stop_strings", model, options)
    tokenizer = options.pop("tokenizer", None)
    if strings is None:
        return
    if model.generation_config.stop_strings is not None or tokenizer is None:
        raise NotCovered("stop_strings come without a tokenizer, or from the model's generation_config")
    options.pop("stop_strings", None)
    settings: GenerationConfig | None = options.get("generation_config")
    if settings is not None:
        options["generation_config"] = settings = copy.copy(settings)
        settings.stop_strings = None
    given = options.get("stopping_criteria") or []
    options["stopping_criteria"] = StoppingCriteriaList([*given, StopStringCriteria(tokenizer, strings)])


def _setting(name: str, model: PreTrainedModel, options: dict[str, Any]) -> Any:
    places = (
        options.get(name),
        getattr(options.get("generation_config"), name, None),
        getattr(model.generation_config, name),
    )
    return next((value for value in places if value is not None), None)


def decode(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    synced_gpus: bool = False,
    streamer: BaseStreamer | None = None,
    ahead: int | None = None,
    cache_dtype: torch.dtype | None = None,
    **inputs: Any,
) -> GenerateDecoderOnlyOutput | Tensor:
    """The result of ``generate`` from what it has prepared; ``ahead`` as in ``Loop``. Raises ``NotCovered``."""
    check_model(model)
    check_settings(generation_config, inputs, synced_gpus)
    home, device = input_ids.device, model.device  # transformers also moves inputs to the model
    input_ids = input_ids.to(device)
    inputs = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in inputs.items()}
    with _running(model) as kept, kept.attention.call(), _plain_tensors(model, inputs.get(ARGUMENT)):
        if kept.unfit:
            raise NotCovered(kept.unfit)
        check_prepared(model, input_ids, inputs)
        request = read_request(input_ids, logits_processor, stopping_criteria, generation_config, inputs)
        group = process_group(model)
        if group is not None:
            _agree(group, request, device)
        context, decoder = _take(kept, model, request, cache_dtype)
        if ahead is None:
            ahead = AHEAD if input_ids.is_cuda else 0
        assert kept.decoders is not None
        # If only one process retried its prompt, it would be alone in the collective sums.
        free = kept.decoders.free if group is None else lambda: False
        loop = Loop(model, request, context, decoder, ahead, kept.tell, free)
        lent = request.cache is not None or generation_config.return_dict_in_generate
        used = context.used
        try:
            kept.attention.use(model, context.attention)
            sequences = loop.run(streamer).to(home)
        except UnfitAttentionError as error:
            context.rewind(used)  # transformers' loop continues with the caller's cache
            kept.unfit = error.reason
            raise NotCovered(kept.unfit) from error
        finally:
            if not lent:
                kept.decoders.put_back(context, decoder)
        if lent:
            setattr(context.cache, _KEPT, decoder)
    if generation_config.return_dict_in_generate:
        named: dict[str, Any] = {"sequences": sequences, ARGUMENT: context.cache}
        return GenerateDecoderOnlyOutput(**named)
    return sequences


def _take(kept: _Kept, model: PreTrainedModel, request: Request, dtype: torch.dtype | None) -> tuple[Context, Decoder]:
    own = kept.attention.own(model)
    if kept.decoders is None or kept.snapshot is None or kept.implementation != own or not kept.snapshot.holds():
        configs = model.config, model.config.get_text_config(decoder=True)
        try:
            kept.snapshot = Snapshot(model, configs, _OF_A_CALL)
        except UnfitModelError as error:
            raise NotCovered(str(error)) from error
        kept.decoders, kept.implementation = Decoders(model.device, process_group(model) is not None), own
    position = request.position_ids[..., -1:]
    wanted = request.new + request.steps - 1
    if request.cache is None:
        return kept.decoders.take(
            request.batch,
            wanted,
            position,
            dtype,
            lambda capacity: make_context(model, request.batch, capacity, dtype),
        )
    context = use_context(request.cache, model, request.batch)
    if context.used + wanted > context.capacity:
        raise ValueError(
            f"{ARGUMENT} has room for {context.capacity} tokens, but there are {context.used} in it and {wanted} "
            f"to come: make it larger, or ask for fewer new tokens"
        )
    decoder: Decoder | None = getattr(request.cache, _KEPT, None)
    if decoder is None or decoder.memory is not kept.decoders.memory or not decoder.fits(request.batch, position):
        decoder = Decoder(request.batch, context, position, kept.decoders.memory)
    context.buffers = decoder.buffers
    return context, decoder


def _agree(group: Any, request: Request, device: torch.device) -> None:
    """Makes all processes draw the same tokens, with the random generator of the first one."""
    if request.stops.deadline is not None:
        raise NotCovered("max_time is set, which processes may see pass at different tokens")
    if not request.sampler.draws:
        return
    first = distributed.get_global_rank(group, 0)
    if device.type == "cpu":
        state = torch.get_rng_state()
        distributed.broadcast(state, first, group=group)
        torch.set_rng_state(state)
        return
    generator = torch.cuda.default_generators[device.index]
    shared = torch.tensor([generator.initial_seed(), generator.get_offset()], device=device)
    distributed.broadcast(shared, first, group=group)
    seed, offset = shared.tolist()
    if seed != generator.initial_seed():
        generator.manual_seed(seed)
    generator.set_offset(offset)


@contextlib.contextmanager
def _running(model: PreTrainedModel) -> Iterator[_Kept]:
    """What the model keeps, for one call at a time: a call from another thread, or from a streamer, doesn't get it."""
    kept = _kept(model)
    if not kept.running.acquire(blocking=False):
        raise NotCovered("the model is running another generate")
    try:
        yield kept
    finally:
        kept.running.release()


@contextlib.contextmanager
def _plain_tensors(model: PreTrainedModel, cache: Cache | None) -> Iterator[None]:
    """Inside, tensors that outlive the call are made so that later calls can write to them, in inference mode or not.

    A cache made in inference mode could only be written to in inference mode.
    """
    layers = [] if cache is None else cache.layers
    inference = any(
        each.is_inference() for layer in layers for each in vars(layer).values() if isinstance(each, Tensor)
    )
    on_device = torch.cuda.device(model.device) if model.device.type == "cuda" else contextlib.nullcontext()
    with torch.inference_mode(inference), torch.no_grad(), on_device:
        yield
