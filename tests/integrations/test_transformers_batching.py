"""Continuous batching of models with ``fast_generate`` runs through ``paged_attention``, with ``generate``'s tokens."""

import copy
import functools
import gc
import io
import weakref
from typing import Any

import pytest
import torch
from families import FAMILIES, VOCABULARY
from families.example import DEPTH, language_model
from families.mixtures import MIXTURES
from transformers import CompileConfig, ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching.model_runner import ModelRunner
from transformers.utils import import_utils

import qgemm
from qgemm.integrations.transformers import batching
from qgemm.integrations.transformers.batching import PAGED_ATTENTION
from qgemm.kernels.attention import dispatch

pytestmark = pytest.mark.usefixtures("little_to_collect")  # transformers collects twice a call

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# One is longer than a batch, so its later parts come beside new tokens of the others.
PROMPTS = [(torch.arange(3, 3 + length) * 11 % 90 + 5).tolist() for length in (7, 1, 23, 12)]
SETTINGS = GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=VOCABULARY, pad_token_id=0)


def small() -> ContinuousBatchingConfig:
    return ContinuousBatchingConfig(num_blocks=32, block_size=8, max_batch_tokens=16)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Of ``paged_attention``: queries of the longest request, and dimensions of what says where keys are, or 0."""
    seen: list[tuple[int, int]] = []

    def attend(call: Any) -> Any:
        seen.append((call.max_queries, 0 if call.pages is None else call.pages.ndim))
        return run(call)

    run = dispatch.attend_paged
    monkeypatch.setattr(dispatch, "attend_paged", attend)
    return seen


def in_batches(model: Any, **options: Any) -> list[list[int]]:
    options = {"generation_config": SETTINGS, "continuous_batching_config": small()} | options
    done = model.generate_batch(PROMPTS, progress_bar=False, **options)
    assert all(result.error is None for result in done.values())
    return [result.generated_tokens for result in done.values()]


def one_by_one(model: Any) -> list[list[int]]:
    prompts = [torch.tensor([prompt], device=DEVICE) for prompt in PROMPTS]
    return [model.generate(ids, generation_config=SETTINGS)[0, ids.shape[1] :].tolist() for ids in prompts]


# Heads of values are narrower than those of keys.
NARROW = language_model(
    "MiMoV2FlashForCausalLM",
    **{**DEPTH, "vocab_size": VOCABULARY, "num_key_value_heads": 2, "head_dim": 24, "v_head_dim": 16},
    **{"layer_types": ["full_attention"] * 2, "mlp_layer_types": ["dense"] * 2, "intermediate_size": 96},
    **{"initializer_range": 0.1, "pad_token_id": 0},
)


@pytest.mark.slow(quick=["llama-fused"])
@pytest.mark.parametrize("fused", [False, True], ids=["float", "fused"])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gemma3", "gpt_oss", "qwen3_moe", "mimo"])
def test_tokens_are_those_of_generate(family: str, fused: bool, calls: list[tuple[int, int]]) -> None:
    model: Any = (FAMILIES | MIXTURES | {"mimo": NARROW})[family]().model.to(DEVICE)
    if fused:
        qgemm.quantize_model(model, fuse=True, progress=False)
    expected = one_by_one(model)
    before = model.config._attn_implementation
    qgemm.fast_generate(model)
    assert in_batches(model) == expected
    assert model.config._attn_implementation == before
    assert max(calls)[0] > 1
    if family in ("llama", "qwen3_moe"):  # parts of prompts beside new tokens, and new tokens alone, with tables
        assert {1, 2} <= {pages for _, pages in calls}
        assert (1, 2) in calls
    elif family == "mistral":  # layers with a window are gathered by transformers
        assert {pages for _, pages in calls} == {0}


@pytest.mark.slow
def test_padded_batches(calls: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """As transformers has them for CUDA graphs: with tokens, requests and keys that aren't there."""
    model: Any = FAMILIES["llama"]().model.to(DEVICE)
    del model.model.layers[1:]  # of which each is traced
    model.config.num_hidden_layers = 1
    expected = one_by_one(model)
    config = small()
    config.q_padding_interval_size, config.kv_padding_interval_size = 4, 16
    config.varlen_compile_config = CompileConfig(backend="eager", mode=None, fullgraph=False, dynamic=True)
    config.decode_compile_config = config.varlen_compile_config
    warmed, warm_up = [], ModelRunner.run_one_warmup
    monkeypatch.setattr(
        ModelRunner, "run_one_warmup", lambda self, **given: (warmed.append(given), warm_up(self, **given))[1]
    )
    assert in_batches(qgemm.fast_generate(model), continuous_batching_config=config) == expected
    assert (1, 2) in calls
    assert (1, 1) not in calls
    # The cache has room for 256 keys, and would be read whole.
    assert (16, 16) in {(given["num_q_tokens"], given["max_kv_read"]) for given in warmed}
    assert max(given["max_kv_read"] or 0 for given in warmed) == 16


