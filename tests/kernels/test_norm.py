"""The norm kernel: against ``reference.py`` and float64, and its three functions against one another, bit for bit."""

import pytest
import torch
from torch import Tensor

from qgemm.kernels import dispatch
from qgemm.kernels.launch.plans import PlanCache
from qgemm.kernels.norm import launcher as norm_launch
from qgemm.kernels.norms import MODULATED, NORMS, Norm, NormCall
from qgemm.kernels.reference import add_norm_reference, quantize_rows_reference
from qgemm.numerics.formats import FP8, INT8

DTYPES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
KINDS = pytest.mark.parametrize("kind", NORMS)
Vectors = tuple[Tensor | None, Tensor | None, Tensor | None]


@pytest.fixture(autouse=True)
def _kernel_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU as well, in the interpreter."""
    monkeypatch.setattr(dispatch, "_backend", lambda tensor: norm_launch)


def vectors_of(kind: str, K: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor | None]:
    """The branch's weight, the weight, and a bias for a norm that has one."""
    branch, weight, bias = (torch.randn(K, device=device).to(dtype) for _ in range(3))
    return branch, weight, bias if Norm(kind).is_layer else None


def exact_norm(x: Tensor, weight: Tensor, bias: Tensor | None, norm: Norm) -> Tensor:
    """In float64, without a rounding."""
    h = x.double()
    if norm.is_layer:
        h = h - h.mean(-1, keepdim=True)
    y = h / (h.square().mean(-1, keepdim=True) + norm.eps).sqrt()
    y = y * (weight.double() + (norm.adds_one))
    return y if bias is None else y + bias.double()


def same(ours: Tensor, theirs: Tensor) -> bool:
    if ours.dtype == FP8.storage:  # a zero's sign isn't kept
        ours, theirs = ours.float(), theirs.float()
    return torch.equal(ours.nan_to_num(nan=77), theirs.nan_to_num(nan=77))


def assert_parts_agree(x: Tensor, residual: Tensor, vectors: Vectors, norm: Norm, scale: Tensor | None = None) -> None:
    """All that the kernel gives, against the floats that it gives, which are compared with PyTorch's."""
    branch, weight, bias = vectors
    total, normed = dispatch.add_norm(x, residual, branch, weight, bias, norm)
    wanted_total, _ = add_norm_reference(x, residual, branch, weight, bias, norm)
    finite = wanted_total.isfinite().all(-1)
    if branch is None:
        assert same(total, wanted_total)
    else:
        eps = 3 * torch.finfo(x.dtype).eps
        torch.testing.assert_close(total[finite], wanted_total[finite], rtol=eps, atol=eps * 8)
    # Rows of fp8 without a norm behind the branch alone: one more kernel of each kind.
    formats = (INT8, FP8) if branch is None else (INT8,)
    rows = {form: quantize_rows_reference(normed, scale, dtype=form.storage) for form in formats}
    for form, q in rows.items():
        arguments = (x, residual, branch, weight, bias, norm, scale, form.storage)
        found_total, *found = dispatch.add_norm_quantize(*arguments)
        assert same(found_total, total)
        assert found[0].dtype == form.storage
        assert all(same(*pair) for pair in zip(found, q, strict=True))
        assert found_total.shape == found[0].shape == x.shape
    if weight is not None:
        if branch is None:
            assert same(dispatch.post_norm(x, residual, weight, bias, norm), normed)
            for form, q in rows.items():
                found = dispatch.post_norm_quantize(x, residual, weight, bias, norm, scale, form.storage)
                assert all(same(*pair) for pair in zip(found, (normed, *q), strict=True))
        # Its norm alone, of the rounded sum: the same device code, the same bits.
        assert same(dispatch.add_norm(total, None, None, weight, bias, norm)[1], normed)
        for form, q in rows.items():
            found = list(dispatch.norm_quantize(total, weight, bias, norm, scale, form.storage))
            assert all(same(*pair) for pair in zip(found, q, strict=True))
        exact = exact_norm(total, weight, bias, norm)[finite]
        # Of values with a rounding or two, and of a mean that is taken off.
        eps = 2 * torch.finfo(x.dtype).eps
        torch.testing.assert_close(normed[finite].double(), exact, rtol=eps, atol=eps)


