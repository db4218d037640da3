"""``generate`` without waiting for the GPU: steps in CUDA graphs, tokens chosen on the device and read some steps late.

- ``entry.py``: a call's way to the loop, and back to transformers' own if it isn't covered (``request.py``)
- ``loop.py``: prefill and steps; ``sampling.py``, ``stopping.py``: what a step does with its logits; ``reading.py``:
  tokens on their way to the host
- ``contexts.py``: what the loop asks of a cache
- ``decoder.py``: what is kept between calls; ``replay.py``: its graphs; ``fingerprint.py``: when they are void
"""

from qgemm.integrations.transformers.generate.entry import fast_generate, generate

__all__ = ["fast_generate", "generate"]
