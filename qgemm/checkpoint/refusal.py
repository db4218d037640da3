"""What keeps transformers from loading a checkpoint without qgemm, as float weights of up to 127.

transformers passes over a ``quant_method`` that it doesn't know with a warning, casts int8 values to float, and runs.
But it raises, before it reads a weight, for a fusion of layers in ``fusion_config`` that it doesn't know, and prints
its name. So that is where the config says what is missing. Where qgemm is imported, its quantizer takes the name out
first.
"""

from __future__ import annotations

from typing import Any

FUSIONS_KEY = "fusion_config"
_ALWAYS = "qgemm, which must be imported before this checkpoint is loaded"
# An automatic class that is given None takes the config's own quantization_config away, so that nothing asks qgemm.
REFUSAL = f"{_ALWAYS}, without quantization_config=None"


def add_refusal(fusions: Any) -> dict[str, Any]:
    """The ``fusion_config`` of a checkpoint that transformers alone is to refuse; ``fusions``: its own, or None."""
    return {**(fusions if isinstance(fusions, dict) else {}), REFUSAL: True}


def drop_refusal(fusions: Any) -> Any:
    """What ``add_refusal`` was given; None instead of an empty one."""
    if not isinstance(fusions, dict):
        return fusions
    return {name: options for name, options in fusions.items() if not name.startswith(_ALWAYS)} or None
