"""``multiplied_parameters``: which of its own parameters a module multiplies matrices by, according to its source.

A layer that multiplies by a weight is usually a module (``nn.Linear``). Some modules hold weights themselves and write
out the product: ``torch.einsum("ibh,hnd->ibnd", h, self.q)``. The parameter itself doesn't show whether it is such a
weight, a table of positions or a learned query, so the class's code is read. A parameter counts if it is an operand of
a product: directly, through methods (``self.w.t()``), functions (``torch.index_select(self.w, ...)``) or indices, or as
a local variable that is one of these.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections import defaultdict

from torch import nn

_PRODUCTS = frozenset(
    ("matmul", "mm", "bmm", "mv", "addmm", "addbmm", "baddbmm", "addmv", "einsum", "linear", "bilinear", "tensordot")
)


def multiplied_parameters(cls: type[nn.Module]) -> frozenset[str] | None:
    """The attributes ``self.<name>`` of ``cls`` that are operands of a product; None if its source can't be read."""
    names: set[str] = set()
    for base in cls.__mro__[: cls.__mro__.index(nn.Module)]:
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
        except (OSError, TypeError, SyntaxError):  # defined in a prompt or by exec, or compiled
            return None
        for method in ast.walk(tree):
            if isinstance(method, ast.FunctionDef) and "init" not in method.name:
                names |= _operands(method)
    return frozenset(names)


def _operands(method: ast.FunctionDef) -> set[str]:
    variables: dict[str, set[str]] = defaultdict(set)
    for node in ast.walk(method):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    variables[target.id] |= _origins(node.value, variables)
    found: set[str] = set()
    for node in ast.walk(method):
        for operand in _product_operands(node):
            found |= _origins(operand, variables)
    return found


def _product_operands(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
        return [node.left, node.right]
    if not isinstance(node, ast.Call):
        return []
    function = node.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    if name not in _PRODUCTS:
        return []
    own = [function.value] if isinstance(function, ast.Attribute) else []  # the x in x.matmul(w)
    return [*own, *node.args, *(keyword.value for keyword in node.keywords)]


def _origins(node: ast.expr, variables: dict[str, set[str]]) -> set[str]:
    """The attributes of ``self`` that ``node`` comes from, through methods, indices and variables."""
    while True:
        if isinstance(node, ast.Name):
            return variables.get(node.id, set())
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
            return {node.attr}
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            is_function = isinstance(node.func.value, ast.Name) and node.func.value.id in ("torch", "F")
            node = node.args[0] if is_function and node.args else node.func
        elif isinstance(node, ast.Attribute | ast.Subscript):
            node = node.value
        else:
            return set()
