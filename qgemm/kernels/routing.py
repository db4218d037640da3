"""``Routing``: which experts a token goes to, and with what weights, as models' routers compute it from logits."""

from dataclasses import dataclass

import torch
from torch import Tensor

ROUTINGS = ("softmax", "softmax_of_top_k", "sigmoid", "sigmoid_of_top_k", "sparsemixer")
"""The kinds of routers; see ``Routing``."""


@dataclass(frozen=True)
class Routing:
    """The ``top_k`` experts of a token, the largest first, from a logit for each expert.

    - ``"softmax"``: the largest of ``p = softmax(logits)``, in float32. Mixtral, Qwen2-MoE, Qwen3-MoE, OLMoE,
      Ernie 4.5.
    - ``"softmax_of_top_k"``: ``softmax`` of the largest logits, rounded once. GPT-OSS, GraniteMoE.
    - ``"sigmoid"``: the largest of ``p = sigmoid(logits)``, in float32. DeepSeek V3, GLM-4-MoE, MiniMax-M2, LFM2-MoE.
    - ``"sigmoid_of_top_k"``: ``sigmoid`` of the largest logits, in float32. Llama 4.
    - ``"sparsemixer"``: one expert after the other, each time the one with the largest remaining logit ``l``. Its
      weight is its ``softmax`` among the remaining logits that are near: less than ``l`` by at most ``margin`` times
      the larger of the magnitudes of ``l`` and that logit. Everything is rounded to the dtype of the logits.
      Phi-3.5-MoE.

    With a bias, the experts with the largest ``p + bias`` are chosen, but the weights come from ``p`` alone.

    - ``normalized``: whether weights are divided by their sum plus ``offset``, or by ``floor`` if that is larger.
    - ``rounded``: whether ``p``, and each value that is computed from it, is rounded to the dtype of the logits.
    - ``in_float``: whether weights are float32, as Mixtral's, or rounded to the dtype of the logits.
    - ``scale``: the factor that weights are multiplied by at the end.
    - ``groups``, ``kept_groups``: experts form ``groups`` groups of equal size, and a token chooses among the experts
      of ``kept_groups`` of them: the groups with the largest sums of their two largest values.

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
    offset: float = 0.0
    rounded: bool = False
    margin: float = 0.0

    def __post_init__(self) -> None:
        """Checks the values."""
        if self.kind not in ROUTINGS:
            raise ValueError(f"kind is {self.kind!r}; it must be one of {sorted(ROUTINGS)}")
        if self.top_k < 1:
            raise ValueError(f"top_k is {self.top_k}; it must be at least 1")
        if not 1 <= self.kept_groups <= self.groups:
            raise ValueError(f"kept_groups is {self.kept_groups}; it must be from 1 to groups = {self.groups}")

    def dtype(self, logits: Tensor) -> torch.dtype:
        """The dtype of the weights."""
        return torch.float32 if self.in_float else logits.dtype

    @property
    def chooses_by_logits(self) -> bool:
        """Whether experts are chosen by their logits, without a bias."""
        return self.kind in ("softmax_of_top_k", "sigmoid_of_top_k", "sparsemixer")

    def __call__(self, logits: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Weights ``[T, top_k]`` and experts, int64 ``[T, top_k]``, from ``logits [T, E]``; ties are PyTorch's."""
        if self.kind == "sparsemixer":
            return self._mix(logits, None)
        p = self._scores(logits)
        choice = p if bias is None else p + bias
        if self.kept_groups < self.groups:
            parts = choice.unflatten(-1, (self.groups, -1))
            kept = parts.topk(2, dim=-1)[0].sum(dim=-1).topk(self.kept_groups, dim=-1, sorted=False)[1]
            left = torch.zeros(parts.shape[:-1], dtype=torch.bool, device=p.device).scatter_(-1, kept, True)
            choice = parts.masked_fill(~left[..., None], float("-inf")).flatten(-2)
        # In the models' order, in which experts are summed.
        index = choice.topk(self.top_k, dim=-1, sorted=self.kind != "sigmoid" or self.rounded)[1]
        return self._weigh(p, index, self.dtype(logits)), index

    def weights(self, logits: Tensor, index: Tensor) -> Tensor:
        """The weights of the chosen experts ``index [T, top_k]``."""
        if self.kind == "sparsemixer":
            return self._mix(logits, index)[0]
        return self._weigh(self._scores(logits), index, self.dtype(logits))

    def _scores(self, logits: Tensor) -> Tensor:
        if self.chooses_by_logits:
            return logits
        p = logits.softmax(dim=-1, dtype=torch.float32) if self.kind == "softmax" else logits.float().sigmoid()
        return p.to(logits.dtype) if self.rounded else p

    def _weigh(self, p: Tensor, index: Tensor, dtype: torch.dtype) -> Tensor:
        weights = p.gather(-1, index)
        if self.kind == "softmax_of_top_k":
            weights = weights.softmax(dim=-1, dtype=dtype)
        elif self.kind == "sigmoid_of_top_k":
            weights = weights.float().sigmoid()
        elif self.normalized:
            total = weights.sum(dim=-1, keepdim=True)
            total = total + self.offset if self.offset else total
            weights = weights / (total.clamp(min=self.floor) if self.floor else total)
        return (weights if self.scale == 1.0 else weights * self.scale).to(dtype)

    def _mix(self, logits: Tensor, index: Tensor | None) -> tuple[Tensor, Tensor]:
        """SparseMixer without its noise, for the experts in ``index``, or those that it chooses if that is None."""
        left, weights, chosen = logits, [], []
        for j in range(self.top_k):
            largest, expert = left.max(dim=-1, keepdim=True)
            expert = expert if index is None else index[:, j : j + 1]
            far = (largest - logits) / logits.abs().clamp(min=largest) > self.margin
            weights.append(left.masked_fill(far, float("-inf")).softmax(dim=-1).gather(-1, expert))
            chosen.append(expert)
            left = left.scatter(-1, expert, float("-inf"))
        return torch.cat(weights, dim=-1).to(self.dtype(logits)), torch.cat(chosen, dim=-1)
