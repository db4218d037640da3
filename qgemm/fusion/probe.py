"""What a module computes, according to its numbers: its norm, activation, rotation or choice of experts.

Class names don't tell: modules called RMSNorm round in three different ways. So a module runs on random bfloat16
values, which show every rounding, and is identified with the operation that gives the same bits.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qgemm.device import one_thread
from qgemm.kernels.activations import ACTIVATIONS
from qgemm.kernels.norms import NORMS, Norm
from qgemm.kernels.rotary.call import RotaryCall
from qgemm.kernels.rotary.reference import ANGLES
from qgemm.kernels.routing import ROUTINGS, Routing
from qgemm.kernels.xielu.coefficients import Coefficients
from qgemm.kernels.xielu.dispatch import plain as plain_xielu
from qgemm.nn.blocks.angles import FREQUENCIES, Table, angles_of
from qgemm.nn.blocks.attention import Rotation
from qgemm.nn.blocks.mixture import RouterStep, ScaledRouter

_ROWS, _VALUES = 16, 4096
# Logits with sigmoids of 1 show which values are compared, and such values exceed the limit of an activation.
_LARGE = 30.0
_MAX_UNLIKE = 0.01
"""The fraction of values that may differ, from another order of sums; a rounding more or less changes a quarter."""


def normal(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Values of the standard normal distribution: float32 on the CPU, whatever PyTorch's defaults are."""
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")


