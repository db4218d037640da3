"""Calibration: statistics of a float model's activations, and the static scales that are made of them."""

from qgemm.calibration.collect import calibrate, run_batches
from qgemm.calibration.observers import (
    OBSERVERS,
    MeanSquaredError,
    MinMax,
    MovingAverage,
    Observer,
    Percentile,
)
from qgemm.calibration.result import Calibration

__all__ = [
    "OBSERVERS",
    "Calibration",
    "MeanSquaredError",
    "MinMax",
    "MovingAverage",
    "Observer",
    "Percentile",
    "calibrate",
    "run_batches",
]
