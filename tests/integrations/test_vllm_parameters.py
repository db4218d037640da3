"""Layers of vLLM that load what a rank of several has, in one process: together they compute what qgemm's layers do."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from nn.test_shard import SCHEMES, error, linear, shards
from torch import Tensor

from qgemm.checkpoint.manifest import Manifest
from qgemm.integrations.vllm.names import for_vllm
from qgemm.nn.linear_layer import LinearLayer
from qgemm.scheme import resolve_scheme

pytestmark = pytest.mark.vllm
K, HEAD = 512, 128  # whole groups and blocks of each rank


@contextlib.contextmanager
def as_rank(rank: int, size: int) -> Iterator[Any]:
    """vLLM's module of linear layers, in which everything takes itself for a rank of several that waits for nobody."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor import parameter
    from vllm.model_executor.layers import linear as layers

    with pytest.MonkeyPatch.context() as patch, set_current_vllm_config(VllmConfig()):
        for module in (layers, parameter):
            patch.setattr(module, "get_tensor_model_parallel_rank", lambda: rank)
            patch.setattr(module, "get_tensor_model_parallel_world_size", lambda: size)
        patch.setattr(layers, "tensor_model_parallel_all_reduce", lambda x: x)
        yield layers


def served(kind: str, scheme: str, *arguments: Any, **options: Any) -> Any:
    """A layer of vLLM of a class, in a scheme."""
    from vllm.model_executor.layers import linear as layers

    from qgemm.integrations.vllm.config import ServedConfig

    config = ServedConfig({"layer": resolve_scheme(scheme)})
    options |= {"params_dtype": torch.float32, "quant_config": config, "prefix": "layer"}
    return getattr(layers, kind)(*arguments, **options)


def outputs(layer: Any, given: dict[Any, LinearLayer], x: Tensor) -> Tensor:
    """What ``layer`` computes with the tensors of the layers that it is merged of, by vLLM's name of each part."""
    for part, own in given.items():
        manifest = Manifest({"layer": own.scheme}, {})
        stored = ((f"layer.{name}", own.stored(name).detach()) for name in own.state_dict())
        for name, tensor in for_vllm(stored, manifest):
            parameter = layer._parameters[name.removeprefix("layer.")]
            parameter.weight_loader(parameter, tensor, *(() if part is None else (part,)))
    layer.quant_method.process_weights_after_loading(layer)
    out: Tensor = layer(x)[0]
    return out


def cut(out: Tensor, rank: int, size: int) -> Tensor:
    return out.chunk(size, -1)[rank]


@torch.no_grad()
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_parts_of_sums(scheme: str, size: int) -> None:
    whole, x, found = linear(scheme), torch.randn(3, K), []
    for rank, own in enumerate(x.chunk(size, -1)):
        with as_rank(rank, size):
            layer = served("RowParallelLinear", scheme, K, whole.out_features)
            assert layer.weight.shape[0] == whole.out_features
            found.append(outputs(layer, {None: whole}, own))
    # Scales of rows are each rank's own, so parts of qgemm's are added up.
    parts = shards(whole, "row") if size > 1 else [whole]
    expected = [part(own) for part, own in zip(parts, x.chunk(size, -1), strict=True)]
    for out, like in zip(found, expected, strict=True):
        assert error(out, like) < 2e-6
    assert error(sum(found[1:], found[0]), whole(x)) < 0.03


@torch.no_grad()
def test_parts_of_sums_of_rotated_rows() -> None:
    # Halves of rows have smaller blocks than rows do; thirds of these have the same.
    whole, x, size = linear("int8-hadamard", 768), torch.randn(3, 768), 3
    found = torch.zeros(3, whole.out_features)
    for rank, own in enumerate(x.chunk(size, -1)):
        with as_rank(rank, size):
            found += outputs(served("RowParallelLinear", "int8-hadamard", 768, whole.out_features), {None: whole}, own)
    assert error(found, whole(x)) < 0.03


@torch.no_grad()
@pytest.mark.parametrize("kv_heads", [2, 1])
@pytest.mark.parametrize("scheme", [*SCHEMES, "int8-hadamard"])
def test_queries_keys_and_values(scheme: str, kv_heads: int) -> None:
    """One head of keys is there for both ranks. Each part has scales and outliers of its own."""
    heads, x = {"q": 4, "k": kv_heads, "v": kv_heads}, torch.randn(3, K)
    given = {part: linear(scheme, K, count * HEAD, seed) for seed, (part, count) in enumerate(heads.items())}
    for rank in range(2):
        with as_rank(rank, 2):
            layer = served("QKVParallelLinear", scheme, K, HEAD, 4, kv_heads)
            found = outputs(layer, given, x)
        own = [cut(part(x), rank, 1 if heads[name] == 1 else 2) for name, part in given.items() if heads[name] > 1]
        own += [part(x) for name, part in given.items() if heads[name] == 1]
        assert error(found, torch.cat(own, -1)) < 2e-6


@torch.no_grad()
@pytest.mark.parametrize("scheme", [*SCHEMES, "int8-hadamard"])
def test_gates_and_ups(scheme: str) -> None:
    given, x = {part: linear(scheme, K, 256, seed=part) for part in range(2)}, torch.randn(3, K)
    for rank in range(2):
        with as_rank(rank, 2):
            found = outputs(served("MergedColumnParallelLinear", scheme, K, [256, 256]), given, x)
        assert error(found, torch.cat([cut(part(x), rank, 2) for part in given.values()], -1)) < 2e-6


@torch.no_grad()
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("scheme", [*SCHEMES, "int8-hadamard"])
def test_layers_that_are_merged_in_the_files(scheme: str, size: int) -> None:
    """As Phi-3's: one layer of qgemm, of which a rank has rows of each part."""
    x = torch.randn(3, K)

    def rows(out: Tensor, sizes: Sequence[int], rank: int) -> Tensor:
        return torch.cat([cut(part, rank, size) for part in out.split(list(sizes), -1)], -1)

    for kind, arguments, sizes in (
        ("QKVParallelLinear", (HEAD, 4, 2), (4 * HEAD, 2 * HEAD, 2 * HEAD)),
        ("MergedColumnParallelLinear", ([512, 512],), (512, 512)),
    ):
        whole = linear(scheme, K, sum(sizes))
        for rank in range(size):
            with as_rank(rank, size):
                found = outputs(served(kind, scheme, K, *arguments), {None: whole}, x)
            assert error(found, rows(whole(x), sizes, rank)) < 2e-6
