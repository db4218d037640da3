"""Chains of blocks: which ones are found, and that blocks by themselves get the inputs that they have in the model."""

from __future__ import annotations

import warnings
from collections import UserDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from families import FAMILIES
from families.mixtures import MIXTURES
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from qgemm.calibration import chains as module
from qgemm.calibration.chains import Chain, capture, find_chains
from qgemm.calibration.hooks import without_cache
from qgemm.calibration.method import Call
from qgemm.model.selection import select_layers


def layers_of(model: nn.Module) -> list[nn.Module]:
    return [model.get_submodule(layer.name) for layer in select_layers(model, None) if not layer.reason]


def tensors_of(call: Call) -> list[Tensor]:
    return [leaf.clone() for leaf in tree_leaves((call.args, dict(call.kwargs))) if isinstance(leaf, Tensor)]


def true_inputs(model: nn.Module, names: list[str], call: Call) -> dict[str, list[Tensor]]:
    """The tensors that each module is called with as the model runs, seen from within its ``forward``."""
    seen: dict[str, list[Tensor]] = {}
    originals = {name: model.get_submodule(name).forward for name in names}
    for name, forward in originals.items():

        def record(*args: Any, name: str = name, forward: Any = forward, **kwargs: Any) -> Any:
            seen[name] = tensors_of(Call(args, kwargs))
            return forward(*args, **kwargs)

        model.get_submodule(name).forward = record  # type: ignore[method-assign]
    with torch.no_grad():
        model(*call.args, **call.kwargs)
    for name in names:
        del model.get_submodule(name).forward
    return seen


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@torch.no_grad()
def check_chains(model: nn.Module, chains: list[Chain], calls: list[Call], device: str | None = None) -> None:
    """Works through the chains as a quantizer does, changing block by block; inputs must be those of the model then."""
    for chain in chains:
        inputs = capture(model, chain, calls, None if device is None else torch.device(device))
        for place, name in enumerate(chain.names):
            given = inputs.calls(place)
            assert len(given) == len(calls)
            for batch, call in enumerate(calls):
                expected = true_inputs(model, [name], call)[name]
                assert same(tensors_of(given[batch]), expected), name
                block = model.get_submodule(name)
                block(*given[batch].args, **given[batch].kwargs)  # a first run changes nothing for a second
                assert same(tensors_of(given[batch]), expected), name
            for parameter in block.parameters():
                parameter.mul_(1.01)
            inputs.advance(place, block)


EXPECTED = {
    "llama": ["model.layers.0 model.layers.1"],
    # Each has masks and position embeddings of its own.
    "gemma3": ["model.layers.0 model.layers.1"],
    "gpt2": ["transformer.h.0 transformer.h.1"],
    "bloom": ["transformer.h.0 transformer.h.1"],
    "bert": ["bert.encoder.layer.0 bert.encoder.layer.1"],
    # The first block returns position biases that the second one takes.
    "t5": ["encoder.block.0 encoder.block.1", "decoder.block.0 decoder.block.1"],
    "whisper": ["model.encoder.layers.0 model.encoder.layers.1", "model.decoder.layers.0 model.decoder.layers.1"],
    # One block that runs twice is no chain.
    "albert": [],
    "jamba": ["model.layers.0 model.layers.1"],
    # What a block returns has another shape than what it is given.
    "swin": ["swin.encoder.layers.0 swin.encoder.layers.1"],
    "qwen2_5_vl": [
        "model.visual.blocks.0 model.visual.blocks.1",
        "model.language_model.layers.0 model.language_model.layers.1",
    ],
    "mixtral": ["model.layers.0 model.layers.1"],
}


