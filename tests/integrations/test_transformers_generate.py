"""``fast_generate`` gives the tokens of transformers' own loop, which each test runs beside it."""

import copy
import functools
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from families import FAMILIES, VOCABULARY
from torch import Tensor
from transformers import (
    ContinuousBatchingConfig,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.generation import (
    LogitsProcessor,
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

import qgemm
from qgemm.integrations.transformers.generate import loop
from qgemm.integrations.transformers.generate.entry import decode
from qgemm.integrations.transformers.generate.stopping import Stops

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PROMPTS = torch.arange(3, 24).reshape(3, 7) * 11 % 90 + 5
# Left padding: of three tokens, of one, of none.
PADDED = (torch.arange(7) >= torch.tensor([[3], [1], [0]])).long()
NO_END = {"eos_token_id": None, "pad_token_id": 0}


@functools.cache
def _llama() -> PreTrainedModel:
    model: Any = FAMILIES["llama"]().model.to(DEVICE)
    return model


@pytest.fixture
def llama() -> Iterator[PreTrainedModel]:
    yield _llama()
    qgemm.fast_generate(_llama(), False)


@pytest.fixture(autouse=True)
def _no_fallback() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "generate runs")
        warnings.filterwarnings("error", "generate's steps run")
        yield


def both(model: PreTrainedModel, **options: Any) -> tuple[Any, Any]:
    """What transformers' loop gives and what ours gives, with one state of the random generators."""
    options = {key: value.to(DEVICE) if isinstance(value, Tensor) else value for key, value in options.items()}
    torch.manual_seed(0)
    expected = model.generate(**options)
    qgemm.fast_generate(model)
    torch.manual_seed(0)
    result = model.generate(**options)
    torch.manual_seed(0)
    again = model.generate(**options)  # with the cache and the tensors of the call before
    qgemm.fast_generate(model, False)
    if isinstance(result, Tensor):
        assert torch.equal(again, result)
    return expected, result


SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "greedy with a penalty": {"do_sample": False, "repetition_penalty": 1.5},
    "draws": {"do_sample": True, "top_k": 0},
    "all warpers": {"do_sample": True, "temperature": 0.7, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "typical_p": 0.9},
    "several of a prompt": {"do_sample": True, "num_return_sequences": 2},
    "a minimum": {"do_sample": True, "min_new_tokens": 5, "eos_token_id": list(range(40)), "pad_token_id": 1},
    "a minimum of all tokens": {
        "do_sample": True,
        "min_length": 11,
        "eos_token_id": list(range(40)),
        "pad_token_id": 1,
    },
    "end tokens": {"do_sample": True, "eos_token_id": list(range(30)), "pad_token_id": 1},
    "one end token": {"do_sample": False, "eos_token_id": 30, "pad_token_id": 1},
    "one token": {"do_sample": False, "max_new_tokens": 1},
}


@pytest.mark.parametrize("padded", [False, True], ids=["even", "padded"])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_tokens_are_those_of_transformers(llama: PreTrainedModel, settings: dict[str, Any], padded: bool) -> None:
    mask = PADDED if padded else torch.ones_like(PADDED)
    expected, result = both(
        llama, input_ids=PROMPTS, attention_mask=mask, **{**NO_END, "max_new_tokens": 12, **settings}
    )
    assert torch.equal(result, expected)


@pytest.mark.parametrize("together", [1, 2])
@pytest.mark.parametrize("dtype", [None, torch.int8], ids=["float", "int8"])
@pytest.mark.parametrize("padded", [False, True], ids=["even", "padded"])
def test_prompts_are_computed_in_parts(
    llama: PreTrainedModel, padded: bool, dtype: torch.dtype | None, together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def decoded() -> tuple[Any, list[tuple[int, ...]]]:
        sizes: list[tuple[int, ...]] = []
        seen = llama.register_forward_pre_hook(
            lambda _, args, kwargs: sizes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
        )
        qgemm.fast_generate(llama, cache_dtype=dtype)
        first = llama.generate(PROMPTS.to(DEVICE), attention_mask=mask, return_dict_in_generate=True, **options)
        more = torch.cat([first.sequences, torch.full_like(first.sequences[:, :2], 9)], dim=1)
        longer = torch.cat([mask, mask.new_ones(3, more.shape[1] - 7)], dim=1)
        later = llama.generate(more, attention_mask=longer, past_key_values=first.past_key_values, **options)
        seen.remove()
        qgemm.fast_generate(llama, False)
        return later, sizes

    mask = (PADDED if padded else torch.ones_like(PADDED)).to(DEVICE)
    options: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, **NO_END}
    expected, whole = decoded()
    monkeypatch.setattr(loop, "MAX_PROMPT_VALUES", together * 7 * llama.config.hidden_size)
    result, parts = decoded()
    assert torch.equal(result, expected)
    assert [size for size in whole if size[1] > 1] == [(3, 7), (3, 3)]
    assert [size for size in parts if size[1] == 7] == {1: [(1, 7)] * 3, 2: [(2, 7), (1, 7)]}[together]
    # What already is in a cache stays together.
    assert [size for size in parts if size[1] == 3] == [(3, 3)]


