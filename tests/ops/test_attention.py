"""``torch.ops.qgemm.decode_attention`` and ``paged_attention``: tracing, and that they have no gradient."""

from typing import Any

import pytest
import torch
from torch import Tensor

from qgemm.kernels import decode_attention, paged_attention, quantize_rows

ops = torch.ops.qgemm


def arguments(device: torch.device, int8: bool = False, S: int = 2) -> tuple[Any, ...]:
    q = torch.randn(2, S, 4, 32, device=device).bfloat16()
    k, v = torch.randn(2, 2, 2, 20, 32, device=device).bfloat16()
    k_scale = v_scale = sinks = start = None
    if int8:
        (k, k_scale), (v, v_scale) = quantize_rows(k), quantize_rows(v)
        sinks, start = torch.randn(4, device=device), torch.tensor([3, 0], dtype=torch.int32, device=device)
    length = torch.tensor([17], dtype=torch.int32, device=device)
    return q, k, v, k_scale, v_scale, length, start, sinks, 0.2, 3.0 if int8 else 0.0, 9 if int8 else 0, 20


def paged_arguments(device: torch.device, pages: bool = True) -> tuple[Any, ...]:
    q = torch.randn(5, 4, 32, device=device).bfloat16()
    k, v = torch.randn(2, 40, 2, 32, device=device).bfloat16()
    starts = [torch.tensor(values, dtype=torch.int32, device=device) for values in ([0, 1, 5], [0, 9, 20])]
    places = torch.randperm(40, device=device)[:20] if pages else None
    return q, k, v, None, None, *starts, places, torch.randn(4, device=device), 0.2, 3.0, 9, 4, 11


@pytest.mark.slow
@pytest.mark.parametrize("pages", [False, True])
def test_opcheck_of_pages(pages: bool, device: torch.device) -> None:
    torch.library.opcheck(ops.paged_attention.default, paged_arguments(device, pages))


@pytest.mark.slow
def test_opcheck_of_storing(device: torch.device) -> None:
    key, value = torch.randn(2, 2, 3, 32, device=device)
    k, v = torch.zeros(2, 9, 16, 3, 32, device=device)
    starts = torch.tensor([0, 20, 21], dtype=torch.int32, device=device)
    pages = torch.tensor([[3, 7], [1, -1]], dtype=torch.int32, device=device)
    torch.library.opcheck(ops.store_in_pages.default, (key, value, k, v, None, None, starts, pages))
    ops.store_in_pages(key, value, k, v, None, None, starts, pages)
    assert torch.equal(k[7, 3], key[0])
    assert torch.equal(v[1, 0], value[1])
    k, v = torch.zeros(2, 9, 16, 3, 32, dtype=torch.int8, device=device)
    k_scale, v_scale = torch.zeros(2, 9, 16, 3, device=device)
    torch.library.opcheck(ops.store_in_pages.default, (key, value, k, v, k_scale, v_scale, starts, pages))
    ops.store_in_pages(key, value, k, v, k_scale, v_scale, starts, pages)
    torch.testing.assert_close(k[7, 3] * k_scale[7, 3, :, None], key[0], atol=0.02, rtol=0.0)


def test_the_operator_of_pages_is_the_kernel_function(device: torch.device) -> None:
    given = paged_arguments(device)
    q, k, v, _, _, query_starts, key_starts, pages, sinks, scale, softcap, window, max_queries, max_keys = given
    wanted = paged_attention(
        q, k, v, query_starts, key_starts, pages=pages, sinks=sinks, scale=scale, softcap=softcap, window=window,
        max_queries=max_queries, max_keys=max_keys,
    )  # fmt: skip
    assert torch.equal(ops.paged_attention(*given), wanted)
    meta = ops.paged_attention(*[each.to("meta") if isinstance(each, Tensor) else each for each in given])
    assert (meta.shape, meta.dtype) == (wanted.shape, wanted.dtype)


@pytest.mark.slow
def test_pages_compiled_for_all_bounds(device: torch.device) -> None:
    q, *rest, max_queries, max_keys = paged_arguments(device)

    def step(q: Tensor, max_queries: int, max_keys: int) -> Tensor:
        return ops.paged_attention(q * 2, *rest, max_queries, max_keys) + 1

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=True)
    for bound in (max_keys, 50):
        assert torch.equal(compiled(q, max_queries, bound), step(q, max_queries, bound))


@pytest.mark.slow
@pytest.mark.parametrize("int8", [False, True])
def test_opcheck(int8: bool, device: torch.device) -> None:
    torch.library.opcheck(ops.decode_attention.default, arguments(device, int8))


def test_the_operator_is_the_kernel_function(device: torch.device) -> None:
    q, k, v, k_scale, v_scale, length, start, sinks, scale, softcap, window, max_length = arguments(device, int8=True)
    wanted = decode_attention(
        q, k, v, length, k_scale=k_scale, v_scale=v_scale, start=start, sinks=sinks,
        scale=scale, softcap=softcap, window=window, max_length=max_length,
    )  # fmt: skip
    assert torch.equal(ops.decode_attention(*arguments_again(device)), wanted)


def arguments_again(device: torch.device) -> tuple[Any, ...]:
    torch.manual_seed(0)
    return arguments(device, int8=True)


@pytest.mark.slow
def test_compiled(device: torch.device) -> None:
    given = arguments(device)

    def step(q: Tensor, *others: Any) -> Tensor:
        return ops.decode_attention(q * 2, *others) + 1

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*given), step(*given))


def test_meta_tensors_give_the_shape(device: torch.device) -> None:
    given = [each.to("meta") if isinstance(each, Tensor) else each for each in arguments(device, int8=True)]
    out = ops.decode_attention(*given)
    assert out.shape == given[0].shape
    assert out.is_contiguous()
    with pytest.raises(ValueError, match="max_length is 21"):
        ops.decode_attention(*given[:-1], 21)


def test_there_is_no_gradient(device: torch.device) -> None:
    q, *rest = arguments(device)
    out = ops.decode_attention(q.requires_grad_(), *rest)
    with pytest.raises(NotImplementedError, match="scaled_dot_product_attention"):
        out.sum().backward()
    q, *rest = paged_arguments(device)
    with pytest.raises(NotImplementedError, match="scaled_dot_product_attention"):
        ops.paged_attention(q.requires_grad_(), *rest).sum().backward()
