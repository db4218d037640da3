"""Tiny random models of the families that quantize_model must handle, each with inputs for one forward.

Widths are 32 to 128, so that quantization errors average out as they do in a real layer; a model takes some hundred
kilobytes. Weights are larger than a library's own start values (std about 1/sqrt(K), where 0.02 is usual) and biases
aren't zero: otherwise the embedding dominates the output, and a broken layer would hardly show in it.
"""

from collections.abc import Callable
from typing import Any

import pytest

from families.example import TOKENS, VOCABULARY, Example
from families.language import LANGUAGE
from families.perception import PERCEPTION

__all__ = ["ALIKE", "FAMILIES", "TOKENS", "UNLIKE", "VOCABULARY", "Example"]

FAMILIES: dict[str, Callable[[], Example]] = {**LANGUAGE, **PERCEPTION}

ALIKE = {
    *("cohere", "gemma2", "mistral", "olmo2", "phi", "qwen2", "qwen3", "stablelm"),
    *("bert_classifier", "distilbert", "roberta", "clip_vision", "siglip_vision", "gpt_neo", "opt"),
}
"""With layers and names of the same kinds as others have, Llama or BERT for the most part."""

UNLIKE: list[Any] = [pytest.param(name, marks=[pytest.mark.complete] if name in ALIKE else []) for name in FAMILIES]
"""Parameters of a test of families: those that are alike run with ``--complete`` alone."""
