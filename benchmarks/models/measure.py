"""Measures: one provider of a decoder, or all providers of an encoder in turn."""

from __future__ import annotations

import contextlib
import functools
import gc
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, distributed
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_hook

from benchmarks.models.providers import BASE, Provider
from benchmarks.models.results import DECODE, ENCODE, FIRST_CALL, FIRST_TOKEN, PREFILL, SERVE, Figure
from benchmarks.models.shapes import ModelShape
from benchmarks.peers import first_line
from qgemm.device import no_garbage_collection

CALLS_IN_TURN = 4
CHECKED_REQUESTS = 4
"""Those of a served batch whose tokens are compared with the model's forward."""
FEWEST_DECODING_ROUNDS = 3
MAX_GAP = 1.5
"""How far the logit of a generated token may be below the largest of the same model's forward, in standard
deviations: rounding moves logits by a few tenths of one, and a wrong token is four below."""


@dataclass(frozen=True)
class Sizes:
    """What is measured, and how long.

    - ``prefill``: sequences and tokens of each.
    - ``new``: tokens of the longer of two calls of ``generate``, whose difference counts. ``first``: of a first call.
    - ``requests``: how many are served at once. ``prompts``, ``answers``: their fewest and most tokens, given and new.
    - ``sentences``, ``sentence``: sentences in a batch, and tokens in each.
    - ``rounds``: the median of so many counts.
    """

    batches: tuple[int, ...] = (1, 16, 64)
    contexts: tuple[int, ...] = (512, 4096, 16384)
    prefill: tuple[int, int] = (8, 2048)
    new: int = 130
    requests: tuple[int, ...] = (64, 256)
    prompts: tuple[int, int] = (64, 1024)
    answers: tuple[int, int] = (32, 256)
    first: int = 256
    sentences: tuple[int, ...] = (1, 48)
    sentence: int = 24
    rounds: int = 3

    def new_tokens(self, batch: int, context: int) -> int:
        """Those of the longer call: more where the prompt, whose time is taken off, takes long itself."""
        return self.new + min(batch * context // 1024, 256)


@dataclass(frozen=True)
class Request:
    """A prompt, and how many tokens are to follow it."""

    prompt: list[int]
    new: int


def draw_requests(count: int, sizes: Sizes, vocabulary: int, turn: int) -> list[Request]:
    """Requests of unlike lengths, the same in every turn and for every provider.

    The prompts are other ones in every turn: engines keep the keys and values of prompts that they have seen.
    """
    generator = torch.Generator().manual_seed(count)
    prompts, answers = (
        torch.randint(fewest, most + 1, (count,), generator=generator).tolist()
        for fewest, most in (sizes.prompts, sizes.answers)
    )
    generator.manual_seed(count * 100003 + turn)
    return [
        Request(torch.randint(1, vocabulary, (length,), generator=generator).tolist(), new)
        for length, new in zip(prompts, answers, strict=True)
    ]


def check_lengths(requests: Sequence[Request], answers: Sequence[Sequence[int]]) -> None:
    """Raises ``RuntimeError`` if an answer hasn't the number of tokens that was asked for."""
    for request, answer in zip(requests, answers, strict=True):
        if len(answer) != request.new:
            raise RuntimeError(f"wrong output: a request has {len(answer)} new tokens, not {request.new}")


def measure_decoder(
    shape: ModelShape,
    provider: Provider,
    layers: int,
    measures: Sequence[str],
    sizes: Sizes,
    device: torch.device,
    cache: str = "",
) -> Iterator[Figure]:
    """Figures of one provider, one by one. ``cache``: of compiled kernels, which a first call finds cold or warm."""
    base = Figure(shape.name, layers, provider.name, "", cache=cache)
    wanted = [measure for measure in measures if measure in provider.measures]
    model = shape.build(device, layers)
    if FIRST_TOKEN in wanted:
        yield from _first_call(model, provider, sizes, base)
        return
    ids = random_tokens(model, 2, 64)
    reference = _logits(model, ids)
    notes = provider.prepare(model)
    base = replace(base, note="; ".join(notes), weight_bytes=_allocated(device))
    if provider.is_coarse:
        reference = _logits_of_float_products(model, ids)
    cosine = F.cosine_similarity(reference, _logits(model, ids), dim=-1).min().item()
    base = replace(base, cosine=cosine)
    if not cosine >= shape.min_cosine:
        reason = f"wrong output: a cosine of {cosine:.4f}, not {shape.min_cosine}"
        yield replace(base, measure=wanted[0], reason=reason)
        return
    if PREFILL in wanted:
        yield _measured(replace(base, measure=PREFILL), device, _prefill, model, *sizes.prefill, sizes.rounds)
    for count in sizes.requests if SERVE in wanted else ():
        figure = replace(base, measure=SERVE, batch=count, context=sizes.prompts[1])
        yield replace(_measured(figure, device, _serve, model, sizes), peak_bytes=None)
    if DECODE not in wanted:
        return
    with _noting(notes):
        found = _decoded_gaps(model, provider, sizes)
    base = replace(base, note="; ".join(dict.fromkeys(notes)))
    if reason := _wrong(found):
        yield replace(base, measure=DECODE, reason=reason)
        return
    for context in sizes.contexts:
        for batch in sizes.batches:
            figure = replace(base, measure=DECODE, batch=batch, context=context)
            needed = shape.cache_bytes(batch, context + sizes.new_tokens(batch, context)) * layers // shape.layers
            if device.type == "cuda" and needed > 0.8 * (torch.cuda.mem_get_info(device)[1] - _allocated(device)):
                yield replace(figure, reason=f"{needed / 1e9:.0f} GB of keys and values don't fit")
                continue
            yield _measured(figure, device, _decode, model, provider, batch, context, sizes)


def _measured(figure: Figure, device: torch.device, measure: Callable[..., Figure], *arguments: Any) -> Figure:
    """What ``measure`` adds to ``figure``, and the peak of memory; or why it couldn't."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    try:
        with torch.no_grad():
            figure = measure(figure, *arguments)
    except Exception as error:  # one size that fails leaves the others
        return replace(figure, reason=first_line(error))
    return replace(figure, peak_bytes=torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None)


def _prefill(figure: Figure, model: Any, batch: int, length: int, rounds: int) -> Figure:
    ids = random_tokens(model, batch, length)
    seconds = median_seconds(lambda: model(ids, use_cache=True, logits_to_keep=1), rounds)
    return replace(figure, batch=batch, context=length, value=batch * length / seconds)


def _decode(figure: Figure, model: Any, provider: Provider, batch: int, context: int, sizes: Sizes) -> Figure:
    ids, new = random_tokens(model, batch, context), sizes.new_tokens(batch, context)
    run = functools.partial(generate, model, provider, ids)
    return replace(figure, value=decoding_rate(run, batch, new, sizes.rounds))


def _serve(figure: Figure, model: Any, sizes: Sizes) -> Figure:
    """New tokens a second of a whole batch, prompts included: from handing it over to the last token.

    As a server does, the manager starts before, and the first batch, in which graphs of further sizes are captured,
    isn't counted.
    """
    from transformers import GenerationConfig

    batches = [draw_requests(figure.batch, sizes, model.config.vocab_size, turn) for turn in range(sizes.rounds + 1)]
    greedy = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)  # no token has the number -1
    options = _options_of_a_cpu(batches[0]) if model.device.type == "cpu" else {}
    before, seconds, notes = model.config._attn_implementation, [], [figure.note] if figure.note else []
    try:
        with _noting(notes), model.continuous_batching_context_manager(generation_config=greedy, **options) as manager:
            notes.append(f"serves with {model.config._attn_implementation}")  # which one depends on what is installed
            for requests in batches:
                # Nothing waits for the GPU here: the manager's thread may be capturing a graph, and tokens that have
                # come are there.
                start = time.perf_counter()
                answers = _answers(manager, requests)
                seconds.append(time.perf_counter() - start)
                check_lengths(requests, answers)
    finally:
        if model.config._attn_implementation != before:  # a manager that couldn't start leaves its own
            model.set_attn_implementation(before)
    figure = replace(figure, note="; ".join(dict.fromkeys(notes)))
    if reason := wrong_answer(model, requests, answers):
        return replace(figure, reason=reason)
    return replace(figure, value=sum(request.new for request in batches[0]) / statistics.median(seconds[1:]))


@torch.no_grad()
def wrong_answer(model: Any, requests: Sequence[Request], answers: Sequence[list[int]]) -> str:
    """Why the first wrong one of a few is wrong, by the model's own forward; empty if all are right."""
    for request, answer in zip(requests[:CHECKED_REQUESTS], answers, strict=False):
        ids = torch.tensor([request.prompt + answer], device=model.device)
        if reason := _wrong(gaps(model, ids, request.new)):
            return reason
    return ""


def _answers(manager: Any, requests: Sequence[Request]) -> list[list[int]]:
    """The new tokens of each. Raises ``RuntimeError`` if one fails."""
    names = [manager.add_request(request.prompt, max_new_tokens=request.new) for request in requests]
    found: dict[str, list[int]] = {}
    while len(found) < len(names):
        result = manager.get_result(timeout=1)
        if result is None:
            if not manager.is_running():
                raise RuntimeError(f"continuous batching ended after {len(found)} of {len(names)} requests")
        elif result.error is not None:
            raise RuntimeError(result.error)
        else:
            found[result.request_id] = result.generated_tokens
    return [found[name] for name in names]


def _options_of_a_cpu(requests: Sequence[Request]) -> dict[str, Any]:
    """A cache that fits: transformers would make one of nearly all memory, as it does on a GPU."""
    from transformers import ContinuousBatchingConfig

    config = ContinuousBatchingConfig()
    size = getattr(config, "page_size", None) or config.block_size  # since transformers 5.18, and before
    blocks = sum((len(request.prompt) + request.new) // size + 2 for request in requests)
    return {"continuous_batching_config": ContinuousBatchingConfig(num_blocks=blocks, max_batch_tokens=512)}


def _first_call(model: Any, provider: Provider, sizes: Sizes, base: Figure) -> Iterator[Figure]:
    """From the float model on: preparation, compilation, capture of graphs, prefill of one prompt, and all tokens."""
    ids, times = random_tokens(model, 1, min(sizes.contexts)), _Times()
    start = _now()
    notes = provider.prepare(model)
    called = _now()
    generate(model, provider, ids, sizes.first, streamer=times)
    end = _now()
    base = replace(base, batch=1, context=ids.shape[1], note="; ".join(notes))
    yield replace(base, measure=FIRST_TOKEN, value=times.puts[1] - start)
    yield replace(base, measure=FIRST_CALL, value=sizes.first / (end - called))


class _Times:
    """A streamer that keeps when it was given something: the prompt first."""

    def __init__(self) -> None:
        self.puts: list[float] = []

    def put(self, value: Tensor) -> None:
        self.puts.append(time.perf_counter())

    def end(self) -> None:
        pass


def measure_encoder(
    shape: ModelShape, providers: Sequence[Provider], layers: int, sizes: Sizes, device: torch.device
) -> Iterator[Figure]:
    """Sentences a second of every provider, which take turns."""
    models, bases = {}, {}
    for provider in providers:
        model = models[provider.name] = shape.build(device, layers)
        notes = provider.prepare(model)
        bases[provider.name] = Figure(shape.name, layers, provider.name, ENCODE, note="; ".join(notes))
    reference = models[BASE] if BASE in models else shape.build(device, layers)
    for batch in sizes.sentences:
        ids = random_tokens(reference, batch, sizes.sentence)
        with torch.no_grad():
            expected = reference(ids).last_hidden_state.flatten(1)
            found = {name: model(ids).last_hidden_state.flatten(1) for name, model in models.items()}
            runs = {name: functools.partial(model, ids) for name, model in models.items()}
            seconds = _in_turn(runs, 7 * sizes.rounds)
        for name, figure in bases.items():
            cosine = F.cosine_similarity(expected.float(), found[name].float(), dim=-1).min().item()
            figure = replace(figure, batch=batch, context=sizes.sentence, cosine=cosine)
            if cosine < shape.min_cosine:
                yield replace(figure, reason=f"wrong output: a cosine of {cosine:.4f}, not {shape.min_cosine}")
            else:
                yield replace(figure, value=batch / seconds[name])


def _in_turn(runs: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in runs}
    names = list(runs)
    for _ in range(rounds):
        for name in names:
            # The first call finds the caches full of another model's weights, as none does that is used by itself.
            runs[name]()
            times[name] += [_seconds(runs[name]) for _ in range(CALLS_IN_TURN)]
        names.reverse()
    return {name: statistics.median(values) for name, values in times.items()}


def median_seconds(run: Callable[[], object], rounds: int) -> float:
    """Of so many runs, after one that isn't counted."""
    return statistics.median([_seconds(run) for _ in range(rounds + 1)][1:])


def decoding_rate(generate: Callable[[int], object], batch: int, new: int, rounds: int) -> float:
    """Tokens a second, from how much longer ``generate(new)`` takes than ``generate(2)``: no prompt is in it.

    The calls take turns, and there are at least ``FEWEST_DECODING_ROUNDS``: what disturbs one of them would be the
    difference. Raises ``RuntimeError`` if there is none.
    """
    turns = [
        (_seconds(functools.partial(generate, new)), _seconds(functools.partial(generate, 2)))
        for _ in range(max(rounds, FEWEST_DECODING_ROUNDS) + 1)
    ]
    long, short = (statistics.median(times) for times in zip(*turns[1:], strict=True))
    if long <= short:
        raise RuntimeError(f"a call with {new} new tokens took {long:.3g} s, and one with 2 took {short:.3g}")
    rate: float = batch * (new - 2) / (long - short)
    return rate


def _seconds(run: Callable[[], object]) -> float:
    gc.collect()
    if distributed.is_initialized():
        distributed.barrier()  # collecting takes some processes longer: the others would wait for them in their time
    with no_garbage_collection():
        start = _now()
        run()
        return _now() - start


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def generate(model: Any, provider: Provider, ids: Tensor, new: int, **more: Any) -> Tensor:
    """``ids`` and ``new`` greedy tokens after each row, as ``provider`` calls it; ``more``: of its options on a GPU."""
    options = {**provider.options, **more} if ids.device.type == "cuda" else more
    result: Tensor = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new, do_sample=False, **options
    )
    return result


def _decoded_gaps(model: Any, provider: Provider, sizes: Sizes) -> Tensor:
    """Of the tokens of the first size that is timed: what compiles for each size does so once."""
    batch, context = sizes.batches[0], sizes.contexts[0]
    ids, new = random_tokens(model, batch, context), sizes.new_tokens(batch, context)
    return gaps(model, generate(model, provider, ids, new), new)


@torch.no_grad()
def gaps(model: Any, tokens: Tensor, new: int) -> Tensor:
    """How far the logit of each of the last ``new`` tokens is below the largest, in standard deviations, ``[B, new]``.

    By the model's own forward of ``tokens [B, S]``.
    """
    logits = model(tokens, logits_to_keep=new + 1).logits[:, :-1].float()
    chosen = logits.gather(-1, tokens[:, -new:, None]).squeeze(-1)
    found: Tensor = (logits.amax(-1) - chosen) / logits.std(-1)
    return found


def _wrong(found: Tensor) -> str:
    """The reason why tokens with these gaps, NaN too, have no figure; empty if they are right."""
    gap = float(found.max())
    if gap <= MAX_GAP:
        return ""
    return f"wrong output: a generated token's logit is {gap:.2g} standard deviations below the largest"


@contextlib.contextmanager
def _noting(notes: list[str]) -> Iterator[None]:
    """Adds what qgemm warns of: that another loop runs, say."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        yield
    notes += [str(each.message) for each in said if "qgemm" in str(each.message)]


@torch.no_grad()
def _logits(model: Any, ids: Tensor) -> Tensor:
    """Of the last tokens, float32."""
    result: Tensor = model(ids, logits_to_keep=16).logits.float()
    return result


def _logits_of_float_products(model: Any, ids: Tensor) -> Tensor:
    """As ``_logits``, by PyTorch's products of what the quantized weights of ``model`` stand for."""

    def compute(layer: Any, x: Tensor) -> Tensor:
        return F.linear(x, layer.float_linear(x.dtype).weight, layer.bias)

    layers: list[Any] = [module for module in model.modules() if hasattr(module, "dequantize")]
    # Hooks on all modules: then fused layers are computed as the modules that they are.
    hook = register_module_forward_hook(lambda *_: None)
    try:
        for layer in layers:
            layer.compute = functools.partial(compute, layer)
        return _logits(model, ids)
    finally:
        hook.remove()
        for layer in layers:
            del layer.compute


def random_tokens(model: Any, batch: int, length: int) -> Tensor:
    """Prompts ``[batch, length]`` for ``model``, always the same."""
    generator = torch.Generator().manual_seed(batch * 100003 + length)
    ids = torch.randint(1, model.config.vocab_size, (batch, length), generator=generator)
    return ids.to(next(model.parameters()).device)


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
