"""What a run converts to what; a later run recognizes its work by this."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from qgemm.calibration.quantization import Quantization
from qgemm.calibration.result import Calibration
from qgemm.checkpoint.layout import parse_size
from qgemm.streaming.plan import CheckpointPlan, plan_checkpoint
from qgemm.streaming.source import Source
from qgemm.version import __version__


@dataclass(frozen=True)
class Job:
    """The checkpoint in the folder ``source``, how to quantize it, and the other arguments of ``plan_checkpoint``."""

    source: Path
    wanted: Quantization
    drop: list[str]
    max_shard_size: int | str
    calibration: Calibration | None = None

    def plan(self, opened: Source) -> CheckpointPlan:
        """Plans what to write; raises as ``plan_checkpoint`` does. ``opened``: the source."""
        return plan_checkpoint(opened, self.wanted, self.drop, self.max_shard_size, self.calibration)

    def most_files(self, opened: Source) -> int:
        """An upper bound of the number of files, without a plan."""
        total = sum(tensor.nbytes for tensor in opened.tensors.values())
        # The tensors of two consecutive files together exceed the size of one file.
        return 2 * total // parse_size(self.max_shard_size) + 1

    def describe(self, opened: Source, plan: CheckpointPlan) -> dict[str, Any]:
        """Identifies plan and source, JSON-ready: a run for which all of this is equal writes the same bytes."""
        import transformers

        layout = {name: [str(tensor.dtype), list(tensor.shape)] for name, tensor in plan.tensors.items()}
        return {
            **opened.fingerprints,
            **self.wanted.to_dict(),
            **({} if self.calibration is None else {"input_scales": plan.input_scales}),
            "max_shard_size": parse_size(self.max_shard_size),
            "layout": hashlib.sha256(json.dumps([layout, plan.shards]).encode()).hexdigest(),
            "versions": {"qgemm": __version__, "torch": torch.__version__, "transformers": transformers.__version__},
        }
