"""``Routing``: which experts a token goes to, and with what weights, as routers of models compute it from logits."""

from dataclasses import dataclass

import torch
from torch import Tensor

ROUTINGS = ("softmax", "softmax_of_top_k", "sigmoid")
"""The kinds; ``Routing`` says what they are."""


@dataclass(frozen=True)
class Routing:
    """The ``top_k`` experts of a token, the largest first, from a logit for each expert.

    - ``"softmax"``: the largest of ``p = softmax(logits)``, in float32. Mixtral, Qwen2-MoE, Qwen3-MoE, OLMoE,
      Ernie 4.5.
    - ``"softmax_of_top_k"``: ``softmax`` of the largest logits, rounded once. GPT-OSS, GraniteMoE.
    - ``"sigmoid"``: the largest of ``p = sigmoid(logits)``, in float32. DeepSeek V3, GLM-4-MoE, MiniMax-M2.

    Where there is a bias, those with the largest ``p + bias`` are chosen, with weights of ``p`` alone.

    - ``normalized``: whether weights are divided by their sum, or ``floor`` where that is smaller.
    - ``in_float``: whether weights are float32, as Mixtral's, or rounded to the dtype of the logits.
    - ``scale``: what weights are multiplied by at last.
    - ``groups``, ``kept_groups``: of so many equal parts of the experts, a token may choose in so many: those whose two
      largest are the most, added up.

    Raises ``ValueError`` for other values.
    """

    top_k: int
    kind: str = "softmax"
    normalized: bool = True
    in_float: bool = False
    scale: float = 1.0
    floor: float = 0.0
    groups: int = 1
    kept_groups: int = 1

    def __post_init__(self) -> None:
        """Checks the values."""
        if self.kind not in ROUTINGS:
            raise ValueError(f"kind is {self.kind!r}; it must be one of {sorted(ROUTINGS)}")
        if self.top_k < 1:
            raise ValueError(f"top_k is {self.top_k}; it must be at least 1")
        if not 1 <= self.kept_groups <= self.groups:
            raise ValueError(f"kept_groups is {self.kept_groups}; it must be from 1 to groups = {self.groups}")

    def dtype(self, logits: Tensor) -> torch.dtype:
        """Of the weights."""
        return torch.float32 if self.in_float else logits.dtype

    def __call__(self, logits: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Weights ``[T, top_k]`` and experts, int64 ``[T, top_k]``, of ``logits [T, E]``; as PyTorch breaks ties."""
        p = self._scores(logits)
        choice = p if bias is None else p + bias
        if self.kept_groups < self.groups:
            parts = choice.unflatten(-1, (self.groups, -1))
            kept = parts.topk(2, dim=-1)[0].sum(dim=-1).topk(self.kept_groups, dim=-1, sorted=False)[1]
            left = torch.zeros(parts.shape[:-1], dtype=torch.bool, device=p.device).scatter_(-1, kept, True)
            choice = parts.masked_fill(~left[..., None], float("-inf")).flatten(-2)
        # The order of models, in which experts are summed.
        index = choice.topk(self.top_k, dim=-1, sorted=self.kind != "sigmoid")[1]
        return self._weigh(p, index, self.dtype(logits)), index

    def weights(self, logits: Tensor, index: Tensor) -> Tensor:
        """Those of chosen experts ``index [T, top_k]``."""
        return self._weigh(self._scores(logits), index, self.dtype(logits))

    def _scores(self, logits: Tensor) -> Tensor:
        if self.kind == "softmax_of_top_k":
            return logits
        return logits.softmax(dim=-1, dtype=torch.float32) if self.kind == "softmax" else logits.float().sigmoid()

    def _weigh(self, p: Tensor, index: Tensor, dtype: torch.dtype) -> Tensor:
        weights = p.gather(-1, index)
        if self.kind == "softmax_of_top_k":
            weights = weights.softmax(dim=-1, dtype=dtype)
        elif self.normalized:
            total = weights.sum(dim=-1, keepdim=True)
            weights = weights / (total.clamp(min=self.floor) if self.floor else total)
        return (weights if self.scale == 1.0 else weights * self.scale).to(dtype)