@pytest.mark.parametrize("family", EXPECTED)
def test_chains_of_real_models(family: str) -> None:
    example = {**FAMILIES, **MIXTURES}[family]()
    model = example.model
    other = {
        key: value.roll(1, -1) if value.ndim and "grid" not in key else value for key, value in example.inputs.items()
    }
    calls = [Call((), example.inputs), Call((), other)]
    expected = example.output()
    with without_cache(model):
        chains = find_chains(model, calls[0], layers_of(model))
        assert torch.equal(example.output(), expected)
        assert [" ".join(chain.names) for chain in chains] == EXPECTED[family]
        check_chains(model, chains, calls)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: Tensor, gain: Tensor | float = 1.0) -> Any:
        return x + self.linear(self.norm(x)) * gain


class InPlace(Block):
    def forward(self, x: Tensor, gain: Tensor | float = 1.0) -> Any:
        return x.add_(self.linear(self.norm(x)) * gain)


class Longer(Block):
    """Returns more rows than it is given, so that it can't be left out."""

    def forward(self, x: Tensor, gain: Tensor | float = 1.0) -> Any:
        return torch.cat([x, super().forward(x, gain)])


class ReturnsMore(Block):
    def forward(self, x: Tensor, gain: Tensor | float = 1.0) -> Any:
        return {"logs": None, "out": (super().forward(x, gain), x.mean())}


class Cache:
    def __init__(self) -> None:
        self.seen: list[Tensor] = []


class Caching(Block):
    def forward(self, x: Tensor, cache: Cache | None = None) -> Any:  # type: ignore[override]
        assert cache is not None
        cache.seen.append(x.mean(-1, keepdim=True))
        return super().forward(x, sum(cache.seen[-1:]) + 0.1 * len(cache.seen))


class Sharing(Block):
    """Hands values on in a dictionary, for later blocks to take instead of their own."""

    def forward(self, x: Tensor, shared: Any = None, takes: bool = False) -> Any:  # type: ignore[override]
        own = self.norm(x)
        if not takes:
            shared["values"] = own, own + 1
        return x + self.linear(shared["values"][0] if takes else own)


class Model(nn.Module):
    """Blocks as ``run`` calls them; an input layer ahead that no chain holds."""

    def __init__(self, run: Callable[[Model, Tensor], Tensor], kind: type[Block] = Block, count: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inp = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(kind() for _ in range(count))
        self.run = run
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, self.inp(x))


def plain(model: Model, x: Tensor) -> Tensor:
    for block in model.blocks:
        x = block(x)
    return x


def by_keyword(model: Model, x: Tensor) -> Tensor:
    for block in model.blocks:
        x = block(gain=torch.full((8,), 0.5), x=x)
    return x


def own_gains(model: Model, x: Tensor) -> Tensor:
    gains = torch.linspace(0.5, 1.0, 4)
    for block, gain in zip(model.blocks, gains, strict=True):
        x = block(x, gain)
    return x


def adds_between(model: Model, x: Tensor) -> Tensor:
    for place, block in enumerate(model.blocks):
        x = block(x)
        if place == 1:
            x = x + 1.0
    return x


def gain_of_hidden(model: Model, x: Tensor) -> Tensor:
    gain: Tensor | float = 1.0
    for place, block in enumerate(model.blocks):
        x = block(x, gain)
        if place == 1:
            gain = x.mean()
    return x


def gain_of_a_block(model: Model, x: Tensor) -> Tensor:
    """The third block is given what the first one returned."""
    first = x = model.blocks[0](x)
    x = model.blocks[1](x)
    x = model.blocks[2](x, first)
    return model.blocks[3](x)


def unpacks(model: Model, x: Tensor) -> Tensor:
    for block in model.blocks:
        x = block(x)["out"][0]
    return x


def caches(model: Model, x: Tensor) -> Tensor:
    cache = Cache()
    for block in model.blocks:
        x = block(x, cache=cache)
    return x


def shares(model: Model, x: Tensor, kind: Callable[[], Any] = UserDict) -> Tensor:
    shared = kind()
    for place, block in enumerate(model.blocks):
        x = block(x, shared=shared, takes=place > 1)
    return x


def twice(model: Model, x: Tensor) -> Tensor:
    return plain(model, plain(model, x))


