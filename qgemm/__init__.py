"""Int8 inference layers for PyTorch."""

from qgemm.nn import QuantLinear
from qgemm.scheme import QuantScheme

__version__ = "0.1.0"

__all__ = ["QuantLinear", "QuantScheme", "__version__"]
