"""``find_folds``: where a scale per input channel of linear layers can go without changing the float function.

``(x / s) (W * s)^T = x W^T``: dividing a layer's input by ``s [K]`` and multiplying its weight's columns by it changes
nothing. The division costs nothing if it is folded into the source of ``x``: the gain (and bias) of the preceding norm,
or the rows of the preceding linear layer, if between the two there is nothing, a product with a gate, an attention's
weighted sum of values, or ReLU.

The layers of a norm are all modules that are called with the very values that it returned, including experts and layers
that stay in float. Preceding linear layers are known by name (``up_proj`` and ``down_proj``). Each candidate is then
verified: with scales of 1, 2 and 4, which cause no rounding, everything that the block returns must stay the same. So a
norm whose output is also a residual (BERT), an activation that scales can't pass (GELU), or an unseen consumer is
refused, by name.

One batch doesn't show everything. For a preceding linear layer, the check is repeated with much larger outputs, because
there may be a limit of values that few tokens reach (``clip_qkv``). And nothing is folded where a layer that the batch
doesn't reach has as many columns (of another modality, or an inactive adapter).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, nn

from qgemm.calibration.hooks import hooked
from qgemm.calibration.method import Block
from qgemm.nn.float_experts import known_experts
from qgemm.nn.linear_layer import is_float_linear, linear_weight
from qgemm.scheme import INT8_ROWS, TensorScheme

# (layer, preceding layer): ends of names with the same beginning. Pairs that can't pass a scale on are listed too, so
# that they are refused with the right reason, and for models whose activation is ReLU.
_PAIRS = (
    ("down_proj", "up_proj"),
    ("down_proj", "gate_up_proj"),
    ("w2", "w3"),
    ("wo", "wi_1"),
    ("wo", "wi"),
    ("fc2", "fc1"),
    ("c_proj", "c_fc"),
    ("dense_4h_to_h", "dense_h_to_4h"),
    ("lin2", "lin1"),
    ("linear2", "linear1"),
    ("output.dense", "intermediate.dense"),
    ("output_dense", "intermediate_dense"),
    ("o_proj", "v_proj"),
    ("out_proj", "v_proj"),
    ("dense", "v_proj"),
    ("o", "v"),
    ("out_lin", "v_lin"),
    ("output.dense", "self.value"),
    ("output.dense", "attention.value"),
    ("attention.dense", "attention.value"),
    ("ffn_output", "ffn"),
    ("o_proj", "qkv_proj"),
    ("c_proj", "c_attn"),
    ("dense", "query_key_value"),
    ("proj", "qkv"),
    ("out_proj", "in_proj"),
    ("o_proj", "kv_b_proj"),
)
_HEAD_DIMS = ("v_head_dim", "head_dim", "head_size", "attention_head_size", "key_value_proj_dim")
# Relative to the change that the scales cause where nothing compensates for them. A true fold's is 0, but for the
# rounding of gains that are stored minus 1; a false one's was more than a tenth in every model of the tests.
_TOLERANCE = 0.02
# How much larger values are made to find a limit. In float16 the first factor may overflow; what overflows with the
# last one is beyond any limit already.
_LARGER = (1024.0, 32.0)


@dataclass(frozen=True, eq=False)
class Fold:
    """Scales for the input channels of ``layers``, which go into ``source``.

    - ``source``: the norm or linear layer that computes their input. ``layers``: all that read it, quantized or not.
    - ``channels [K]``: int64, the output channel of ``source`` behind each input column; None if it has the same index.
      With grouped queries, several columns come from one channel.
    - ``gain_offset``: the norm multiplies by ``gain_offset + weight``; the offset is 1 in Gemma.
    """

    source: str
    layers: tuple[str, ...]
    channels: Tensor | None = None
    gain_offset: float = 0.0

    def is_norm(self, block: Block) -> bool:
        """Whether the source is a norm instead of a linear layer."""
        return _is_norm(block.model.get_submodule(self.source))

    def weights(self, block: Block) -> tuple[list[Tensor], list[TensorScheme]]:
        """All weights that the scales go into and that get quantized, with their schemes; experts' one by one."""
        weights: list[Tensor] = []
        schemes: list[TensorScheme] = []
        for name in self.layers:
            work = block.layers.get(name) or block.experts.get(name)
            for weight in input_weights(block.model.get_submodule(name)):
                # Experts are [E, N, K]; a router stays in float.
                own = [weight] if name in block.layers else [*weight] if weight.ndim == 3 else []
                weights += own
                schemes += [work.scheme.weight if work else INT8_ROWS] * len(own)
        return weights, schemes

    def undecide(self, block: Block) -> None:
        """Discards what methods have decided for the weights that the fold changes."""
        for name in (self.source, *self.layers):
            if name in block.layers:
                block.layers[name].undecide()
            if name in block.experts:
                block.experts[name].undecide()

    def tie(self, values: Tensor) -> Tensor:
        """``values [K]``, with their maximum for columns that come from one channel: these share a scale."""
        if self.channels is None:
            return values
        channels = self.channels.to(values.device)
        largest = values.new_full((int(channels.max()) + 1,), -torch.inf)
        return largest.scatter_reduce(0, channels, values, "amax")[channels]

    @torch.no_grad()
    def apply(self, block: Block, scales: Tensor) -> Tensor:
        """Divides the source's output by ``scales [K]``, and multiplies the layers' columns by them, in place.

        A norm's gain is rounded to its dtype, so it is divided by slightly different numbers: these multiply the
        columns and are returned. Raises ``ValueError``, with the model unchanged, if a scale isn't finite and positive,
        if columns of one channel have different scales, or if a weight becomes too large for its dtype.
        """
        source = block.model.get_submodule(self.source)
        layers = {name: block.model.get_submodule(name) for name in self.layers}
        scales = scales.detach().float()
        if not (scales.isfinite() & (scales > 0)).all():
            raise ValueError(f"scales of the output of {self.source!r} must be finite and greater than 0")
        if not torch.equal(self.tie(scales), scales):
            raise ValueError(f"a channel of {self.source!r} has different scales where it is used twice: tie them")
        with as_they_were([source, *layers.values()]) as keep:
            divided = self._divide(source, scales)
            for name, layer in layers.items():
                for weight in input_weights(layer):
                    weight.mul_(divided.to(weight.device))
                    if not weight.isfinite().all():
                        raise ValueError(f"the weight of {name!r} is too large for {weight.dtype} with these scales")
            keep()
        return divided

    def _divide(self, source: nn.Module, scales: Tensor) -> Tensor:
        """Divides the source's output; returns the actual divisor of each input column."""
        weight, bias = source.weight, source.bias if hasattr(source, "bias") else None
        assert isinstance(weight, Tensor)
        scales = scales.to(weight.device)
        if _is_norm(source):
            before = weight.float() + self.gain_offset
            weight.copy_(before / scales - self.gain_offset)
            after = weight.float() + self.gain_offset
            scales = torch.where(after != 0, before / after, scales)
            if isinstance(bias, Tensor):
                bias.copy_(bias.float() / scales)
            return scales
        rows = linear_weight(source)
        by = scales.new_ones(rows.shape[0])
        by[slice(None) if self.channels is None else self.channels.to(weight.device)] = scales
        rows.copy_(rows / by[:, None])
        if isinstance(bias, Tensor):
            bias.copy_(bias / by)
        return scales


