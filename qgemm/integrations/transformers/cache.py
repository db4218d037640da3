"""``KeyValueCache``: keys and values of all tokens so far, in memory at fixed addresses, in float or int8.

It is a static cache of transformers: ``model.generate(..., past_key_values=cache)`` fills it, another call continues
with it, ``reset()`` empties it. Its own features:

- With the attention "qgemm" (``attention.py``), decoding reads the keys in use in place: no copy, no mask.
- int8 takes half the memory, with a scale for each token and head. Prompts are computed with the values before
  rounding.
- All layers have one length, on the device, which decoding never copies to the host: a CUDA graph of one step works for
  the next one. ``used`` counts along on the host.

Layers with a sliding window also keep all tokens; attention reads only the last ones.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, GenerationMixin, PreTrainedConfig, StaticCache
from transformers.cache_utils import CacheLayerMixin, StaticLayer, StaticSlidingWindowLayer

from qgemm.integrations.transformers.tokens import CacheMetadata, Seen, Tokens, UnfitAttentionError
from qgemm.kernels.rotary.call import RotaryCall
from qgemm.nn.blocks.attention import CACHES
from qgemm.numerics.formats import FLOAT_DTYPES, INT8

ATTENTION = "qgemm"
"""The name of the attention that reads this cache."""
ARGUMENT = next(
    name for name in CACHES if name in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
)
"""transformers' name of the cache among the arguments of a model, and in its output."""
NO_MASK = -1
"""Marks the first key of a mask that isn't needed, in compiled code, where ``Seen`` can't be used."""


def check_cache_dtype(name: str, dtype: torch.dtype | None) -> None:
    """Raises ``ValueError``, calling it ``name``, for a dtype that a ``KeyValueCache`` can't store."""
    if dtype is not None and dtype not in (*FLOAT_DTYPES, INT8.storage):
        names = ", ".join(str(each) for each in (*FLOAT_DTYPES, INT8.storage))
        raise ValueError(f"{name} is {dtype}; it must be one of {names}, or None")


def fits_key_value_cache(model: Any) -> bool:
    """Whether the attention of ``model`` can be replaced, and isn't latent, with keys and values of different sizes."""
    config: Any = model.config.get_text_config(decoder=True)
    replaceable: bool = model._supports_attention_backend
    return replaceable and all(rank is None for rank in values_of(config, "kv_lora_rank"))


def values_of(config: Any, name: str) -> list[Any]:
    """The setting ``name`` in ``config``: one value, or one per layer if layers differ; None where it isn't set."""
    layers = config.per_layer_config if config.is_heterogeneous else [config]
    return [getattr(layer, name, None) for layer in layers]


def reads_stored_keys(config: PreTrainedConfig) -> bool:
    """Whether a model itself reads keys from its cache, and expects as many as a growing cache would have."""
    return getattr(config, "recurrent_kv_cache_mode", None) == "last_loop"


