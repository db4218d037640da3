"""One layer at a time: makes a ``QuantLinear`` from an ``nn.Linear``, compares the two, and trains through it.

Run it with ``python examples/quant_linear.py``.
"""

import torch
from torch import nn
from torch.nn import functional as F

from qgemm import QuantLinear


def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    linear = nn.Linear(1024, 4096, device=device)
    layer = QuantLinear.from_linear(linear)
    print(layer)
    for name, parameter in layer.named_parameters():
        print(f"  {name:13} {str(parameter.dtype).removeprefix('torch.'):8} {list(parameter.shape)}")

    x = torch.randn(32, 1024, device=device)
    with torch.no_grad():
        expected, got = linear(x), layer(x)
    print(f"relative error of the output: {((got - expected).norm() / expected.norm()).item():.4f}")

    # The scheme with one activation scale for everything, found beforehand: here from the data itself.
    static = QuantLinear.from_linear(linear, "int8-static", input_scale=x.abs().max() / 127)
    print(f"with a static scale:          {((static(x) - expected).norm() / expected.norm()).item():.4f}")

    # The weight is frozen, but gradients flow through the layer: a low-rank adapter in front of it learns.
    down = nn.Parameter(torch.randn(1024, 8, device=device) / 32)
    up = nn.Parameter(torch.zeros(8, 1024, device=device))
    optimizer = torch.optim.Adam([down, up], lr=1e-2)
    with torch.no_grad():
        target = linear(x + x @ torch.randn(1024, 8, device=device) @ torch.randn(8, 1024, device=device) / 64)
    losses = []
    for _ in range(30):
        loss = F.mse_loss(layer(x + x @ down @ up), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(f"loss of an adapter before it: {losses[0]:.4f} at first, {losses[-1]:.4f} after {len(losses)} steps")
    assert losses[-1] < losses[0] / 2, "the adapter doesn't learn"


if __name__ == "__main__":
    main()