@pytest.mark.slow(quick=["shape0-dtype0-rms", "shape3"])
@KINDS
# No power of 2; a vector of one value; two blocks, the second of which is nearly empty.
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((2, 3, 53), torch.float16),
        ((2, 3, 53), torch.bfloat16),
        ((2, 3, 53), torch.float32),
        ((1,), torch.bfloat16),
        ((2, 2050), torch.bfloat16),
    ],
)
def test_shapes(shape: tuple[int, ...], dtype: torch.dtype, kind: str, device: torch.device) -> None:
    x, residual = (torch.randn(shape, device=device).to(dtype) for _ in range(2))
    vectors = vectors_of(kind, shape[-1], dtype, device)
    assert_parts_agree(x, residual, (None, *vectors[1:]), Norm(kind, 1e-5))


@pytest.mark.slow(quick=["True-rms"])
@KINDS
@pytest.mark.parametrize("static", [False, True])
def test_norms_on_both_sides_of_the_sum(static: bool, kind: str, device: torch.device) -> None:
    x, residual = (torch.randn(4, 200, device=device).bfloat16() for _ in range(2))
    branch, weight, bias = vectors_of(kind, 200, torch.bfloat16, device)
    scale = torch.tensor(0.02, device=device) if static else None
    assert_parts_agree(x, residual, (branch, weight, bias), Norm(kind), scale)
    assert_parts_agree(x, residual, (branch, None, None), Norm(kind), scale)
    assert_parts_agree(x, residual, (None, None, None), Norm(kind), scale)


@KINDS
@DTYPES
def test_the_bits_of_the_reference_where_sums_are_exact(kind: str, dtype: torch.dtype, device: torch.device) -> None:
    # Whole numbers: any order gives the same sum of squares, and every difference is a rounding in another place.
    x = torch.randint(-7, 8, (6, 256), device=device).to(dtype)
    x[:, 128:] = -x[:, :128]  # a mean of 0
    branch, weight, bias = vectors_of(kind, 256, dtype, device)
    residual = torch.randint(-7, 8, (6, 256), device=device).to(dtype)
    norm = Norm(kind, 1e-5)
    _, normed = dispatch.add_norm(x, None, None, weight, bias, norm)
    if norm.is_layer:  # PyTorch's multiplies by a scale and adds a shift: rounded elsewhere, in float32
        torch.testing.assert_close(normed, norm(x, weight, bias), rtol=torch.finfo(dtype).eps, atol=1e-6)
    else:
        assert torch.equal(normed, norm(x, weight))
    total, _ = dispatch.add_norm(x, residual, branch, None, None, norm)
    if not norm.is_layer:
        assert torch.equal(total, residual + norm(x, branch))


@pytest.mark.slow(quick=["rms"])
@KINDS
def test_what_is_not_finite(kind: str, device: torch.device) -> None:
    x, residual = (torch.randn(6, 70, device=device).bfloat16() for _ in range(2))
    x[1, 3], x[2, 69], residual[3, 5] = torch.nan, torch.inf, -torch.inf
    x[4], residual[4] = 0, 0
    branch, weight, bias = vectors_of(kind, 70, torch.bfloat16, device)
    assert_parts_agree(x, residual, (None, weight, bias), Norm(kind))
    assert_parts_agree(x, residual, (branch, weight, bias), Norm(kind))
    _, q, row_scale = dispatch.add_norm_quantize(x, residual, None, weight, bias, Norm(kind))
    assert row_scale.isnan().tolist() == [False, True, True, True, False, False]
    assert not q[1:4].any()
    if bias is None:
        assert row_scale[4] == 1


