"""``Tokens``: how many tokens a ``KeyValueCache`` holds, and what attention and masks are told of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


class UnfitAttentionError(ValueError):
    """A model attends to keys in its own way, which the attention "qgemm" to a ``KeyValueCache`` knows nothing of."""

    def __init__(self, reason: str) -> None:
        """``reason``: what the model does."""
        self.reason = reason
        super().__init__(f"{reason}, which a KeyValueCache isn't for: use a cache and the attention of transformers")


class Tokens:
    """How many tokens a cache holds, on the device and on the host, and where each of its sequences begins."""

    def __init__(self, capacity: int, device: torch.device) -> None:
        """None yet."""
        self.capacity = capacity
        with torch.inference_mode(mode=False):  # else it couldn't be written to outside of that
            self.length = torch.zeros(1, dtype=torch.int32, device=device)
        """On the device; those of a forward that has begun are in it."""
        self.used: int | None = 0
        """The same on the host; None after compiled code has changed it."""
        self.announced = 0
        """How many tokens of a forward are counted already, that no layer has stored yet."""
        self.start: Tensor | None = None
        """int32 ``[B]``: the first token of each sequence, after its padding; None without padding."""
        self.masked = False
        """Whether something else is masked than padding on the left: then masks say what is seen."""
        self.masks: dict[tuple[int, int], Tensor] = {}
        """Of this forward, by how many queries there are, and the window."""
        self.bound = capacity
        """How long sequences are at most: attention shares out its work by it."""
        self.first_row = 0
        """Which sequence of the cache is the first of a forward."""
        self.told_of_mask = True
        """Whether the mask of this forward was made; else attention has to know without one."""
        self.told_of_window = False
        """Whether a mask of any forward had a window; else attention has none."""
        self.unread = False
        """Whether a layer has stored keys for attention that has to, which hasn't been given them yet."""

    def check_read(self) -> None:
        """Raises ``UnfitAttentionError`` if the keys that were stored last didn't get to attention as they are."""
        if self.unread and not torch.compiler.is_compiling():
            self.unread = False
            raise UnfitAttentionError("the model changes keys between the cache and attention")

    def advance(self, count: int) -> None:
        """Counts ``count`` tokens more. Raises ``ValueError`` if the cache has no room for them."""
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
        """``advance`` before a forward of ``count`` tokens, instead of in it."""
        self.advance(count)
        self.announced = count

    def begin(self, count: int) -> None:
        """By the first layer of a forward: counts its tokens, if they weren't announced."""
        if self.announced:
            if self.announced != count:
                raise ValueError(f"advance() announced {self.announced} tokens, and {count} came")
            self.announced = 0
        else:
            self.advance(count)

    def seen(self) -> int | Tensor:
        """How many tokens were there before the forward that is about to begin, or has."""
        if torch.compiler.is_compiling() or self.used is None:
            return self.length - self.announced if self.announced else self.length
        return self.used - self.announced

    def rewind(self, used: int) -> None:
        """Forgets all tokens but the first ``used``."""
        self.length.fill_(used)
        self.used, self.announced, self.unread = used, 0, False
        if used == 0:
            self.start, self.masked = None, False

    def look_at(self, attention_mask: Tensor | None, count: int) -> bool:
        """Whether the cache's own counts say all that a mask ``[B, tokens]`` does, for a forward of ``count`` tokens.

        Waits for the device, but not in decoding: a generated token isn't masked.
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
    """How many tokens a cache has seen, -1 if the host doesn't know; a mask function finds the cache by this."""

    tokens: Tokens


@dataclass
class CacheMetadata:
    """What attention must know of keys and values that it is given, beside themselves."""

    tokens: Tokens
    window: int
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    fresh: tuple[Tensor, Tensor] | None = None
    """Keys and values of this forward before rounding, where the cache holds nothing else."""
