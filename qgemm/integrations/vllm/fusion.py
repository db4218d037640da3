"""Fused kernels in the graphs that vLLM compiles: the operation before a product quantizes its own output.

``fuse`` finds norms, including a preceding residual sum and a preceding norm of the branch, and gated activations, if
all of their readers are products of quantized rows (``torch.ops.qgemm.quant_linear``). It replaces them by
``norm_quantize``, ``add_norm_quantize`` or ``activation_quantize`` and ``multiply``, as ``qgemm.fuse`` does in
transformers models. Everything else stays as it is, such as a norm that a router or an adapter also reads.

Norms are vLLM's operators ``vllm_ir``, which vLLM turns into kernels after its passes; activations are what PyTorch
decomposes them to. A sum is rounded before its norm, as in transformers; vLLM's own kernels don't round it.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._guards import tracing
from torch._inductor import pattern_matcher
from torch._subclasses.fake_tensor import unset_fake_temporarily

from qgemm.kernels.activations import ACTIVATIONS

NORMS = {"vllm_ir.rms_norm.default": False, "vllm_ir.fused_add_rms_norm.default": True}
"""For each of vLLM's operators, by name: whether a residual is added first."""
GATED = ("silu", "gelu", "gelu_tanh")
"""The gates' activations in vLLM's models."""


def fuse(graph: fx.Graph) -> int:
    """Replaces what can be fused; returns the number of norms and activations replaced."""
    return sum(_fuse_norm(graph, node) or _fuse_activation(graph, node) for node in list(graph.nodes))


class _Norm(NamedTuple):
    """``norm(x + residual)``, as vLLM's operators compute it. ``residual``: None if nothing is added."""

    x: fx.Node
    residual: fx.Node | None
    weight: fx.Node
    kind: str
    eps: float

    @classmethod
    def of(cls, node: fx.Node) -> _Norm | None:
        """The norm that ``node`` computes; None if it isn't a norm, or one that qgemm's kernels don't compute."""
        adds = NORMS.get(str(node.target))
        if adds is None:
            return None
        x, *others = _arguments(node)
        residual = others.pop(0) if adds else None
        weight, eps, size = others
        if weight is None or size is not None:
            return None
        weight, kind = _of_gemma(weight, _value(x).dtype) or (weight, "rms")
        if any(_value(each).dtype != _value(x).dtype for each in (residual, weight) if each is not None):
            return None
        return cls(x, residual, weight, kind, eps)


def _fuse_norm(graph: fx.Graph, node: fx.Node) -> bool:
    norm = _Norm.of(node)
    if norm is None:
        return False
    outputs: dict[Any, fx.Node] = {0: node}
    if norm.residual is not None:
        outputs = {user.args[1]: user for user in node.users if user.target is operator.getitem}
        if len(outputs) != len(node.users):
            return False
    if 0 not in outputs or not (products := _products_of(outputs[0])):
        return False
    with graph.inserting_before(node):
        about = (norm.weight, None, norm.kind, norm.eps, *_how(products[0]))
        if norm.residual is None:
            done = _call(graph, torch.ops.qgemm.norm_quantize.default, norm.x, *about)
            rows = [_call(graph, operator.getitem, done, index) for index in range(2)]
        else:
            x, branch_weight = _branch(norm)
            done = _call(graph, torch.ops.qgemm.add_norm_quantize.default, x, norm.residual, branch_weight, *about)
            total, *rows = (_call(graph, operator.getitem, done, index) for index in range(3))
            if 1 in outputs:
                outputs[1].replace_all_uses_with(total)
    _multiply(graph, products, rows)
    for output in (*(outputs.values() if norm.residual is not None else ()), node):
        graph.erase_node(output)
    return True


def _branch(norm: _Norm) -> tuple[fx.Node, fx.Node | None]:
    """What is added to the residual, and the weight of a norm of that alone, if there is one, as in Gemma 2."""
    own = _Norm.of(norm.x)
    if own is None or own.residual is not None or len(norm.x.users) > 1 or (own.kind, own.eps) != (norm.kind, norm.eps):
        return norm.x, None
    return own.x, own.weight