def side_by_side(model: Model, x: Tensor) -> Tensor:
    return sum((block(x) for block in model.blocks), torch.zeros(()))


CASES: dict[str, tuple[Callable[[Model, Tensor], Tensor], type[Block], list[list[int]]]] = {
    "plain": (plain, Block, [[0, 1, 2, 3]]),
    "by keyword": (by_keyword, Block, [[0, 1, 2, 3]]),
    "own gains": (own_gains, Block, [[0, 1, 2, 3]]),
    "in place": (plain, InPlace, [[0, 1, 2, 3]]),
    "more outputs": (unpacks, ReturnsMore, [[0, 1, 2, 3]]),
    "an output of an earlier block": (gain_of_a_block, Block, [[0, 1, 2, 3]]),
    "added between": (adds_between, Block, [[0, 1], [2, 3]]),
    "a constant that isn't": (gain_of_hidden, Block, [[0, 1], [2, 3]]),
    "other shapes": (own_gains, Longer, [[0, 1, 2, 3]]),
    "a constant that isn't, of blocks that must run": (gain_of_hidden, Longer, [[0, 1], [2, 3]]),
    # What a cache holds can't be seen, but what blocks make of it.
    "caches": (caches, Caching, [[0], [1], [2], [3]]),
    # The first two blocks put something in, the others nothing.
    "a dictionary": (partial(shares, kind=dict), Sharing, [[0], [1], [2, 3]]),
    "a dictionary of another kind": (shares, Sharing, [[0], [1], [2, 3]]),
    "twice": (twice, Block, []),
    "side by side": (side_by_side, Block, []),
}


@pytest.mark.parametrize("device", [None, "cpu"])
@pytest.mark.parametrize("case", CASES)
def test_chains_are_cut_where_blocks_by_themselves_would_get_other_inputs(case: str, device: str | None) -> None:
    run, kind, expected = CASES[case]
    model = Model(run, kind)
    calls = [Call((torch.randn(2, 3, 8),)), Call((torch.randn(5, 8),))]
    chains = find_chains(model, calls[0], layers_of(model))
    assert [list(chain.names) for chain in chains] == [[f"blocks.{place}" for place in part] for part in expected]
    check_chains(model, chains, calls, device)


def test_a_sequential_is_a_list_too_unless_its_members_are_layers() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), Block(), Block()).eval()
    call = Call((torch.randn(3, 8),))
    (chain,) = find_chains(model, call, layers_of(model))
    assert chain.names == ("0", "1", "2")
    alone = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).eval()
    assert find_chains(alone, call, layers_of(alone)) == []


def test_blocks_that_are_in_two_lists_are_one_chain() -> None:
    model = Model(plain)
    model.again = nn.ModuleList([nn.Identity(), *model.blocks])
    (chain,) = find_chains(model, Call((torch.randn(3, 8),)), layers_of(model))
    assert chain.names == ("blocks.0", "blocks.1", "blocks.2", "blocks.3")


def test_blocks_without_layers_are_left_out_at_the_ends_only() -> None:
    model = Model(plain, count=5)
    (chain,) = find_chains(model, Call((torch.randn(3, 8),)), [model.blocks[1].linear, model.blocks[3].linear])
    assert chain.names == ("blocks.1", "blocks.2", "blocks.3")
    assert find_chains(model, Call((torch.randn(3, 8),)), [model.inp, model.blocks[3].linear]) == []


@contextmanager
def counted_runs(model: Model) -> Iterator[list[int]]:
    counts = [0] * len(model.blocks)
    handles = []
    for place, block in enumerate(model.blocks):

        def count(module: nn.Module, args: Any, place: int = place) -> None:
            counts[place] += 1

        handles.append(block.norm.register_forward_pre_hook(count))
    yield counts
    for handle in handles:
        handle.remove()