def uniform(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Values between 0 and 1, as ``normal`` makes them."""
    return torch.rand(shape, generator=generator, dtype=torch.float32, device="cpu")


@one_thread()
@torch.no_grad()
def find_norm(module: nn.Module, columns: int = 0) -> Norm | None:
    """The norm that ``module`` computes; None if it isn't a known one.

    ``columns``: the number of values that a norm without a weight reads; its weight counts as 1.
    """
    weight: Tensor | None = module._parameters.get("weight")
    eps = next((getattr(module, name) for name in ("variance_epsilon", "eps") if hasattr(module, name)), None)
    if weight is None and columns and not isinstance(module, nn.LayerNorm):
        weight = torch.ones(columns, dtype=torch.float32, device="cpu")
    if (
        weight is None
        or weight.dim() != 1
        or not isinstance(eps, float)
        or set(module._parameters) - {"weight", "bias"}
        or module._buffers
    ):
        return None
    own = copy.deepcopy(module).to_empty(device="cpu").to(torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    for parameter in own.parameters():
        parameter.copy_(normal(parameter.shape, generator))
    # Small enough to show eps; of three dimensions, of which other norms, such as ``nn.GroupNorm``, read the second.
    x = normal((2, _ROWS // 2, weight.shape[0]), generator).mul_(max(eps, 1e-12) ** 0.5).to(torch.bfloat16)
    vectors = (own._parameters.get("weight", weight.to(torch.bfloat16)), own._parameters.get("bias"))

    def unlike(norm: Norm) -> float:
        return _fraction_unlike(own, lambda x: norm(x, *vectors), x)  # type: ignore[arg-type]

    best = min((Norm(kind, eps) for kind in NORMS), key=unlike)
    return best if unlike(best) <= _MAX_UNLIKE else None


@torch.no_grad()
def find_scale(module: nn.Module) -> str:
    """The name of the vector that ``module`` multiplies by, if it does nothing else; otherwise empty."""
    if len(module._parameters) != 1 or module._modules or module._buffers:
        return ""
    ((name, scale),) = module._parameters.items()
    if scale is None or scale.dim() != 1:
        return ""
    own = copy.deepcopy(module).to_empty(device="cpu").to(torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    x = normal((1 + _ROWS, scale.shape[0]), generator).to(torch.bfloat16)
    own.get_parameter(name).copy_(x[0])
    return "" if _fraction_unlike(own, lambda rows: rows * x[0], x[1:]) else name


@torch.no_grad()
def passes_on(module: nn.Module) -> bool:
    """Whether ``module`` returns its input, except in training, as paths that are dropped at random do."""
    if isinstance(module, nn.Dropout | nn.Identity):
        return True
    if module._parameters or module._modules or module._buffers:
        return False
    own, x = copy.copy(module), torch.linspace(-_LARGE, _LARGE, 24, dtype=torch.float32, device="cpu").view(2, 3, 4)
    own.training, given = False, x.clone()
    try:
        return type(own).forward(own, x) is x and torch.equal(x, given)
    except Exception:  # a third-party module may raise anything
        return False


@one_thread()
@torch.no_grad()
def find_activation(activation: Callable[[Tensor], Tensor]) -> str:
    """The name of ``activation`` in ``ACTIVATIONS``; empty if it isn't one of them, or has parameters or buffers.

    It gives the same bits, or computes the same with more roundings, as activations do that are written out with
    PyTorch's operators (``gelu_new``).
    """
    if isinstance(activation, nn.Module) and [*activation.parameters(), *activation.buffers()]:
        return ""
    x = _small_and_large()
    same = (name for name, act in ACTIVATIONS.items() if _fraction_unlike(activation, act, x) <= _MAX_UNLIKE)
    return next(same, "") or next((name for name, act in ACTIVATIONS.items() if _rounds_more(activation, act, x)), "")


def _small_and_large() -> Tensor:
    """Inputs of an activation, bfloat16."""
    x = normal((_VALUES,), torch.Generator().manual_seed(0)).mul_(2)
    x[_VALUES // 2 :] *= _LARGE
    return x.to(torch.bfloat16)


def _rounds_more(activation: Callable[[Tensor], Tensor], known: Callable[[Tensor], Tensor], x: Tensor) -> bool:
    """Whether ``activation`` of ``x`` differs from ``known`` by roundings alone, and is less exact on average."""
    exact = known(x.double())
    try:
        found, rounded = activation(x.double()), activation(x.clone())
    except Exception:  # a third-party module may raise anything
        return False
    if [each.dtype for each in (found, rounded)] != [exact.dtype, x.dtype] or found.shape != exact.shape:
        return False
    error = (rounded.double() - exact).abs()
    few = bool((error <= x.double().abs() * 4 * torch.finfo(x.dtype).eps).all())
    is_same = torch.allclose(found, exact, 1e-6, 1e-6)
    return is_same and few and bool((known(x).double() - exact).abs().sum() <= error.sum())


@one_thread()
@torch.no_grad()
def is_xielu(activation: Any) -> bool:
    """Whether ``activation`` is a module that computes xIELU, with its coefficients as parameters and buffers."""
    if not isinstance(activation, nn.Module) or activation._modules:
        return False
    own = {**activation._parameters, **activation._buffers}
    if {*own} != {*Coefficients._fields} or any(each is None or each.numel() != 1 for each in own.values()):
        return False
    try:
        copied = copy.deepcopy(activation).to_empty(device="cpu").to(torch.bfloat16)
        for name, value in (("alpha_p", 0.7), ("alpha_n", -1.3), ("beta", 0.4), ("eps", -0.25)):
            getattr(copied, name).fill_(value)
    except Exception:  # a third-party module may raise anything
        return False
    coefficients = Coefficients(*(getattr(copied, name) for name in Coefficients._fields))
    return _fraction_unlike(copied, lambda x: plain_xielu(x, coefficients), _small_and_large()) <= _MAX_UNLIKE


@one_thread()
@torch.no_grad()
def find_router(router: nn.Module, mixture: nn.Module) -> RouterStep:
    """What ``router``, part of ``mixture``, does with its logits; without a routing if that is unknown."""
    bias = _choice_bias(router, mixture)
    chooser = mixture if type(router) is nn.Linear and hasattr(mixture, "route_tokens_to_experts") else None
    top_k = next((each.top_k for each in (router, mixture) if hasattr(each, "top_k")), None)
    linears = [name for name, child in router._modules.items() if type(child) is nn.Linear]
    linear = linears[0] if len(linears) == 1 and not router._parameters else ""
    called = RouterStep(
        router,
        bias=bias,
        told=bias is not None and bias[0] is mixture,
        linear=linear,
        chooser=chooser,
        top_k=top_k if isinstance(top_k, int) else 0,
    )
    weight = router.get_submodule(linear)._parameters.get("weight")
    others = set(router._parameters) - {"weight", "bias"} | set(router._buffers) | set(router._modules) - {linear}
    of_bias = () if bias is None else (bias[1], *(name for name, child in router._modules.items() if child is bias[0]))
    if not called.top_k or weight is None or weight.dim() != 2 or weight.is_meta or others - set(of_bias):
        return called
    # bfloat16 shows what is rounded, float32 shows which of two formulas for one value it is.
    calls = [_call_router(called, dtype) for dtype in (torch.bfloat16, torch.float32)]
    if calls == [None, None]:
        called = replace(called, takes_batch=True)
        calls = [_call_router(called, dtype) for dtype in (torch.bfloat16, torch.float32)]
    for found, in_float in _routings(router, called.top_k, bias is not None):
        if all(call and call.is_of(found, in_float) for call in calls):
            return replace(called, routing=found, in_float=in_float)
    return called


def _routings(router: nn.Module, top_k: int, is_biased: bool) -> Iterator[tuple[Routing, bool]]:
    """The possible routings of ``router``, and whether its product is computed in float32."""
    groups, kept_groups = (int(getattr(router, name, None) or 1) for name in ("num_group", "topk_group"))
    scale = next((float(getattr(router, name)) for name in _SCALES if hasattr(router, name)), 1.0)
    floor = float(getattr(router, "norm_min", 0.0))
    for kind, normalized, rounds, in_float in product(ROUTINGS, (True, False), (False, True), (False, True)):
        # Models add it to a sum of sigmoids; in MiniMax-M2, which doesn't, no sum is that small.
        least = 1e-20 if kind == "sigmoid" and normalized else floor
        margin = 2 * getattr(router, "router_jitter_noise", 0.0) if kind == "sparsemixer" else 0.0
        found = Routing(top_k, kind, normalized, not rounds, scale, least, groups, kept_groups, margin=margin)
        if not (found.chooses_by_logits and is_biased):
            yield found, in_float
    constants = inspect.unwrap(type(router).forward).__code__.co_consts
    for offset in (each for each in constants if isinstance(each, float) and 0.0 < each < 1e-3):
        for kind, is_rounded in product(ROUTINGS, (True, False)):
            yield Routing(top_k, kind, True, False, scale, 0.0, groups, kept_groups, offset, is_rounded), False


@torch.no_grad()
def find_scaled_router(router: Any) -> ScaledRouter | None:
    """Describes ``router`` if it computes as Gemma 4's does; otherwise None."""
    parts = {*router._parameters} == {"scale", "per_expert_scale"} and {*router._modules} == {"norm", "proj"}
    if not parts or type(router.proj) is not nn.Linear or not hasattr(router, "scalar_root_size"):
        return None
    norm, top_k = find_norm(router.norm, router.proj.in_features), getattr(router.config, "top_k_experts", None)
    if norm is None or router.norm._parameters or not isinstance(top_k, int):
        return None
    own = copy.deepcopy(router).to_empty(device="cpu").eval()
    # Its norm, which has no weight, is rounded before the product with the scale.
    found = ScaledRouter(own, Norm("rms", norm.eps), Routing(top_k, "softmax", True, True))
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.bfloat16, torch.float32):
        own.to(dtype)
        for parameter in own.parameters():
            parameter.copy_(uniform(parameter.shape, generator))
        x = normal((_ROWS, router.proj.in_features), generator).to(dtype)
        _, *wanted = own(x)
        if not all(torch.allclose(a.float(), b.float(), 1e-5) for a, b in zip(found(x), wanted, strict=True)):
            return None
    return replace(found, module=router)