def test_a_mean_far_from_0_leaves_a_variance(device: torch.device) -> None:
    # mean(x^2) - mean^2 would be lost in float32.
    x = 1000 + torch.randn(3, 512, device=device)
    out = dispatch.add_norm(x, None, None, torch.ones(512, device=device), None, Norm("layer"))[1]
    exact = exact_norm(x, torch.ones(512, device=device), None, Norm("layer"))
    torch.testing.assert_close(out.double(), exact, rtol=0, atol=3e-4)


@pytest.mark.slow
def test_rows_have_the_same_bits_in_any_number(device: torch.device) -> None:
    x, weight = torch.randn(17, 300, device=device).bfloat16(), torch.randn(300, device=device).bfloat16()
    q, scale = dispatch.norm_quantize(x, weight, None, Norm())
    for row in (0, 16):
        own_q, own_scale = dispatch.norm_quantize(x[row : row + 1], weight, None, Norm())
        assert torch.equal(own_q[0], q[row])
        assert torch.equal(own_scale[0], scale[row])


@pytest.mark.slow(quick=["100"])
@pytest.mark.parametrize("limit", [2**15, 100])  # held by a program; longer than that
def test_strides_and_empty_tensors(limit: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norm_launch, "MAX_ROW_BYTES", limit)
    monkeypatch.setattr(norm_launch, "plans", PlanCache())
    x, residual = torch.randn(70, 6, device=device), torch.randn(2, 3, 70, device=device)
    weight = torch.randn(140, device=device)[::2]
    views = x.t().reshape(3, 2, 70).transpose(0, 1), x.t().view(2, 3, 70), residual[..., ::1].transpose(0, 1)
    for view in views:
        other = torch.randn(70, *view.shape[:-1], device=device).movedim(0, -1)
        assert_parts_agree(view, other, (weight, weight, None), Norm())
        assert_parts_agree(view, other, (None, weight, None), Norm(), torch.tensor(0.02, device=device))
    for shape in ((0, 70), (3, 0), (2, 0, 70)):
        empty = torch.empty(shape, device=device)
        vector = torch.ones(shape[-1], device=device)
        total, q, scale = dispatch.add_norm_quantize(empty, empty, vector, vector, None, Norm())
        assert total.shape == q.shape == shape
        assert torch.equal(scale, torch.ones(shape[:-1], device=device))
        assert dispatch.norm_quantize(empty, vector, None, Norm())[0].shape == shape
        assert dispatch.add_norm(empty, None, vector, vector, None, Norm())[1].shape == shape


