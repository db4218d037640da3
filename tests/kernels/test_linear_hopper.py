"""A quantized linear layer in one launch of Hopper's kernel, whose programs wait for one another.

When it is made is tested everywhere; what it computes on a Hopper GPU only, as in ``test_gemm_hopper.py``.
"""

import operator
import threading
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from qgemm.kernels import GemmConfig, select_config
from qgemm.kernels.gemm import hopper
from qgemm.kernels.gemm.config import CANDIDATES
from qgemm.kernels.launch import memory
from qgemm.kernels.launch.plans import PlanCache
from qgemm.kernels.linear import launcher as linear
from qgemm.kernels.reference import quantize_rows_reference, scaled_mm_reference
from tests.kernels.devices import H200
from tests.kernels.one_layer import Parameters, wrong_in_threads
from tests.kernels.test_gemm_hopper import on_hopper

CUDA = torch.device("cuda")
SKINNY = GemmConfig(16, 32, 256, num_warps=4, num_stages=6, schedule="specialized")
TALL = GemmConfig(256, 128, 128, num_warps=8, num_stages=4, schedule="specialized")


@pytest.mark.parametrize(
    ("config", "M", "N", "K", "one"),
    [
        (SKINNY, 1, 1024, 1024, True),
        (SKINNY, 16, 8192, 8192, True),
        (SKINNY, 17, 8192, 8192, True),
        (SKINNY, 17, 8192, 8208, False),  # a weight that takes the device longer than the host
        (SKINNY, 16, 57_344, 28_672, True),  # few rows: always
        (SKINNY, 16, 16, 200_000, False),  # but for those that one program would quantize for long
        (SKINNY, 16 * 32, 1024, 1024, True),
        (SKINNY, 1, 32, 4096, True),
        (SKINNY, 16, 32, 4096, True),
        (SKINNY, 17, 16, 4096, True),  # two tiles, and so two programs
        (SKINNY, 33, 16, 4096, True),
        (TALL, 256, 128, 256, False),  # one program would quantize all rows
        (TALL, 256, 4096, 4096, True),
        (TALL, 264, 4096, 4096, False),  # many products
        (SKINNY, 2048, 512, 1536, True),
        (SKINNY, 2056, 512, 1536, False),  # many values to quantize
    ],
)
def test_when_a_layer_is_one_launch(config: GemmConfig, M: int, N: int, K: int, one: bool) -> None:
    assert hopper.in_one_launch(config, M, N, K, H200) == one


@pytest.mark.parametrize(
    ("M", "N", "K", "one"),
    [
        (1, 4096, 2048, True),
        (16, 57_344, 8192, True),
        (17, 4096, 4096, False),
        (1, 4096, 2032, False),  # short
        (16, 64, 200_000, False),  # two programs would quantize for long
    ],
)
def test_when_a_layer_is_one_launch_in_graphs(M: int, N: int, K: int, one: bool) -> None:
    assert hopper.in_one_launch(SKINNY, M, N, K, H200, in_graphs=True) == one


def tiled(block_m: int, block_n: int, block_k: int = 128, stages: int = 6) -> GemmConfig:
    return next(
        config
        for config in CANDIDATES
        if config.schedule == "specialized"
        and (config.block_m, config.block_n, config.block_k, config.num_stages) == (block_m, block_n, block_k, stages)
    )


@pytest.mark.parametrize(
    ("block_m", "M", "N", "K", "columns"),
    [
        (256, 2048, 4096, 4096, 1),
        (256, 2048, 4096, 4224, 4),
        (256, 512, 57_344, 8192, 1),  # clusters share blocks of B
        (128, 8192, 8192, 8192, 1),
    ],
)
def test_columns_of_tiles_at_a_time(block_m: int, M: int, N: int, K: int, columns: int) -> None:
    config = tiled(block_m, 128, stages=4 if block_m == 256 else 6)
    assert hopper.columns_at_a_time(config, M, N, K, H200) == columns


