"""Continuous batching of transformers (``generate_batch``, ``transformers serve``) with ``paged_attention``.

transformers concatenates the tokens of all requests, prompts and new tokens mixed, and tells each layer where the keys
of every request are in its paged cache. ``torch.ops.qgemm.paged_attention`` reads them there. For layers with a sliding
window, transformers gathers them.

``use_in_batches`` makes a model's ``init_continuous_batching`` choose that attention, under a name that contains
"flash". By that word transformers recognizes attention that needs no mask, which is required for CUDA graphs of the
steps and for preparing a batch while the previous one runs. Batches with only new tokens come with page tables, but
transformers enables these only for its own flash attention: ``_start`` enables them. Without them, the host would list
the position of every key in every step. Batches with prompts run without CUDA graphs, for the reason given in ``_pad``.

In int8, the bytes of a page contain the int8 numbers of its keys, followed by their scales. transformers treats them as
heads with fewer numbers in the model's dtype, and everything that it does with pages still works: sharing, copying,
moving to the host.
"""

from __future__ import annotations

import copy
import functools
import inspect
import weakref
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.generation.continuous_batching import PagedAttentionCache
from transformers.generation.continuous_batching.cache import find_head_dim
from transformers.generation.utils import GenerationMixin
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import import_utils

from qgemm.integrations.transformers.cache import ARGUMENT, ATTENTION, fits_key_value_cache
from qgemm.nn import QuantLayer
from qgemm.numerics.formats import INT8
from qgemm.numerics.integers import round_up

# From 5.19 on, attention over a paged cache has no prefix.
PAGED_ATTENTION = ("paged|" if "paged|sdpa" in ALL_ATTENTION_FUNCTIONS.valid_keys() else "") + ATTENTION + "_flash"
_UPDATES_ARGUMENTS = "kwargs" in inspect.signature(PagedAttentionCache.update).parameters  # from 5.19 on
_START = "init_continuous_batching"
_IS_INT8, _CACHE_DTYPE = "_qgemm_is_int8", "_qgemm_dtype_of_batches"
_RUNNING = "the model runs continuous batching, whose attention needs its cache: stop it first, or call another model"
MAX_PAGES = 32
"""The number of pages of a request whose steps come with page tables, as for transformers' own flash attention."""
_SIZES_OF_GRAPHS = ("use_cuda_graph", "q_padding_interval_size", "kv_padding_interval_size")
"""The settings by which users ask transformers for CUDA graphs of all kinds of batches."""


class _Layer(NamedTuple):
    """A paged cache's data about a layer: its kind, which indices apply to it, and where keys and values are.

    ``k``, ``v``: ``[pages, keys of a page, heads, D]``; None for a layer with a window, whose keys transformers moves.
    """

    kind: str
    group: int
    window: int
    k: Tensor | None
    v: Tensor | None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None


def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    cache: PagedAttentionCache | None = None,
    **batch: Any,
) -> tuple[Tensor, None]:
    """Called by transformers: ``query [1, heads, T, D]`` of all requests; returns ``[1, T, heads, D]``, no weights.

    ``key``, ``value``: of the same tokens, not yet in the cache. Raises ``ValueError`` without a ``cache``.
    """
    if cache is None:
        raise ValueError(_RUNNING)
    size = value.shape[-1]
    if size != query.shape[-1]:
        value = F.pad(value, (0, query.shape[-1] - size))
    layer = _layer_of(cache, module.layer_idx, query.shape[-1])
    max_queries: int = batch.get("max_seqlen_q", batch.get("max_length_q", 1))  # renamed in 5.19
    max_keys: Any = batch.get("max_seqlen_k", batch.get("max_length_k", 1))
    key_starts = batch["cu_seq_lens_k"]
    if isinstance(key_starts, dict):
        key_starts = key_starts[layer.kind]
    if isinstance(max_keys, dict):
        max_keys = max_keys[layer.kind]
    new_k, new_v = (each.squeeze(0).transpose(0, 1) for each in (key, value))
    stored: tuple[Tensor | None, ...] = (new_k, new_v, None, None)  # for whole prompts, the values before rounding
    pages, tables = None, batch.get("block_table")
    if layer.k is None or layer.v is None:
        stored = (*_gathered(cache, module, key, value, batch), None, None)
    elif tables is not None:
        stored, pages = layer[3:], tables[layer.group]
        torch.ops.qgemm.store_in_pages(new_k, new_v, *stored, key_starts, pages)
        max_keys = pages.shape[1] * layer.k.shape[1]
    else:
        read, write = batch["read_index"][layer.group], batch["write_index"][layer.group]
        torch.ops.qgemm.store_in_pages(new_k, new_v, *layer[3:], None, write)
        if len(read):
            stored, pages = layer[3:], read
    out: Tensor = torch.ops.qgemm.paged_attention(
        query.squeeze(0).transpose(0, 1), *stored, batch["cu_seq_lens_q"], key_starts, pages, s_aux,
        query.shape[-1] ** -0.5 if scaling is None else scaling, softcap or 0.0, layer.window,
        max(1, max_queries), max(1, max_keys),
    )  # fmt: skip
    return out[..., :size].unsqueeze(0), None


