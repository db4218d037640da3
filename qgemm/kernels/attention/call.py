"""The arguments of each function of ``dispatch`` as one value."""

from typing import NamedTuple

from torch import Tensor


class AttentionCall(NamedTuple):
    """The arguments of a call, in the order of the operator's arguments; see ``dispatch.decode_attention``."""

    q: Tensor
    k: Tensor
    v: Tensor
    k_scale: Tensor | None
    v_scale: Tensor | None
    length: Tensor
    start: Tensor | None
    sinks: Tensor | None
    scale: float
    softcap: float
    window: int
    max_length: int

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """The arguments that are, or may be, tensors."""
        return self[:8]


class PagedCall(NamedTuple):
    """The arguments of a call, in the order of the operator's arguments; see ``dispatch.paged_attention``."""

    q: Tensor
    k: Tensor
    v: Tensor
    k_scale: Tensor | None
    v_scale: Tensor | None
    query_starts: Tensor
    key_starts: Tensor
    pages: Tensor | None
    sinks: Tensor | None
    scale: float
    softcap: float
    window: int
    max_queries: int
    max_keys: int

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """The arguments that are, or may be, tensors."""
        return self[:9]


class StoreCall(NamedTuple):
    """The arguments of a call, in the order of the operator's arguments; see ``dispatch.store_in_pages``."""

    key: Tensor
    value: Tensor
    k: Tensor
    v: Tensor
    k_scale: Tensor | None
    v_scale: Tensor | None
    key_starts: Tensor | None
    pages: Tensor
