"""``torch.ops.qgemm.hadamard``: its gradient."""

import torch

from qgemm.numerics.hadamard import hadamard

ops = torch.ops.qgemm


def test_the_gradient_of_a_rotation_is_the_rotated_gradient(device: torch.device) -> None:
    x, grad = torch.randn(2, 3, 24, device=device, requires_grad=True), torch.randn(2, 3, 24, device=device)
    ops.hadamard(x).backward(grad)
    assert torch.equal(x.grad, hadamard(grad))