def find_folds(block: Block) -> tuple[list[Fold], dict[str, str]]:
    """The folds for the layers of ``block``, at most one per layer, and for each other layer why it has none.

    Runs the block on its first batch, several times; leaves the model unchanged.
    """
    if not block.calls:
        return [], dict.fromkeys(block.layers, "there is no calibration data to verify a fold with")
    block = replace(block, calls=block.calls[:1])
    check, elsewhere, idle = OutputCheck(block), _held_elsewhere(block), idle_modules(block)
    folds: list[Fold] = []
    refused: dict[str, str] = {}
    norms = [
        [Fold(norm, layers, gain_offset=offset) for offset in (0.0, 1.0)]
        for norm, layers in norm_consumers(block).items()
    ]
    for candidates in (*norms, *_linear_candidates(block)):
        source, layers = candidates[0].source, candidates[0].layers
        waiting = [name for name in layers if name in block.layers and not any(name in fold.layers for fold in folds)]
        if not waiting:
            continue
        parameters = [
            p for name in (source, *layers) for p in block.model.get_submodule(name).parameters(recurse=False)
        ]
        if holder := next((elsewhere[id(p)] for p in parameters if id(p) in elsewhere), None):
            reason = f"{source!r} or a layer after it is shared with {holder!r}, outside the block"
        elif (fold := next((each for each in candidates if _is_verified(each, block, check)), None)) is None:
            reason = f"scales in {source!r} don't verifiably keep what the block computes"
        elif other := _may_take_it(idle, fold, block.model):
            reason = f"{other!r} may take what {source!r} returns, and the first batch doesn't reach it"
        else:
            folds.append(fold)
            continue
        refused |= dict.fromkeys(waiting, reason)
    folded = {name for fold in folds for name in fold.layers}
    nothing = "nothing that is known to take scales makes its input"
    return folds, {name: refused.get(name, nothing) for name in block.layers if name not in folded}


