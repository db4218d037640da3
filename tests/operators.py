"""``Operators``: which operators of PyTorch run, in the order of their calls."""

from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Operators(TorchDispatchMode):
    """``names``: those that compute something inside, such as ``qgemm.quant_linear``; ``views``: the others."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.views: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        (self.views if func.is_view else self.names).append(func._schema.name.replace("::", "."))
        return func(*args, **(kwargs or {}))

    @property
    def products(self) -> int:
        """How many of them are products of int8 or fp8 layers."""
        return self.names.count("qgemm.quant_linear") + self.names.count("qgemm.multiply")


def operators(call: Callable[..., Any], *arguments: Any, **options: Any) -> list[str]:
    """The names of all operators, views too, that run in ``call(*arguments, **options)``."""
    with Operators() as found:
        call(*arguments, **options)
    return found.names + found.views
