"""How fast a product could be: the longer of its bytes at the memory's speed and its operations at the chip's peak.

Bytes are the fewest that must move: each operand read once, the output written once. Scales and a bias are left out
(under 0.1 % of the operands from K = 4096 on), and so is what a layer writes and reads between its own kernels.
The memory's speed is measured in the same run, by a copy. Reading alone can be a little faster than copying, so a
kernel that only reads weights may pass 100 %.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

KINDS = {torch.int8: "int8", torch.float8_e4m3fn: "fp8", torch.bfloat16: "bf16", torch.float32: "fp32"}
"""The names under which peaks are kept, by the dtype that is multiplied."""

PEAK_TOPS: dict[str, dict[str, float]] = {
    # By a part of the device's name, the longer one first. Tera-operations a second without sparsity, from datasheets.
    "H100 PCIe": {"bf16": 756, "fp8": 1513, "int8": 1513},
    "H100": {"bf16": 989, "fp8": 1979, "int8": 1979},
    "H200": {"bf16": 989, "fp8": 1979, "int8": 1979},
    "A100": {"bf16": 312, "int8": 624},
    "L40S": {"bf16": 362, "fp8": 733, "int8": 733},
    "MI300X": {"bf16": 1307, "fp8": 2615, "int8": 2615},
}


@dataclass(frozen=True)
class Roofline:
    """``bandwidth``: bytes a second. ``peak_tops``: tera-operations a second by kind, where a peak is known."""

    bandwidth: float
    peak_tops: Mapping[str, float]

    def limit(self, operations: float, bytes_moved: float, kind: str) -> float:
        """The least seconds that ``operations`` on ``kind`` of values and ``bytes_moved`` can take."""
        peak = self.peak_tops.get(kind)
        return max(bytes_moved / self.bandwidth, operations / (peak * 1e12) if peak else 0.0)


def known_peaks(device_name: str) -> dict[str, float]:
    """The datasheet's peaks for a device, by kind; empty for one that isn't in the table."""
    return next((dict(peaks) for part, peaks in PEAK_TOPS.items() if part in device_name), {})


def operations(M: int, N: int, K: int) -> float:
    """Multiplies and adds of ``[M, K] @ [K, N]``."""
    return 2.0 * M * N * K


def bytes_moved(
    M: int, N: int, K: int, input_dtype: torch.dtype, weight_dtype: torch.dtype, output_dtype: torch.dtype
) -> float:
    """The fewest bytes that a product of these dtypes reads and writes."""
    return float(M * K * input_dtype.itemsize + N * K * weight_dtype.itemsize + M * N * output_dtype.itemsize)
