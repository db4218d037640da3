"""A stack of blocks, and why its layers stay in float."""

from __future__ import annotations

from torch import Tensor, nn

from qgemm.model.report import report


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(32, 48)
        self.down = nn.Linear(48, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


class Stack(nn.Module):
    """Twelve blocks, so that layers.1 has layers.10 and layers.11 beside it."""

    def __init__(self, depth: int = 12) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(depth))
        self.out = nn.Linear(32, 7)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


def reasons_of(model: nn.Module) -> dict[str, str]:
    return {record.name: record.reason for record in report(model).kept}