@pytest.mark.parametrize(("scheme", "waits"), [("", True), ("int8", False), ("fp8-block", False)])
def test_which_mixtures_wait_for_the_device(scheme: str, waits: bool) -> None:
    """Experts in float32; not those with scales of blocks, which are such parameters, too."""
    model: Any = MIXTURES["qwen3_moe"]().model
    assert batching._waits(qgemm.quantize_model(model, scheme) if scheme else model) == waits


@pytest.mark.parametrize(
    ("options", "kinds"),
    [
        ({}, {"tables"}),
        ({"max_blocks_per_request": 0}, {"new tokens"}),
        ({"use_cuda_graph": True}, {"tables", "prompts"}),
        ({"q_padding_interval_size": 4}, {"tables", "prompts"}),
    ],
    ids=["default", "without tables", "graphs", "padding"],
)
def test_which_batches_are_captured(options: dict[str, Any], kinds: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of new tokens alone; with prompts if the user asks for graphs. Without a GPU nothing else would be."""
    captured = set()

    def start(self: Any, *arguments: Any, **more: Any) -> None:
        real_start(self, *arguments, **more)
        self.use_cuda_graph_varlen = self.use_cuda_graph_decode = self.pad_inputs = True

    def capture(self: Any, forward: Any, stream: Any, *arguments: Any) -> None:
        batch = getattr(self.inputs_and_outputs, "io_pairs", None)
        batch = self.inputs_and_outputs if batch is None else batch[self.inputs_and_outputs.current_pair].host_io
        has_prompts = batch.total_seqlen_q > batch.num_request_in_batch
        captured.add("tables" if batch.use_block_table else "prompts" if has_prompts else "new tokens")
        with torch.cuda.stream(stream):
            forward(*arguments)

    model: Any = FAMILIES["llama"]().model.to(DEVICE)
    expected = one_by_one(model)
    qgemm.fast_generate(model)
    config = small()
    vars(config).update(options)
    real_start = ModelRunner.__init__
    monkeypatch.setattr(ModelRunner, "__init__", start)
    monkeypatch.setattr(ModelRunner, "_capture_graph", capture)
    assert in_batches(model, continuous_batching_config=config, warmup=False) == expected
    assert captured == kinds


def test_int8_takes_half_the_memory_and_can_be_forked() -> None:
    model: Any = FAMILIES["llama"]().model.to(DEVICE)
    settings = copy.deepcopy(SETTINGS)
    settings.num_return_sequences, settings.do_sample, settings.top_k = 2, True, 1
    sizes, answers = [], []
    for dtype in (None, torch.int8):
        qgemm.fast_generate(model, cache_dtype=dtype)
        options = {"generation_config": settings, "continuous_batching_config": small()}
        with model.continuous_batching_context_manager(**options) as manager:
            cache = manager.batch_processor.cache
            kept = [cache.cache_tensor] if hasattr(cache, "cache_tensor") else cache.key_cache + cache.value_cache
            sizes.append(sum(each.nbytes for each in kept))
            manager.add_requests(PROMPTS)
            results = [manager.get_result(timeout=60) for _ in range(2 * len(PROMPTS))]
        answers.append(sorted((result.request_id.partition("__")[0], result.generated_tokens) for result in results))
    assert sizes[1] <= 0.51 * sizes[0]
    assert answers[1] == answers[0]


@pytest.mark.slow(quick=["llama-True"])
@pytest.mark.parametrize("tables", [True, False])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "mistral"])
def test_int8(family: str, tables: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half the memory, and the logits of each token are close to those of the float cache."""
    model: Any = (FAMILIES | MIXTURES)[family]().model.to(DEVICE)
    dtypes: set[torch.dtype] = set()
    run = dispatch.attend_paged
    monkeypatch.setattr(dispatch, "attend_paged", lambda call: (dtypes.add(call.k.dtype), run(call))[1])
    config = small()
    if not tables:
        config.max_blocks_per_request = 0
    qgemm.fast_generate(model, cache_dtype=torch.int8)
    found = in_batches(model, continuous_batching_config=config)
    if family == "mistral":  # windows
        assert dtypes == {torch.float32}
    else:
        assert torch.int8 in dtypes  # with CUDA graphs, prompts read their keys there as well
    qgemm.fast_generate(model, enabled=False)
    for prompt, tokens in zip(PROMPTS, found, strict=True):
        ids = torch.tensor([prompt + tokens], device=DEVICE)
        logits = model(ids).logits[0, len(prompt) - 1 : -1]
        chosen = logits.gather(1, ids[0, len(prompt) :, None])[:, 0]
        assert (logits.amax(1) - chosen).max() <= 0.05 * logits.std()


def test_a_model_with_the_attention_of_the_cache(calls: list[tuple[int, int]]) -> None:
    model: Any = FAMILIES["llama"]().model.to(DEVICE)
    expected = one_by_one(model)
    model.set_attn_implementation("qgemm")
    qgemm.fast_generate(model)
    assert in_batches(model) == expected
    assert calls
    assert model.config._attn_implementation == "qgemm"
    assert one_by_one(model) == expected


def test_a_manager_that_is_kept_is_used_again(calls: list[tuple[int, int]]) -> None:
    model: Any = qgemm.fast_generate(FAMILIES["llama"]().model.to(DEVICE))
    expected = one_by_one(model)
    for turn in range(2):
        calls.clear()
        assert in_batches(model, persistent_manager=True) == expected
        assert calls or (turn and DEVICE == "cuda")  # which replays graphs
        assert model.config._attn_implementation == "sdpa"
    model.destroy_cached_continuous_batching_manager()


@pytest.mark.parametrize("dtype", [None, torch.int8])
def test_memory_is_free_after_batches(dtype: torch.dtype | None) -> None:
    """Without the garbage collector, which may come late."""
    model: Any = qgemm.fast_generate(FAMILIES["llama"]().model.to(DEVICE), cache_dtype=dtype)
    options = {"generation_config": SETTINGS, "continuous_batching_config": small()}
    gc.collect()
    gc.disable()
    try:
        with model.continuous_batching_context_manager(**options) as manager:
            processor = manager.batch_processor
            kept = [weakref.ref(each) for each in (manager, processor, processor.cache, processor.model_runner)]
            del processor
        del manager
        assert [each() for each in kept] == [None] * len(kept)
    finally:
        gc.enable()


def test_tables_are_left_out_where_they_are_not_wanted(calls: list[tuple[int, int]]) -> None:
    model: Any = qgemm.fast_generate(FAMILIES["llama"]().model.to(DEVICE))
    config = small()
    config.max_blocks_per_request = 0
    expected = one_by_one(model)
    assert in_batches(model, continuous_batching_config=config) == expected
    assert {pages for _, pages in calls} <= {0, 1}
    # A longer request than a table has room for goes without.
    calls.clear()
    config.max_blocks_per_request = 2
    assert in_batches(model, continuous_batching_config=config) == expected
    assert {1, 2} <= {pages for _, pages in calls}


def test_a_copy_batches_by_itself(calls: list[tuple[int, int]]) -> None:
    model: Any = qgemm.fast_generate(FAMILIES["llama"]().model.to(DEVICE))
    copied = copy.deepcopy(model)
    assert in_batches(copied) == one_by_one(model)
    assert calls
    assert model.config._attn_implementation == copied.config._attn_implementation == "sdpa"


def test_a_model_that_was_pickled_is_as_transformers_has_it(calls: list[tuple[int, int]]) -> None:
    model: Any = qgemm.fast_generate(FAMILIES["llama"]().model.to(DEVICE))
    memory = io.BytesIO()
    torch.save(model, memory)
    memory.seek(0)
    again = torch.load(memory, weights_only=False)
    expected = one_by_one(model)
    assert in_batches(again) == expected
    assert one_by_one(again) == expected
    assert not calls
    assert in_batches(qgemm.fast_generate(again)) == expected
    assert calls


def test_other_attention_is_left_to_transformers(calls: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """One that the caller chose, flash attention that transformers would take, and without ``fast_generate``."""
    model: Any = FAMILIES["llama"]().model.to(DEVICE)
    expected = one_by_one(model)
    assert in_batches(model) == expected
    qgemm.fast_generate(model)
    model.set_attn_implementation("eager")
    assert in_batches(model) == expected
    model.set_attn_implementation("sdpa")
    monkeypatch.setattr(import_utils, "is_flash_attn_2_available", lambda **options: True)
    assert not batching._is_covered(model, "sdpa")
    assert batching._is_covered(model, "qgemm")
    monkeypatch.undo()
    assert batching._is_covered(model, "sdpa")
    qgemm.fast_generate(model, enabled=False)
    assert "init_continuous_batching" not in vars(model)
    assert not calls


def test_a_start_that_fails_leaves_the_attention() -> None:
    model: Any = qgemm.fast_generate(FAMILIES["llama"]().model.to(DEVICE))
    with pytest.raises(AttributeError):
        model.init_continuous_batching(continuous_batching_config=object())
    assert model.config._attn_implementation == "sdpa"


def test_a_forward_of_its_own_meanwhile_is_refused() -> None:
    model: Any = qgemm.fast_generate(FAMILIES["llama"]().model.to(DEVICE))
    model.init_continuous_batching(generation_config=SETTINGS, continuous_batching_config=small())
    assert model.config._attn_implementation == PAGED_ATTENTION
    ids = torch.tensor([PROMPTS[0]], device=DEVICE)
    for call in (model, functools.partial(model.generate, generation_config=SETTINGS)):
        with pytest.raises(ValueError, match="runs continuous batching"):
            call(ids)
    assert model.config._attn_implementation == PAGED_ATTENTION
