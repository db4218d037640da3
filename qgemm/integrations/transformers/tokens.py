"""``Tokens``: the number of tokens in a ``KeyValueCache``, and the data that attention and masks need about them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


class UnfitAttentionError(ValueError):
    """A model attends to keys in a way that the attention "qgemm" doesn't support for a ``KeyValueCache``."""

    def __init__(self, reason: str) -> None:
        """``reason``: what the model does."""
        self.reason = reason
        super().__init__(f"{reason}, which a KeyValueCache isn't for: use a cache and the attention of transformers")


class Tokens:
    """The number of tokens in a cache, on the device and on the host, and where each of its sequences begins."""

    def __init__(self, capacity: int, device: torch.device) -> None:
        """Starts without tokens."""
        self.capacity = capacity
        with torch.inference_mode(mode=False):  # otherwise it couldn't be written to outside of inference mode
            self.length = torch.zeros(1, dtype=torch.int32, device=device)
        """On the device; includes the tokens of a forward that has begun."""
        self.used: int | None = 0
        """The same on the host; None after compiled code has changed it."""
        self.announced = 0
        """How many tokens of a forward are already counted, but not yet stored by any layer."""
        self.start: Tensor | None = None
        """int32 ``[B]``: the first token of each sequence, after its padding; None without padding."""
        self.masked = False
        """Whether anything but padding on the left is masked: if so, masks decide what is seen."""
        self.masks: dict[tuple[int, int], Tensor] = {}
        """The masks of this forward, by number of queries and window."""
        self.bound = capacity
        """The maximum length of sequences, by which attention divides its work."""
        self.first_row = 0
        """The index, in the cache, of the first sequence of a forward."""
        self.told_of_mask = True
        """Whether the mask of this forward was made; otherwise attention must not need one."""
        self.told_of_window = False
        """Whether a mask of any forward had a window; otherwise attention must have none."""
        self.unread = False
        """Whether a layer has stored keys that attention must read but hasn't got yet."""

    def check_read(self) -> None:
        """Raises ``UnfitAttentionError`` if the keys stored last didn't reach attention unchanged."""
        if self.unread and not torch.compiler.is_compiling():
            self.unread = False
            raise UnfitAttentionError("the model changes keys between the cache and attention")

    def advance(self, count: int) -> None:
        """Counts ``count`` more tokens. Raises ``ValueError`` if the cache has no room for them."""
        if torch.compiler.is_compiling():
            self.used = None
        else:
            self.masks.clear()
        if self.used is not None:
            if self.used + count > self.capacity:
                raise ValueError(
                    f"the cache has room for {self.capacity} tokens, holds {self.used}, and {count} more come: make it "
                    "with a larger max_length, or reset() it"
                )
            self.used += count
        self.length.add_(count)

    def announce(self, count: int) -> None:
        """Counts ``count`` tokens before a forward, instead of during it."""
        self.advance(count)
        self.announced = count

    def begin(self, count: int) -> None:
        """Called by the first layer of a forward: counts its tokens, unless they were announced."""
        if self.announced:
            if self.announced != count:
                raise ValueError(f"advance() announced {self.announced} tokens, and {count} came")
            self.announced = 0
        else:
            self.advance(count)

    def seen(self) -> int | Tensor:
        """The number of tokens before the forward that is about to begin, or has begun."""
        if torch.compiler.is_compiling() or self.used is None:
            return self.length - self.announced if self.announced else self.length
        return self.used - self.announced

    def rewind(self, used: int) -> None:
        """Forgets all tokens except the first ``used``."""
        self.length.fill_(used)
        self.used, self.announced, self.unread = used, 0, False
        if used == 0:
            self.start, self.masked = None, False

    def look_at(self, attention_mask: Tensor | None, count: int) -> bool:
        """Whether the cache's own counts say the same as a mask ``[B, tokens]``, for a forward of ``count`` tokens.

        Waits for the device, except in decoding, because a generated token isn't masked.
        """
        if attention_mask is None or (count == 1 and (self.used is None or self.seen() != 0)):
            return not self.masked
        mask = attention_mask[:, : int(self.seen()) + count].bool()
        start = (~mask).sum(-1, dtype=torch.int32)
        position = torch.arange(mask.shape[1], device=mask.device)
        padded, left = map(bool, torch.stack((~mask.all(), (mask == (position >= start[:, None])).all())).tolist())
        self.masked = not left
        self.start = start if padded and left else None
        return left


class Seen(int):
    """The number of tokens that a cache has seen, -1 if the host doesn't know it; by it, masks find the cache."""

    tokens: Tokens


@dataclass
class CacheMetadata:
    """What attention must know about the keys and values that it gets."""

    tokens: Tokens
    window: int
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    fresh: tuple[Tensor, Tensor] | None = None
    """Keys and values of this forward before rounding, if the cache contains no others."""
