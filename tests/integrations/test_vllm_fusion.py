"""Fused kernels in graphs as vLLM compiles them, without vLLM: what is fused, what isn't, and that outputs stay."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.post_grad import remove_noop_ops
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from qgemm.integrations.vllm import fusion
from qgemm.integrations.vllm.fusion import fuse
from qgemm.kernels import quantize_rows

M, K, N, EPS = 5, 64, 96, 1e-5
OPS = torch.ops.qgemm


def rms_norm(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> Tensor:
    h = x.float()
    y = h * torch.rsqrt(h[..., :variance_size].square().mean(-1, keepdim=True) + epsilon)
    return y.to(x.dtype) if weight is None else (y.to(weight.dtype) * weight).to(x.dtype)


def fused_add_rms_norm(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> tuple[Tensor, Tensor]:
    total = x + x_residual
    return rms_norm(total, weight, epsilon, variance_size), total


@pytest.fixture(scope="module", autouse=True)
def operators_of_vllm() -> Iterator[None]:
    """As vLLM names them; ``vllm_engine.py`` has the real ones."""
    library = torch.library.Library("vllm_ir", "DEF")
    end = "Tensor? weight, float epsilon, int? variance_size=None) ->"
    library.define(f"rms_norm(Tensor x, {end} Tensor")
    library.define(f"fused_add_rms_norm(Tensor x, Tensor x_residual, {end} (Tensor, Tensor)")
    for function in (rms_norm, fused_add_rms_norm):
        library.impl(function.__name__, function, "CompositeExplicitAutograd")
    yield
    library._destroy()


class Given:
    """Tensors of a layer of a model."""

    def __init__(self, dtype: torch.dtype = torch.float32, operand: torch.dtype = torch.int8) -> None:
        generator = torch.Generator().manual_seed(0)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(dtype)

        self.x, self.residual, self.norm, self.bias = draw(M, K), draw(M, K), draw(K), draw(N)
        self.gates = draw(M, 2 * K)
        self.weight, self.scale = quantize_rows(draw(N, K), dtype=operand)
        self.input_scale = torch.tensor([0.02])

    def product(self, x: Tensor, bias: Tensor | None = None, input_scale: Tensor | None = None) -> Any:
        return OPS.quant_linear(x, self.weight, self.scale, bias, input_scale)


def check(
    given: Given, compute: Callable[[Given], Any], fused: int, library: str = "qgemm", **tolerance: float
) -> list[str]:
    """Fuses what ``compute`` becomes, and compares; the names of a library's operators then."""
    module, tensors = traced(given, compute)
    expected = module(*tensors)
    assert fuse(module.graph) == fused
    module.graph.eliminate_dead_code()
    module.graph.lint()
    module.recompile()
    torch.testing.assert_close(module(*tensors), expected, **tolerance)
    return [str(node.target).split(".")[1] for node in module.graph.nodes if str(node.target).startswith(f"{library}.")]


def traced(given: Given, compute: Callable[[Given], Any]) -> tuple[fx.GraphModule, tuple[Tensor, ...]]:
    """``compute`` as PyTorch's compiler has it, and the tensors to call that with."""
    names, tensors = zip(*vars(given).items(), strict=True)

    def run(*values: Tensor) -> Any:
        made = Given.__new__(Given)
        vars(made).update(zip(names, values, strict=True))
        return compute(made)

    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = [mode.from_tensor(tensor) for tensor in tensors]
        module: fx.GraphModule = make_fx(run, select_decomp_table())(*fake)
    remove_noop_ops(module.graph)
    return module, tensors


def plain_norm(given: Given) -> Any:
    return given.product(torch.ops.vllm_ir.rms_norm(given.x, given.norm, EPS), given.bias)


def norm_of_a_sum(given: Given) -> Any:
    normed, total = torch.ops.vllm_ir.fused_add_rms_norm(given.x, given.residual, given.norm, EPS)
    return given.product(normed), given.product(normed, given.bias), total