_SCALES = ("routed_scaling_factor", "router_scaling_factor", "route_scale")
"""Names of a factor of all weights."""

CHOICE_BIAS = ("e_score_correction_bias", "expert_bias")
"""Names of a bias that counts only in the choice of experts."""


def _choice_bias(router: nn.Module, mixture: nn.Module) -> tuple[nn.Module, str] | None:
    """The module that has the bias, and the bias's name there."""
    places = product((*router.modules(), mixture), CHOICE_BIAS)
    return next(((holder, name) for holder, name in places if isinstance(getattr(holder, name, None), Tensor)), None)


@dataclass(frozen=True)
class _RouterCall:
    """Some rows, the operands of a router's product and choice, and the weights and experts that it returned."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    choice_bias: Tensor | None
    weights: Tensor
    index: Tensor
    has_order: bool

    def is_of(self, routing: Routing, in_float: bool) -> bool:
        """Whether a router with ``routing`` returns the same."""
        operands = [
            each.float() if in_float and each is not None else each for each in (self.x, self.weight, self.bias)
        ]
        weights, index = routing(F.linear(*operands), self.choice_bias)  # type: ignore[arg-type]
        weights = weights if routing.in_float else weights.to(self.x.dtype)
        if self.has_order:
            return _is_equal(weights, self.weights) and _is_equal(index, self.index)
        order, its_order = index.argsort(dim=-1), self.index.argsort(dim=-1)
        found, wanted = weights.gather(-1, order), self.weights.gather(-1, its_order)
        # It is computed for all experts, in a vector of another length.
        near = found.dtype == wanted.dtype and torch.allclose(found, wanted, torch.finfo(found.dtype).eps, 0.0)
        return near and _is_equal(index.gather(-1, order), self.index.gather(-1, its_order))


def _call_router(router: RouterStep, dtype: torch.dtype) -> _RouterCall | None:
    """A call with random rows; None if ``router`` doesn't return weights and experts."""
    generator = torch.Generator().manual_seed(0)
    bias = router.bias
    if bias is not None:
        holder, name = bias
        # Below zero, because some models exclude experts with a score of 0.
        values = uniform(getattr(holder, name).shape, generator) - 2
    own = copy.deepcopy(router.module).to_empty(device="cpu").to(dtype).eval()
    linear = own.get_submodule(router.linear)
    columns = linear.get_parameter("weight").shape[-1]
    for parameter in own.parameters():
        parameter.copy_(normal(parameter.shape, generator) / columns**0.5)
    told = []
    if bias is not None:
        for each in own.modules():
            if isinstance(getattr(each, bias[1], None), Tensor):
                getattr(each, bias[1]).copy_(values)
        told = [values.to(dtype)] if router.told else []
    x = normal((_ROWS, columns), generator)
    x[_ROWS // 2 :] *= _LARGE
    x = x.to(dtype)
    try:
        out = own(x[None] if router.takes_batch else x, *told)
        weights, index = router.chosen(x, out)
    except Exception:  # a third-party module may raise anything
        return None
    choice_bias = None if bias is None else values.to(dtype).flatten()
    operands = linear.get_parameter("weight"), linear._parameters.get("bias"), choice_bias
    return _RouterCall(x, *operands, weights, index, has_order=isinstance(out, Tensor) or len(out) == 3)


def _is_equal(found: Tensor, wanted: Any) -> bool:
    return isinstance(wanted, Tensor) and found.dtype == wanted.dtype and torch.equal(found, wanted)


@torch.no_grad()
def find_rotation(
    rotate: Callable[..., tuple[Tensor, Tensor]], cos: Tensor, sin: Tensor, columns: int | None, dtype: torch.dtype
) -> Rotation | None:
    """What ``rotate``, for queries and keys in ``dtype``, does with ``cos`` and ``sin``; None if no operator does it.

    ``columns``: how many columns of a head it gets, of half as many more.
    """
    if cos.dim() != 3 or cos.shape[-1] % 2:
        return None
    own = [values[:1].cpu().to(torch.bfloat16 if values.dtype == dtype else values.dtype) for values in (cos, sin)]
    for pairs, interleaved, in_float in product(("half", "other", "all"), (False, True), (False, True)):
        found = Rotation(interleaved, pairs, in_float)  # type: ignore[arg-type]
        turned = [found.of_pairs(values) for values in own]
        R = 2 * turned[0].shape[-1]
        if columns is not None and columns != R:
            continue
        D = R if columns is not None else R + R // 2
        generator = torch.Generator().manual_seed(0)
        x = normal((1, cos.shape[1], 3 * D), generator).to(torch.bfloat16)
        angles = turned[0], turned[1], None, None
        given = RotaryCall(x, *angles, "rms", 0.0, 1, 1, interleaved, in_float=in_float)
        for size in (D, R):  # for a function that rotates part of a head, or all of it
            q, k, _ = (each.unflatten(-1, (1, -1)).transpose(1, 2) for each in x[..., : 3 * size].chunk(3, dim=-1))

            def theirs(_: Tensor) -> Tensor:
                return torch.cat(rotate(q, k, *own))  # noqa: B023

            def ours(values: Tensor) -> Tensor:
                q, k, _ = torch.ops.qgemm.rotate(*given._replace(qkv=values))  # noqa: B023
                return torch.cat((q.transpose(1, 2), k))

            if _fraction_unlike(theirs, ours, x[..., : 3 * size].contiguous()) <= _MAX_UNLIKE:
                return found
    return None


# Types whose frequencies don't depend on the length of a sequence.
_FIXED = ("default", "linear", "llama3", "yarn", "proportional")


@torch.no_grad()
def find_angles(module: nn.Module) -> dict[str, Table]:
    """The tables of ``rotary_angles`` that are those of a rotary embedding, bit for bit, by type of layer.

    The type is "" if there are no types. Empty if there are others.
    """
    arguments = list(inspect.signature(type(module).forward).parameters)[1:]
    if arguments == ["x", "position_ids"]:
        types = [""]
    elif arguments == ["x", "position_ids", "layer_type"]:
        names = [name for name in module._buffers if name.endswith(FREQUENCIES) and "original" not in name]
        types = [name.removesuffix(f"_{FREQUENCIES}") for name in names]
    else:
        return {}
    found = {each: _find_table(module, each) for each in types}
    return {} if None in found.values() else found  # type: ignore[return-value]


@torch.no_grad()
def find_own_frequencies(module: nn.Module, tables: Mapping[str, Table]) -> dict[str, Tensor]:
    """The frequencies of an embedding with these ``tables`` that doesn't read its buffer, by type of layer.

    It computes them in every call, so they stay the same when the model, with its buffers, becomes bfloat16.
    """
    other = copy.copy(module)
    vars(other)["_buffers"] = {name: value * 0.75 for name, value in module._buffers.items() if value is not None}
    found = {}
    for layer_type, table in tables.items():
        frequencies, _ = angles_of(module, layer_type)
        assert frequencies is not None
        positions = torch.arange(8, device=frequencies.device)[None]
        positions = positions.expand(max(table.axes) + 1, 1, 8) if table.axes else positions
        if not _has_angles(other, layer_type, positions, table, torch.float32):
            found[layer_type] = frequencies.clone()
    return found


def _find_table(module: nn.Module, layer_type: str) -> Table | None:
    kinds = getattr(module, "rope_type", None)
    frequencies, scale = angles_of(module, layer_type)
    if frequencies is None or frequencies.dim() != 1 or frequencies.is_meta or not isinstance(scale, float):
        return None
    if (kinds.get(layer_type) if isinstance(kinds, dict) else kinds) not in _FIXED:
        return None
    positions = torch.arange(512, device=frequencies.device) * torch.tensor([[1], [61]], device=frequencies.device)
    on_axes = torch.stack((positions, positions.flip(1) + 7, positions.roll(100, 1) + 90))
    for layout, in_float in product(ANGLES, (False, True)):
        for axes in ((), _find_axes(module, layer_type, on_axes, layout)):
            table, given = Table(layout, in_float, axes), on_axes if axes else positions
            if all(_has_angles(module, layer_type, given, table, dtype) for dtype in (torch.float32, torch.bfloat16)):
                return table
    return None


def _find_axes(module: nn.Module, layer_type: str, positions: Tensor, layout: str) -> tuple[int, ...]:
    """The axis of ``positions [A, B, S]`` that each pair of an embedding reads, if it has this ``layout``."""
    wanted = _angles_at(module, layer_type, positions, torch.float32)
    if not isinstance(wanted, tuple | list) or len(wanted) != 2:
        return ()
    frequencies, scale = angles_of(module, layer_type)
    known = [torch.ops.qgemm.rotary_angles(each, frequencies, scale, layout, torch.float32) for each in positions]
    if any(not isinstance(each, Tensor) or each.shape != known[0][0].shape for each in wanted):
        return ()
    is_same = torch.stack([((cos == wanted[0]) & (sin == wanted[1])).all(dim=(0, 1)) for cos, sin in known])
    of_pairs = is_same[:, :: 2 if layout == "each twice" else 1][:, : frequencies.shape[0]]  # type: ignore[union-attr]
    return tuple(of_pairs.int().argmax(dim=0).tolist())


def _angles_at(module: Any, layer_type: str, positions: Tensor, dtype: torch.dtype) -> Any:
    """What an embedding returns for hidden states in ``dtype``; None if it raises."""
    x = torch.empty(0, dtype=dtype, device=positions.device)
    try:
        return type(module).forward(module, x, positions, *([layer_type] if layer_type else []))
    except Exception:  # a third-party module may raise anything
        return None


def _has_angles(module: Any, layer_type: str, positions: Tensor, table: Table, dtype: torch.dtype) -> bool:
    frequencies, scale = angles_of(module, layer_type)
    assert frequencies is not None
    assert scale is not None
    found = table.of(positions, frequencies, scale, dtype, table.axes_on(positions.device))
    wanted = _angles_at(module, layer_type, positions, dtype)
    return isinstance(wanted, tuple | list) and len(wanted) == 2 and all(map(_is_equal, found, wanted))


def _fraction_unlike(module: Callable[[Tensor], Tensor], known: Callable[[Tensor], Tensor], x: Tensor) -> float:
    try:
        found = module(x)
    except Exception:  # a third-party module may raise anything
        return 1.0
    if not isinstance(found, Tensor) or found.dtype != x.dtype:
        return 1.0
    wanted = known(x)
    return (found != wanted).float().mean().item() if found.shape == wanted.shape else 1.0