@pytest.mark.parametrize("limit", [2**15, 100])  # held by a program; longer than that
@pytest.mark.parametrize("kind", ["rms", "layer", MODULATED])
def test_a_sample_has_vectors_of_its_own(
    kind: str, limit: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(norm_launch, "MAX_ROW_BYTES", limit)
    monkeypatch.setattr(norm_launch, "plans", PlanCache())
    x, residual = (torch.randn(3, 2, 2, 70, device=device).bfloat16() for _ in range(2))
    branch, weight, bias = (torch.randn(size, device=device).bfloat16() for size in ((70,), (3, 70), (3, 70)))
    norm, given = Norm(kind, 1e-5), None if kind == "rms" else bias

    def outputs(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, gate: Tensor) -> tuple[Tensor, ...]:
        return (
            *dispatch.norm_quantize(x, weight, bias, norm),
            *dispatch.add_norm_quantize(x, residual, branch, weight, bias, norm, None, FP8.storage),
            *dispatch.add_norm(x, residual, None, weight, bias, norm),
            *dispatch.add_norm(x, residual, None, weight, bias, norm, gate),
            *dispatch.add_norm_quantize(x, residual, None, weight, bias, norm, None, INT8.storage, gate),
            dispatch.post_norm(x, residual, weight, bias, norm),
            *dispatch.post_norm_quantize(x, residual, weight, bias, norm),
        )

    gate = torch.randn(3, 70, device=device).bfloat16()
    found = outputs(x, residual, weight, given, gate)
    for sample in range(3):
        bias_of_it = None if given is None else given[sample]
        own = outputs(x[sample], residual[sample], weight[sample], bias_of_it, gate[sample].expand(2, 70))
        for of_all, wanted in zip(found, own, strict=True):
            # PyTorch rounds a layer norm with vectors [K] elsewhere.
            assert same(of_all[sample], wanted) or (limit == 100 and kind == "layer")
    exact = exact_norm(x, weight[:, None, None], None if given is None else given[:, None, None], norm)
    normed = dispatch.add_norm(x, None, None, weight, given, norm)[1]
    torch.testing.assert_close(normed.double(), exact, rtol=2 * torch.finfo(x.dtype).eps, atol=2e-2)
    total = dispatch.add_norm(x, residual, None, None, None, norm, gate)[0]
    assert torch.equal(total, residual + gate[:, None, None] * x)


@pytest.mark.parametrize("limit", [2**15, 100])  # held by a program; longer than that
@pytest.mark.parametrize("kind", ["layer", MODULATED])
def test_float32_vectors_are_not_rounded(
    kind: str, limit: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(norm_launch, "MAX_ROW_BYTES", limit)
    monkeypatch.setattr(norm_launch, "plans", PlanCache())
    x, residual = (torch.randn(3, 5, 70, device=device).bfloat16() for _ in range(2))
    weight, bias, gate = torch.randn(3, 3, 70, device=device).unbind(1)  # one stride between samples
    norm = Norm(kind, 1e-5)

    def add_norm(x: Tensor, residual: Tensor | None, *vectors: Tensor | None) -> list[Tensor | None]:
        return [*norm_launch.norm_rows(NormCall(x, residual, None, *vectors, norm), total=True, normed=True)[:2]]

    total, normed = add_norm(x, residual, gate, weight, bias)
    assert total is not None
    assert normed is not None
    assert total.dtype == normed.dtype == torch.bfloat16
    assert torch.equal(total, (residual.float() + x * gate[:, None]).bfloat16())
    exact = exact_norm(total, weight[:, None], bias[:, None], norm)
    assert (normed != exact.bfloat16()).float().mean() < 0.01  # another rounding would change a quarter
    found = norm_launch.norm_rows(NormCall(x, residual, None, gate, weight, bias, norm, None, INT8.storage), total=True)
    wanted = (total, *quantize_rows_reference(normed))
    assert all(same(*pair) for pair in zip((found[0], *found[2:]), wanted, strict=True))
    # Strides that differ, a row's own vectors, and one for all.
    apart = add_norm(x, residual, gate, weight, bias.contiguous())
    assert all(same(*pair) for pair in zip(apart, (total, normed), strict=True))
    by_row = [each.repeat_interleave(5, dim=0) for each in (gate, weight, bias)]
    rows = add_norm(x.view(15, 70), residual.view(15, 70), *by_row)
    assert all(same(of_rows.view(3, 5, 70), wanted) for of_rows, wanted in zip(rows, (total, normed), strict=True))
    sample = add_norm(x[:1], residual[:1], gate[:1], weight[:1], bias[0].clone()[None])
    assert all(same(*pair) for pair in zip(sample, (total[:1], normed[:1]), strict=True))
    one = add_norm(x[:1], residual[:1], gate[:1], weight[0], bias[0])
    assert all(same(*pair) for pair in zip(one, (total[:1], normed[:1]), strict=True)) or limit == 100
    assert torch.equal(add_norm(x, None, gate, None, None)[0], (x * gate[:, None]).bfloat16())


@DTYPES
@pytest.mark.parametrize("limit", [2**15, 100])  # held by a program; longer than that
def test_numbers_multiply_what_is_added_and_the_total(
    limit: int, dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(norm_launch, "MAX_ROW_BYTES", limit)
    monkeypatch.setattr(norm_launch, "plans", PlanCache())
    x, residual = (torch.randn(3, 5, 70, device=device).to(dtype) for _ in range(2))
    branch, weight = (torch.randn(70, device=device).to(dtype) for _ in range(2))
    # Neither is a number of 16 bits: 0.22 isn't rounded before the product, 1.7 is a value of the tensor's dtype.
    norm, factor, of_total = Norm("rms", 1e-5), 0.22, torch.tensor([1.7], device=device).to(dtype)
    total, normed = dispatch.add_norm(x, residual, None, weight, None, norm, factor=factor, total_factor=of_total)
    assert same(total, (residual + x * factor) * of_total)
    assert same(normed, dispatch.add_norm(total, None, None, weight, None, norm)[1])
    exact = (residual.double() + x.double() * factor) * of_total.double()
    torch.testing.assert_close(total.double(), exact, rtol=2 * torch.finfo(dtype).eps, atol=4 * torch.finfo(dtype).eps)
    assert same(dispatch.add_norm(x, residual, None, None, None, norm, factor=factor)[0], residual + x * factor)
    assert same(dispatch.add_norm(x, None, None, None, None, norm, total_factor=of_total)[0], x * of_total)
    assert same(dispatch.add_norm(x, None, None, None, None, norm, factor=factor)[0], x * factor)
    # Behind a norm.
    of_branch = dispatch.add_norm(x, None, branch, None, None, norm)[0]
    behind, normed = dispatch.add_norm(x, residual, branch, weight, None, norm, factor=factor)
    assert same(behind, residual + of_branch * factor)
    total, *rows = dispatch.add_norm_quantize(x, residual, branch, weight, None, norm, factor=factor)
    assert all(map(same, (total, *rows), (behind, *quantize_rows_reference(normed))))


@pytest.mark.parametrize("limit", [2**15, 100])  # held by a program; longer than that
@pytest.mark.parametrize("of_gate", [torch.bfloat16, torch.float32])
def test_one_gate_for_all_samples(
    of_gate: torch.dtype, limit: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(norm_launch, "MAX_ROW_BYTES", limit)
    monkeypatch.setattr(norm_launch, "plans", PlanCache())
    x, residual = (torch.randn(3, 5, 70, device=device).bfloat16() for _ in range(2))
    gate, weight = torch.randn(70, device=device).to(of_gate), torch.randn(3, 70, device=device).bfloat16()
    for vector in (None, weight[0], weight):
        total, normed = dispatch.add_norm(x, residual, None, vector, None, Norm(), gate)
        wanted = dispatch.add_norm(x, residual, None, vector, None, Norm(), gate.expand(3, 70))
        assert all(map(same, (total, normed), wanted))
    assert same(total, (residual + x * gate).bfloat16())


def test_what_is_not_asked_for_is_not_made(device: torch.device) -> None:
    x, weight = torch.randn(5, 40, device=device), torch.randn(40, device=device)
    assert dispatch.add_norm(x, None, None, weight, None, Norm())[0] is x
    total, normed = dispatch.add_norm(x, x, None, None, None, Norm())
    assert normed is total
    assert torch.equal(total, x + x)
    assert dispatch.add_norm(x, None, None, None, None, Norm())[1] is x


@pytest.mark.parametrize("K", [1, 64, 384, 768, 2048, 3072, 4096, 5120, 8192])
def test_a_program_holds_the_rows_of_all_models(K: int) -> None:
    block, blocks, threads = norm_launch.quantize.row_blocks(K, 4, norm_launch.MAX_ROW_BYTES, 0)
    assert blocks
    assert threads <= 1024
    assert block * blocks <= 64 * threads
