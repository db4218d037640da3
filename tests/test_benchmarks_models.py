"""The benchmark of whole models: on tiny models outputs are checked, every measure gives a figure, tables are right."""

from __future__ import annotations

import gc
import json
import sys
import time
import warnings
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import qgemm
from benchmarks.models import __main__ as runner
from benchmarks.models import measure, plots, tables, timeline, vllm_worker
from benchmarks.models.measure import Sizes
from benchmarks.models.providers import PROVIDERS, Provider
from benchmarks.models.results import DECODE, ENCODE, FIRST_CALL, FIRST_TOKEN, PREFILL, SERVE, Figure, Run, extrapolated
from benchmarks.models.shapes import MODELS, ModelShape
from benchmarks.models.vllm_worker import _config
from benchmarks.models.worker import Job
from benchmarks.models.worker import measure as measure_job
from qgemm.checkpoint.manifest import Manifest

pytestmark = pytest.mark.usefixtures("little_to_collect")  # the benchmark collects before each call that it times

CPU = torch.device("cpu")
SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "vocab_size": 211}
DECODER = ModelShape("tiny", "LlamaConfig", 2, {**SMALL, "num_key_value_heads": 2, "max_position_embeddings": 256})
ENCODER = ModelShape("tiny-bert", "BertConfig", 2, SMALL, is_decoder=False)
SERVED: dict[str, Any] = {"requests": (3, 5), "prompts": (4, 20), "answers": (2, 6)}
SIZES = Sizes((1, 3), (8,), (2, 16), new=6, **SERVED, first=5, sentences=(1, 4), sentence=8, rounds=1)

SIZES_OF = ((PREFILL, 2, 16), (DECODE, 1, 8), (DECODE, 3, 8))


def job(*providers: str, measures: tuple[str, ...] = (PREFILL, DECODE), cache: str = "") -> Job:
    return Job("tiny", 2, providers, measures, cache, SIZES)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_every_measure_of_a_decoder() -> None:
    found = list(measure_job(job("bf16", "qgemm", "qgemm int8 cache"), DECODER, CPU))
    assert [(one.provider, one.measure, one.batch, one.context) for one in found] == [
        (name, *size)
        for name, sizes in (("bf16", SIZES_OF), ("qgemm", SIZES_OF), ("qgemm int8 cache", SIZES_OF[1:]))
        for size in sizes
    ]
    assert all(one.value and not one.reason for one in found)
    assert [one.cosine == pytest.approx(1, abs=1e-6) for one in found] == [True] * 3 + [False] * 5
    first, call = measure_job(job("qgemm", measures=(FIRST_TOKEN,), cache="cold"), DECODER, CPU)
    assert (first.measure, call.measure, first.cache) == (FIRST_TOKEN, FIRST_CALL, "cold")
    assert 0 < first.value < 60  # type: ignore[operator]
    assert call.value is not None
    assert call.value > 0


def test_coarse_weights_are_compared_with_float_products_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    first, *others = measure_job(job("qgemm int4"), DECODER, CPU)
    assert all(one.value for one in (first, *others))
    assert first.cosine == pytest.approx(1, abs=1e-4)
    provider = replace(PROVIDERS["qgemm int4"], is_coarse=False)
    monkeypatch.setitem(PROVIDERS, "qgemm int4", provider)
    assert next(iter(measure_job(job("qgemm int4"), DECODER, CPU))).cosine < 0.999  # type: ignore[operator]


