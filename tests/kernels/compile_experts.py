"""What ``compile_kernels.py`` compiles of grouped products and experts."""

from collections.abc import Iterator

import torch
from assumed_devices import META, Case

from qgemm.kernels import GPT_OSS, GatedActivation
from qgemm.kernels.activation import launcher as activate
from qgemm.kernels.expert_weights import ExpertWeights, WeightOnlyExperts
from qgemm.kernels.gemm.config import GemmConfig, is_valid
from qgemm.kernels.grouped import launcher as grouped
from qgemm.kernels.grouped.config import BY_ROWS, HOPPER, NARROW, WIDE
from qgemm.kernels.launch.device import DeviceLimits
from qgemm.kernels.moe import launcher as moe
from qgemm.kernels.moe import weight_launcher as moe_weights
from qgemm.kernels.quantize import launcher as quantize
from qgemm.kernels.router import launcher as router
from qgemm.kernels.routing import Routing
from qgemm.nn import QuantExperts
from qgemm.nn.experts import expert_weights
from qgemm.numerics.formats import FP8

GROUPS = 256
COUNTED = ("_count_pairs_kernel", "_place_pairs_kernel", "_quantize_tokens_kernel")
FEW = ("_quantize_pairs_kernel",)
ACTIVATED = ("_activate_kernel",)
ROUTED = ("_route_kernel",)


def expert_cases(limits: DeviceLimits) -> Iterator[Case]:
    yield from products(limits)
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    relu2 = GatedActivation("relu2", gated=False)
    yield Case(
        "experts", lambda: experts(64, 8, 7168, 14_336, bf16, GPT_OSS), only=(*FEW, *ACTIVATED, "_combine_kernel")
    )
    yield Case("experts many tokens", lambda: experts(1024, 8, 7168, 768, bf16, relu2), only=(*COUNTED, *ACTIVATED))
    longest = activate.MAX_ROW_BYTES // fp16.itemsize  # that is kept in registers
    yield Case(
        "experts longest row", lambda: experts(64, 8, 1024, longest, fp16, GatedActivation("gelu")), only=ACTIVATED
    )
    # Rows that are read, and computed, twice. The code is there once for each of the top experts: two of them, since
    # eight compile for seconds.
    hidden = quantize.max_row_bytes(limits) // fp32.itemsize + 16
    intermediate = activate.MAX_ROW_BYTES // fp32.itemsize + 16
    tanh = GatedActivation("gelu_tanh")
    yield Case("experts long rows", lambda: experts(256, 2, hidden, intermediate, fp32, tanh), only=(*FEW, *ACTIVATED))
    yield Case(
        "experts many long rows",
        lambda: experts(1024, 2, hidden, intermediate, fp32, tanh),
        only=("_quantize_tokens_kernel",),
    )

    both = ("_grouped_gemm_kernel", "_grouped_hopper_kernel")
    for blocks in (False, True):
        label = "fp8 experts of blocks" if blocks else "fp8 experts"
        few = (*FEW, *both, *ACTIVATED)
        yield Case(f"{label} few", lambda b=blocks: fp8_experts(4, bf16, b), only=few)
        yield Case(f"{label} many", lambda b=blocks: fp8_experts(2048, fp16, b), only=(COUNTED[2], *both))
    yield Case("experts residual", lambda: experts(64, 8, 2048, 768, bf16, relu2, adds=True), only=("_combine_kernel",))
    both = ("_grouped_weight_kernel",)
    # On Hopper few tokens have a kernel of their own, except for many rows of an expert's 8-bit weight.
    yield Case("experts weights few", lambda: weight_only(64, "mxfp8", fp16), only=both)
    yield Case("experts weights many fp4", lambda: weight_only(2048, "mxfp4", fp16), only=both)
    yield Case("experts weights many", lambda: weight_only(2048, "int4-32-asymmetric", fp16), only=both)
    yield Case("experts weights-floats many", lambda: weight_only(2048, "int8-weight-32-float-zeros", bf16), only=both)
    if limits.hopper:
        few = ("_list_pairs_kernel", "_few_tokens_kernel", "_combine_kernel")
        yield Case("experts hopper few", lambda: weight_only(1, "mxfp4", bf16), only=few[1:])
        yield Case("experts several int4", lambda: weight_only(16, "int4-asymmetric", fp16), only=few[:2])
        yield Case("experts several-floats int4", lambda: weight_only(16, "int4-float-zeros", bf16), only=few[1:2])
        yield Case("experts several fp8", lambda: weight_only(16, "fp8-weight", bf16), only=few[1:2])
        yield Case("experts several mxfp4", lambda: weight_only(64, "mxfp4", bf16), only=few[1:2])
        yield Case("experts several mxfp4 more", lambda: weight_only(128, "mxfp4", bf16), only=few[1:2])
        for T in (1, 16, 64):
            label = f"experts several whole blocks {T}"
            yield Case(label, lambda T=T: weight_only(T, "int4+mxfp4", bf16, 2048, 1536), only=few[1:2])
        yield Case(
            "experts hopper many", lambda: weight_only(2048, "mxfp4", bf16), only=("_grouped_weight_hopper_kernel",)
        )
    yield Case("experts routed", lambda: route(128, Routing(8)), only=ROUTED)
    yield Case("experts routed most", lambda: route(router.MAX_EXPERTS, Routing(32, "softmax_of_top_k")), only=ROUTED)
    groups = Routing(8, "sigmoid", in_float=True, scale=2.5, floor=1e-20, groups=8, kept_groups=4)
    yield Case("experts routed near", lambda: route(128, Routing(2, "sparsemixer", margin=0.02)), only=ROUTED)
    rounds = Routing(4, "sigmoid", offset=1e-6, rounded=True)
    yield Case("experts routed in steps", lambda: route(64, rounds, bias=True), only=ROUTED)
    logits = ("_router_logits_kernel",)
    yield Case("experts logits bfloat16", lambda: product(1, 128, 2048, bf16, bf16), only=logits)
    yield Case("experts logits longest float32", lambda: product(16, 256, 8192, bf16, torch.float32, True), only=logits)
    yield Case("experts routed by groups", lambda: route(256, groups, bias=True), only=ROUTED)