def _depend_on_the_longest(model: Any) -> None:
    model.config.rope_parameters = {**model.config.rope_parameters, "rope_type": "dynamic", "factor": 2.0}


def _have_a_forward_of_their_own(model: Any) -> None:
    model.forward = model.forward  # which may look at all of a batch


@pytest.mark.parametrize("change", [_depend_on_the_longest, _have_a_forward_of_their_own])
def test_prompts_that_may_depend_on_others_stay_together(
    change: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = copy.deepcopy(_llama())
    change(model)
    sizes = []
    model.register_forward_pre_hook(
        lambda _, args, kwargs: sizes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    monkeypatch.setattr(loop, "MAX_PROMPT_VALUES", 1)
    qgemm.fast_generate(model)
    model.generate(PROMPTS.to(DEVICE), max_new_tokens=1, do_sample=False, **NO_END)
    assert sizes == [(3, 7)]


def test_a_part_that_fails_harms_no_later_call(llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        if len(calls) == 2:
            raise RuntimeError("no more")
        calls.append(1)

    options: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, **NO_END}
    expected = llama.generate(PROMPTS.to(DEVICE), **options)
    monkeypatch.setattr(loop, "MAX_PROMPT_VALUES", 1)
    cache = qgemm.KeyValueCache(llama.config, 3, 16, device=DEVICE)
    qgemm.fast_generate(llama)
    calls: list[int] = []
    hook = llama.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="no more"):
        llama.generate(PROMPTS.to(DEVICE), past_key_values=cache, **options)
    hook.remove()
    cache.reset()
    assert torch.equal(llama.generate(PROMPTS.to(DEVICE), past_key_values=cache, **options), expected)


@pytest.mark.parametrize("ahead", [1, 3, 50])  # 50 is more than there are steps
def test_steps_after_the_end_leave_no_trace(llama: PreTrainedModel, ahead: int) -> None:
    options = {
        "input_ids": PROMPTS.to(DEVICE),
        "max_new_tokens": 20,
        "do_sample": False,
        "return_dict_in_generate": True,
    }
    plain = llama.generate(**options, **NO_END)
    ends = {"eos_token_id": plain.sequences[:, 7 + 4].tolist(), "pad_token_id": 0}
    expected = llama.generate(**options, **ends)
    streamer = Recorder()
    late = functools.partial(decode, ahead=ahead, streamer=streamer)
    result = llama.generate(**options, **ends, custom_generate=late)
    assert expected.sequences.shape[1] < 7 + 20, "the sequences are to end early"
    assert torch.equal(result.sequences, expected.sequences)
    assert int(result.past_key_values.get_seq_length()) == int(expected.past_key_values.get_seq_length())
    assert torch.equal(torch.stack(streamer.values[1:], dim=1), result.sequences[:, 7:].cpu())
    # The cache goes on as transformers' does, past what the steps after the end have written.
    more = result.sequences[:, -1:].new_full((3, 2), 9)
    longer: dict[str, Any] = {"input_ids": torch.cat([result.sequences, more], dim=1), "max_new_tokens": 1, **NO_END}
    longer["attention_mask"] = torch.ones_like(longer["input_ids"])
    continued = llama.generate(**longer, past_key_values=result.past_key_values, custom_generate=qgemm.generate)
    assert torch.equal(continued, llama.generate(**longer, past_key_values=expected.past_key_values))


class Recorder(BaseStreamer):
    def __init__(self) -> None:
        self.values: list[Tensor] = []
        self.ends = 0

    def put(self, value: Tensor) -> None:
        self.values.append(value.clone())

    def end(self) -> None:
        self.ends += 1


def test_a_streamer_gets_what_transformers_gives_it(llama: PreTrainedModel) -> None:
    options = {"input_ids": PROMPTS[:1].to(DEVICE), "max_new_tokens": 9, "do_sample": False, **NO_END}
    expected, result = Recorder(), Recorder()
    llama.generate(**options, streamer=expected)
    qgemm.fast_generate(llama)
    llama.generate(**options, streamer=result)
    assert [each.tolist() for each in result.values] == [each.tolist() for each in expected.values]
    assert (len(result.values), result.ends) == (10, 1)


@functools.cache
def _tokenizer() -> PreTrainedTokenizerFast:
    """A token a character, but for a few that are two."""
    from tokenizers import Tokenizer, decoders, models

    words = [chr(33 + i) for i in range(VOCABULARY - 10)] + [f"a{chr(98 + i)}" for i in range(10)]
    backend = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


@pytest.mark.parametrize("ends", [{}, {"eos_token_id": 30, "pad_token_id": 1}], ids=["strings", "strings and a token"])
def test_stop_strings(llama: PreTrainedModel, ends: dict[str, int]) -> None:
    options: dict[str, Any] = {"input_ids": PROMPTS, "max_new_tokens": 20, "do_sample": False, **NO_END, **ends}
    plain = llama.generate(**{**options, "input_ids": PROMPTS.to(DEVICE), **NO_END})
    words = _tokenizer().convert_ids_to_tokens(plain[0].tolist())
    rest = {"tokenizer": _tokenizer(), "stop_strings": ["".join(words[9:12]), "".join(words[13:14])]}
    expected, result = both(llama, **options, **rest)
    assert torch.equal(result, expected)
    for strings in (rest["stop_strings"], ["".join(words[5:8])]):  # new tokens alone, and some of the prompt
        one, other = both(llama, **{**options, "input_ids": PROMPTS[:1]}, **{**rest, "stop_strings": strings})
        assert one.shape[1] < 27
        assert torch.equal(one, other)


def test_a_call_that_its_streamer_ends_harms_no_other(llama: PreTrainedModel) -> None:
    class Fails(Recorder):
        def put(self, value: Tensor) -> None:
            if value.ndim == 1:
                raise RuntimeError("no more")

    options = {"input_ids": PROMPTS[:1].to(DEVICE), "max_new_tokens": 9, "do_sample": False, **NO_END}
    expected = llama.generate(**options)
    qgemm.fast_generate(llama)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no more"):
            llama.generate(**options, streamer=Fails())
        assert torch.equal(llama.generate(**options), expected)


def test_a_maximum_of_time_stops(llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = iter(range(100))
    monkeypatch.setattr(Stops, "out_of_time", lambda stops: stops.deadline is not None and next(steps) == 5)
    qgemm.fast_generate(llama)
    result = llama.generate(PROMPTS.to(DEVICE), max_new_tokens=20, max_time=1000.0, do_sample=False, **NO_END)
    assert result.shape[1] == 7 + 6


def test_a_dict_has_a_cache_of_its_own(llama: PreTrainedModel) -> None:
    qgemm.fast_generate(llama)
    options = {"max_new_tokens": 5, "do_sample": False, "return_dict_in_generate": True, **NO_END}
    first = llama.generate(PROMPTS.to(DEVICE), **options)
    keys = [layer.keys.clone() for layer in first.past_key_values.layers]
    second = llama.generate(PROMPTS.to(DEVICE) + 1, **options)
    assert second.past_key_values is not first.past_key_values
    assert all(torch.equal(layer.keys, old) for layer, old in zip(first.past_key_values.layers, keys, strict=True))
    assert copy.deepcopy(first.past_key_values) is not None  # prompts that are continued in several ways


def test_a_cache_in_int8(llama: PreTrainedModel) -> None:
    options: dict[str, Any] = {"input_ids": PROMPTS.to(DEVICE), "max_new_tokens": 12, "do_sample": False, **NO_END}
    llama.set_attn_implementation("qgemm")
    expected = llama.generate(**options, past_key_values=qgemm.KeyValueCache(llama.config, 3, 40, torch.int8, DEVICE))
    llama.set_attn_implementation("sdpa")
    explicit = llama.generate(**options, custom_generate=qgemm.generate, cache_dtype=torch.int8)
    qgemm.fast_generate(llama, cache_dtype=torch.int8)
    result = llama.generate(**options, return_dict_in_generate=True)
    assert torch.equal(explicit, expected)
    assert torch.equal(result.sequences, expected)
    assert result.past_key_values.layers[0].keys.dtype == torch.int8
    assert llama.config._attn_implementation == "sdpa", "the model's attention is changed"


def test_calls_of_other_sizes_share_what_is_kept(llama: PreTrainedModel) -> None:
    """Batches, lengths and settings in turn, with one cache a batch, in inference mode or not."""
    qgemm.fast_generate(llama)
    for batch, repeats, ignored in [(3, 1, 0), (2, 2, 7), (3, 50, 350), (3, 2, 0), (2, 1, 5)]:
        penalty = RepetitionPenaltyLogitsProcessor(9.0, prompt_ignore_length=ignored)
        options = {"max_new_tokens": 5, "do_sample": False, "logits_processor": LogitsProcessorList([penalty])}
        prompts = PROMPTS[:batch].repeat(1, repeats).to(DEVICE)
        with torch.inference_mode(batch == 2):
            result = llama.generate(prompts, **options, **NO_END)
        assert torch.equal(result, type(llama).generate(llama, prompts, **options, **NO_END))


def test_without_enough_memory_waiting_caches_are_freed(
    llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory for keys is taken in the prompt's forward; here it fails in the second layer."""
    options: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, **NO_END}
    wait: list[bool] = []

    def fail_once(module: Any, *arguments: Any) -> None:
        if wait:
            wait.clear()
            raise torch.OutOfMemoryError("no memory")

    layer: Any = llama.model.layers[1]
    monkeypatch.setattr(layer, "_forward_pre_hooks", {0: fail_once})
    prompts = PROMPTS.to(DEVICE)
    expected = llama.generate(prompts, **options)
    qgemm.fast_generate(llama)
    llama.generate(prompts[:1], **options)
    wait.append(True)
    assert torch.equal(llama.generate(prompts, **options), expected)
    qgemm.fast_generate(llama, False)
    qgemm.fast_generate(llama)
    wait.append(True)
    with pytest.raises(torch.OutOfMemoryError):  # nothing waits
        llama.generate(prompts, **options)


def test_the_end_of_a_call_is_not_that_of_the_next(llama: PreTrainedModel) -> None:
    options: dict[str, Any] = {"max_new_tokens": 9, "do_sample": False, "pad_token_id": 0}
    qgemm.fast_generate(llama)
    expected = type(llama).generate(llama, PROMPTS[:1].to(DEVICE), eos_token_id=None, **options)
    short = llama.generate(PROMPTS[:1].to(DEVICE), eos_token_id=expected[0, 9].tolist(), **options)
    assert short.shape[1] < 7 + 9
    assert torch.equal(llama.generate(PROMPTS[:1].to(DEVICE), eos_token_id=None, **options), expected)


def test_a_copy_of_a_fast_model_is_fast_by_itself(llama: PreTrainedModel) -> None:
    qgemm.fast_generate(llama)
    options = {"max_new_tokens": 8, "do_sample": False, **NO_END}
    expected = llama.generate(PROMPTS.to(DEVICE), **options)
    twin = copy.deepcopy(llama)
    assert vars(twin)["generate"].__self__ is twin
    assert torch.equal(twin.generate(PROMPTS.to(DEVICE), **options), expected)
    assert twin.state_dict().keys() == llama.state_dict().keys()


def test_it_is_undone(llama: PreTrainedModel) -> None:
    before = set(vars(llama))
    assert qgemm.fast_generate(llama) is llama
    llama.generate(PROMPTS.to(DEVICE), max_new_tokens=3, **NO_END)
    assert qgemm.fast_generate(llama, False) is llama
    assert set(vars(llama)) == before


def test_what_has_no_generate_is_refused() -> None:
    with pytest.raises(TypeError, match="model is a Linear, and fast_generate takes"):
        qgemm.fast_generate(torch.nn.Linear(2, 2))


class _Reversed(LogitsProcessor):
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return -scores


class _Never(StoppingCriteria):
    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


NOT_COVERED: dict[str, tuple[dict[str, Any], str]] = {
    "beams": ({"num_beams": 2}, "it is beam search"),
    "an assistant": ({"prompt_lookup_num_tokens": 2, "input_ids": PROMPTS[:1]}, "it is assisted generation"),
    "scores": ({"output_scores": True, "return_dict_in_generate": True}, "output_scores is asked for"),
    "a processor": ({"logits_processor": LogitsProcessorList([_Reversed()])}, "no logits processor _Reversed"),
    "a criterion": ({"stopping_criteria": StoppingCriteriaList([_Never()])}, "no stopping criterion _Never"),
    "no cache": ({"use_cache": False}, "use_cache is False"),
    "a prompt in chunks": ({"prefill_chunk_size": 4}, "prefill_chunk_size is set"),
    "holes in the mask": ({"attention_mask": 1 - torch.eye(3, 7).long()}, "only padding on the left is covered"),
}


@pytest.mark.parametrize("explicit", [False, True], ids=["wrapped", "custom_generate"])
@pytest.mark.parametrize(("options", "reason"), NOT_COVERED.values(), ids=NOT_COVERED)
def test_what_is_not_covered_goes_to_transformers(
    llama: PreTrainedModel, options: dict[str, Any], reason: str, explicit: bool
) -> None:
    options = {"input_ids": PROMPTS, "max_new_tokens": 5, "do_sample": False, **NO_END, **options}
    options = {key: value.to(DEVICE) if isinstance(value, Tensor) else value for key, value in options.items()}
    expected = llama.generate(**options)
    streamed = {}
    if explicit:
        options["custom_generate"] = qgemm.generate
    else:
        qgemm.fast_generate(llama)
        if options.get("num_beams", 1) == 1:
            streamed["streamer"] = Recorder()
    with pytest.warns(UserWarning, match=f"transformers' own loop, not qgemm's: .*{reason}") as told:
        result, _ = llama.generate(**options, **streamed), llama.generate(**options)
    assert len([each for each in told if "own loop" in str(each.message)]) == 1
    assert torch.equal(getattr(result, "sequences", result), getattr(expected, "sequences", expected))
    for streamer in streamed.values():
        assert len(streamer.values) <= 1 + 5
        assert streamer.values[0].shape == options["input_ids"].shape


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("t5", "has an encoder and a decoder"),
        ("bloom", "takes no position_ids"),
        ("mamba", "state besides keys and values"),
    ],
)
def test_models_that_are_not_covered_go_to_transformers(family: str, reason: str) -> None:
    model: Any = FAMILIES[family]().model.to(DEVICE)
    options = {"input_ids": PROMPTS.to(DEVICE), "max_new_tokens": 3, "do_sample": False}
    if family == "t5":
        options["decoder_start_token_id"] = 0
    expected = model.generate(**options)
    qgemm.fast_generate(model)
    with pytest.warns(UserWarning, match=reason):
        assert torch.equal(model.generate(**options), expected)


