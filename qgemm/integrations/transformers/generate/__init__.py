"""``generate`` without waiting for the GPU: steps run in CUDA graphs, tokens are chosen on the device and read later.

- ``entry.py``: takes a call to the loop, or back to transformers' own if the loop doesn't cover it (``request.py``)
- ``loop.py``: prefill and steps; ``sampling.py``, ``stopping.py``: what a step does with its logits; ``reader.py``:
  copies tokens to the host
- ``contexts.py``: the loop's interface to a cache
- ``decoder.py``: what is kept between calls, with graphs of ``qgemm/replay``
"""

from qgemm.integrations.transformers.generate.entry import fast_generate, generate

__all__ = ["fast_generate", "generate"]