def check_no_batches(model: Any) -> None:
    """Raises ``ValueError`` while ``model`` runs continuous batching through ``paged_attention``."""
    if model.config._attn_implementation == PAGED_ATTENTION:
        raise ValueError(_RUNNING)


def _layer_of(cache: Any, layer: int, size: int) -> _Layer:
    """The data of ``layer`` in ``cache``. ``size``: of a head."""
    if hasattr(cache, "layer_to_allocator"):
        allocator = cache.layer_to_allocator[layer]
        if window := getattr(allocator, "sliding_window", 0):
            return _Layer("sliding_attention", allocator.index, window, None, None)
        group, (k, v) = allocator.index, allocator.get_cache_for_block_table(layer)
    else:  # 5.17
        group, place = cache.layer_index_to_group_indices[layer]
        if (window := cache.sliding_windows[layer]) != 1:
            return _Layer("sliding_attention", group, window, None, None)
        k, v = (each[place].unflatten(0, (-1, cache.block_size)) for each in (cache.key_cache, cache.value_cache))
    if not hasattr(cache, _IS_INT8):
        return _Layer("full_attention", group, 0, k, v)
    (k, k_scale), (v, v_scale) = (_numbers_and_scales(each, size) for each in (k, v))
    return _Layer("full_attention", group, 0, k, v, k_scale, v_scale)