class KeyValueLayer(CacheLayerMixin):
    """Keys and values of a layer: ``[max_batch, heads, max_length, D]``, and int8's scales without the ``D``."""

    is_compileable = True
    is_croppable = True
    is_sliding = False

    def __init__(self, cache: KeyValueCache, window: int, is_first: bool) -> None:
        """Allocates nothing: the first tokens do."""
        super().__init__()
        self.keys: Any
        self.values: Any
        self.tokens, self.config = cache.tokens, cache.config
        self.max_batch, self.stored_dtype = cache.max_batch, cache.dtype
        self.window, self.is_first = window, is_first
        self.batch_size = self.max_batch
        self.key_scales: Tensor | None = None
        self.value_scales: Tensor | None = None
        self._views: tuple[Tensor, Tensor, Tensor | None, Tensor | None] | None = None
        self._rows = slice(0)

    def __deepcopy__(self, memo: dict[int, Any]) -> KeyValueLayer:
        """A copy without its cache becomes another layer of that cache; models whose layers run twice make such."""
        alone = id(self.tokens) not in memo
        known = {id(each): each for each in (self.tokens, self.config)} if alone else memo
        copied = memo[id(self)] = type(self).__new__(type(self))
        vars(copied).update(copy.deepcopy(vars(self), known))
        copied.is_first = self.is_first and not alone
        return copied

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocates memory for keys and values like these, ``[B, heads, S, D]``."""
        if not torch.compiler.is_compiling() and torch.is_inference_mode_enabled():
            with torch.inference_mode(mode=False):
                return self.lazy_initialization(key_states, value_states)
        heads, D = key_states.shape[1], key_states.shape[3]
        if value_states.shape[1] != heads or value_states.shape[3] != D:
            of_values = f"values {value_states.shape[1]} of size {value_states.shape[3]}"
            raise UnfitAttentionError(f"keys have {heads} heads of size {D}, and {of_values}")
        dtype = key_states.dtype if self.stored_dtype is None else self.stored_dtype
        shape, device = (self.max_batch, heads, self.tokens.capacity), key_states.device
        self.dtype, self.device = key_states.dtype, device
        self.keys, self.values = (torch.zeros((*shape, D), dtype=dtype, device=device) for _ in range(2))
        if dtype == INT8.storage:
            self.key_scales, self.value_scales = (
                torch.ones(shape, device=device, dtype=torch.float32) for _ in range(2)
            )
        if not torch.compiler.is_compiling():
            for each in (self.keys, self.values, self.key_scales, self.value_scales, self.tokens.length):
                if each is not None:
                    torch._dynamo.mark_static_address(each)
        self.is_initialized = True

    def begin(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Counts keys and values like these before they are stored; returns where they go, with the scales."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if key_states.dtype != self.dtype or (self.stored_dtype not in (None, INT8.storage, self.dtype)):
            wanted = self.dtype if self.stored_dtype in (None, INT8.storage) else self.stored_dtype
            raise ValueError(f"keys are {key_states.dtype} and the cache is {wanted}: make it with dtype=None")
        self.tokens.check_read()
        if self.is_first:
            self.tokens.begin(key_states.shape[2])
        return self._of_batch(key_states.shape[0])

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Stores keys and values ``[B, heads, S, D]``; returns all of them, as the model's attention reads them."""
        stores = self.begin(key_states, value_states)
        torch.ops.qgemm.store_key_value(key_states, value_states, *stores, self.tokens.length)
        return self.found(stores, (key_states, value_states))

    def found(
        self, stores: tuple[Tensor, Tensor, Tensor | None, Tensor | None], fresh: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor]:
        """All keys and values for the model's attention: in place for qgemm's, in float for others.

        ``fresh``: those of this forward.
        """
        keys, values, k_scale, v_scale = stores
        has_reader = self.config._attn_implementation == ATTENTION
        self.tokens.unread = has_reader and not (self.tokens.told_of_mask or torch.compiler.is_compiling())
        if k_scale is None or v_scale is None:
            return keys, values
        about: Any = keys.about  # type: ignore[attr-defined]
        about.fresh = None
        if has_reader:
            if fresh is not None and self.tokens.used == fresh[0].shape[2]:
                about.fresh = fresh
            return keys, values
        keys, values = ((x * s[..., None]).to(self.dtype) for x, s in ((keys, k_scale), (values, v_scale)))
        keys.about = CacheMetadata(self.tokens, self.window)  # type: ignore[attr-defined]
        return keys, values

    def _of_batch(self, batch: int) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """The parts of the tensors for ``batch`` sequences."""
        rows = slice(self.tokens.first_row, self.tokens.first_row + batch)
        if self._views is None or self._rows != rows:
            if rows.stop > self.max_batch:
                raise ValueError(f"{batch} sequences come, and the cache has room for {self.max_batch}: make it larger")
            keys, values = self.keys[rows], self.values[rows]
            k_scale = None if self.key_scales is None else self.key_scales[rows]
            v_scale = None if self.value_scales is None else self.value_scales[rows]
            # Not on self.keys, which the attribute would keep alive.
            keys.about = values.about = CacheMetadata(self.tokens, self.window, k_scale, v_scale)
            self._views, self._rows, self.batch_size = (keys, values, k_scale, v_scale), rows, batch
        return self._views

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The number of keys in a mask, and the first of them: all positions, used or not."""
        return self.tokens.capacity, 0

    def get_seq_length(self) -> Any:
        """How many tokens were stored before: a number, or a tensor in compiled code."""
        return self.tokens.seen()

    def get_max_length(self) -> int:
        """The maximum number of tokens."""
        return self.tokens.capacity

    def reset(self) -> None:
        """Forgets all values."""
        if self.is_initialized:
            for each in (self.keys, self.values):
                each.zero_()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorders sequences, for beam search."""
        if self._views is not None:
            for each in self._views:
                if each is not None:
                    each.copy_(each.index_select(0, beam_idx.to(each.device)))


