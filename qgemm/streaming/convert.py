"""``quantize_checkpoint``: from a folder of float weights to one of quantized weights, in little memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from qgemm.checkpoint.layout import CONFIG_FILE
from qgemm.checkpoint.staging import StagedFiles
from qgemm.quantize import Pattern
from qgemm.reporting import QuantReport
from qgemm.scheme import QuantScheme
from qgemm.streaming.plan import make_plan
from qgemm.streaming.shards import bytes_to_read, write_shard
from qgemm.streaming.source import open_source


def quantize_checkpoint(
    source: str | Path,
    destination: str | Path,
    scheme: str | QuantScheme = "int8",
    *,
    skip: Pattern | Iterable[Pattern] | None = None,
    input_scales: Mapping[str, float | Tensor] | None = None,
    drop: str | Iterable[str] = (),
    device: torch.device | str = "cpu",
    max_shard_size: int | str = "5GB",
    resume: bool = True,
    progress: bool | None = None,
) -> QuantReport:
    """Quantizes the float checkpoint in ``source`` into a new folder ``destination``; returns the report."""
    source, destination = Path(source), Path(destination)
    device = torch.device(device)
    with open_source(source) as opened:
        plan = make_plan(opened, scheme, skip, input_scales, [drop] if isinstance(drop, str) else drop, max_shard_size)
        total = sum(bytes_to_read(plan, names) for names in plan.shards.values())
        destination.mkdir(parents=True)
        staged = StagedFiles(destination)
        errors: dict[str, float] = {}
        hide = None if progress is None else not progress
        try:
            with tqdm(total=total, desc="quantize", unit="B", unit_scale=True, disable=hide) as bar:
                for file_name, names in plan.shards.items():
                    with staged.create(file_name) as file:
                        errors |= write_shard(file, plan, names, device, bar.update)
            for file_name, text in plan.text_files(errors).items():
                with staged.create(file_name) as file:
                    file.write(text)
            staged.publish(last=CONFIG_FILE, stale=())
        finally:
            staged.discard()
    return plan.report(errors)