def _is_verified(fold: Fold, block: Block, check: OutputCheck) -> bool:
    modules = [block.model.get_submodule(name) for name in (fold.source, *fold.layers)]
    K = input_weights(modules[1])[0].shape[-1]
    scales = fold.tie(2.0 ** torch.randint(0, 3, (K,), generator=torch.Generator().manual_seed(0), device="cpu"))
    source = replace(fold, layers=())

    def keeps(check: OutputCheck) -> bool:
        with as_they_were(modules):
            return check.keeps_outputs(modules, lambda: fold.apply(block, scales), lambda: source.apply(block, scales))

    if not keeps(check):
        return False
    if fold.is_norm(block):
        return True
    for factor in _LARGER:
        with as_they_were(modules):
            source.apply(block, torch.full((K,), 1 / factor, dtype=torch.float32, device="cpu"))
            larger = OutputCheck(block)
            if larger.is_finite:
                return keeps(larger)
    return True


def idle_modules(block: Block) -> list[str]:
    """The full names of modules with parameters of their own that aren't called when the block runs."""
    modules = {name: module for name, module in _hookable(block).items() if module._parameters}
    called: set[str] = set()
    with hooked(modules, lambda name, *_: called.add(name)):
        block.outputs()
    return [name for name in modules if name not in called]


def _hookable(block: Block) -> dict[str, nn.Module]:
    """The block's modules by full name, apart from those of TorchScript, which take no hooks."""
    return {
        block.prefix + name: module
        for name, module in block.module.named_modules()
        if not isinstance(module, torch.jit.ScriptModule)
    }


def _may_take_it(idle: Sequence[str], fold: Fold, model: nn.Module) -> str | None:
    """One of the ``idle`` modules, other than those of ``fold``, whose weight has as many columns."""
    parts = zip(*(name.split(".") for name in (fold.source, *fold.layers)), strict=False)
    around = "".join(f"{each[0]}." for each in takewhile(lambda part: len({*part}) == 1, parts))
    K = input_weights(model.get_submodule(fold.layers[0]))[0].shape[-1]
    for name in (name for name in idle if name.startswith(around)):
        module = model.get_submodule(name)
        weights = [] if isinstance(module, nn.Embedding) else input_weights(module)
        if weights and weights[0].shape[-1] == K:
            return name
    return None


def _held_elsewhere(block: Block) -> dict[int, str]:
    """The modules outside the block that hold parameters, by the parameter's ``id``."""
    named = block.model.named_parameters(remove_duplicate=False)
    return {id(parameter): name.rpartition(".")[0] for name, parameter in named if not name.startswith(block.prefix)}


def input_weights(module: nn.Module) -> list[Tensor]:
    """Views ``[..., K]`` of the weights by which ``module`` multiplies its input; none if that isn't known.

    It knows linear layers, routers with a weight ``[E, K]``, and fused experts' first weight; all in float.
    """
    weight = module._parameters.get("weight")
    if weight is not None and weight.ndim == 2:
        return [linear_weight(module).detach()] if weight.is_floating_point() else []
    experts = known_experts(module)
    if experts is None:
        return []
    first = module.get_parameter(experts.parameters["gate_up_proj"]).detach()
    return [first.transpose(1, 2) if experts.is_transposed else first]


class OutputCheck:
    """Compares a block's outputs for its first batch with those before its weights were changed."""

    @torch.no_grad()
    def __init__(self, block: Block) -> None:
        """Keeps the outputs of ``block`` as it is now."""
        self._block = block
        self._expected = self._outputs()

    @property
    def is_finite(self) -> bool:
        """Whether the kept outputs contain no NaN or Inf."""
        return all(bool(output.isfinite().all()) for output in self._expected)

    @torch.no_grad()
    def keeps_outputs(
        self, modules: Sequence[nn.Module], change: Callable[[], object], half: Callable[[], object]
    ) -> bool:
        """Applies ``change`` to ``modules``; undoes it and returns False if the block's outputs differ.

        ``half``: the part of the change that alone affects the outputs; errors are measured relative to its effect.
        """
        with as_they_were(modules):
            half()
            limits = self._changes()
        with as_they_were(modules) as keep:
            change()
            pairs = zip(self._changes(), limits, strict=True)
            kept = all(_is_small(error, limit) for error, limit in pairs) and any(bool(limit.any()) for limit in limits)
            if kept:
                keep()
        return kept

    def _changes(self) -> list[Tensor]:
        """How much each row of each output has changed."""
        pairs = zip(self._outputs(), self._expected, strict=True)
        return [torch.atleast_1d(new - old).norm(dim=-1).flatten() for new, old in pairs]

    def _outputs(self) -> list[Tensor]:
        call = self._block.calls[0]
        returned = self._block.module(*call.args, **call.kwargs)
        # A block passes values to later ones also through a dictionary (values that several layers share).
        handed_on = [value for value in call.kwargs.values() if isinstance(value, Mapping)]
        return [tensor.double() for tensor in float_tensors([returned, *handed_on])]


