"""``sensitivity``: how much each layer damages a model if it alone is quantized.

The damage is measured at the model's output, over all tokens of the data:
- if the model returns logits ``[..., classes]``, the mean of ``KL(p || q) = sum_c p_c (log p_c - log q_c)`` in nats,
  with ``p`` from the float model and ``q`` from the model in which one layer is quantized;
- otherwise ``norm(q - p) / norm(p)`` of the first tensor that the model returns.

Padding doesn't count (``padding.py``). The result also contains the layer's own error on its float inputs,
``norm(quantized(x) - float(x)) / norm(float(x))``, which costs nothing more but doesn't tell how the error propagates.

The cost is that of ``layers * schemes`` passes over the data, or half of that, because blocks before the layer aren't
run again. A few thousand tokens are enough to rank layers. Nothing is swapped: while a layer is measured, its
``forward`` computes with a quantized copy, of which only one exists at a time.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from tqdm import tqdm

from qgemm.arguments import check_model, shortened
from qgemm.calibration.chains import find_chains
from qgemm.calibration.collect import as_calls, check_batches, run_batches
from qgemm.calibration.hooks import hooked, in_eval_mode, replaced, without_cache
from qgemm.calibration.method import Call, first_tensor
from qgemm.calibration.observers import MinMax, Observer
from qgemm.calibration.padding import Masks
from qgemm.calibration.sensitivity_result import ERROR, KL, LayerSensitivity, Sensitivity
from qgemm.model.offloading import weights_at_hand
from qgemm.model.report import parameter_bytes
from qgemm.model.selection import Patterns, listed, select_layers
from qgemm.model.survey import Layer
from qgemm.nn import QuantExperts, QuantLayer, linear_class
from qgemm.nn.attention import opened_attention
from qgemm.scheme import QuantScheme, resolve_scheme
from qgemm.warn import warn_user

# Logits that are compared at a time, in float64.
_PIECE = 1 << 24


def sensitivity(
    model: nn.Module,
    data: Iterable[Any],
    schemes: str | QuantScheme | Sequence[str | QuantScheme] = "int8",
    *,
    skip: Patterns = None,
    include: Patterns = None,
    progress: bool | None = None,
) -> Sensitivity:
    """Measures how much the output of ``model`` changes when one layer alone is quantized, rounded to nearest.

    - ``data``: batches as for ``quantize_model(calibration=)``. The model runs on them in eval mode, without gradients,
      ``1 + layers * schemes`` times; once more for static schemes, to find ``"min-max"`` scales; and a few times on the
      first batch, to find its blocks. The outputs of all blocks on one batch are kept in memory.
    - ``schemes``: one or more, each tried on every layer. Schemes with outlier columns, or with a rotation and a static
      scale, are refused. Experts are measured in ``QuantScheme.for_experts``.
    - ``skip``, ``include``: layers not to measure, and additional layers to measure, as in ``quantize_model``.
    - ``progress``: whether to show a progress bar; None shows one on a terminal only.

    The model isn't changed, even if an error occurs. Layers that no token reaches have no record; a warning names them.
    Raises ``ValueError`` and ``TypeError`` as ``quantize_model`` does, and ``ValueError`` if the output holds NaN or
    Inf.
    """
    check_batches(data)
    check_model(model)
    resolved = _measurable_schemes(schemes)
    with opened_attention(model):
        layers = [layer for layer in select_layers(model, skip, include) if not layer.reason]
        calls = as_calls(data, "data")
        seen: dict[str, Observer] = {}
        if any(scheme.is_static for scheme in resolved):
            linears = [layer.name for layer in layers if not layer.is_experts]
            seen = run_batches(model, linears, calls, progress=progress).statistics
        trials = [
            _Trial(layer, scheme, seen.get(layer.name))
            for layer in layers
            for scheme in dict.fromkeys(layer.scheme_for(each) for each in resolved)
        ]
        outputs = _run(model, calls, trials, progress)
    if unseen := list(dict.fromkeys(trial.layer.name for trial in trials if not trial.was_reached)):
        warn_user(f"{listed(unseen)} saw no tokens, so they weren't measured: add batches that reach them")
    records = tuple(trial.record(outputs) for trial in trials if trial.was_reached)
    measured = {record.name: record.bytes_before for record in records}
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    whole = sum(tensor.nbytes for tensor in tensors.values())
    return Sensitivity(outputs.metric, outputs.tokens, whole - sum(measured.values()), records)


def _run(model: nn.Module, calls: Sequence[Call], trials: list[_Trial], progress: bool | None) -> _Outputs:
    """Runs all ``trials`` on every batch; returns the float outputs that they were compared with."""
    outputs = _Outputs()
    hidden = None if progress is None else not progress
    with (
        tqdm(total=len(calls) * len(trials), desc="sensitivity", unit="run", disable=hidden) as bar,
        in_eval_mode(model),
        without_cache(model),
        torch.no_grad(),
    ):
        blocks = _Blocks(model, calls[0], [trial.layer for trial in trials])
        for index, call in enumerate(calls):
            masks = Masks.of(model, call.args, call.kwargs)
            with blocks.recorded():
                output = model(*call.args, **call.kwargs)
            outputs.expect(output, masks, index)
            for trial in trials:
                with trial.running(model, masks), blocks.skipped_ahead_of(trial.layer):
                    trial.damage += outputs.damage_of(model(*call.args, **call.kwargs))
                bar.update()
    return outputs


class _Trial:
    """One layer under one scheme; it accumulates over batches."""

    def __init__(self, layer: Layer, scheme: QuantScheme, seen: Observer | None) -> None:
        self.layer, self.scheme = layer, scheme
        # A layer without statistics isn't called either, so any scale will do.
        seen = seen or MinMax().update(torch.zeros(1, 1, dtype=torch.float32, device="cpu"))
        self._input_scale = seen.input_scale(scheme) if scheme.is_static else None
        self.damage = 0.0
        self._bytes = 0
        # The sums of squares of the difference and of the float output.
        self._squares: Tensor | None = None

    @property
    def was_reached(self) -> bool:
        """Whether the layer was called with at least one token."""
        return self._squares is not None

    @contextmanager
    def running(self, model: nn.Module, masks: Masks) -> Iterator[None]:
        """Inside, the layer computes with a quantized copy. ``masks``: those of the batch."""
        module = model.get_submodule(self.layer.name)
        with weights_at_hand(module):
            quantized = self._quantized(module)
        self._bytes = parameter_bytes(quantized)
        # The function that accelerate loads the weights for, and that hooks surround.
        key = "_old_forward" if hasattr(module, "_hf_hook") else "forward"
        compute = getattr(module, key)

        def forward(*args: Any, **kwargs: Any) -> Any:
            output = quantized(*args, **kwargs)
            outputs = (first_tensor(each) for each in (output, compute(*args, **kwargs)))
            self._compare(*(masks.tokens(each, self.layer.name) for each in outputs))
            return output

        with replaced(module, key, forward):
            yield

    def _quantized(self, module: nn.Module) -> QuantLayer:
        if self.layer.is_experts:
            return QuantExperts.from_experts(module, self.scheme)
        return linear_class(self.scheme).from_linear(module, self.scheme, self._input_scale)

    def _compare(self, got: Tensor, wanted: Tensor) -> None:
        if wanted.numel():
            wanted = wanted.double()
            squares = torch.stack(((got.double() - wanted).square_().sum(), wanted.square().sum()))
            self._squares = squares if self._squares is None else self._squares + squares.to(self._squares.device)

    def record(self, outputs: _Outputs) -> LayerSensitivity:
        assert self._squares is not None
        difference, whole = self._squares.sqrt().tolist()
        return LayerSensitivity(
            self.layer.name,
            self.scheme.name,
            outputs.mean(self.damage),
            _without_nan(difference / whole if whole else 0.0),
            self.layer.bytes,
            self._bytes,
        )


class _Blocks:
    """The outputs of the blocks of a model's chains on a batch, so that blocks before a layer needn't run again.

    A block that gets a dictionary does run again, because it may store something in it for later blocks.
    """

    def __init__(self, model: nn.Module, call: Call, layers: list[Layer]) -> None:
        modules = [model.get_submodule(layer.name) for layer in layers]
        names = [name for chain in find_chains(model, call, modules) for name in chain.names]
        self._modules = {name: model.get_submodule(name) for name in names}
        self._starts: dict[str, int] = {}
        self._ends: dict[str, tuple[int, Any]] = {}

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Inside, records the model's run on the next batch."""
        self._starts, self._ends = {}, {}
        events = itertools.count()

        fillers = set()

        def start(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._starts[name] = next(events)
            if any(isinstance(each, Mapping) for each in (*args, *kwargs.values())):
                fillers.add(name)

        def end(name: str, output: Any) -> None:
            if name not in fillers:
                self._ends[name] = next(events), _copied(output)

        with hooked(self._modules, start, end):
            yield

    @contextmanager
    def skipped_ahead_of(self, layer: Layer) -> Iterator[None]:
        """Inside, blocks that end before the block with ``layer`` starts return their recorded output."""
        around = [block for block in self._modules if all(name.startswith(f"{block}.") for name in layer.names)]
        start = self._starts.get(around[0], 0) if around else 0
        with ExitStack() as stack:
            for name, (end, output) in self._ends.items():
                if end < start:
                    # Copied each time, because the receiver may change it.
                    given = functools.partial(lambda output, *args, **kwargs: _copied(output), output)
                    stack.enter_context(replaced(self._modules[name], "forward", given))
            yield


def _copied(output: Any) -> Any:
    return tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, output)


