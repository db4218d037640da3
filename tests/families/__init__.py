"""Tiny random models of the families that quantize_model must handle, each with inputs for one forward.

Widths are 32 to 128, so that quantization errors average out as they do in a real layer; a model takes some hundred
kilobytes. Weights are larger than a library's own start values (std about 1/sqrt(K), where 0.02 is usual) and biases
aren't zero: otherwise the embedding dominates the output, and a broken layer would hardly show in it.
"""

from collections.abc import Callable

from families.example import TOKENS, VOCABULARY, Example
from families.language import LANGUAGE
from families.perception import PERCEPTION

__all__ = ["FAMILIES", "TOKENS", "VOCABULARY", "Example"]

FAMILIES: dict[str, Callable[[], Example]] = {**LANGUAGE, **PERCEPTION}
