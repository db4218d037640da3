"""Keeps transformers from loading a checkpoint without qgemm, as float weights of up to 127.

For a ``quant_method`` that it doesn't know, transformers only warns, casts int8 values to float, and runs. But for an
unknown fusion of layers in ``fusion_config`` it raises an error with the fusion's name before it reads a weight. So the
config tells there what is missing. If qgemm is imported, its quantizer removes that entry first.
"""

from __future__ import annotations

from typing import Any

FUSIONS_KEY = "fusion_config"
_ALWAYS = "qgemm, which must be imported before this checkpoint is loaded"
# If an automatic class gets None, it removes the config's own quantization_config, and qgemm is never asked.
REFUSAL = f"{_ALWAYS}, without quantization_config=None"


def add_refusal(fusions: Any) -> dict[str, Any]:
    """Returns a checkpoint's ``fusion_config`` that transformers alone will refuse; ``fusions``: its own, or None."""
    return {**(fusions if isinstance(fusions, dict) else {}), REFUSAL: True}


def drop_refusal(fusions: Any) -> Any:
    """Returns what ``add_refusal`` was given; None instead of an empty one."""
    if not isinstance(fusions, dict):
        return fusions
    return {name: options for name, options in fusions.items() if not name.startswith(_ALWAYS)} or None
