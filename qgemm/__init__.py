"""Quantized inference layers for PyTorch: int8, fp8 and 4-bit weights.

- ``quantize_model(model)`` replaces the linear layers and experts of a model in place; ``report(model)`` lists what was
  done with each layer.
- ``calibrate(model)`` computes the scales that static schemes need.
- ``qgemm.calibration`` has the methods for recipes: ``quantize_model(..., calibration=batches, recipe=[GPTQ()])``.
- ``sensitivity(model, data)`` ranks layers by the loss when each one alone is quantized; a ``Budget`` chooses schemes
  with it.
- ``fuse(model)`` fuses the kernels of a transformer's layers; ``unfuse(model)`` undoes it.
- ``QuantLinear`` is the quantized linear layer, ``QuantExperts`` a quantized mixture of experts.
- ``save_quantized(model, folder)`` and ``load_quantized(folder)`` store and load a quantized model as safetensors.
- ``quantize_checkpoint(source, destination)`` quantizes from files to files, for models larger than memory.
- ``fast_generate(model)`` makes ``generate`` of a transformers model fast.
- ``fast_forward(model)`` makes calls of any other model fast that wait for the host.
- ``offload_embeddings(model)`` moves embedding tables to host memory, from which the GPU reads the rows that it needs.
- ``share_scales(model)`` makes a tensor-parallel model use the scales that a single process would use.
- ``KeyValueCache(config, max_batch, max_length)`` is a static cache for transformers, in float or int8.
- ``QGemmConfig(...)`` is the ``quantization_config`` for transformers' ``from_pretrained``.

``qgemm.kernels`` has the matrix products, ``qgemm.kernels.stages`` the building blocks for kernels of your own.
"""

from typing import TYPE_CHECKING, Any

from qgemm import integrations
from qgemm.calibration import Budget, Calibration, Sensitivity, calibrate
from qgemm.calibration.sensitivity import sensitivity
from qgemm.checkpoint import CheckpointError, load_quantized, save_quantized
from qgemm.fusion import FusionReport, fuse, fusion_report, unfuse
from qgemm.generation import fast_generate, generate
from qgemm.model.host_embeddings import offload_embeddings
from qgemm.model.report import QuantReport, report
from qgemm.nn import QuantExperts, QuantLinear
from qgemm.parallel import share_scales
from qgemm.quantize import quantize_model
from qgemm.replay import fast_forward
from qgemm.scheme import SCHEMES, QuantScheme
from qgemm.streaming import quantize_checkpoint
from qgemm.version import __version__

if TYPE_CHECKING:
    from qgemm.integrations.transformers import KeyValueCache as KeyValueCache
    from qgemm.integrations.transformers import QGemmConfig as QGemmConfig

__all__ = [
    "SCHEMES",
    "Budget",
    "Calibration",
    "CheckpointError",
    "FusionReport",
    "QuantExperts",
    "QuantLinear",
    "QuantReport",
    "QuantScheme",
    "Sensitivity",
    "__version__",
    "calibrate",
    "fast_forward",
    "fast_generate",
    "fuse",
    "fusion_report",
    "generate",
    "load_quantized",
    "offload_embeddings",
    "quantize_checkpoint",
    "quantize_model",
    "report",
    "save_quantized",
    "sensitivity",
    "share_scales",
    "unfuse",
]

_OF_TRANSFORMERS = ("KeyValueCache", "QGemmConfig")

integrations.register()


def __getattr__(name: str) -> Any:
    # These classes need transformers, whose import takes seconds, so they are imported only on request. For the same
    # reason they aren't in __all__.
    if name not in _OF_TRANSFORMERS:
        raise AttributeError(f"module 'qgemm' has no attribute {name!r}")
    try:
        from qgemm.integrations import transformers
    except ImportError as error:
        raise ImportError(
            f'{name} needs transformers 5.17 or later: pip install "transformers>=5.17" ({error})'
        ) from error
    return getattr(transformers, name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_OF_TRANSFORMERS])