class NoLayer(CacheLayerMixin):
    """A layer without keys of its own: it uses another layer's, or has no attention."""

    is_compileable = True
    is_croppable = True
    is_sliding = False
    supports_early_init = False

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Does nothing."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Raises: nothing is stored here."""
        raise RuntimeError(
            "keys came for a layer that has none by the cache's config: make the cache with the config of this model"
        )

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """No keys."""
        return query_length, 0

    def get_seq_length(self) -> int:
        """0."""
        return 0

    def get_max_length(self) -> int:
        """No limit."""
        return -1


class KeyValueCache(Cache):
    """A static cache of keys and values, in float or int8, for up to ``max_batch`` sequences of ``max_length`` tokens.

    Use ``cache = qgemm.KeyValueCache(model.config, max_batch=8, max_length=4096, dtype=torch.int8)``, and then
    ``model.generate(..., past_key_values=cache)``, preferably after ``model.set_attn_implementation("qgemm")``: other
    attention reads the whole cache, in float, with a mask.

    - ``dtype``: float16, bfloat16 or float32, which must be the model's; int8; or None for the model's own.
    - ``device``: the model's; None for the current device.

    Raises ``TypeError`` if ``config`` isn't a transformers config, ``ValueError`` for unsupported sizes and dtypes, and
    for a model with layers that store anything but keys and values.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        max_batch: int,
        max_length: int,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        """Allocates nothing: each layer's first tokens do."""
        if not isinstance(config, PreTrainedConfig):
            raise TypeError(f"config is a {type(config).__name__}; it must be a config of transformers: model.config")
        for name, value in (("max_batch", max_batch), ("max_length", max_length)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} is {value!r}; it must be a whole number, 1 or more")
        check_cache_dtype("dtype", dtype)
        self.config = config.get_text_config(decoder=True)
        self.max_batch, self.max_length, self.dtype = max_batch, max_length, dtype
        self.tokens = Tokens(max_length, torch.empty(0, device=device).device)
        layers: list[Any] = []
        for window in _windows(self.config, max_length):
            if window is None:
                layers.append(NoLayer())
            else:
                is_first = not any(isinstance(layer, KeyValueLayer) for layer in layers)
                layers.append(KeyValueLayer(self, window, is_first))
        super().__init__(layers=layers)

    def __repr__(self) -> str:
        """Shows its sizes."""
        sizes = f"max_batch={self.max_batch}, max_length={self.max_length}, dtype={self.dtype}"
        return f"KeyValueCache({len(self.layers)} layers, {sizes}, used={self.used})"

    @property
    def used(self) -> int:
        """How many tokens it holds, including those of an announced forward."""
        if self.tokens.used is None:
            self.tokens.used = int(self.tokens.length)
        return self.tokens.used

    @used.setter
    def used(self, used: int) -> None:
        """Sets the count after replaying a CUDA graph, which advances the length on the device."""
        self.tokens.used = used
        self.tokens.masks.clear()

    @property
    def length(self) -> Tensor:
        """int32 ``[1]``, on the device: how many tokens it holds."""
        return self.tokens.length

    @property
    def start(self) -> Tensor | None:
        """int32 ``[B]``, on the device: where each sequence begins after its padding, or None without padding."""
        return self.tokens.start

    @start.setter
    def start(self, start: Tensor | None) -> None:
        self.tokens.start = start
        self.tokens.masks.clear()

    @contextlib.contextmanager
    def rows_from(self, first: int) -> Iterator[None]:
        """Inside, forwards process only some sequences: the cache's from ``first`` on."""
        self.tokens.first_row = first
        try:
            yield
        finally:
            self.tokens.first_row = 0

    def advance(self, count: int) -> None:
        """Counts ``count`` tokens before a forward. Without this call, the first layer counts them.

        On the device it is a single addition, for a CUDA graph of a step; the caller must then set ``used``.
        """
        self.tokens.announce(count)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Stores a layer's keys and values ``[B, heads, S, D]``; returns everything stored, for attention."""
        found: tuple[Tensor, Tensor] = self._layer(layer_idx).update(key_states, value_states)
        return found

    def _layer(self, layer_idx: int) -> Any:
        if layer_idx >= len(self.layers):
            raise ValueError(
                f"the cache has {len(self.layers)} layers, and keys of layer {layer_idx} come: make it with the config "
                "of this model"
            )
        return self.layers[layer_idx]

    def rotate_and_store(self, layer_idx: int, call: RotaryCall) -> tuple[Tensor, Tensor, Tensor]:
        """Runs ``torch.ops.qgemm.rotate_and_store``: returns ``q [B, S, q_heads, D]``, and what ``update`` returns."""
        layer = self._layer(layer_idx)
        B, S, _ = call.qkv.shape
        # A view with the shape that keys and values will have; its values aren't read.
        like = call.qkv.as_strided((B, call.kv_heads, S, call.head_size), (0, 0, 0, 0))
        stores = layer.begin(like, like)
        if self.dtype == INT8.storage and self.tokens.used == S:
            # A prompt is computed with the values before rounding.
            q, key, value = torch.ops.qgemm.rotate(*call)
            torch.ops.qgemm.store_key_value(key, value, *stores, self.tokens.length)
            return (q, *layer.found(stores, (key, value)))
        q = torch.ops.qgemm.rotate_and_store(*call, *stores, self.tokens.length)
        return (q, *layer.found(stores, None))

    def get_query_offset(self, layer_idx: int = 0) -> Any:
        """As ``get_seq_length``; a mask function finds this cache through the result."""
        seen = self.tokens.seen()
        if torch.compiler.is_compiling() or (
            isinstance(seen, Tensor) and self.config._attn_implementation != ATTENTION
        ):
            return seen
        found = Seen(-1 if isinstance(seen, Tensor) else seen)
        found.tokens = self.tokens
        return found

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        """How many tokens were stored before this forward: a number, or a tensor in compiled code."""
        return self.tokens.seen()

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """The maximum number of tokens."""
        return self.max_length

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """The number of keys in a mask, and the first of them: all positions, used or not; or ``NO_MASK``."""
        if torch.compiler.is_compiling():
            if query_length > 1:
                # Compiled code can't look for padding in a prompt: from now on, masks decide what is seen.
                self.tokens.masked = True
            elif not self.tokens.masked and self.config._attn_implementation == ATTENTION:
                return self.max_length, NO_MASK
        return self.max_length, 0

    @property
    def is_compileable(self) -> bool:
        """True."""
        return True

    def reset(self) -> None:
        """Empties the cache; memory and addresses stay."""
        self.tokens.rewind(0)
        super().reset()

    def rewind(self, used: int) -> None:
        """Forgets all tokens except the first ``used``; their values stay in memory."""
        self.tokens.rewind(used)

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the last tokens; as in transformers, their number is negative."""
        if tokens_to_remove > 0:
            raise ValueError(
                f"crop takes how many tokens to forget, as a negative number, and got {tokens_to_remove}: rewind() "
                "takes how many to keep"
            )
        self.tokens.rewind(max(self.used + tokens_to_remove, 0))


def _windows(config: PreTrainedConfig, max_length: int) -> Sequence[int | None]:
    """Each layer's sliding window, 0 for none; None for a layer without keys of its own."""
    windows: list[int | None] = []
    types = getattr(config, "layer_types", None) or []
    if "chunked_attention" in types or (not types and any(values_of(config, "attention_chunk_size"))):
        raise ValueError("a KeyValueCache has no chunked attention: use transformers' StaticCache")
    if getattr(config, "cross_attention_layers", None):
        raise ValueError(
            "the model has layers with cross attention, which keep keys of images or none: use a cache of transformers"
        )
    if reads_stored_keys(config):
        raise ValueError("the model reads keys of its cache by itself: use a cache of transformers")
    # Uses transformers' own rules, for all of its models; its layers allocate nothing before their first token.
    for layer in StaticCache(config, max_cache_len=max_length).layers:
        if type(layer) is StaticLayer:
            windows.append(0)
        elif type(layer) is StaticSlidingWindowLayer:
            windows.append(layer.max_cache_len if layer.max_cache_len < max_length else 0)
        elif type(layer).__name__ == "DummyLayer":
            windows.append(None)
        else:
            raise ValueError(
                f"the model has layers of the kind {type(layer).__name__}, and a KeyValueCache keeps only keys and "
                "values: use a cache of transformers"
            )
    return windows