def _of_gemma(weight: fx.Node, dtype: torch.dtype) -> tuple[fx.Node, str] | None:
    """The source, in ``dtype``, of ``1 + weight.float()``, and the kind of such a norm."""
    is_sum = weight.target is torch.ops.aten.add.Tensor and weight.args[1] == 1
    if not is_sum or _value(weight).dtype != torch.float32:
        return None
    wide: Any = weight.args[0]
    if wide.target is not torch.ops.prims.convert_element_type.default or _value(wide.args[0]).dtype != dtype:
        return None
    return wide.args[0], "rms_plus_one"


def _fuse_activation(graph: fx.Graph, node: fx.Node) -> bool:
    """Fuses an activation that ends with ``node``, the product of an activated gate with the parallel up branch."""
    if node.target is not torch.ops.aten.mul.Tensor or not (products := _products_of(node)):
        return False
    value = _value(node)
    for name in GATED:
        match = _pattern(name, value.ndim, value.shape[-1], value.dtype).match(node)
        if not match:
            continue
        x = match.kwargs["x"]
        with graph.inserting_before(node):
            how = _how(products[0])
            done = _call(graph, torch.ops.qgemm.activation_quantize.default, x, name, True, *how)
            rows = [_call(graph, operator.getitem, done, index) for index in range(2)]
        _multiply(graph, products, rows)
        return True
    return False


@functools.cache
def _pattern(name: str, ndim: int, columns: int, dtype: torch.dtype) -> Any:
    """The pattern of a gated activation with so many ``columns`` in a graph of PyTorch's compiler."""

    def activate(x: Tensor) -> Tensor:
        return ACTIVATIONS[name](x[..., :columns]) * x[..., columns:]

    with tracing(None), unset_fake_temporarily():
        example = torch.zeros([2] * (ndim - 1) + [2 * columns], dtype=dtype)
        return pattern_matcher.fx_to_pattern(pattern_matcher.fwd_only(activate, [example]), argnames=["x"])


def _products_of(node: fx.Node) -> list[fx.Node]:
    """All readers of ``node``, if they are products of quantized rows that quantize it in the same way; else none."""
    products = list(node.users)
    for each in products:
        if each.target is not torch.ops.qgemm.quant_linear.default:
            return []
        _, *others = _arguments(each)
        if node in others or others[4] is not None or _how(each) != _how(products[0]):
            return []
        if others[3] is not None and others[3].op != "placeholder":  # it is computed after node
            return []
    return products


def _arguments(node: fx.Node) -> list[Any]:
    """All arguments of an operator, in order, including defaults."""
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    given = {argument.name: value for argument, value in zip(schema, node.args, strict=False)} | dict(node.kwargs)
    return [given.get(argument.name, argument.default_value) for argument in schema]


def _how(product: fx.Node) -> tuple[Any, torch.dtype]:
    """The scale with which a product's input is quantized, and the dtype."""
    _, weight, _, _, input_scale, _ = _arguments(product)
    return input_scale, _value(weight).dtype


def _multiply(graph: fx.Graph, products: list[fx.Node], rows: list[fx.Node]) -> None:
    """Makes ``products`` read quantized ``rows``."""
    for product in products:
        _, weight, weight_scale, bias, *_ = _arguments(product)
        about = (weight, weight_scale, bias, None, _value(product).dtype)
        with graph.inserting_before(product):
            out = _call(graph, torch.ops.qgemm.multiply.default, *rows, *about)
        product.replace_all_uses_with(out)
        graph.erase_node(product)


def _call(graph: fx.Graph, target: Callable[..., Any], *arguments: Any) -> fx.Node:
    """Adds a node, with the metadata that PyTorch's compiler needs about its value."""
    value = target(*fx.map_arg(arguments, _value))  # may raise, before anything is added
    node = graph.call_function(target, arguments)
    node.meta["val"] = value
    return node


def _value(node: fx.Node) -> Any:
    """The node's fake tensor."""
    return node.meta["val"]
