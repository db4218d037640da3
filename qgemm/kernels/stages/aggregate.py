"""``aggregate``: the decorator that makes a stage out of a class with annotated fields.

A stage is a value made of Triton values. It exists only inside a kernel and takes no space there: the compiler flattens
it into its fields. The decorator gives the class an ``__init__`` with the fields as parameters, in order, and converts
each argument to the type in its annotation:

- ``tl.tensor``: a run-time value. A plain number becomes a tensor, so a stride of 1 (an argument that Triton turns into
  a constant) is accepted like one that is only known at run time.
- ``tl.constexpr``: a compile-time value.
- ``OPTIONAL``: a run-time value, or None.
- another stage: taken as is.

A value set in the class body is the field's default. Methods are ordinary ``@triton.jit`` functions.

When compiling, Triton's own decorator does this work. In the interpreter (``TRITON_INTERPRET=1``) it loses the methods,
so there a stage is a plain Python object that holds the interpreted functions as bound methods. Written against Triton
3.6 to 3.9.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import triton
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction, interpreter_semantic

T = TypeVar("T", bound=type)

INTERPRETING = tl.constexpr(bool(triton.knobs.runtime.interpret))
"""Whether kernels run in Triton's interpreter. Triton reads this when a kernel is defined, so it is fixed at import."""


OPTIONAL = tl.tensor | tl.constexpr


def aggregate(cls: T) -> T:
    """Turns ``cls`` into a stage; see the module's description."""
    fields = dict(cls.__annotations__)
    defaults = {name: cls.__dict__[name] for name in fields if name in cls.__dict__}
    for name in defaults:
        delattr(cls, name)
    cls.__init__ = _make_init(fields, defaults)  # type: ignore[misc]
    if INTERPRETING:
        for name, member in list(vars(cls).items()):
            if isinstance(member, InterpretedFunction):
                setattr(cls, name, _bind(member))
        return cls
    # Public from Triton 3.8.
    decorate = getattr(triton, "aggregate", None) or tl.core._aggregate
    return decorate(cls)


def _make_init(fields: dict[str, Any], defaults: dict[str, Any]) -> Callable[..., None]:
    signature = inspect.Signature(
        [
            inspect.Parameter(
                name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=defaults.get(name, inspect.Parameter.empty)
            )
            for name in fields
        ]
    )

    def __init__(self: Any, *args: Any, _semantic: Any = None, **kwargs: Any) -> None:
        arguments = signature.bind(*args, **kwargs)
        arguments.apply_defaults()
        for name, value in arguments.arguments.items():
            setattr(self, name, _coerce(value, fields[name], _semantic))

    __init__.__triton_builtin__ = True  # type: ignore[attr-defined]
    return __init__


def _coerce(value: Any, kind: Any, semantic: Any) -> Any:
    if kind is tl.tensor:
        return (semantic or interpreter_semantic).to_tensor(value)
    if kind == OPTIONAL and not (value is None or isinstance(value, tl.constexpr)):
        return (semantic or interpreter_semantic).to_tensor(value)
    if kind is tl.constexpr or kind == OPTIONAL:
        plain = value.value if isinstance(value, tl.constexpr) else value
        # Interpreted code computes with numbers where compiled code computes with constants.
        return plain if INTERPRETING else tl.constexpr(plain)
    return value


def _bind(function: Any) -> Callable[..., Any]:
    @functools.wraps(function.fn)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return function(self, *args, **kwargs)

    return method
