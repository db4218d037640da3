"""Times the conversion of a checkpoint by one process and by several: ``python -m benchmarks.conversion FOLDER``.

A checkpoint of Llama 3 8B's shape with random weights is written to ``FOLDER``, which should be in memory (a tmpfs) and
have room for it and for what becomes of it, 1.6 times its size. One process and several convert it in turns, each in a
new Python that has imported transformers; the files must be the same, byte for byte. Two times are printed: of the call
of ``quantize_checkpoint``, and of the whole process with its imports.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.models.shapes import MODELS, ModelShape
from benchmarks.results import environment
from benchmarks.tables import Table, render

SHAPE = MODELS["llama-3-8b"]
_CALL = "--call"


@dataclass(frozen=True)
class Seconds:
    """Of a conversion by so many ``workers``: of the call, and of the process."""

    workers: int
    call: float
    whole: float


def write_checkpoint(folder: Path, shape: ModelShape, layers: int) -> int:
    """Writes a float checkpoint in bfloat16, a file a layer, and returns its bytes."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shape.make_config(layers), dtype=torch.bfloat16)
    model.config.architectures = [type(model).__name__]
    shapes = model.state_dict()
    random = torch.randn(max(each.numel() for each in shapes.values()) + len(shapes), dtype=torch.bfloat16) * 0.02
    index = {name: f"model-{name.partition('.layers.')[2].split('.')[0] or name}.safetensors" for name in shapes}
    for file in dict.fromkeys(index.values()):
        # The same numbers in every tensor, from another one on.
        tensors = {
            name: random[i : i + each.numel()].view(each.shape).clone()
            for i, (name, each) in enumerate(shapes.items())
            if index[name] == file
        }
        save_file(tensors, folder / file, {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    model.config.save_pretrained(folder)
    return sum(each.nbytes for each in shapes.values())


def convert(source: Path, destination: Path, workers: int, shard_size: str, device: str) -> Seconds:
    """Converts in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.conversion", _CALL, *map(str, (source, destination, workers))]
    start = time.perf_counter()
    done = subprocess.run([*command, shard_size, device], check=True, stdout=subprocess.PIPE, text=True)
    return Seconds(workers, float(done.stdout.splitlines()[-1]), time.perf_counter() - start)


def measure(
    folder: Path, shape: ModelShape, layers: int, workers: int, pairs: int, shard_size: str, device: str
) -> list[Seconds]:
    """One process and ``workers`` of them, in turns. Raises ``ValueError`` if their files differ."""
    source, found, wanted = folder / "float", [], None
    source.mkdir()
    size = write_checkpoint(source, shape, layers)
    print(f"{size / 1e9:.1f} GB in bfloat16", flush=True)
    for _ in range(pairs):
        for count in (1, workers):
            destination = folder / "int8"
            found.append(convert(source, destination, count, shard_size, device))
            hashes = _hashes(destination)
            wanted = wanted or hashes
            if hashes != wanted:
                raise ValueError(f"{count} processes wrote other files than one")
            shutil.rmtree(destination)
    return found


def table(found: Sequence[Seconds], workers: int) -> Table:
    """A row a pair."""
    header = ["the call, 1", f"{workers}", "times as fast", "whole process, 1", f"{workers}", "times as fast"]
    rows = []
    for one, several in zip(found[::2], found[1::2], strict=True):
        times = (one.call, several.call, one.whole, several.whole)
        call, whole = f"{one.call / several.call:.2f}", f"{one.whole / several.whole:.2f}"
        seconds = [f"{each:.1f} s" for each in times]
        rows.append([*seconds[:2], call, *seconds[2:], whole])
    return header, rows


def _hashes(folder: Path) -> Mapping[str, str]:
    return {file.name: hashlib.blake2b(file.read_bytes()).hexdigest() for file in sorted(folder.iterdir())}


def _call(source: str, destination: str, workers: str, shard_size: str, device: str) -> None:
    """What a process of ``convert`` does."""
    from transformers import AutoModelForCausalLM

    import qgemm

    with torch.device("meta"):  # so that the code of the model's class is imported as well
        AutoModelForCausalLM.from_config(SHAPE.make_config(1))
    start = time.perf_counter()
    qgemm.quantize_checkpoint(
        source, destination, device=device, workers=int(workers), max_shard_size=shard_size, progress=False
    )
    print(time.perf_counter() - start)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == [_CALL]:
        _call(*arguments[1:])
        return
    args = _parse(arguments)
    options: dict[str, Any] = {"layers": args.layers, "workers": args.workers, "pairs": args.pairs}
    options |= {"shard_size": args.max_shard_size, "device": args.device}
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        found = measure(Path(folder), SHAPE, **options)
    about = environment(torch.device(args.device), args.commit)
    print(f"{about['device']}, {os.cpu_count()} cores, {about['versions']}, commit {about['commit']}; the same files\n")
    print(render(table(found, args.workers), markdown=True))


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.conversion", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=SHAPE.layers)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--device", default="cpu", help="that computes; cuda: one GPU per process (default: cpu)")
    parser.add_argument("--max-shard-size", default="400MB")
    parser.add_argument("--commit", help="of a copy of the tree that git doesn't know")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