def test_capturing_runs_no_block() -> None:
    model = Model(own_gains)
    calls = [Call((torch.randn(3, 8),))] * 5
    (chain,) = find_chains(model, calls[0], layers_of(model))
    with counted_runs(model) as counts:
        inputs = capture(model, chain, calls)
        assert counts == [0, 0, 0, 0]
        with torch.no_grad():
            inputs.advance(0, model.blocks[0])
        assert counts == [5, 0, 0, 0]
    assert all("forward" not in vars(block) for block in model.blocks)


def test_hooks_of_others_run_as_often_as_in_the_model() -> None:
    model = Model(plain)
    model.blocks[1].register_forward_pre_hook(lambda module, args: (args[0] * 2.0,))
    model.blocks[2].register_forward_hook(lambda module, args, output: output + 1.0)
    calls = [Call((torch.randn(3, 8),))]
    chains = find_chains(model, calls[0], layers_of(model))
    assert len(chains) == 1
    inputs = capture(model, chains[0], calls)
    x = model.inp(calls[0].args[0])
    with torch.no_grad():
        for place, block in enumerate(model.blocks):
            assert torch.equal(inputs.calls(place)[0].args[0], x)
            x = block(x)
            inputs.advance(place, block)


def sometimes(model: Model, x: Tensor) -> Tensor:
    blocks = model.blocks if x.shape[0] > 1 else model.blocks[:2]
    for block in blocks if x.shape[0] < 10 else []:
        x = block(x)
    return x


def test_batches_that_take_another_way() -> None:
    model = Model(sometimes)
    calls = [Call((torch.randn(rows, 8),)) for rows in (3, 10, 4)]
    (chain,) = find_chains(model, calls[0], layers_of(model))
    inputs = capture(model, chain, calls)
    assert [tuple(call.args[0].shape) for call in inputs.calls(0)] == [(3, 8), (4, 8)]
    with pytest.raises(RuntimeError, match=r"a batch of calibration reaches blocks\.0 but not blocks\.2"):
        capture(model, chain, [*calls, Call((torch.randn(1, 8),))])
    assert all("forward" not in vars(block) and not block._forward_pre_hooks for block in model.blocks)


def digests_of(x: Tensor) -> Any:
    return module._digest(x)


def test_tensors_are_compared_by_all_their_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PIECE", 24)
    for dtype in (torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex64):
        x = torch.arange(35).reshape(5, 7).to(dtype)
        assert digests_of(x) == digests_of(x.clone()) == digests_of(x.t().contiguous().t())
        others = [x.t(), x.reshape(7, 5), x.flip(0), x[:4], torch.cat([x[3:], x[:3]])]
        for place in range(35):
            changed = x.clone()
            changed.view(-1)[place] = (
                0 if dtype == torch.bool and x.view(-1)[place] else 77 if dtype != torch.bool else 1
            )
            others.append(changed)
        assert all(digests_of(other) != digests_of(x) for other in others)
    assert digests_of(torch.empty(0, 3)) == digests_of(torch.zeros(0, 3))
    assert digests_of(torch.eye(3).to_sparse()) is None
    assert digests_of(torch.zeros(())) != digests_of(torch.tensor(-0.0))


def test_calls_are_a_sequence() -> None:
    model = Model(plain)
    calls = [Call((torch.randn(rows, 8),)) for rows in (1, 2, 3)]
    (chain,) = find_chains(model, calls[0], layers_of(model))
    given = capture(model, chain, calls).calls(0)
    assert len(given) == len(list(given)) == 3
    assert given[-1].args[0].shape == (3, 8)
    assert [call.args[0].shape[0] for call in given[1:]] == [2, 3]
    with pytest.raises(IndexError):
        given[3]


def test_the_cache_of_transformers_is_off_inside_and_as_before_outside() -> None:
    model = FAMILIES["llama"]().model
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with without_cache(model):
            assert not model.config.use_cache
            assert model(torch.tensor([[1, 2]])).past_key_values is None
    assert model.config.use_cache
    with pytest.raises(IndexError), without_cache(model):
        model(torch.tensor([[10_000]]))
    assert model.config.use_cache
