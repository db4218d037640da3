"""Scales of keys and values in a checkpoint, for a server's fp8 cache (``kv_cache_scheme``).

In qgemm, the cache is chosen when it is made, in float or in int8 with a scale for each token and head, which is finer
than these scales. So they are left out, and the user is told.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from qgemm.checkpoint.contents import Contents
from qgemm.checkpoint.tensors import split_name

_LEAVES = ("k_scale", "v_scale", "kv_scale", "k_zero_point", "v_zero_point")
# The layers that compute keys and values, in older files of AutoFP8 and LLM Compressor.
_OUTPUTS = tuple(f"{made}_proj.output_{leaf}" for made in "kv" for leaf in ("scale", "zero_point"))
# Where configs ask for scales or a dtype for keys and values; AutoRound's, ModelOpt's and Quark's after the first.
_ASKED_FOR = ("kv_cache_scheme", "static_kv_dtype", "kv_cache_quant_algo", "kv_cache_quant_config", "kv_cache_group")
NOTE = (
    "its scales of keys and values are not used: they stay in the dtype of the cache (qgemm.fast_generate takes "
    "cache_dtype=torch.int8)"
)


def leave_to_cache(contents: Contents, quantization: Mapping[str, Any]) -> None:
    """Leaves the scales of keys and values out of ``contents``, with a note.

    There is none if the files have no such scales, and the config, ``quantization``, doesn't ask for them either.
    """
    is_asked_for = any(quantization.get(key) for key in _ASKED_FOR)
    for name, tensor in contents.stored.items():
        if split_name(name)[1] in _LEAVES or name.endswith(_OUTPUTS):
            if math.prod(tensor.shape) == max(tensor.shape, default=1):  # one scale, or one for each head
                contents.pass_over(name)
                is_asked_for = True
    if is_asked_for:
        contents.note(NOTE)
