"""``reorder``: the kernel against PyTorch's ``index_select``."""

import pytest
import torch

from qgemm.kernels.reorder import launcher
from qgemm.ops.rows import reorder


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(1, 4096), (1, 1), (3, 1030), (17, 513), (2, 9, 100), (70,), (0, 8), (3, 0)])
def test_columns_are_reordered(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    x = torch.randn(shape, device=device).to(dtype)
    order = torch.randperm(shape[-1], device=device).int()
    expected = x.index_select(-1, order)
    assert torch.equal(launcher.reorder(x, order), expected)
    for _ in range(3):  # the last calls are recalled
        assert torch.equal(reorder(x, order), expected)
    strided = torch.randn((*shape[:-1], 2 * shape[-1]), device=device).to(dtype)
    assert torch.equal(launcher.reorder(strided[..., ::2], order), strided[..., ::2].index_select(-1, order))
    part = strided[..., : shape[-1]]
    assert torch.equal(launcher.reorder(part, order), part.index_select(-1, order))


def test_what_is_not_finite_stays_so_and_no_column_is_nan(device: torch.device) -> None:
    x = torch.tensor([[torch.nan, torch.inf, 1.0]], device=device)
    out = launcher.reorder(x, torch.tensor([1, 0, 3], dtype=torch.int32, device=device))
    assert out[0].isposinf().tolist() == [True, False, False]
    assert out[0].isnan().tolist() == [False, True, True]


def test_gradients_are_in_the_input_s_order(device: torch.device) -> None:
    x = torch.randn(2, 6, device=device, requires_grad=True)
    order = torch.randperm(6, device=device).int()
    grad = torch.randn(2, 6, device=device)
    reorder(x, order).backward(grad)
    assert x.grad is not None
    assert torch.equal(x.grad[:, order], grad)