def _is_small(error: Tensor, limit: Tensor) -> bool:
    """Whether the error is small over all rows together, and in most rows: a few large ones could hide the others."""
    most = int((error <= _TOLERANCE * limit).sum()) * 2 >= len(error)
    return most and bool(error.norm() <= _TOLERANCE * limit.norm())


def float_tensors(output: Any) -> Iterator[Tensor]:
    """The float tensors in a module's output."""
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield output
    elif isinstance(output, Mapping | tuple | list):
        for part in output.values() if isinstance(output, Mapping) else output:
            yield from float_tensors(part)


def norm_consumers(block: Block) -> dict[str, tuple[str, ...]]:
    """The norms in a block, and the modules called with the very values that each of them returned, by name.

    Only modules with known weights count (``input_weights``); norms without such consumers are left out.
    """
    modules = _hookable(block)
    modules.pop(block.prefix, None)
    returned: dict[str, Tensor] = {}
    consumers: dict[str, dict[str, None]] = defaultdict(dict)

    widths = {
        name: weights[0].shape[-1]
        for name, module in modules.items()
        if not _is_norm(module) and (weights := input_weights(module))
    }

    def match(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = args[0] if args else next(iter(kwargs.values()), None)
        if name not in widths or not isinstance(x, Tensor):
            return
        K = widths[name]
        for norm, output in returned.items():
            if output.shape[-1] == x.shape[-1] == K and output.numel() == x.numel():
                if torch.equal(output.reshape(-1, K), x.reshape(-1, K)):
                    consumers[norm][name] = None

    def remember(name: str, output: Any) -> None:
        if _is_norm(modules[name]) and isinstance(output, Tensor):
            returned[name] = output.detach()

    with hooked(modules, match, remember):
        block.outputs()
    return {norm: tuple(layers) for norm, layers in consumers.items()}


def _is_norm(module: nn.Module) -> bool:
    weight = module._parameters.get("weight")
    return weight is not None and weight.ndim == 1 and "norm" in type(module).__name__.lower()


def _linear_candidates(block: Block) -> Iterator[list[Fold]]:
    """For each pair of layers that are connected according to their names, the folds to try."""
    names = {name for name, _ in block.model.named_modules()}
    for name, work in block.layers.items():
        for end, ahead in _PAIRS:
            beginning = name.removesuffix(end)
            source = beginning + ahead
            if beginning == name or (beginning and not beginning.endswith(".")) or source not in names:
                continue
            module = block.model.get_submodule(source)
            if not is_float_linear(module):
                continue
            N, K = linear_weight(module).shape[0], linear_weight(work.module).shape[1]
            head_dim = head_dim_of(block.model, (source, name)) or K
            if folds := [Fold(source, (name,), channels) for channels in _arrangements(N, K, head_dim)]:
                yield folds


def head_dim_of(model: nn.Module, names: Sequence[str]) -> int | None:
    """The width of an attention's heads (of values, if theirs differs), from a module that contains these layers."""
    holders = [model.get_submodule(name.rpartition(".")[0]) for name in names]
    found = (getattr(holder, each, None) for holder in holders for each in _HEAD_DIMS)
    return next((width for width in found if isinstance(width, int)), None)


def _arrangements(N: int, K: int, head_dim: int) -> Iterator[Tensor | None]:
    """Which of ``N`` output channels may be behind each of the ``K`` input columns of the next layer; each way once."""
    if N == K:
        yield None
        return
    column = torch.arange(K, device="cpu")
    if N == 2 * K:  # gates, followed by ups
        yield column + K
    if K % head_dim:
        return
    head, within = column // head_dim, column % head_dim
    heads = K // head_dim
    # Only values; after all queries and keys; or after the queries and keys of their group. Keys have the same width.
    alone = N
    fused = (N - K) // 2 if N > K and (N - K) % 2 == 0 else 0
    for width, is_fused in ((alone, False), (fused, True)):
        if not width or width > K or width % head_dim or K % width:
            continue
        groups = width // head_dim
        group = head * groups // heads
        if not is_fused:
            yield group * head_dim + within
            continue
        yield N - width + group * head_dim + within
        if groups > 1:
            yield group * (N // groups) + N // groups - head_dim + within
    if N % heads == 0 and N // heads > head_dim:  # the last part of each head, as after latent attention's keys
        yield head * (N // heads) + N // heads - head_dim + within


@contextmanager
def as_they_were(modules: Sequence[nn.Module]) -> Iterator[Callable[[], None]]:
    """Restores the modules' own parameters at the end, unless the function that it yields was called."""
    kept = [(p, p.detach().clone()) for module in modules for p in module.parameters(recurse=False)]
    try:
        yield kept.clear
    finally:
        with torch.no_grad():
            for parameter, value in kept:
                parameter.copy_(value)
