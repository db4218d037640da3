"""``swap``: replaces one float layer of a model by a quantized layer.

The float weight is freed with the float layer, so that memory peaks at the model plus the working space of one layer.
Experts can be swapped one tensor at a time (``ExpertsSwap``), for a model that is quantized while it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from qgemm.device import useful_threads
from qgemm.model.offloading import carry_hooks, weights_at_hand
from qgemm.model.report import LayerRecord, parameter_bytes
from qgemm.model.survey import Layer
from qgemm.nn import LinearLayer, QuantExperts, QuantLayer, linear_class
from qgemm.nn.carry_over import carry_over
from qgemm.nn.float_experts import describe_experts
from qgemm.nn.linear_layer import InputScale, linear_weight
from qgemm.numerics.integers import round_up
from qgemm.scheme import QuantScheme

_LEAST_SQUARES = 1e-25
"""For a piece of rows: above this, float32 can hold the squares of differences, a hundred thousandth of it."""


def swap(
    model: nn.Module, layer: Layer, scheme: QuantScheme, input_scale: InputScale | None = None, **decided: Any
) -> LayerRecord:
    """Replaces one layer of ``model`` by a quantized layer, under all its names.

    ``decided``: other arguments of ``from_linear`` of the scheme's class, such as a ``weight`` that a method has
    rounded; for experts, ``weights`` by name.
    """
    module = model.get_submodule(layer.name)
    with weights_at_hand(module):
        if layer.is_experts:
            experts = ExpertsSwap(model, layer, scheme, **decided)
            for name in list(experts.waiting):
                experts.take(name, module.get_parameter(name))
            record = experts.finish()
        else:
            weight = linear_weight(module).detach()
            with useful_threads(weight.device):
                quantized = linear_class(scheme).from_linear(module, scheme, input_scale, **decided)
                error = None if weight.device.type == "meta" else WeightError.of_layer(weight, quantized).value
            record = _put_and_record(model, layer, quantized, error)
    carry_hooks(module, model.get_submodule(layer.name))
    return record


class ExpertsSwap:
    """Swaps one module of experts as its tensors arrive, in any order: ``take`` for each, then ``finish``.

    ``waiting``: the shapes of the tensors still to come, by their names in the float module. That module stays in place
    until the end, without values for these tensors.
    """

    def __init__(
        self,
        model: nn.Module,
        layer: Layer,
        scheme: QuantScheme,
        weights: Mapping[str, tuple[Tensor, ...]] | None = None,
    ) -> None:
        """``layer``: a module that ``describe_experts`` understands. ``weights``: those already rounded, by name."""
        self._model, self._layer, self._decided = model, layer, weights or {}
        module = model.get_submodule(layer.name)
        self._source = describe_experts(module)
        self._quantized = QuantExperts.like(module, self._source, scheme)
        self._names = {theirs: name for name, theirs in self._source.parameters.items()}
        self.waiting = {theirs: module.get_parameter(theirs).shape for theirs in self._names}
        self._errors: list[float] = []

    def take(self, float_name: str, value: Tensor) -> None:
        """Converts one tensor of the float module; raises ``ValueError`` if it is a weight with NaN or Inf."""
        name, experts = self._names[float_name], self._quantized
        with useful_threads(value.device):
            experts.fill(name, value, self._source, self._decided.get(name))
            del self.waiting[float_name]
            if name in experts.weight_names and value.device.type != "meta":
                error = WeightError()
                for expert in range(experts.num_experts):
                    rows, one = self._source.rows_of(name, value.detach(), expert), experts.linear_of(name, expert)
                    step = error.rows_at_a_time((experts.num_experts, *rows.shape), one.rows_in_step)
                    for start in range(0, rows.shape[0], step):
                        stop = min(start + step, rows.shape[0])
                        error.add(rows[start:stop], partial(one.restore_rows, one.rows_from(start, stop)))
                self._errors.append(error.value)

    def finish(self) -> LayerRecord:
        """Puts the quantized module in place."""
        assert not self.waiting, f"{next(iter(self.waiting))} has yet to come"
        return _put_and_record(self._model, self._layer, self._quantized, max(self._errors, default=None))


def _put_and_record(model: nn.Module, layer: Layer, quantized: QuantLayer, error: float | None) -> LayerRecord:
    put(model, layer, quantized)
    size = parameter_bytes(quantized)
    return LayerRecord(layer.name, layer.kind, quantized.scheme.name, "", layer.bytes, size, error)


def put(model: nn.Module, layer: Layer, quantized: QuantLayer) -> None:
    """Replaces ``layer`` of ``model`` by ``quantized``, under all its names, with what others have added to it."""
    module = model.get_submodule(layer.name)
    quantized.layer_name = layer.name
    carry_over(module, quantized)
    for name in layer.names:
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, quantized)


@contextmanager
def normal_tensors(model: nn.Module) -> Iterator[None]:
    """What is put into ``model`` inside becomes normal tensors, also under ``torch.inference_mode()``.

    Autograd refuses inference tensors, such as the weights of layers through which gradients pass to an adapter. A
    model that already has some stays of that kind.
    """
    had_some = any(True for _ in _inference_tensors(model))
    yield
    if had_some or not torch.is_inference_mode_enabled():
        return
    places: dict[Tensor, list[tuple[dict[str, Any], str]]] = {}
    for holder, name, tensor in _inference_tensors(model):
        places.setdefault(tensor, []).append((holder, name))
    while places:  # one at a time, so that none has two copies for long
        tensor, of_tensor = places.popitem()
        with torch.inference_mode(mode=False):
            normal = tensor.detach().clone()
            normal = nn.Parameter(normal, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else normal
        for holder, name in of_tensor:
            holder[name] = normal


def _inference_tensors(model: nn.Module) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
    for module in model.modules():
        for holder in (module._parameters, module._buffers):
            for name, tensor in holder.items():
                if tensor is not None and not is_lazy(tensor) and tensor.is_inference():
                    yield holder, name, tensor


def make_unusable(model: nn.Module, error: BaseException) -> None:
    """Makes ``model``, whose quantization ``error`` stopped half-way, refuse to run and to give its state.

    The float weights of the layers that are already swapped have been freed, so the model can't be restored.
    """
    swapped = [module for module in model.modules() if isinstance(module, QuantLayer)]
    cause = " ".join(filter(None, (type(error).__name__, str(error).partition("\n")[0])))

    def refuse(*_: Any) -> None:
        raise RuntimeError(
            f"this {type(model).__name__} is partly quantized: quantize_model was stopped half-way ({cause}), with "
            f"{len(swapped)} layers done, whose float weights are freed. Load the model again"
        )

    for module in {model, *swapped}:
        module.register_forward_pre_hook(refuse)
        module.register_state_dict_pre_hook(refuse)


class WeightError:
    """``norm(dequantized - weight) / norm(weight)`` (Frobenius) of a weight ``[N, K]`` given a few rows at a time.

    Sums of rows are accumulated in float64. Other pieces, or other devices, may change the sixth digit, so use
    ``rows_at_a_time``.
    """

    def __init__(self, squares: tuple[float, float] = (0.0, 0.0)) -> None:
        """``squares``: the sums of an earlier object, to continue from."""
        self._squares = torch.tensor(squares, dtype=torch.float64, device="cpu")

    @staticmethod
    def rows_at_a_time(shape: Sequence[int], in_step: int = 1) -> int:
        """The number of rows in a piece of a weight ``[N, K]``, or of each of the experts in ``[E, N, K]``.

        It is a multiple of ``in_step``, the layer's ``rows_in_step``.
        """
        # Three float64 copies of a thirty-second take 3/8 of the memory of a bfloat16 weight. Each has at most 4 MB:
        # the C library returns larger blocks to the system every time, and getting them anew took more time than all
        # the sums (27 s for a checkpoint of 5.8 GB instead of 15). Experts are many and small: 25 MB are processed at a
        # time, because otherwise a GPU would wait for the host.
        N, K = shape[-2:]
        return round_up(max(min(N // 32, 2**19 // K), (2**16 if len(shape) == 2 else 2**20) // K, 1), in_step)

    @torch.no_grad()
    def add(self, weight: Tensor, restore: Callable[[torch.dtype], Tensor]) -> None:
        """Adds rows ``[n, K]``: the float ones, and the quantized ones, which ``restore`` converts to a dtype.

        A CPU computes differences in float32, in two thirds of the time, unless their squares exceed its range.
        """
        self._squares = self._squares.to(weight.device)
        if weight.device.type == "cpu":
            squares = _squares(weight, restore, torch.float32)
            if bool(squares[1].isfinite()) and squares[1].item() > _LEAST_SQUARES:
                self._squares += squares
                return
        self._squares += _squares(weight, restore, torch.float64)

    @classmethod
    def of_layer(cls, weight: Tensor, layer: LinearLayer) -> WeightError:
        """The error over all rows of a weight and of the layer made from it."""
        error, step = cls(), cls.rows_at_a_time(weight.shape, layer.rows_in_step)
        for start in range(0, weight.shape[0], step):
            rows = layer.rows_from(start, min(start + step, weight.shape[0]))
            error.add(weight[start : start + step], partial(layer.restore_rows, rows))
        return error

    @property
    def squares(self) -> tuple[float, float]:
        """The sums of squares so far, of the differences and of the weight."""
        difference, norm = self._squares.tolist()
        return difference, norm

    @property
    def value(self) -> float:
        """The error; 0 for a weight of zeros."""
        difference, norm = self._squares.sqrt().tolist()
        return difference / norm if norm else 0.0


def _squares(weight: Tensor, restore: Callable[[torch.dtype], Tensor], dtype: torch.dtype) -> Tensor:
    """float64 ``[2]``: the sums of squares of the differences and of the weight, computed in ``dtype``."""
    wanted = weight.to(dtype, copy=True)
    error = restore(dtype).sub_(wanted)
    # Row by row, because several threads would each sum a part, and their number would change the last digit.
    return torch.stack([values.square_().sum(1).double().sum() for values in (error, wanted)])