class _Outputs:
    """The float model's outputs, batch after batch, and how much a quantized model's outputs differ from them."""

    def __init__(self) -> None:
        self.metric = ""
        self.tokens = 0
        self._squares = 0.0
        self._expected = torch.empty(0, dtype=torch.float32, device="cpu")
        self._masks = Masks()

    def expect(self, output: Any, masks: Masks, index: int) -> None:
        """Sets the float model's ``output`` for the batch at ``index``, with its ``masks``."""
        self.metric = ERROR if _logits(output) is None else KL
        self._masks = masks
        self._expected = self._rows(output)
        if self._expected.isnan().any():
            raise ValueError(f"the model's output holds NaN on batch {index}: leave it out, or find their cause")
        self.tokens += len(self._expected)
        self._squares += sum(float(rows.double().square().sum()) for rows in self._pieces(self._expected))

    def damage_of(self, output: Any) -> float:
        """The damage of ``output``, summed over tokens; infinity if that isn't a number."""
        total = 0.0
        for wanted, got in zip(self._pieces(self._expected), self._pieces(self._rows(output)), strict=True):
            wanted, got = wanted.double(), got.double()
            if self.metric == KL:
                p, q = wanted.log_softmax(-1), got.log_softmax(-1)
                total += float(torch.where(p > -torch.inf, p.exp() * (p - q), 0.0).sum())
            else:
                total += float((got - wanted).square_().sum())
        return max(_without_nan(total), 0.0)

    def mean(self, total: float) -> float:
        """The damage, from the sum of ``damage_of`` over all batches."""
        if self.metric == KL:
            return total / self.tokens if self.tokens else 0.0
        return math.sqrt(total / self._squares) if self._squares else 0.0

    def _rows(self, output: Any) -> Tensor:
        logits = _logits(output)
        values = first_tensor(output) if logits is None else logits
        # The rows of tokens; outputs of other dimensions belong to a sequence or an image.
        values = self._masks.output_tokens(values) if values.ndim == 3 else values
        return values.reshape(-1, values.shape[-1]) if values.ndim else values.reshape(1, 1)

    def _pieces(self, rows: Tensor) -> Sequence[Tensor]:
        pieces: Sequence[Tensor] = rows.split(max(_PIECE // max(rows.shape[1], 1), 1))
        return pieces


def _logits(output: Any) -> Tensor | None:
    """Logits of several classes, per token or per sequence; None if ``output`` contains none."""
    logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    return logits if isinstance(logits, Tensor) and logits.ndim in (2, 3) and logits.shape[-1] > 1 else None


def _without_nan(value: float) -> float:
    return math.inf if math.isnan(value) else value


def _measurable_schemes(schemes: Any) -> list[QuantScheme]:
    """The schemes to measure; raises ``ValueError`` for one that needs more than rounding to nearest."""
    if isinstance(schemes, Mapping) or not isinstance(schemes, str | QuantScheme | Iterable):
        raise TypeError(f"schemes is {shortened(schemes)}; it must be one scheme or several")
    resolved = [resolve_scheme(each) for each in ([schemes] if isinstance(schemes, str | QuantScheme) else schemes)]
    if not resolved:
        raise ValueError("schemes is empty: name at least one")
    for scheme in resolved:
        needs = ""
        if scheme.outlier_columns:
            needs = "outlier columns, which sensitivity doesn't choose"
        elif scheme.needs_blocks:
            needs = "scales of rotated inputs, which sensitivity doesn't compute"
        if needs:
            raise ValueError(f"scheme {scheme.name!r} needs {needs}: leave it out")
    return resolved
