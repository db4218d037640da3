"""Padding doesn't count: finds the rows of a layer's input that are tokens, by the attention masks of a batch.

A mask is the model's argument ``attention_mask [B, T]``, which is 0 for padding; for the decoder of an encoder-decoder
it is ``decoder_attention_mask``. Rows are left out of an input whose leading dimensions are the mask's:
``[B, T, ...]``, ``[T, B, ...]``, or ``[B * T, ...]`` in the same order, as in routers and experts. Inputs of other
shapes count as a whole: pooled tokens, images, audio, rows that a model has gathered for one of its experts.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

# Keys and values of a decoder's attention to the encoder's output.
_CROSS_ATTENTION = re.compile(r"(encoder_att|encdecatt|cross_?att|encoder_decoder_att)\w*\.(\w+\.)*(k|v|c_attn)", re.I)


@dataclass(frozen=True, eq=False)
class Masks:
    """The masks of one batch, bool ``[B, T]``, True for tokens; None if there is no padding.

    - ``own``: the mask of the model, or of an encoder-decoder's encoder.
    - ``decoder``: the mask of the decoder.
    - ``has_decoder``: whether there is a decoder besides an encoder.
    """

    own: Tensor | None = None
    decoder: Tensor | None = None
    has_decoder: bool = False

    @classmethod
    def of(cls, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Masks:
        """The masks among the arguments of ``model``."""
        given = _named_arguments(model, args, kwargs)
        own, decoder = (_as_mask(given.get(name)) for name in ("attention_mask", "decoder_attention_mask"))
        is_both = bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))
        return cls(own, decoder, is_both or any(name.startswith("decoder_") for name in given))

    def tokens(self, x: Tensor, name: str) -> Tensor:
        """The rows of ``x`` that are tokens, ``[n, ...]``; ``x`` itself if there is no padding.

        ``x``: an input or an output of the layer ``name``.
        """
        mask = self._mask_for(x, name)
        if mask is None:
            return x
        mask = mask.to(x.device)
        if _is_flat(x, mask):
            return x[mask.flatten()]
        return (x if x.shape[:2] == mask.shape else x.transpose(0, 1))[mask]

    def output_tokens(self, x: Tensor) -> Tensor:
        """As ``tokens``, for an output of the model."""
        mask = self.decoder if self.has_decoder else self.own
        return Masks(mask).tokens(x, "")

    def _mask_for(self, x: Tensor, name: str) -> Tensor | None:
        own, decoder = (mask if mask is not None and _fits(x, mask) else None for mask in (self.own, self.decoder))
        if not self.has_decoder:
            return own
        is_decoder = _is_in_decoder(name)
        if is_decoder is not None:
            return decoder if is_decoder else own
        # The name doesn't say whose tokens these are, so only what is padding in both is left out.
        if own is not None and decoder is not None and own.shape == decoder.shape:
            return own | decoder
        return decoder


class Batch:
    """The state of the running batch: its ``masks``, which hooks of layers read."""

    def __init__(self) -> None:
        """Starts without a running batch."""
        self.masks = Masks()

    def tokens(self, x: Tensor, name: str) -> Tensor:
        """See ``Masks.tokens``."""
        return self.masks.tokens(x, name)

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Inside, ``masks`` are those of the running call of ``model``."""

        def begin(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.masks = Masks.of(module, args, kwargs)

        def end(module: nn.Module, args: Any, output: Any) -> None:
            self.masks = Masks()

        with ExitStack() as stack:
            stack.callback(model.register_forward_pre_hook(begin, with_kwargs=True, prepend=True).remove)
            stack.callback(model.register_forward_hook(end, always_call=True).remove)
            yield


def _named_arguments(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments by name, and the contents of mappings among them."""
    forward: Callable[..., Any] = model.forward
    try:
        bound = inspect.signature(forward).bind_partial(*args).arguments if args else {}
    except (TypeError, ValueError):
        bound = {}
    given = {**bound, **kwargs}
    inside = [value for value in given.values() if isinstance(value, Mapping)]
    return {key: value for each in (*inside, given) for key, value in each.items() if isinstance(key, str)}


def _as_mask(value: Any) -> Tensor | None:
    """``value`` as a mask ``[B, T]``; None if it isn't one or leaves nothing out."""
    if not isinstance(value, Tensor) or value.ndim != 2 or value.device.type == "meta":
        return None
    mask = value != 0
    return None if bool(mask.all()) else mask


def _is_flat(x: Tensor, mask: Tensor) -> bool:
    return x.ndim >= 2 and x.shape[0] == mask.numel()


def _fits(x: Tensor, mask: Tensor) -> bool:
    return _is_flat(x, mask) or (x.ndim >= 3 and x.shape[:2] in (mask.shape, mask.T.shape))


def _is_in_decoder(name: str) -> bool | None:
    """Whether a layer's input consists of the decoder's tokens; None if its name doesn't tell."""
    sides = [part for part in name.lower().split(".") if "encoder" in part or "decoder" in part]
    if not sides:
        return None
    return "decoder" in sides[0] and not _CROSS_ATTENTION.search(name)
