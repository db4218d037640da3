"""``Routing``: which experts a token goes to, and with what weights, as routers of models compute it from logits."""

from dataclasses import dataclass

import torch
from torch import Tensor

ROUTINGS = ("softmax", "softmax_of_top_k")
"""The kinds; ``Routing`` says what they are."""


@dataclass(frozen=True)
class Routing:
    """The ``top_k`` experts of a token, the largest first, from a logit for each expert.

    - ``"softmax"``: the largest of ``p = softmax(logits)``, in float32; with ``normalized``, divided by their sum.
      Mixtral, Qwen2-MoE, Qwen3-MoE, OLMoE.
    - ``"softmax_of_top_k"``: ``softmax`` of the largest logits, rounded once. GPT-OSS.

    ``in_float``: whether weights are float32, as Mixtral's, or rounded to the dtype of the logits. Raises
    ``ValueError`` for another kind.
    """

    top_k: int
    kind: str = "softmax"
    normalized: bool = True
    in_float: bool = False

    def __post_init__(self) -> None:
        """Checks the values."""
        if self.kind not in ROUTINGS:
            raise ValueError(f"kind is {self.kind!r}; it must be one of {sorted(ROUTINGS)}")
        if self.top_k < 1:
            raise ValueError(f"top_k is {self.top_k}; it must be at least 1")

    def dtype(self, logits: Tensor) -> torch.dtype:
        """Of the weights."""
        return torch.float32 if self.in_float else logits.dtype

    def __call__(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Weights ``[T, top_k]`` and experts, int64 ``[T, top_k]``, of ``logits [T, E]``; as PyTorch breaks ties."""
        if self.kind == "softmax_of_top_k":
            largest, index = logits.topk(self.top_k, dim=-1)
            return largest.softmax(dim=-1, dtype=self.dtype(logits)), index
        weights, index = logits.softmax(dim=-1, dtype=torch.float32).topk(self.top_k, dim=-1)
        if self.normalized:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights.to(self.dtype(logits)), index
