"""How much memory ``quantize_checkpoint`` takes: ``python tests/streaming/peak_memory.py --gigabytes 4``.

Writes a Llama of random bfloat16 weights of that size, quantizes it in a process of its own, and prints that process's
peak memory beside the bound: three times the largest tensor, and 500 MB.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

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
if sys.argv[1:]:
    qgemm.quantize_checkpoint(sys.argv[1], sys.argv[2])
print(json.dumps({"before": before, "peak": memory("VmHWM"), "seconds": time.perf_counter() - start}))
"""


def write_llama(folder: Path, nbytes: int, hidden_size: int) -> int:
    """Writes a checkpoint of about ``nbytes``; returns the bytes of its largest tensor."""
    sizes = {"hidden_size": hidden_size, "intermediate_size": 4 * hidden_size, "vocab_size": 4 * hidden_size}
    heads = {"num_attention_heads": hidden_size // 64, "num_key_value_heads": hidden_size // 64}
    layers = max(1, round((nbytes / 2 / hidden_size**2 - 8) / 16))
    config = LlamaConfig(**sizes, **heads, num_hidden_layers=layers, dtype="bfloat16")
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    with torch.device("meta"):
        tensors = {name: t.to(torch.bfloat16) for name, t in LlamaForCausalLM(config).named_parameters()}
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
    return max(tensor.nbytes for tensor in tensors.values())


def measure(*folders: Path) -> dict[str, float]:
    """Memory of a process that quantizes the first folder into the second, in bytes: before that, and at its peak."""
    command = [sys.executable, "-c", _CHILD, *map(str, folders)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    measured: dict[str, float] = json.loads(result.stdout)
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split(":")[0])
    parser.add_argument("--gigabytes", type=float, default=4.0, help="of the checkpoint, 10^9 bytes each (4)")
    parser.add_argument("--hidden-size", type=int, default=2048, help="of the model (2048)")
    parser.add_argument("--folder", type=Path, help="where to write; a temporary folder, which is removed, by default")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        largest = write_llama(Path(folder, "float"), int(arguments.gigabytes * 1e9), arguments.hidden_size)
        start = time.perf_counter()
        measured = measure(Path(folder, "float"), Path(folder, "int8"))
        seconds = time.perf_counter() - start
    bound = 3 * largest + ALLOWANCE
    print(f"largest tensor {largest / 1e6:.0f} MB; {seconds:.0f} s")
    peak, before = measured["peak"] / 1e6, measured["before"] / 1e6
    print(f"peak {peak:.0f} MB, of which imports {before:.0f} MB; {bound / 1e6:.0f} MB allowed")
    if measured["peak"] > bound:
        raise SystemExit("more memory than allowed")


if __name__ == "__main__":
    main()