def product(T: int, E: int, K: int, dtype: torch.dtype, to: torch.dtype, bias: bool = False) -> None:
    x, weight = torch.empty(T, K, dtype=dtype, device=META), torch.empty(E, K, dtype=to, device=META)
    router.router_logits(x, weight, torch.empty(E, dtype=to, device=META) if bias else None, to)


def route(E: int, routing: Routing, bias: bool = False) -> None:
    logits = torch.empty(16, E, dtype=torch.bfloat16, device=META)
    router.route(logits, routing, torch.empty(E, device=META) if bias else None)


def experts(
    T: int,
    top_k: int,
    hidden: int,
    intermediate: int,
    dtype: torch.dtype,
    activation: GatedActivation,
    adds: bool = False,
) -> None:
    N = activation.columns(intermediate)
    weights = ExpertWeights(
        torch.empty(GROUPS, N, hidden, dtype=torch.int8, device=META),
        torch.empty(GROUPS, N, device=META),
        None,
        torch.empty(GROUPS, hidden, intermediate, dtype=torch.int8, device=META),
        torch.empty(GROUPS, hidden, device=META),
        None,
        activation,
    )
    x = torch.empty(T, hidden, dtype=dtype, device=META)
    index = torch.empty(T, top_k, dtype=torch.int64, device=META)
    moe.experts(x, index, torch.empty(T, top_k, device=META), weights, torch.empty_like(x) if adds else None)


def fp8_experts(T: int, dtype: torch.dtype, blocks: bool) -> None:
    """The sizes of Qwen3's."""
    hidden, intermediate, experts, top_k = 2048, 768, 128, 8
    tensors = []
    for N, K in ((2 * intermediate, hidden), (hidden, intermediate)):
        scales = (experts, N // 128, K // 128) if blocks else (experts, N)
        tensors += [torch.empty(experts, N, K, dtype=FP8.storage, device=META), torch.empty(scales, device=META), None]
    index = torch.empty(T, top_k, dtype=torch.int64, device=META)
    weights = ExpertWeights(*tensors, GatedActivation())
    moe.experts(torch.empty(T, hidden, dtype=dtype, device=META), index, torch.empty(T, top_k, device=META), weights)


def weight_only(T: int, scheme: str, dtype: torch.dtype, hidden: int = 2880, intermediate: int = 2880) -> None:
    """The sizes of GPT-OSS, unless others are given."""
    layer = QuantExperts(32, hidden, intermediate, GPT_OSS, True, META, dtype, scheme)
    held = expert_weights(layer.scheme, GPT_OSS, layer.stored)
    assert isinstance(held, WeightOnlyExperts)
    x = torch.empty(T, hidden, dtype=dtype, device=META)
    index, weights = torch.empty(T, 4, dtype=torch.int64, device=META), torch.empty(T, 4, device=META)
    moe_weights.weight_only_experts(x, index, weights, held)


def products(limits: DeviceLimits) -> Iterator[Case]:
    """The grouped products of every config that is chosen."""
    if limits.hopper:
        yield Case("grouped hopper", lambda: grouped_mm(4096, HOPPER), HOPPER, only=("_grouped_hopper_kernel",))
    lists = (NARROW, NARROW[1:], WIDE, *(configs for _, configs in BY_ROWS))
    chosen = [next(config for config in configs if is_valid(config, 1, limits)) for configs in lists]
    only = ("_grouped_gemm_kernel",)
    for config in dict.fromkeys(chosen):
        label = f"grouped {config.schedule} {config.block_m}x{config.block_n}x{config.block_k}"
        yield Case(label, lambda c=config: grouped_mm(4096, c), config, only)
    config = GemmConfig(64, 64, 64, num_warps=4, num_stages=2)
    yield Case("grouped ragged K", lambda: grouped_mm(4112, config), config, only)
    yield Case("experts group tiles", lambda: grouped_mm(4096, config), only=("_group_tiles_kernel",))


def grouped_mm(K: int, config: GemmConfig) -> None:
    T, N = 4096, 4096
    a = torch.empty(T, K, dtype=torch.int8, device=META)
    b = torch.empty(GROUPS, N, K, dtype=torch.int8, device=META)
    offsets = torch.empty(GROUPS, dtype=torch.int32, device=META)
    bias = torch.empty(GROUPS, N, dtype=torch.bfloat16, device=META)
    scales = torch.empty(T, device=META), torch.empty(GROUPS, N, device=META)
    grouped.grouped_mm(a, b, offsets, *scales, bias, torch.bfloat16, config)