def _numbers_and_scales(pages: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Pages ``[pages, keys, heads, n]`` as int8 ``[pages, keys, heads, size]`` and float32 without the size.

    In memory, heads come before keys, as attention reads them.
    """
    keys, heads = pages.shape[1:3]
    held = pages.flatten(1).view(torch.int8)
    numbers, scales = heads * keys * size, heads * keys * 4
    first = round_up(numbers, 4)
    return (
        held[:, :numbers].unflatten(1, (heads, keys, size)).transpose(1, 2),
        held[:, first : first + scales].view(torch.float32).unflatten(1, (heads, keys)).transpose(1, 2),
    )


def _bytes_of_int8(size: int) -> int:
    """The bytes of a key's head with its scale, as a multiple of any dtype's size."""
    return round_up(size, 4) + 4


def _gathered(cache: Any, module: Any, key: Tensor, value: Tensor, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """All keys and values that a query may see, ``[N, heads, D]``, one request after the other."""
    if _UPDATES_ARGUMENTS:
        k, v = type(cache).update(cache, key, value, module.layer_idx, dict(batch))
        return k.squeeze(0).transpose(0, 1), v.squeeze(0).transpose(0, 1)
    found: tuple[Tensor, Tensor] = cache.update(
        key, value, module.layer_idx, read_index=batch["read_index"], write_index=batch["write_index"]
    )
    return found


def use_in_batches(model: Any, enabled: bool, cache_dtype: torch.dtype | None) -> None:
    """Makes continuous batching of ``model`` use ``paged_attention``, or undoes that.

    ``cache_dtype``: int8; for anything else the cache has the model's dtype. Layers with a sliding window keep theirs.
    """
    attributes = vars(model)
    attributes.pop(_CACHE_DTYPE, None)
    if enabled and cache_dtype == INT8.storage:
        attributes[_CACHE_DTYPE] = cache_dtype
    if enabled and hasattr(model, _START):
        attributes[_START] = MethodType(_start, model)
    elif getattr(attributes.get(_START), "__func__", None) is _start:
        del attributes[_START]


@functools.wraps(GenerationMixin.init_continuous_batching)  # pickle finds it by this name
def _start(model: Any, *arguments: Any, **options: Any) -> Any:
    """``init_continuous_batching``, with the attention replaced until its manager stops."""
    before = model.config._attn_implementation
    if not _is_covered(model, before):
        return type(model).init_continuous_batching(model, *arguments, **options)
    _set_attention(model, PAGED_ATTENTION)
    given = inspect.signature(type(model).init_continuous_batching).bind_partial(model, *arguments, **options).arguments
    try:
        manager = type(model).init_continuous_batching(model, *arguments, **options)
    except BaseException:
        _set_attention(model, before)
        raise
    manager._original_attn_impl = before  # stop() restores this
    if manager.batch_processor is None:  # otherwise it is one that was kept
        _configure(model, manager, given.get("continuous_batching_config"))
    return manager


def _configure(model: PreTrainedModel, manager: Any, given: Any) -> None:
    """Sets what transformers decides by the kind of attention: to the values ``given``, or the best for this one."""
    config, pages = manager.continuous_batching_config, getattr(given, "max_blocks_per_request", None)
    text: Any = model.config.get_text_config(decoder=True)
    kinds = getattr(text, "layer_types", None)
    has_window = getattr(text, "sliding_window", None) is not None if kinds is None else "sliding_attention" in kinds
    if config.max_blocks_per_request == 0 and not has_window:
        config.max_blocks_per_request = MAX_PAGES if pages is None else pages
    if getattr(given, "use_cuda_graph", None) is None and _waits(model):
        config.use_cuda_graph, config.use_async_batching = (False, False), False
    is_int8 = hasattr(model, _CACHE_DTYPE) and not has_window
    asked = any(getattr(given, name, None) for name in _SIZES_OF_GRAPHS)
    keeps_graphs = asked or config.varlen_compile_config is not None
    # By a weak reference, because otherwise the manager and its cache's memory would wait for the garbage collector.
    manager._create_batch_processor = functools.partial(_create, weakref.ref(manager), is_int8, keeps_graphs)


class _WithConfig:
    """A model that appears to have another config."""

    def __init__(self, model: PreTrainedModel, config: Any) -> None:
        self.config = config
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def _create(reference: Any, is_int8: bool, keeps_graphs: bool) -> Any:
    """Makes a manager's processor of batches. ``keeps_graphs``: whether batches with prompts may be captured, too."""
    manager = reference()
    create = type(manager)._create_batch_processor
    if manager.batch_processor is not None:  # it is reused
        return create(manager)
    processor = _create_in_int8(manager) if is_int8 else create(manager)
    if ARGUMENT == "cache":  # models let the cache store their keys; before 5.24, attention does
        processor.cache.update = functools.partial(_hand_on, weakref.ref(processor.cache))
    # 5.17 doesn't initialize memory, and begins by sampling from its content: NaN would end the process.
    for memory in (*getattr(processor.cache, "key_cache", ()), *getattr(processor.cache, "value_cache", ())):
        memory.zero_()
    runner = processor.model_runner
    runner.run_one_warmup = functools.partial(_warm_up, weakref.ref(runner))
    if runner.use_cuda_graph_varlen and not keeps_graphs:
        runner.maybe_pad_inputs = functools.partial(_pad, weakref.ref(processor))
    return processor


def _hand_on(reference: Any, key: Tensor, value: Tensor, layer_idx: int, kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Replaces ``PagedAttentionCache.update``: ``attention`` gets the cache, and stores keys and values itself."""
    kwargs["cache"] = reference()
    return key, value


def _create_in_int8(manager: Any) -> Any:
    """Does the same with a cache whose heads have as many bytes as they need in int8."""
    model = manager.model
    config = copy.deepcopy(model.config)
    text = config.get_text_config()
    text.head_dim = _bytes_of_int8(find_head_dim(text)) // model.dtype.itemsize
    manager.model = _WithConfig(model, config)
    try:
        processor = type(manager)._create_batch_processor(manager)
    finally:
        manager.model = model
    setattr(processor.cache, _IS_INT8, True)
    return processor


def _warm_up(reference: Any, *, num_q_tokens: int, max_kv_read: int | None, **options: Any) -> Any:
    """Warms up with no more keys than new tokens: more keys don't take more memory, which the warm-up is for.

    transformers would attend to all keys that fit into the cache: half a minute with the memory of an H200.
    """
    if max_kv_read is not None:
        max_kv_read = min(max_kv_read, num_q_tokens)
    runner = reference()
    return type(runner).run_one_warmup(runner, num_q_tokens=num_q_tokens, max_kv_read=max_kv_read, **options)


def _pad(reference: Any, num_q_tokens: int, max_kv_read: int, use_decode_fast_path: bool) -> Any:
    """The sizes of the next batch, padded if a CUDA graph of it is captured or replayed.

    Batches with prompts are not padded: in a server, two of them hardly ever have the same sizes, and each capture also
    runs the batch.
    """
    processor = reference()
    runner = processor.model_runner
    has_prompts = num_q_tokens > len(processor.scheduler.active_requests)
    runner.pad_inputs = runner.use_cuda_graph_varlen = use_decode_fast_path or not has_prompts
    return type(runner).maybe_pad_inputs(runner, num_q_tokens, max_kv_read, use_decode_fast_path)


def _waits(model: PreTrainedModel) -> bool:
    """Whether a forward copies to the host, as PyTorch's grouped products of experts in float32 do."""
    of_others = (module for module in model.modules() if not isinstance(module, QuantLayer | nn.Conv1d))
    parameters = (parameter for module in of_others for parameter in module.parameters(recurse=False))
    return any(parameter.ndim == 3 and parameter.dtype == torch.float32 for parameter in parameters)


def _is_covered(model: PreTrainedModel, attention: str) -> bool:
    """Whether attention can be replaced, and neither the caller nor transformers has chosen a flash attention."""
    if not fits_key_value_cache(model):
        return False
    if attention == ATTENTION:
        return True
    installed = (import_utils.is_flash_attn_2_available, import_utils.is_flash_attn_3_available)
    chosen = model._supports_flash_attn and any(each(kernels_fallback_ok=True) for each in installed)
    default = "sdpa" if model._supports_sdpa else "eager"
    return attention == default and not chosen


def _set_attention(model: PreTrainedModel, name: str) -> None:
    """Sets the attention without ``set_attn_implementation``, which would look for a flash attention package."""
    for config in (model.config, model.config.get_text_config(decoder=True)):
        config._attn_implementation_internal = name
