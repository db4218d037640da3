"""Int8 inference layers for PyTorch.

- ``quantize_model(model)`` swaps the linear layers and experts of a model, in place; ``report(model)`` says what became
  of each.
- ``calibrate(model)`` finds the scales that static schemes want.
- ``qgemm.calibration`` has the methods of recipes: ``quantize_model(..., calibration=batches, recipe=[GPTQ()])``.
- ``sensitivity(model, data)`` ranks layers by the damage that each does alone; ``Budget`` chooses schemes by it.
- ``fuse(model)`` has the layers of a transformer compute as few kernels; ``unfuse(model)`` undoes it.
- ``QuantLinear`` is the layer, ``QuantExperts`` a mixture of experts.
- ``save_quantized(model, folder)`` and ``load_quantized(folder)`` keep a quantized model in safetensors.
- ``quantize_checkpoint(source, destination)`` quantizes from files to files, for models larger than memory.
- ``fast_generate(model)`` makes ``generate`` of a model of transformers fast.
- ``share_scales(model)`` has a model in tensor parallelism compute what one process computes.
- ``KeyValueCache(config, max_batch, max_length)`` is a cache of transformers, in float or int8.
- ``QGemmConfig(...)`` is the ``quantization_config`` of transformers' ``from_pretrained``.

``qgemm.kernels`` has the matrix products themselves, ``qgemm.kernels.stages`` the blocks to write more with.
"""

from typing import TYPE_CHECKING, Any

from qgemm import integrations
from qgemm.calibration import Budget, Calibration, Sensitivity, calibrate
from qgemm.calibration.sensitivity import sensitivity
from qgemm.checkpoint import CheckpointError, load_quantized, save_quantized
from qgemm.fusion import FusionReport, fuse, fusion_report, unfuse
from qgemm.generation import fast_generate, generate
from qgemm.model.report import QuantReport, report
from qgemm.nn import QuantExperts, QuantLinear
from qgemm.parallel import share_scales
from qgemm.quantize import quantize_model
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
    "fast_generate",
    "fuse",
    "fusion_report",
    "generate",
    "load_quantized",
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
    # Classes of transformers, whose import takes seconds: only for those who ask for them. For that reason they aren't
    # in __all__ either.
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