@pytest.mark.parametrize(
    ("M", "N", "device", "programs"),
    [
        (8192, 8192, 132, 128),  # blocks of 8 x 4 tiles, 16 rounds either way
        (1024, 8192, 132, 128),
        (2048, 18_944, 132, 132),  # 10 rounds, not 9
        (8192, 18_944, 132, 128),  # 37, not 36
        (4096, 8192, 114, 114),  # 96 are too few
        (4096, 8192, 20, 20),  # less than a block
    ],
)
def test_multiprocessors_of_long_products(M: int, N: int, device: int, programs: int) -> None:
    limits = replace(H200, num_sms=device)
    assert hopper.multiprocessors_of_long_product(tiled(256, 128, stages=4), M, N, limits) == programs


@pytest.mark.parametrize(("M", "N", "programs"), [(2048, 13_824, 128), (4096, 28_672, 132)])  # 9 rounds; 37, not 38
def test_multiprocessors_where_groups_take_turns(M: int, N: int, programs: int) -> None:
    (config,) = (config for config in CANDIDATES if config.groups == 2)
    assert hopper.columns_at_a_time(config, M, N, 4096, H200) == 4
    assert hopper.multiprocessors_of_long_product(config, M, N, H200) == programs


@pytest.mark.parametrize(
    ("config", "M", "N", "K", "cluster", "early"),
    [
        (tiled(64, 128, stages=8), 64, 57_344, 8192, 1, True),  # one row of tiles: nobody else loads a block of B
        (tiled(64, 128, stages=8), 65, 57_344, 8192, 2, True),
        (tiled(128, 128), 256, 57_344, 8192, 2, True),
        (tiled(64, 128, stages=8), 192, 4096, 14_336, 3, True),
        (tiled(64, 128, stages=8), 192, 10_240, 8192, 1, False),  # 240 tiles: several rounds
        (tiled(64, 128, stages=8), 256, 3584, 18_944, 4, True),
        (tiled(64, 128, stages=8), 256, 4096, 14_336, 1, False),  # 128 tiles: not as many of a cluster of 4 at a time
        (tiled(64, 128, stages=8), 320, 1024, 4096, 1, False),
        (tiled(128, 128), 512, 4096, 8192, 1, True),  # large tiles, one each
        (tiled(128, 128), 512, 4096, 14_336, 1, False),  # much to quantize
        (tiled(128, 128), 512, 28_672, 4096, 1, False),
        (tiled(128, 128), 1024, 2048, 8192, 1, False),
        (tiled(64, 64), 1024, 1024, 1024, 1, True),  # few steps
        (tiled(64, 64), 1024, 1024, 4096, 1, False),
        (tiled(64, 64), 192, 1024, 4096, 1, False),  # programs that share a multiprocessor
    ],
)
def test_programs_that_start_together_and_early(
    config: GemmConfig, M: int, N: int, K: int, cluster: int, early: bool
) -> None:
    assert hopper.cluster(config, M, N, H200) == cluster
    assert hopper.starts_early(config, M, N, K, H200) == early


