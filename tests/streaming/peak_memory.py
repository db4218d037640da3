"""How much memory ``quantize_checkpoint`` takes: ``python tests/streaming/peak_memory.py --gigabytes 4``.

Writes a Llama of random bfloat16 weights of that size, or with ``--experts`` a Mixtral, quantizes it in a process of
its own, and prints that process's peak memory beside the bound: three times the largest tensor, and 500 MB.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from qgemm.checkpoint.layout import split_into_shards
from qgemm.checkpoint.safetensors_writer import SafetensorsWriter

ALLOWANCE = 500_000_000

# What Linux counts includes the pages of mapped files.
_CHILD = """
import json, re, sys, time
from pathlib import Path
import transformers.modeling_utils  # no part of the work, but most of the imports
import qgemm

def memory(key):
    return 1024 * int(re.search(rf"{key}:\\s+(\\d+) kB", Path("/proc/self/status").read_text()).group(1))

before = memory("VmRSS")
start = time.perf_counter()
qgemm.quantize_checkpoint(sys.argv[1], sys.argv[2])
print(json.dumps({"before": before, "peak": memory("VmHWM"), "seconds": time.perf_counter() - start}))
"""


def write_llama(folder: Path, nbytes: int, hidden_size: int) -> int:
    """Writes a checkpoint of about ``nbytes``; returns the bytes of the model's largest tensor."""
    config = LlamaConfig(**_sizes(hidden_size), intermediate_size=4 * hidden_size)
    config.num_hidden_layers = max(1, round((nbytes / 2 / hidden_size**2 - 8) / 16))
    with torch.device("meta"):
        tensors = dict(LlamaForCausalLM(config).named_parameters())
    config.architectures = ["LlamaForCausalLM"]
    _write(folder, config, tensors, nbytes)
    return 2 * max(tensor.numel() for tensor in tensors.values())


def write_mixtral(folder: Path, nbytes: int, hidden_size: int) -> int:
    """The same with 32 experts a layer, each of which is three tensors in the files.

    In the model all experts of a layer are two tensors, of which one is the largest.
    """
    experts = 32
    config = MixtralConfig(**_sizes(hidden_size), intermediate_size=2 * hidden_size, num_local_experts=experts)
    config.num_hidden_layers = max(1, round((nbytes / 2 / hidden_size**2 - 8) / (6 * experts + 4)))
    tensors = {}
    with torch.device("meta"):
        for name, tensor in MixtralForCausalLM(config).named_parameters():
            stem = name.replace("mlp.experts", "block_sparse_moe.experts").replace("mlp.gate", "block_sparse_moe.gate")
            prefix = stem.rpartition(".")[0]
            if name.endswith("gate_up_proj"):
                for expert in range(experts):
                    gate, up = tensor[0].chunk(2)
                    tensors[f"{prefix}.{expert}.w1.weight"], tensors[f"{prefix}.{expert}.w3.weight"] = gate, up
            elif name.endswith("experts.down_proj"):
                tensors.update((f"{prefix}.{expert}.w2.weight", tensor[0]) for expert in range(experts))
            else:
                tensors[stem] = tensor
    config.architectures = ["MixtralForCausalLM"]
    _write(folder, config, tensors, nbytes)
    return 2 * experts * 4 * hidden_size**2


def _sizes(hidden_size: int) -> dict[str, Any]:
    heads = hidden_size // 64
    sizes = {"hidden_size": hidden_size, "num_attention_heads": heads, "num_key_value_heads": heads}
    return {**sizes, "vocab_size": 4 * hidden_size, "dtype": "bfloat16"}


def _write(folder: Path, config: Any, tensors: dict[str, Tensor], nbytes: int) -> None:
    config.save_pretrained(folder)
    tensors = {name: torch.empty(tensor.shape, dtype=torch.bfloat16, device="meta") for name, tensor in tensors.items()}
    shards = split_into_shards({name: tensor.nbytes for name, tensor in tensors.items()}, max(nbytes // 4, 1))
    noise = torch.randn(2**20, generator=torch.Generator().manual_seed(0)).bfloat16()
    for file_name, names in shards.items():
        with (folder / file_name).open("wb") as file:
            writer = SafetensorsWriter(file, {name: tensors[name] for name in names})
            for name in names:
                for start in range(0, tensors[name].numel(), noise.numel()):
                    writer.write(name, noise[: tensors[name].numel() - start])
            writer.finish()
    if len(shards) > 1:
        weight_map = {name: file_name for file_name, names in shards.items() for name in names}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def measure(source: Path, destination: Path) -> dict[str, float]:
    """Of a process that quantizes a checkpoint: bytes before that and at the peak, and seconds."""
    command = [sys.executable, "-c", _CHILD, str(source), str(destination)]
    # Freed tensors go back to the system at once. What glibc keeps of them by itself depends on addresses: the peak of
    # the same conversion was 46 to 94 MB.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(2**17)}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    measured: dict[str, float] = json.loads(result.stdout)
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split(":")[0])
    parser.add_argument("--gigabytes", type=float, default=4.0, help="of the checkpoint, 10^9 bytes each (4)")
    parser.add_argument("--hidden-size", type=int, default=2048, help="of the model (2048)")
    parser.add_argument("--experts", action="store_true", help="a Mixtral instead of a Llama")
    parser.add_argument("--folder", type=Path, help="where to write; a temporary folder, which is removed, by default")
    arguments = parser.parse_args()
    write = write_mixtral if arguments.experts else write_llama
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        largest = write(Path(folder, "float"), int(arguments.gigabytes * 1e9), arguments.hidden_size)
        measured = measure(Path(folder, "float"), Path(folder, "int8"))
    bound = 3 * largest + ALLOWANCE
    peak, before = measured["peak"] / 1e6, measured["before"] / 1e6
    print(f"largest tensor {largest / 1e6:.0f} MB; {measured['seconds']:.0f} s")
    print(f"peak {peak:.0f} MB, of which imports {before:.0f} MB; {bound / 1e6:.0f} MB allowed")
    if measured["peak"] > bound:
        raise SystemExit("more memory than allowed")


if __name__ == "__main__":
    main()
