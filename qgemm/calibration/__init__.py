"""Calibration: statistics of a float model's activations, and what they are used for: static scales, and recipes of
methods that keep a quantized model close to the float one.
"""

from qgemm.calibration.awq import AWQ
from qgemm.calibration.bias_correction import BiasCorrection
from qgemm.calibration.budget import Budget, choose_schemes
from qgemm.calibration.collect import calibrate, run_batches
from qgemm.calibration.gptq import GPTQ
from qgemm.calibration.hadamard import HadamardRotation
from qgemm.calibration.method import Block, Call, LayerWork, Method, QuantizedWeight
from qgemm.calibration.observers import (
    OBSERVERS,
    MeanSquaredError,
    MinMax,
    MovingAverage,
    Observer,
    Percentile,
)
from qgemm.calibration.outlier_columns import OutlierColumns
from qgemm.calibration.quantization import Quantization
from qgemm.calibration.recipe import METHODS, Recipe
from qgemm.calibration.residual_rotation import ResidualRotation
from qgemm.calibration.result import Calibration
from qgemm.calibration.rounding import MSEWeights
from qgemm.calibration.sensitivity_result import LayerSensitivity, Sensitivity
from qgemm.calibration.smoothquant import SmoothQuant
from qgemm.calibration.statistics import InputStatistics

__all__ = [
    "AWQ",
    "GPTQ",
    "METHODS",
    "OBSERVERS",
    "BiasCorrection",
    "Block",
    "Budget",
    "Calibration",
    "Call",
    "HadamardRotation",
    "InputStatistics",
    "LayerSensitivity",
    "LayerWork",
    "MSEWeights",
    "MeanSquaredError",
    "Method",
    "MinMax",
    "MovingAverage",
    "Observer",
    "OutlierColumns",
    "Percentile",
    "Quantization",
    "QuantizedWeight",
    "Recipe",
    "ResidualRotation",
    "Sensitivity",
    "SmoothQuant",
    "calibrate",
    "choose_schemes",
    "run_batches",
]