def test_counts_for_graphs_are_given_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    zeros = torch.zeros(2, memory.COUNTS_BYTES // 4, dtype=torch.int32)
    monkeypatch.setattr(memory, "_graph_counts", {0: (zeros, iter(range(2)))})
    given = [memory.graph_counts(0) for _ in range(3)]
    assert given[0] is not None
    assert given[1] is not None
    assert given[1].data_ptr() - given[0].data_ptr() == memory.COUNTS_BYTES
    assert given[2] is None
    assert memory.graph_counts(1) is None


@pytest.mark.slow
def test_what_stays_allocated_is_made_by_another_thread_as_if_nothing_were_going_on() -> None:
    threads = []

    def allocate() -> Tensor:
        threads.append(threading.get_ident())
        return torch.zeros(3)

    with torch.inference_mode(), FakeTensorMode():
        made = memory.allocated_for_good(allocate)
    assert threads != [threading.get_ident()]
    assert type(made) is Tensor
    assert not made.is_inference()
    with pytest.raises(ZeroDivisionError):
        memory.allocated_for_good(lambda: torch.zeros(1 // 0))


@pytest.mark.parametrize(
    ("config", "M", "rows"), [(SKINNY, 16, 8), (SKINNY, 17, 32), (tiled(64, 80, 256), 16, 16), (TALL, 300, 128)]
)
def test_rows_of_the_weight_that_are_loaded_at_a_time(config: GemmConfig, M: int, rows: int) -> None:
    assert hopper.weight_rows_at_a_time(config, M) == rows


@pytest.mark.parametrize("K", [1, 16, 1024, 1025, 4096, 14_336, 28_672, 65_536])
@pytest.mark.parametrize("config", [SKINNY, TALL, GemmConfig(64, 64, 256, 4, 6, schedule="specialized")], ids=str)
def test_blocks_hold_the_row_or_it_is_read_twice(config: GemmConfig, K: int) -> None:
    block, blocks = hopper.shared_row_blocks(config, K, H200)
    assert block == 8 * 32 * config.num_warps
    if blocks:
        assert blocks & (blocks - 1) == 0
        assert blocks * block >= K
        assert blocks == 1 or blocks // 2 * block < K
    else:
        assert 8 * block < K


# On a Hopper GPU


@pytest.fixture(autouse=True)
def no_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "plans", PlanCache())
    memory._stream_buffers.clear()


def only_plan() -> linear.LinearPlan:
    (plan,) = linear.plans.values()
    return plan


def programs_wait(plan: linear.LinearPlan) -> bool:
    """Whether calls are one launch, whose programs wait for one another's rows."""
    return len(plan.usual.steps) == 1 and len(plan.captured.steps) == 2


def assert_counts_are_zero() -> None:
    torch.cuda.synchronize()
    for buffer in memory._stream_buffers.values():
        assert not buffer[: memory.COUNTS_BYTES].any()
    assert not any(zeros.any() for zeros, _ in memory._graph_counts.values())


def same_bits(out: Tensor, wanted: Tensor) -> bool:
    return torch.allclose(out, wanted, rtol=0, atol=0, equal_nan=True)


@on_hopper
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("patience", [0, hopper.PATIENCE])
@pytest.mark.parametrize(
    ("M", "N", "K"),
    [(1, 1024, 1024), (3, 264, 1040), (16, 4096, 4096), (64, 1600, 40_000), (130, 1000, 272), (500, 640, 96)],
)
def test_the_reference_s_bits_every_time(
    M: int, N: int, K: int, dtype: torch.dtype, patience: int, static: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without patience every program quantizes every row.
    monkeypatch.setattr(hopper, "PATIENCE", patience)
    layer = Parameters(CUDA, N, K, static)
    x = torch.randn(M, K, device="cuda").to(dtype)
    x[-1, 0] = 300
    if M > 2:
        x[0, 5], x[1] = torch.nan, 0
    wanted = layer.expected(x)
    for _ in range(20):
        assert same_bits(layer(x), wanted)
    assert programs_wait(only_plan())
    assert_counts_are_zero()


@on_hopper
@pytest.mark.parametrize(
    "config", [config for config in CANDIDATES if config.schedule == "specialized" and config.groups == 1], ids=str
)
def test_every_config(config: GemmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    from qgemm.kernels.gemm import launcher as gemm

    monkeypatch.setattr(gemm, "select_config", lambda *problem: config)
    monkeypatch.setattr(gemm, "plans", PlanCache())
    for M in (1, 9, 64, 200):
        layer = Parameters(CUDA, 2056, 1040)
        x = torch.randn(M, 1040, device="cuda", dtype=torch.bfloat16)
        wanted = layer.expected(x)
        residual = torch.randn(M, 2056, device="cuda", dtype=torch.bfloat16)
        for _ in range(3):
            assert torch.equal(layer(x), wanted)
            assert torch.equal(layer(x, residual), wanted + residual)
    assert all(programs_wait(plan) for plan in linear.plans.values())


@on_hopper
@pytest.mark.parametrize(
    "view", [lambda x: x[:, ::2], lambda x: x[::2], lambda x: x.t().contiguous().t(), lambda x: x[:, 1:]]
)
def test_any_strides(view: Callable[[Tensor], Tensor]) -> None:
    x = view(torch.randn(24, 1025, device="cuda", dtype=torch.bfloat16))
    x = x[:, : x.shape[1] // 16 * 16]
    layer = Parameters(CUDA, 512, x.shape[1])
    for _ in range(3):
        assert torch.equal(layer(x), layer.expected(x))
    assert programs_wait(only_plan())


def graph_of(run: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    return graph, out


def unused_counts() -> int:
    """How many launches of graphs could still get some."""
    return operator.length_hint(memory._graph_counts[0][1])


@on_hopper
@pytest.mark.parametrize(("M", "N", "one"), [(1, 8224, True), (16, 8224, True), (17, 8224, False), (16, 528, False)])
def test_graphs_run_beside_eager_calls_and_one_another(M: int, N: int, one: bool) -> None:
    layer = Parameters(CUDA, N, 1024)
    x = torch.randn(M, 1024, device="cuda", dtype=torch.bfloat16)
    layer(x)
    assert programs_wait(only_plan())
    assert (only_plan().counted is not None) == one
    Parameters(CUDA, 8192, 1024)(x[:1])  # one that has graphs get counts
    unused = unused_counts()
    graphs = [graph_of(lambda: layer(layer(x)[:, :512].repeat(1, 2))) for _ in range(3)]
    assert unused - unused_counts() == (6 if one else 0)
    streams = [torch.cuda.Stream() for _ in graphs]
    eager_stream = torch.cuda.Stream()
    wanted = layer.expected(x)
    wanted_twice = layer.expected(wanted[:, :512].repeat(1, 2))
    for _ in range(20):
        for _, out in graphs:
            out.fill_(torch.nan)
        torch.cuda.synchronize()
        for stream, (graph, _) in zip(streams, graphs, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
                graph.replay()
        with torch.cuda.stream(eager_stream):
            eager = layer(x)
        torch.cuda.synchronize()
        assert all(torch.equal(out, wanted_twice) for _, out in graphs)
        assert torch.equal(eager, wanted)
    assert_counts_are_zero()


@on_hopper
@pytest.mark.parametrize(("M", "N"), [(1, 8192), (16, 528), (64, 528)])
def test_graphs_that_torch_compile_makes(M: int, N: int) -> None:
    """What a layer keeps isn't taken for a leak."""
    from qgemm import QuantLinear

    layer = QuantLinear.from_linear(torch.nn.Linear(1024, N, device="cuda", dtype=torch.bfloat16))
    x = torch.randn(M, 1024, device="cuda", dtype=torch.bfloat16)
    q, scale = quantize_rows_reference(x * 2)
    wanted = scaled_mm_reference(q, layer.stored("weight").t(), scale, layer.weight_scale, layer.bias, x.dtype)
    compiled = torch.compile(lambda x: layer(x * 2), mode="reduce-overhead")
    with torch.no_grad():
        for _ in range(5):
            assert torch.equal(compiled(x).clone(), wanted)
    assert_counts_are_zero()


@on_hopper
@pytest.mark.parametrize("already", [False, True])
def test_graphs_without_counts_left(already: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """None were kept, since the device's first call is captured; or others have them all."""
    monkeypatch.setattr(memory, "_graph_counts", {})
    monkeypatch.setattr(memory, "MAX_GRAPH_LAUNCHES", 1)
    layer = Parameters(CUDA, 8192, 1024)
    x = torch.randn(8, 1024, device="cuda", dtype=torch.bfloat16)
    wanted = layer.expected(x)
    if already:
        layer(x)
    outs = []
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [layer(x) for _ in range(3)]
    assert (unused_counts() == 0) if already else not memory._graph_counts
    for _ in range(3):
        for out in outs:
            out.fill_(torch.nan)
        graph.replay()
        assert all(torch.equal(out, wanted) for out in outs)


@on_hopper
@pytest.mark.parametrize(
    ("M", "N", "K"),
    [
        (1, 4096, 8192),
        (16, 8192, 1024),
        (32, 1024, 8192),
        (65, 1024, 8192),
        (128, 8192, 4096),
        (192, 1024, 1024),
        (256, 1536, 8192),
        (512, 4096, 2048),
    ],
)
def test_layers_in_a_graph_that_start_before_those_ahead_have_ended(M: int, N: int, K: int) -> None:
    config = select_config(M, N, K, torch.int8, torch.device("cuda", 0))
    assert hopper.starts_early(config, M, N, K, H200) or M <= hopper.MAX_SKINNY_ROWS
    down, up = Parameters(CUDA, N, K), Parameters(CUDA, K, N)
    x = torch.randn(M, K, device="cuda", dtype=torch.bfloat16)
    wanted = x
    for layer in (down, up) * 3:
        wanted = layer.expected(wanted) / 64
    for layer, like in ((down, x), (up, down(x))):
        layer(like)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = x
        for layer in (down, up) * 3:
            out = layer(out) / 64
    for _ in range(10):
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, wanted)


@on_hopper
def test_many_streams_at_once_wait_for_no_room() -> None:
    """More programs than the device holds, of several launches: all have some that wait for others to start."""
    layer = Parameters(CUDA, 8192, 2048)
    assert select_config(128, 8192, 2048, torch.int8, layer.weight.device).schedule == "specialized"
    inputs = [torch.randn(128, 2048, device="cuda", dtype=torch.bfloat16) for _ in range(8)]
    wanted = [layer.expected(x) for x in inputs]
    streams = [torch.cuda.Stream() for _ in inputs]
    torch.cuda.synchronize()
    for _ in range(20):
        outs = []
        for stream, x in zip(streams, inputs, strict=True):
            with torch.cuda.stream(stream):
                outs.append(layer(x))
        torch.cuda.synchronize()
        assert all(torch.equal(out, one) for out, one in zip(outs, wanted, strict=True))
    assert programs_wait(only_plan())
    assert_counts_are_zero()


@on_hopper
def test_threads_on_one_stream() -> None:
    inputs = [torch.randn(1 + 7 * m, 1024, device="cuda", dtype=torch.bfloat16) for m in range(8)]
    assert not wrong_in_threads(Parameters(CUDA, 1024, 1024), inputs, own_streams=False)
    assert_counts_are_zero()


@on_hopper
@pytest.mark.parametrize("rows", [1, 100, 1024])  # one launch, two in a cluster, and two
def test_a_thread_whose_first_call_on_a_gpu_is_a_layer(rows: int) -> None:
    """It takes memory from PyTorch's cache alone, which gives it no context, and has maps encoded for new addresses."""
    x, layers = torch.randn(rows, 1024, device="cuda", dtype=torch.bfloat16), [Parameters(CUDA, 1024, 1024)]
    wanted = [layers[0].expected(x)]
    assert torch.equal(layers[0](x), wanted[0])  # compiled and loaded
    layers.append(Parameters(CUDA, 1024, 1024))
    wanted.append(layers[1].expected(x))
    outs: list[object] = []

    def work() -> None:
        try:
            outs.extend(layer(x) for layer in layers)
        except RuntimeError as error:
            outs.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert [isinstance(out, Tensor) for out in outs] == [True, True], outs
    assert all(torch.equal(out, one) for out, one in zip(outs, wanted, strict=True))  # type: ignore[arg-type]


@on_hopper
def test_weights_that_change_right_ahead_of_the_call() -> None:
    layer = Parameters(CUDA, 4096, 4096)
    x = torch.randn(16, 4096, device="cuda", dtype=torch.bfloat16)
    weights = [layer.weight.clone(), torch.randint_like(layer.weight, -127, 128)]
    wanted = []
    for weight in weights:
        layer.weight.copy_(weight)
        wanted.append(layer.expected(x))
    outs = []
    for i in range(40):
        torch.add(weights[i % 2], 0, out=layer.weight)
        outs.append(layer(x))
    assert all(torch.equal(out, wanted[i % 2]) for i, out in enumerate(outs))


@on_hopper
def test_a_weight_that_moves_where_the_copy_engine_cannot_read_it() -> None:
    """The plan that a call recalls is for aligned weights."""
    import qgemm

    memory = torch.randint(-127, 128, (256 * 512 + 16,), dtype=torch.int8, device="cuda")
    scale = torch.rand(256, device="cuda")
    x = torch.randn(4, 512, device="cuda", dtype=torch.bfloat16)
    for offset in (0, 16, 8, 1, 0):
        weight = memory[offset : offset + 256 * 512].view(256, 512)
        for _ in range(3):
            out = qgemm.ops.quant_linear(x, weight, scale, None, None)
            q, row_scale = quantize_rows_reference(x)
            assert torch.equal(out, scaled_mm_reference(q, weight.t(), row_scale, scale, None, x.dtype))