@pytest.mark.parametrize("operand", [torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_norms(dtype: torch.dtype, operand: torch.dtype) -> None:
    given = Given(dtype, operand)
    assert check(given, plain_norm, 1) == ["norm_quantize", "multiply"]
    assert check(given, norm_of_a_sum, 1) == ["add_norm_quantize", "multiply", "multiply"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_norms_of_gemma(dtype: torch.dtype) -> None:
    def weight(given: Given) -> Tensor:
        return given.norm.float() + 1.0

    def plain(given: Given) -> Any:
        return given.product(torch.ops.vllm_ir.rms_norm(given.x, weight(given), EPS))

    def of_a_sum(given: Given) -> Any:
        normed, total = torch.ops.vllm_ir.fused_add_rms_norm(given.x, given.residual, weight(given), EPS)
        return given.product(normed), total

    assert check(Given(dtype), plain, 1) == ["norm_quantize", "multiply"]
    assert check(Given(dtype), of_a_sum, 1) == ["add_norm_quantize", "multiply"]


@pytest.mark.parametrize("change", ["", "eps", "another reader", "kind"])
def test_norms_of_branches(change: str) -> None:
    """Gemma 2 and 3 have a norm behind each branch, too."""

    def compute(given: Given) -> Any:
        own = given.norm if change == "kind" else given.norm.float() + 1.0
        branch = torch.ops.vllm_ir.rms_norm(given.x, own, 2 * EPS if change == "eps" else EPS)
        weight = given.norm.float() + 1.0
        normed, total = torch.ops.vllm_ir.fused_add_rms_norm(branch, given.residual, weight, EPS)
        return given.product(normed), total, branch if change == "another reader" else total

    assert check(Given(torch.bfloat16), compute, 1) == ["add_norm_quantize", "multiply"]
    assert check(Given(torch.bfloat16), compute, 1, "vllm_ir") == (["rms_norm"] if change else [])


def test_static_scales() -> None:
    def compute(given: Given) -> Any:
        return given.product(torch.ops.vllm_ir.rms_norm(given.x, given.norm, EPS), None, given.input_scale)

    assert check(Given(), compute, 1) == ["norm_quantize", "multiply"]


def test_the_sum_alone_is_read_after_the_last_norm() -> None:
    def compute(given: Given) -> Any:
        return given.product(torch.ops.vllm_ir.fused_add_rms_norm(given.x, given.residual, given.norm, EPS)[0])

    assert check(Given(), compute, 1) == ["add_norm_quantize", "multiply"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_tanh"])
def test_gated_activations(name: str, dtype: torch.dtype) -> None:
    options = {"silu": {}, "gelu": {"approximate": "none"}, "gelu_tanh": {"approximate": "tanh"}}[name]
    function = F.silu if name == "silu" else F.gelu

    def compute(given: Given) -> Any:
        half = given.gates.shape[-1] // 2
        return given.product(function(given.gates[..., :half], **options) * given.gates[..., half:])  # type: ignore

    # PyTorch's compiler rounds between the activation and the product only sometimes.
    tolerance = {} if dtype == torch.float32 else {"rtol": 0.05, "atol": 0.3}
    assert check(Given(dtype), compute, 1, **tolerance) == ["activation_quantize", "multiply"]


def reader_in_float(given: Given) -> Any:
    normed = torch.ops.vllm_ir.rms_norm(given.x, given.norm, EPS)
    return given.product(normed), normed @ given.norm


def readers_that_quantize_otherwise(given: Given) -> Any:
    normed = torch.ops.vllm_ir.rms_norm(given.x, given.norm, EPS)
    return given.product(normed), given.product(normed, None, given.input_scale)


def scale_that_is_computed(given: Given) -> Any:
    return given.product(torch.ops.vllm_ir.rms_norm(given.x, given.norm, EPS), None, given.input_scale * 2)


def norm_without_weight(given: Given) -> Any:
    return given.product(torch.ops.vllm_ir.rms_norm(given.x, None, EPS))


def norm_of_a_part(given: Given) -> Any:
    return given.product(torch.ops.vllm_ir.rms_norm(given.x, given.norm, EPS, K // 2))


def norm_in_another_dtype(given: Given) -> Any:
    return given.product(torch.ops.vllm_ir.rms_norm(given.x, given.norm.double(), EPS))


def weights_and_two(given: Given) -> Any:
    return given.product(torch.ops.vllm_ir.rms_norm(given.x, given.norm.double() + 2.0, EPS))


def residual_in_another_dtype(given: Given) -> Any:
    return given.product(
        torch.ops.vllm_ir.fused_add_rms_norm(given.x, given.residual.double(), given.norm, EPS)[0].float()
    )


def ups_before_gates(given: Given) -> Any:
    return given.product(F.silu(given.gates[..., K:]) * given.gates[..., :K])


def gate_of_another_tensor(given: Given) -> Any:
    return given.product(F.silu(given.gates[..., :K]) * (given.gates * 2)[..., K:])


def some_of_the_columns(given: Given) -> Any:
    wide = torch.cat([given.gates, given.gates], dim=-1)
    return given.product(F.silu(wide[..., :K]) * wide[..., K : 2 * K])


@pytest.mark.parametrize(
    "compute",
    [
        reader_in_float, readers_that_quantize_otherwise, scale_that_is_computed, norm_without_weight, norm_of_a_part,
        norm_in_another_dtype, weights_and_two, residual_in_another_dtype, ups_before_gates, gate_of_another_tensor,
        some_of_the_columns,
    ],
)  # fmt: skip
def test_what_stays(compute: Callable[[Given], Any]) -> None:
    assert set(check(Given(), compute, 0)) == {"quant_linear"}


def test_what_a_failure_leaves_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever it happens: ``FusionPass`` goes on with such a graph."""

    def raises_at(count: int) -> Callable[..., Any]:
        calls = iter(range(count))

        def call(*arguments: Any) -> Any:
            if next(calls, None) is None:
                raise ValueError("no such operator")
            return real(*arguments)

        return call

    real = fusion._call
    for count in range(6):  # an add_norm_quantize, its three outputs, and two products
        module, tensors = traced(Given(), norm_of_a_sum)
        expected = module(*tensors)
        monkeypatch.setattr(fusion, "_call", raises_at(count))
        with pytest.raises(ValueError, match="no such operator"):
            fuse(module.graph)
        assert all("val" in node.meta for node in module.graph.nodes if node.op == "call_function")
        module.graph.lint()
        module.recompile()
        torch.testing.assert_close(module(*tensors), expected)
    monkeypatch.setattr(fusion, "_call", raises_at(6))
    assert fuse(traced(Given(), norm_of_a_sum)[0].graph) == 1


def test_a_block_in_a_row() -> None:
    """A product's output goes into the next norm, whose output goes into the next product."""

    def compute(given: Given) -> Any:
        x, total = given.x, given.residual
        for _ in range(2):
            normed, total = torch.ops.vllm_ir.fused_add_rms_norm(x, total, given.norm, EPS)
            x = given.product(normed)[:, :K]
        return x, total

    assert check(Given(), compute, 2) == ["add_norm_quantize", "multiply"] * 2
