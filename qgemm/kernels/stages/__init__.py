"""Device-side blocks that GEMM kernels are made of; ``docs/stages.md`` shows how.

They run inside ``@triton.jit`` kernels and can't be called from host code.
"""

from qgemm.kernels.stages.aggregate import INTERPRETING, aggregate
from qgemm.kernels.stages.context import GemmContext
from qgemm.kernels.stages.schedule import ScheduleContext
from qgemm.kernels.stages.tile import Tile
from qgemm.kernels.stages.views import (
    BiasView,
    InputView,
    OutputView,
    ScaleView,
    make_bias_view,
    make_input_view,
    make_output_view,
    make_scale_view,
    make_tensor_view,
)

__all__ = [
    "INTERPRETING",
    "BiasView",
    "GemmContext",
    "InputView",
    "OutputView",
    "ScaleView",
    "ScheduleContext",
    "Tile",
    "aggregate",
    "make_bias_view",
    "make_input_view",
    "make_output_view",
    "make_scale_view",
    "make_tensor_view",
]