def test_a_call_within_a_call_goes_to_transformers(llama: PreTrainedModel) -> None:
    """From a streamer here; from another thread it is the same."""
    options = {"input_ids": PROMPTS[:1].to(DEVICE), "max_new_tokens": 5, "do_sample": False, **NO_END}
    expected = llama.generate(**options)
    results = []

    class Calls(Recorder):
        def put(self, value: Tensor) -> None:
            if not results:
                results.append(None)
                thread = threading.Thread(target=lambda: results.append(llama.generate(**options)))
                thread.start()
                thread.join()

    qgemm.fast_generate(llama)
    with pytest.warns(UserWarning, match="running another generate"):
        result = llama.generate(**options, streamer=Calls())
    assert torch.equal(result, expected)
    assert torch.equal(results[1], expected)


def test_continuous_batching_runs_with_quantized_layers(llama: PreTrainedModel) -> None:
    """It has a loop of its own; ``fast_generate`` leaves it alone."""
    model: Any = qgemm.quantize_model(copy.deepcopy(llama))
    qgemm.fast_generate(model)
    settings = GenerationConfig(max_new_tokens=4, do_sample=False, eos_token_id=VOCABULARY, pad_token_id=0)
    small = ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=64)
    done = model.generate_batch(PROMPTS.tolist(), generation_config=settings, continuous_batching_config=small)
    for prompt, result in zip(PROMPTS, done.values(), strict=True):
        expected = model.generate(prompt[None].to(DEVICE), generation_config=settings)
        assert result.generated_tokens == expected[0, 7:].tolist()


def test_a_dtype_that_no_cache_has_is_refused_at_once(llama: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match=r"cache_dtype is torch.float64; it must be one of"):
        qgemm.fast_generate(llama, cache_dtype=torch.float64)
    with pytest.raises(ValueError, match="cache_dtype is int8; it must be one of"):
        llama.generate(  # type: ignore[operator]
            PROMPTS.to(DEVICE), custom_generate=functools.partial(qgemm.generate, cache_dtype="int8"), max_new_tokens=2
        )


def test_generate_called_by_itself_says_who_calls_it(llama: PreTrainedModel) -> None:
    with pytest.raises(TypeError, match=r"custom_generate=qgemm\.generate"):
        qgemm.generate(llama, PROMPTS.to(DEVICE))