@pytest.mark.slow
def test_requests_of_unlike_lengths_are_served_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    batches: list[list[measure.Request]] = []
    clock = [0.0]
    real = measure._answers

    def answers(manager: Any, requests: list[measure.Request]) -> list[list[int]]:
        clock[0] += (100.0, 1.0, 2.0, 9.0)[len(batches) % 4]
        batches.append(requests)
        return real(manager, requests)

    monkeypatch.setattr(measure, "_answers", answers)
    monkeypatch.setattr(measure, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    served = replace(job("bf16", "qgemm", measures=(SERVE,)), sizes=replace(SIZES, rounds=3))
    found = list(measure_job(served, DECODER, CPU))
    assert [(one.provider, one.measure, one.batch, one.context) for one in found] == [
        (name, SERVE, count, 20) for name in ("bf16", "qgemm") for count in (3, 5)
    ]
    for one, requests in zip(found, batches[::4], strict=True):
        assert one.value == sum(request.new for request in requests) / 2, "the first doesn't count, the median does"
        assert not one.reason
        assert one.note.endswith("sdpa" if one.provider == "bf16" else "qgemm_flash")
    assert batches[:8] == batches[8:], "providers get the same requests"
    for turns in (batches[:4], batches[4:8]):
        assert len({tuple((len(one.prompt), one.new) for one in requests) for requests in turns}) == 1
    starts = [tuple(one.prompt[:4]) for requests in batches[:8] for one in requests]
    assert len(set(starts)) == len(starts), "keys and values of prompts that were seen are kept"
    many = measure.draw_requests(128, SIZES, 211, 0)
    assert {len(one.prompt) for one in many} == set(range(4, 21))
    assert {one.new for one in many} == set(range(2, 7))


def test_every_measure_of_an_encoder() -> None:
    found = list(measure_job(job("bf16", "qgemm", measures=(ENCODE,)), ENCODER, CPU))
    assert [(one.provider, one.measure, one.batch) for one in found] == [
        (name, ENCODE, batch) for batch in (1, 4) for name in ("bf16", "qgemm")
    ]
    assert all(one.value for one in found)


def test_wrong_outputs_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def spoil(model: Any) -> list[str]:
        model.model.norm.weight.data[:20] = -3
        return []

    monkeypatch.setitem(PROVIDERS, "bf16", Provider("bf16", spoil))
    (figure,) = measure_job(job("bf16"), DECODER, CPU)
    assert figure.value is None
    assert "wrong output: a cosine of" in figure.reason

    def says_zero(model: Any) -> list[str]:
        generate = model.generate

        def other(ids: torch.Tensor, **options: Any) -> torch.Tensor:
            warnings.warn("another loop than qgemm's runs", stacklevel=2)
            tokens = generate(ids, **options)
            return torch.cat([tokens[:, : ids.shape[1]], torch.zeros_like(tokens[:, ids.shape[1] :])], dim=1)

        model.generate = other
        return []

    monkeypatch.setitem(PROVIDERS, "bf16", Provider("bf16", says_zero))
    prefill, decode = measure_job(job("bf16"), DECODER, CPU)
    assert prefill.value
    assert decode.value is None
    assert "wrong output: a generated token's logit is" in decode.reason
    assert (prefill.note, decode.note) == ("", "another loop than qgemm's runs")


@pytest.mark.slow
def test_wrong_answers_of_served_requests_are_no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    real = measure._answers
    served = replace(job("bf16", measures=(SERVE,)), sizes=replace(SIZES, requests=(3,)))
    monkeypatch.setattr(measure, "_answers", lambda *given: [each[:-1] for each in real(*given)])
    (short,) = measure_job(served, DECODER, CPU)
    new = measure.draw_requests(3, SIZES, 211, 0)[0].new
    assert short.value is None
    assert short.reason == f"RuntimeError: wrong output: a request has {new - 1} new tokens, not {new}"

    def says_zero(*given: Any) -> list[list[int]]:
        warnings.warn("another attention than qgemm's runs", stacklevel=2)
        return [[*each[:-1], 0] for each in real(*given)]

    monkeypatch.setattr(measure, "_answers", says_zero)
    (wrong,) = measure_job(served, DECODER, CPU)
    assert wrong.value is None
    assert "wrong output: a generated token's logit is" in wrong.reason
    # Before transformers 5.24 it is called paged|sdpa.
    assert wrong.note.replace("paged|", "") == "serves with sdpa; another attention than qgemm's runs"


@pytest.mark.parametrize(
    ("cache", "reason"),
    [
        ({"num_blocks": 1, "block_size": 4, "page_size": 4}, "RuntimeError: No requests can be scheduled"),
        ({"num_blocks": 2**50}, "MemoryError: "),
    ],
    ids=["when requests come", "when the manager starts"],
)
def test_a_batch_that_cannot_be_served_leaves_the_others(
    cache: dict[str, int], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = measure._options_of_a_cpu

    def options(requests: list[measure.Request]) -> dict[str, Any]:
        found = real(requests)
        if len(requests) == 3:
            vars(found["continuous_batching_config"]).update(cache)
        return found

    monkeypatch.setattr(measure, "_options_of_a_cpu", options)
    failed, done = measure_job(job("bf16", measures=(SERVE,)), DECODER, CPU)
    assert failed.value is None
    assert failed.reason.startswith(reason)
    assert done.value
    assert not done.reason


def test_a_size_that_fails_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    real = measure._decode

    def decode(figure: Figure, model: Any, provider: Provider, batch: int, *more: Any) -> Figure:
        if batch == 1:
            raise torch.OutOfMemoryError("too large")
        return real(figure, model, provider, batch, *more)

    monkeypatch.setattr(measure, "_decode", decode)
    _, failed, done = measure_job(job("bf16"), DECODER, CPU)
    assert failed.reason == "OutOfMemoryError: too large"
    assert done.value


def test_the_rate_of_decoding_is_no_prompt_and_no_hiccup(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, calls = [0.0], [0]

    def generate(new: int) -> None:
        assert not gc.isenabled()
        calls[0] += 1
        # A prompt of 3 s and tokens of half a second; a call that isn't counted, and one that something disturbs.
        clock[0] += 3 + new / 2 + (100 if calls[0] in (1, 4) else 0)

    monkeypatch.setattr(measure, "_now", lambda: clock[0])
    assert measure.decoding_rate(generate, 16, 34, 1) == pytest.approx(32)
    assert calls == [8]
    assert gc.isenabled()
    with pytest.raises(RuntimeError, match="a call with 34 new tokens took 0 s, and one with 2 took 0"):
        measure.decoding_rate(lambda new: None, 16, 34, 1)


def figures() -> list[Figure]:
    base = Figure("tiny", 2, "bf16", DECODE, 16, 512, 100.0, weight_bytes=2 * 10**9, peak_bytes=3 * 10**9, cosine=1.0)
    ours = replace(base, provider="qgemm", value=250.0, weight_bytes=10**9, cosine=0.99, note="one by one")
    first = [
        replace(one, measure=FIRST_TOKEN, batch=1, value=value, cache="cold")
        for one, value in ((base, 2.0), (ours, 4.0))
    ]
    served = [replace(one, measure=SERVE, batch=64, context=1024) for one in (base, ours)]
    return [base, ours, *served, *first, replace(base, provider="torchao int8", value=None, reason="it broke")]


def test_tables_and_plot(tmp_path: Path) -> None:
    run = Run({"device": "a GPU", "versions": {"torch": "2"}, "commit": "c", "date": "d"}, "python -m x", figures())
    lines = tables.report(run, markdown=True).splitlines()
    assert "`python -m x`" in lines
    assert "| decode, 16 x 512 | 100 | 250 (2.50) | - |" in lines
    assert "| serve, 64 requests of up to 1024 tokens | 100 | 250 (2.50) | - |" in lines
    assert "| first token, 1 x 512, cold kernel cache, seconds | 2.0 | 4.0 (0.50) | - |" in lines
    assert "| qgemm | 1.00 | 3.00 | 0.9900 |" in lines
    assert "- qgemm: one by one" in lines
    assert "- tiny, decode, 16 x 512, torchao int8: it broke" in lines
    run.save(tmp_path / "run.json")
    assert Run.load(tmp_path / "run.json") == run
    assert plots.draw(run, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 5000


def test_extrapolated_figures_say_so() -> None:
    few, more = (Figure("tiny", layers, "qgemm", DECODE, 4, 512, 4 / (1 + 2 * layers)) for layers in (2, 4))
    whole = extrapolated(few, more, 32)
    assert whole.value == pytest.approx(4 / (1 + 2 * 32))
    assert (whole.layers, whole.note) == (32, "extrapolated from 2 and 4 layers to 32")
    assert tables.speed_table([whole])[1] == [["decode, 4 x 512", "0.1*"]]


def test_two_numbers_of_layers_are_extrapolated_once() -> None:
    figures = [
        Figure("llama-3-8b", layers, name, measure, 4, 512, 4 / (1 + layers))
        for layers in (4, 8)
        for name in ("bf16", "qgemm")
        for measure in (DECODE, FIRST_TOKEN)
    ]
    run = Run({}, "", list(figures))
    runner._extrapolate(run, [8])
    assert run.figures == figures
    for _ in range(2):
        runner._extrapolate(run, [4, 8])
    whole = run.figures[len(figures) :]
    assert [(one.provider, one.measure, one.layers) for one in whole] == [("bf16", DECODE, 32), ("qgemm", DECODE, 32)]
    assert all(one.value == pytest.approx(4 / 33) for one in whole)


def test_what_the_command_line_asks_for() -> None:
    args = runner._parse(["--model", "llama-3-8b", "--provider", "bf16", "--provider", "bf16 compiled", "--quick"])
    jobs = list(runner._jobs(args))
    assert [(one.providers[0], one.measures, one.cache) for one in jobs] == [
        ("bf16", (PREFILL, DECODE), ""),
        ("bf16", (SERVE,), ""),
        ("bf16", (FIRST_TOKEN,), "cold"),
        ("bf16", (FIRST_TOKEN,), "warm"),
        ("bf16 compiled", (DECODE,), ""),
        ("bf16 compiled", (FIRST_TOKEN,), "cold"),
        ("bf16 compiled", (FIRST_TOKEN,), "warm"),
    ]
    assert all(one.layers == 32 and Job.from_json(one.to_json()) == one for one in jobs)
    few = ["--layers", "4", "--layers", "8", "--measure", "decode", "--batch", "16", "--context", "4096", "--new", "40"]
    few += ["--measure", "serve", "--requests", "5"]
    jobs = list(runner._jobs(runner._parse(["--model", "llama-3.2-1b", "--provider", "qgemm", *few])))
    assert [(one.layers, *one.measures) for one in jobs] == [(4, DECODE), (8, DECODE), (8, SERVE)]
    assert all(one.sizes == Sizes(batches=(16,), contexts=(4096,), new=40, requests=(5,)) for one in jobs)
    (encoder,) = runner._jobs(runner._parse(["--model", "minilm-l6"]))
    assert encoder.providers == ("bf16", "qgemm")


@pytest.mark.slow
@pytest.mark.complete
def test_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "QUICK", replace(SIZES, sentences=(2,), rounds=1))
    path = tmp_path / "run.json"
    run = runner.main(["--model", "minilm-l6", "--layers", "1", "--quick", "--json", str(path)])
    assert [one.provider for one in run.figures] == ["bf16", "qgemm"]
    assert all(one.value for one in run.figures)
    assert json.loads(path.read_text())["command"].startswith("python -m benchmarks.models --model minilm-l6")


def is_running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads the state of a process from /proc")
def test_a_process_that_fails_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner.sys, "executable", "false")
    *_, (figure,) = runner._run_job(job("bf16"), None, 10)
    assert figure.reason == "exit status 1"
    stuck = tmp_path / "stuck"  # it has written a figure by then, and half of one
    line = json.dumps(asdict(figures()[0]))
    started = tmp_path / "started"  # as servers are
    stuck.write_text(f'#!/bin/sh\necho \'{line}\' >"$4"; printf "{{" >>"$4"; sleep 60 & echo $! >{started}; wait\n')
    stuck.chmod(0o755)
    monkeypatch.setattr(runner.sys, "executable", str(stuck))
    monkeypatch.setattr(runner, "_SECONDS_BETWEEN_LOOKS", 0.1)
    *_, (done, late) = runner._run_job(job("bf16"), None, 0.5)
    assert done == figures()[0]
    assert late.reason == "not done after 0.5 s"
    number, end = int(started.read_text()), time.monotonic() + 10
    while is_running(number) and time.monotonic() < end:
        time.sleep(0.02)
    assert not is_running(number)


@pytest.mark.parametrize("shape", MODELS.values(), ids=MODELS)
def test_the_models_have_the_sizes_that_they_are_called_by(shape: ModelShape) -> None:
    billions = {
        "llama-3-8b": 8.03,
        "llama-3.2-1b": 1.24,
        "qwen3-30b-a3b": 8.09,
        "bert-base": 0.109,
        "minilm-l6": 0.0227,
    }
    with torch.device("meta"):
        model = shape.build(torch.device("meta"))
    assert sum(parameter.numel() for parameter in model.parameters()) / 1e9 == pytest.approx(
        billions[shape.name], rel=0.01
    )


def test_bytes_of_keys_and_values() -> None:
    assert MODELS["llama-3-8b"].cache_bytes(1, 1) == 131072


def test_long_prompts_are_followed_by_more_tokens() -> None:
    assert Sizes().new_tokens(1, 512) == 130
    assert Sizes().new_tokens(16, 16384) == Sizes().new_tokens(64, 16384) == 386


def test_vllm_serves_requests_of_unlike_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    starts: list[dict[str, Any]] = []
    calls: list[list[tuple[int, dict[str, Any]]]] = []
    clock = [0.0]
    missing = [0]

    class Engine:
        def __init__(self, **options: Any) -> None:
            starts.append(options)

        def generate(self, prompts: list[Any], settings: Any, use_tqdm: bool) -> list[SimpleNamespace]:
            every = settings if isinstance(settings, list) else [settings] * len(prompts)
            calls.append([(len(one["prompt_token_ids"]), each) for one, each in zip(prompts, every, strict=True)])
            clock[0] += 4.0 if len(calls) % 2 else 2.0
            answers = [[0] * (each["max_tokens"] - missing[0]) for each in every]
            return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=each)]) for each in answers]

    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=Engine, SamplingParams=dict))  # type: ignore[arg-type]
    monkeypatch.setattr(vllm_worker, "ENVIRONMENT", {})
    monkeypatch.setattr(measure, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    sizes = replace(SIZES, prompts=(4, 400))
    found = list(vllm_worker.measure_vllm(DECODER, "vllm bf16", 2, (SERVE,), sizes))
    assert [(one.measure, one.batch, one.context, one.reason) for one in found] == [
        (SERVE, 3, 400, ""),
        (SERVE, 5, 400, ""),
    ]
    for one, call in zip(found, calls[::2], strict=True):
        requests = measure.draw_requests(one.batch, sizes, 211, 0)
        assert one.value == sum(request.new for request in requests) / 2, "the first doesn't count"
        assert [(length, each["max_tokens"], each["min_tokens"], each["ignore_eos"]) for length, each in call] == [
            (len(request.prompt), request.new, request.new, True) for request in requests
        ]
    assert starts[0]["max_model_len"] == 406, "the longest prompt and answer"
    assert "compilation_config" not in starts[0], "a served batch shrinks, and vLLM has graphs of all sizes"
    list(vllm_worker.measure_vllm(DECODER, "vllm bf16", 2, (PREFILL,), SIZES))
    assert starts[1]["compilation_config"] == {"cudagraph_capture_sizes": [1, 3]}
    missing[0] = 1
    for one in vllm_worker.measure_vllm(DECODER, "vllm bf16", 2, (SERVE,), SIZES):
        assert one.value is None
        assert "wrong output: a request has" in one.reason


def test_vllm_gets_the_config_of_the_model() -> None:
    for name, kind in (("vllm int8", "int"), ("vllm fp8", "float")):
        values = _config(DECODER, 1, name)
        assert values["architectures"] == ["LlamaForCausalLM"]
        assert values["num_hidden_layers"] == 1
        weights = values["quantization_config"]["config_groups"]["group_0"]["weights"]
        assert (weights["strategy"], weights["type"]) == ("channel", kind)
        json.dumps(values)
    assert "quantization_config" not in _config(DECODER, 1, "vllm bf16")


def test_vllm_gets_the_layers_that_quantize_model_takes() -> None:
    device = torch.device("cpu")
    model = qgemm.quantize_model(DECODER.build(device, 1), progress=False)
    layers = {name for name, module in model.named_modules() if isinstance(module, qgemm.QuantLinear)}
    config = _config(DECODER, 1, "vllm qgemm")
    assert set(Manifest.from_config(config, Path("config.json")).layers) == layers


LAYER = ["_norm_quantize_kernel", "_gemm_hopper_kernel", "decode_attention", "at::elementwise"]


def recorded(steps: int) -> list[timeline.Kernel]:
    step = [*LAYER * 3, "nvjet_lm_head", "argmax"]
    names = ["embedding", *LAYER * 3, "nvjet_lm_head", "argmax", *step * steps, "Memcpy DtoH", "fill"]
    return [timeline.Kernel(name, 100 + 10.0 * place, 8.0) for place, name in enumerate(names)]


def test_one_step_is_cut_out_of_the_kernels() -> None:
    step = timeline.one_step(recorded(7), 7)
    assert [one.name for one in step] == [*LAYER * 3, "nvjet_lm_head", "argmax"]
    assert step[0].start == 0
    assert step[-1].start == 130
    with pytest.raises(ValueError, match="no step repeats in 40 kernels"):
        timeline.one_step([timeline.Kernel(str(place), place, 1) for place in range(40)], 7)


def test_a_step_may_have_other_kernels_than_the_one_before() -> None:
    kernels = [
        replace(one, name=f"{one.name}_{place // 14}") if one.name == "decode_attention" else one
        for place, one in enumerate(recorded(7))
    ]
    step = timeline.one_step(kernels, 7)
    assert (step[0].name, step[-1].name, len(step)) == ("nvjet_lm_head", "argmax", 2), "nothing else is there once"
    starts = range(15, 113, 14)
    kernels = [replace(one, name="embedding") if place in starts else one for place, one in enumerate(kernels)]
    step = timeline.one_step(kernels, 7)
    assert (step[0].name, step[-1].name, len(step), step[0].start) == ("embedding", "argmax", 14, 0)


def test_the_time_line_says_what_takes_how_long(tmp_path: Path) -> None:
    steps = {"bf16": timeline.one_step(recorded(7), 7)}
    header, (row,) = timeline.table(steps)
    found = dict(zip(header[1:], row[1:], strict=True))
    assert (found["step, us"], found["kernels"], found["between kernels"]) == ("138", "14", "26")
    assert (found["product"], found["attention"], found["norm, quantization, activation"]) == ("32", "24", "24")
    timeline.draw(steps, "a step", tmp_path / "step.png")
    assert (tmp_path / "step.png").stat().st_size > 5000


def test_a_kernel_that_is_started_early_counts_from_the_end_of_those_ahead() -> None:
    step = [timeline.Kernel("gemm", 0, 10), timeline.Kernel("norm", 2, 11), timeline.Kernel("gemm", 3, 6)]
    assert [(one.start, one.duration) for one in timeline.in_turn(step)] == [(0, 10), (10, 3), (13, 0)]
    header, (row,) = timeline.table({"qgemm": step})
    found = dict(zip(header[1:], row[1:], strict=True))
    assert (found["product"], found["norm, quantization, activation"], found["between kernels"]) == ("10", "3", "0")
