"""A model on two ranks: ``python -m integrations.vllm_two_ranks KIND FOLDER COUNTS`` prints vLLM's tokens.

Ranks are forked from here, where vLLM is imported and nothing else has run: that is quick, ranks have what is changed
here, and none waits for a thread that only another process has.

- ``tensor``, ``experts``: columns and rows of layers, or whole experts, on each rank.
- ``fused``: compiled as on a GPU; how much was fused is in the file ``COUNTS``.
- ``pipeline``: layers on each rank. vLLM's own insides for that fail on a CPU, and are mended here.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from integrations.vllm_engine import compiled_as_on_a_gpu, counting_fused, tokens_of_vllm


@contextlib.contextmanager
def fused(counts: Path) -> Iterator[dict[str, Any]]:
    """Options with which two ranks compute in compiled graphs with fused kernels."""
    from vllm.compilation.passes.utility.fix_functionalization import FixFunctionalizationPass

    # With several ranks it asks for operators that a build for CPUs hasn't; it saves copies alone.
    FixFunctionalizationPass.__call__ = lambda self, graph: None
    with counting_fused(counts), compiled_as_on_a_gpu() as options:
        yield {**options, "tensor_parallel_size": 2}


def mend_pipelines() -> None:
    """Has ranks send tensors with ``torch.distributed``, and take what they get as it is.

    vLLM's own way of sending fails between ranks of one CPU; a rank's buffer is made only while a model is compiled.
    """
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    CpuCommunicator._all_group_ranks_share_shm_group_name = lambda self: False
    GPUModelRunner.sync_and_gather_intermediate_tensors = lambda self, count, tensors, sync_self: tensors[:count]


def fork_ranks() -> None:
    """Has vLLM fork its processes: for a CPU it spawns them, whatever it is asked for."""
    from vllm.platforms.cpu import CpuPlatform

    own = CpuPlatform.check_and_update_config

    def check(config: Any) -> None:
        own(config)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    CpuPlatform.check_and_update_config = staticmethod(check)


OPTIONS: dict[str, dict[str, Any]] = {
    "tensor": {"tensor_parallel_size": 2},
    "experts": {"tensor_parallel_size": 2, "enable_expert_parallel": True},
    "pipeline": {"pipeline_parallel_size": 2},
}


if __name__ == "__main__":
    kind, folder, counts = sys.argv[1:]
    fork_ranks()
    if kind == "pipeline":
        mend_pipelines()
    with fused(Path(counts)) if kind == "fused" else contextlib.nullcontext(OPTIONS[kind]) as options:
        tokens = tokens_of_vllm(Path(folder), **options)
    print(json.dumps(tokens), flush=True)
    os._exit(0)  # what ranks leave behind isn't waited for
