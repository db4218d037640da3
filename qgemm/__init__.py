"""Int8 inference layers for PyTorch.

- ``quantize_model(model)`` swaps the linear layers of a model, in place; ``report(model)`` says what became of each.
- ``QuantLinear`` is the layer.
- ``save_quantized(model, folder)`` and ``load_quantized(folder)`` keep a quantized model in safetensors.

``qgemm.kernels`` has the matrix products themselves, ``qgemm.kernels.stages`` the blocks to write more with.
"""

from qgemm.checkpoint import CheckpointError, load_quantized, save_quantized
from qgemm.nn import QuantLinear
from qgemm.quantize import quantize_model
from qgemm.reporting import QuantReport, report
from qgemm.scheme import SCHEMES, QuantScheme

__version__ = "0.1.0"

__all__ = [
    "SCHEMES",
    "CheckpointError",
    "QuantLinear",
    "QuantReport",
    "QuantScheme",
    "__version__",
    "load_quantized",
    "quantize_model",
    "report",
    "save_quantized",
]
