"""``torch.ops.qgemm.rotate``: its gradients; the operators that store, in traced code."""

import pytest
import torch
from kernels.test_rotary import HEADS, KV_HEADS, D, arguments, cache, int32
from torch import Tensor
from torch.nn import functional as F

ops = torch.ops.qgemm


@pytest.mark.parametrize("norm", ["rms", "rms_once", "rms_plus_one", "layer"])
def test_gradients(norm: str, device: torch.device) -> None:
    qkv, cos, sin, q_weight, k_weight, _, *rest = arguments(torch.float32, device)
    leaves = [x.clone().requires_grad_() for x in (qkv, q_weight, k_weight)]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    outs = ops.rotate(leaves[0], cos, sin, *leaves[1:], norm, *rest)
    wanted = exact_rotate(*exact, torch.complex(cos, sin).to(torch.complex128), norm)
    for ours, theirs in zip(outs, wanted, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-5)
    grads = [torch.randn_like(x) for x in outs]
    torch.autograd.backward(outs, grads)
    torch.autograd.backward(wanted, [grad.double() for grad in grads])
    for ours, theirs in zip(leaves, exact, strict=True):
        torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=1e-4, atol=1e-5)


def exact_rotate(x: Tensor, q_weight: Tensor, k_weight: Tensor, turn: Tensor, norm: str) -> list[Tensor]:
    q, k, v = x.unflatten(-1, (-1, D)).split([HEADS, KV_HEADS, KV_HEADS], 2)
    out = []
    for heads, weight in ((q, q_weight), (k, k_weight)):
        if norm == "layer":
            heads = F.layer_norm(heads, (D,), weight, None, 1e-6)
        else:
            heads = F.rms_norm(heads, (D,), 1 + weight if norm == "rms_plus_one" else weight, 1e-6)
        turned = torch.complex(*heads.chunk(2, -1)) * turn[:, :, None]
        out.append(torch.cat((turned.real, turned.imag), -1))
    return [out[0], out[1].transpose(1, 2), v.transpose(1, 2)]


def test_one_output_alone_has_a_gradient(device: torch.device) -> None:
    qkv, *rest = arguments(torch.float32, device)
    qkv.requires_grad_()
    ops.rotate(qkv, *rest)[2].sum().backward()
    assert (qkv.grad[..., -32:] == 1).all()
    assert not qkv.grad[..., :-32].any()


@pytest.mark.parametrize("stored", [torch.float32, torch.int8], ids=str)
def test_compiled_code_changes_the_cache(stored: torch.dtype, device: torch.device) -> None:
    rotated = arguments(torch.float32, device)

    def step(qkv: Tensor, length: Tensor, *stores: Tensor) -> Tensor:
        length.add_(3)
        return ops.rotate_and_store(qkv, *rotated[1:], *stores, length) + 1

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    ours, wanted = cache(stored, device), cache(stored, device)
    lengths = int32(0, device=device), int32(0, device=device)
    for _ in range(2):
        qkv = torch.randn_like(rotated[0])
        assert torch.equal(compiled(qkv, lengths[0], *ours), step(qkv, lengths[1], *wanted))
    assert lengths[0].item() == 6
    for found, each in zip(ours, wanted, strict=True):
        assert each is None or torch.equal(found, each)


@pytest.mark.parametrize("stored", [torch.float32, torch.int8], ids=str)
def test_opcheck_of_what_returns_nothing(stored: torch.dtype, device: torch.device) -> None:
    key, value = (torch.randn(2, KV_HEADS, 3, D, device=device) for _ in range(2))
    length = int32(4, device=device)
    torch.library.opcheck(ops.store_key_value.default, (key, value, *cache(stored, device), length))
    torch.library.opcheck(ops.store_key_value.default, (key.requires_grad_(), value, *cache(stored, device), length))
