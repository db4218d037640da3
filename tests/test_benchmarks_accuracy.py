"""The accuracy table: figures against NumPy, a broken variant shows, nothing is measured twice, a run end to end."""

import dataclasses
import importlib.util
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

import qgemm
from benchmarks.accuracy import __main__ as command
from benchmarks.accuracy import measure, minilm, peers, plots, tables
from benchmarks.accuracy.evaluate import evaluate, unigram_perplexity, window_logits, windows_of
from benchmarks.accuracy.jobs import Models, measure_all
from benchmarks.accuracy.measure import Effort, Subject, draw, pending, weight_bytes
from benchmarks.accuracy.results import MINILM, OUTLIERS, PLAIN, Mean, Result, Run
from benchmarks.accuracy.variants import BASELINE, Variant, named, variants

pytestmark = pytest.mark.usefixtures("little_to_collect")  # the benchmark collects after each variant

CPU = torch.device("cpu")
EFFORT = Effort(
    window=16, windows=3, calibration_windows=4, sentences=24, calibration_sentences=8, seeds=(0, 1), batch=2
)


def tiny_llama(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        tie_word_embeddings=True,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What training leaves, with a model that wasn't trained."""
    tiny_llama().bfloat16().save_pretrained(tmp_path / "model")
    generator = torch.Generator().manual_seed(1)
    tokens = {name: torch.randint(0, 97, (200,), generator=generator).short() for name in ("held_out", "calibration")}
    save_file(tokens, tmp_path / "model" / "tokens.safetensors")
    sentences = [f"Sentence number {index} is about the thing called {chr(97 + index % 26)}." for index in range(40)]
    (tmp_path / "model" / "sentences.json").write_text(json.dumps(sentences))
    return tmp_path / "model"


def test_windows() -> None:
    assert windows_of(torch.arange(7, dtype=torch.int16), 3).tolist() == [[0, 1, 2], [3, 4, 5]]
    with pytest.raises(ValueError, match="2 tokens make no window of 3"):
        windows_of(torch.arange(2), 3)


def test_perplexity_and_kl_are_those_of_numpy() -> None:
    model, other = tiny_llama(0), tiny_llama(1)
    windows = torch.randint(0, 97, (5, 12))
    found = evaluate(other, windows, window_logits(model, windows, batch=2), batch=2)

    def log_softmax(logits: Tensor) -> Any:
        values = logits[:, :-1].detach().numpy().astype(np.float64)
        values = values - values.max(-1, keepdims=True)
        return values - np.log(np.exp(values).sum(-1, keepdims=True))

    p, q = log_softmax(model(windows).logits), log_softmax(other(windows).logits)
    targets = windows[:, 1:].numpy()
    assert found.tokens == targets.size == 55
    assert found.perplexity == pytest.approx(np.exp(-np.take_along_axis(q, targets[..., None], -1).mean()), rel=1e-5)
    assert found.kl == pytest.approx((np.exp(p) * (p - q)).sum(-1).mean(), rel=1e-4)
    assert found.kl > 0.1


def test_a_model_is_itself_and_evaluates_to_the_same_figures_again() -> None:
    model, windows = tiny_llama().bfloat16(), torch.randint(0, 97, (4, 12))
    reference = window_logits(model, windows, batch=3)
    first = evaluate(model, windows, reference, batch=3)
    assert first.kl == 0
    assert evaluate(model, windows, reference, batch=3) == first
    with pytest.raises(ValueError, match="reference is of other windows"):
        evaluate(model, windows, reference, batch=2)


def test_logits_that_are_not_finite_are_seen() -> None:
    model, windows = tiny_llama(), torch.randint(0, 97, (2, 8))
    reference = window_logits(model, windows)
    with torch.no_grad():
        model.model.norm.weight[0] = torch.nan
    found = evaluate(model, windows, reference)
    assert math.isnan(found.perplexity)
    assert math.isnan(found.kl)


def test_unigram_perplexity() -> None:
    # Counts 3 and 1, one more each: 4/6 and 2/6.
    train, held_out = torch.tensor([0, 0, 0, 1]), torch.tensor([0, 1])
    assert unigram_perplexity(train, held_out, 2) == pytest.approx(1 / math.sqrt(4 / 6 * 2 / 6))


def test_agreement() -> None:
    expected = F.normalize(torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0], [0.1, 0.9]]), dim=1)
    same = minilm.agreement(expected, expected)
    assert same.least_cosine == pytest.approx(1)
    assert same.neighbours == 1
    moved = expected.clone()
    moved[0] = torch.tensor([0.6, 0.8])
    found = minilm.agreement(moved, expected)
    assert found.least_cosine == pytest.approx(0.6)
    assert found.mean_cosine == pytest.approx((0.6 + 3) / 4)
    # The first is now nearest to the fourth, and nearest to the second.
    assert found.neighbours == 0.75


def test_draws_are_of_the_seed_and_without_repetition() -> None:
    rows = torch.arange(50)
    assert draw(rows, 20, 0).tolist() == draw(rows, 20, 0).tolist() != draw(rows, 20, 1).tolist()
    assert len(draw(rows, 20, 0).unique()) == 20
    with pytest.raises(ValueError, match="60 rows of calibration data are wanted"):
        draw(rows, 60, 0)


def test_bytes_of_weights() -> None:
    model = tiny_llama().bfloat16()
    # Tied embeddings count once.
    assert weight_bytes(model) == 2 * sum(weight.numel() for weight in model.parameters())
    linears = [module for module in model.model.modules() if isinstance(module, nn.Linear)]
    smaller = sum(module.weight.numel() - 4 * module.out_features for module in linears)
    assert weight_bytes(model) - weight_bytes(qgemm.quantize_model(tiny_llama().bfloat16(), progress=False)) == smaller


def language(folder: Path, name: str) -> Subject:
    return {one.name: one for one in measure.language_subjects(folder, EFFORT, CPU)}[name]


@pytest.mark.slow(quick=["plain"])
@pytest.mark.parametrize("name", [PLAIN, OUTLIERS])
def test_bf16_is_itself_and_a_broken_variant_shows(folder: Path, name: str) -> None:
    subject = language(folder, name)
    table = {one.name: one for one in variants()}

    def broken(model: Any, batches: list[Any]) -> Any:
        model.model.layers[1].mlp.down_proj.weight.data.fill_(1.0)
        return model

    def failing(model: Any, batches: list[Any]) -> Any:
        raise RuntimeError("no kernel\nand more of it")

    base = measure.measure(subject, table[BASELINE], 0)
    int8 = measure.measure(subject, table["int8"], 0)
    wrong = measure.measure(subject, Variant("broken", broken), 0)
    assert base.kl == 0
    assert int8.kl is not None
    assert wrong.kl is not None
    assert 0 < int8.kl < wrong.kl
    assert wrong.perplexity != base.perplexity
    failed = measure.measure(subject, Variant("failing", failing), 0)
    assert failed.reason == "RuntimeError: no kernel"
    assert failed.perplexity is None
    # Every variant starts from the model as it was.
    assert measure.measure(subject, table[BASELINE], 0) == dataclasses.replace(base, seconds=pytest.approx(0, abs=9))


def test_int8_is_worse_with_outliers(folder: Path) -> None:
    int8 = named(variants(), ["int8"])[0]
    with_and_without = [measure.measure(language(folder, name), int8, 0).kl for name in (OUTLIERS, PLAIN)]
    assert with_and_without[0] > 3 * with_and_without[1]


def test_a_cache_changes_little_and_int8_more(folder: Path) -> None:
    # A window is longer than what is read at once, which nothing is cached before.
    effort = dataclasses.replace(EFFORT, window=40, windows=1)
    subject = next(measure.language_subjects(folder, effort, CPU))
    table = {one.name: one for one in variants()}
    base = measure.measure(subject, table[BASELINE], 0)
    found = [measure.measure(subject, table[f"bf16, cache in {dtype}"], 0) for dtype in ("bf16", "int8")]
    assert [one.reason for one in found] == [None, None]
    assert 0 <= found[0].kl < found[1].kl < 1e-3
    assert all(one.bytes == base.bytes and one.perplexity == pytest.approx(base.perplexity, rel=0.01) for one in found)


def test_calibration_is_of_text_that_is_not_measured(folder: Path) -> None:
    tokens = language(folder, PLAIN).calibration(1)
    assert [batch["input_ids"].shape for batch in tokens] == [(2, 16), (2, 16)]
    subject = measure.minilm_subject(folder, EFFORT, CPU)
    _, tokenizer = minilm.load_minilm()
    sentences = json.loads((folder / "sentences.json").read_text())
    for seed in EFFORT.seeds:
        texts = [
            tokenizer.decode(row, skip_special_tokens=True)
            for batch in subject.calibration(seed)
            for row in batch["input_ids"]
        ]
        assert len(texts) == 8
        assert not set(texts) & {sentence.lower() for sentence in sentences[: EFFORT.sentences]}
        assert set(texts) <= {tokenizer.decode(tokenizer(one).input_ids, skip_special_tokens=True) for one in sentences}


def test_minilm_agrees_with_itself_and_int8_less(folder: Path) -> None:
    subject = measure.minilm_subject(folder, EFFORT, CPU)
    figures = subject.evaluate(subject.model, "float")
    assert figures["least_cosine"] == pytest.approx(1)
    assert figures["neighbours"] == 1
    int8 = measure.measure(subject, named(variants(), ["int8"])[0], 0)
    assert int8.least_cosine is not None
    assert 0.98 < int8.least_cosine < 1 - 1e-5


def test_nothing_is_measured_twice_and_failures_are_tried_again() -> None:
    table = [
        Variant("a", lambda model, _: model, seeded=False),
        Variant("b", lambda model, _: model, subjects=(PLAIN,)),
    ]
    todo = pending((PLAIN, MINILM), table, (0, 1), [])
    assert [(subject, one.name, seed) for subject, one, seed in todo] == [
        (PLAIN, "a", 0),
        (PLAIN, "b", 0),
        (PLAIN, "b", 1),
        (MINILM, "a", 0),
    ]
    done = [Result("b", PLAIN, 1), Result("a", PLAIN, 0, reason="broke")]
    left = pending((PLAIN,), table, (0, 1), done)
    assert [(one.name, seed) for _, one, seed in left] == [("a", 0), ("b", 0)]


@pytest.mark.complete
@pytest.mark.slow
def test_several_processes_measure_the_same(folder: Path) -> None:
    models = Models(frozenset({PLAIN, OUTLIERS}), folder, EFFORT, CPU, "a CPU")
    todo = pending((PLAIN, OUTLIERS), named(variants(), ["int8", "int8-static"]), EFFORT.seeds, [])
    alone, together = list(measure_all(models, todo, 1)), list(measure_all(models, todo, 2))
    assert [(one.subject, one.variant, one.seed) for one in alone] == [(one, row.name, seed) for one, row, seed in todo]
    assert all(one.reason is None and one.device == "a CPU" for one in alone)

    def figures(results: list[Result]) -> set[Result]:
        return {dataclasses.replace(one, seconds=None) for one in results}

    assert len(figures(alone)) == len(todo)
    assert figures(together) == figures(alone)
    assert not list(measure_all(dataclasses.replace(models, folder=Path("none")), [], 2))


def test_variants_by_name() -> None:
    names = [one.name for one in variants()]
    assert len(set(names)) == len(names)
    assert [one.name for one in named(variants(), ["int8", "bf16"])] == ["bf16", "int8"]
    with pytest.raises(ValueError, match="there is no variant 'int9'; there are bf16, int8"):
        named(variants(), ["int9"])


def test_peers_that_are_missing_are_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    rows, missing = peers.installed_peers()
    assert not rows
    assert [line.rsplit(": ")[-1] for line in missing] == [
        "torchao is not installed",
        "bitsandbytes is not installed",
        "auto_round is not installed",
        "llmcompressor is not installed",
    ]


def test_bitsandbytes_keeps_outliers_in_16_bits(folder: Path) -> None:
    theirs, int8 = named(peers.PEERS, ["bitsandbytes int8"])[0], named(variants(), ["int8"])[0]
    subject = language(folder, OUTLIERS)
    found, ours = measure.measure(subject, theirs, 0), measure.measure(subject, int8, 0)
    assert found.reason is None
    assert found.kl is not None
    assert ours.kl is not None
    assert 0 < found.kl < ours.kl
    assert found.bytes is not None
    assert found.bytes < weight_bytes(subject.model)


def run_of(*results: Result) -> Run:
    about = {"device": "a CPU", "versions": {"torch": "2.11"}, "commit": "abc", "date": "2026-01-01"}
    settings = dataclasses.asdict(EFFORT) | {"parameters": 31_500_000, "tokens": 200_000}
    return Run(about, settings, [dataclasses.replace(one, device="a CPU") for one in results])


@pytest.mark.slow
def test_the_table_has_means_ranges_and_reasons(tmp_path: Path) -> None:
    run = run_of(
        Result(BASELINE, PLAIN, 0, bytes=63_000_000, perplexity=8.0, kl=0.0),
        Result("x", PLAIN, 0, note="computed in bf16", bytes=36_000_000, perplexity=8.1, kl=0.01),
        Result("x", PLAIN, 1, note="computed in bf16", bytes=36_000_000, perplexity=8.3, kl=0.03),
        Result("x", OUTLIERS, 0, note="computed in bf16", perplexity=7.6, kl=0.02),
        Result("x", MINILM, 0, note="computed in bf16", least_cosine=0.99, mean_cosine=0.999, neighbours=0.9375),
        Result("y", PLAIN, 0, reason="RuntimeError: no kernel"),
        Result("y", OUTLIERS, 0, reason="RuntimeError: no kernel"),
    )
    assert run.mean("x", PLAIN, "perplexity") == Mean(pytest.approx(8.2), pytest.approx(0.2))
    run.save(tmp_path / "run.json")
    again = Run.load(tmp_path / "run.json")
    assert again.results == run.results
    text = tables.report(again, markdown=True)
    assert "| bf16 | 63.0 | 8.000 (+0.00 %) | 0.0 | - | - | - | - | - |" in text
    assert (
        "| x (computed in bf16) | 36.0 | 8.200 (+2.50 ± 1.25 %) | 0.020 ± 0.010 | 7.600 (-5.00 %) | 0.020 | 0.9900 "
        "| 0.99900 | 93.8 % |" in text
    )
    assert "- y (plain, outliers): RuntimeError: no kernel" in text
    assert "31.5 million parameters; 200,000 held-out tokens in windows of 16" in text
    assert "a CPU; torch 2.11; commit abc; 2026-01-01." in text
    mixed = Run(again.environment, again.settings, [*again.results, Result("z", MINILM, 0, device="a GPU")])
    assert "a CPU (plain, outliers, minilm), a GPU (minilm); torch" in tables.report(mixed)
    document = tmp_path / "accuracy.md"
    document.write_text(f"before\n{tables.BEGIN}\nold\n{tables.END}\nafter\n")
    for _ in range(2):
        tables.put_into(document, again)
        assert document.read_text() == f"before\n{tables.BEGIN}\n{text}\n{tables.END}\nafter\n"
    document.write_text("nothing")
    with pytest.raises(ValueError, match="has no place for the table"):
        tables.put_into(document, again)
    plots.draw(again, tmp_path / "plots" / "kl.png")
    assert (tmp_path / "plots" / "kl.png").stat().st_size > 1000


@pytest.mark.slow
def test_the_command_from_end_to_end(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "QUICK", EFFORT)
    output, names = tmp_path / "run.json", ["bf16", "int8", "int8-static"]
    options = ["--quick", "--device", "cpu", "--model", str(folder), "--json", str(output)]
    options += [argument for name in names for argument in ("--variant", name)]
    run = command.main([*options, "--subject", PLAIN, "--markdown", str(tmp_path / "run.md")])
    assert [(one.variant, one.seed) for one in run.results] == [
        ("bf16", 0),
        ("int8", 0),
        *(("int8-static", i) for i in (0, 1)),
    ]
    assert not [one.reason for one in run.results if one.reason]
    assert run.mean(BASELINE, PLAIN, "kl") == Mean(0, 0)
    assert "| int8-static | " in (tmp_path / "run.md").read_text()
    # What is in the file isn't measured again, and what is new joins it in the table's order.
    more = command.main([*options, "--subject", PLAIN, "--subject", OUTLIERS, "--seeds", "2"])
    assert [one for one in more.results if one.subject == PLAIN] == run.results
    assert [one.variant for one in more.results] == sorted((one.variant for one in more.results), key=names.index)
    loaded = command.main(["--load", str(output)])
    assert loaded.results == more.results
    assert "perplexity with outliers" in capsys.readouterr().out
    # What isn't installed is a line, and what failed before stays in the file unless it is tried again.
    broken, gone = Result("torchao fp8", PLAIN, 0, reason="wants a GPU"), Result("a former row", PLAIN, 0, kl=0.5)
    dataclasses.replace(more, results=[gone, *more.results, broken]).save(output)
    monkeypatch.setattr(minilm, "PACKAGE", "no_such_package")
    assert command.main([*options, "--subject", MINILM]).results == [*more.results, broken, gone]
    assert "left out: minilm: the weights are missing" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="measured with other settings"):
        command.main([*options, "--seeds", "1"])
    with pytest.raises(SystemExit, match="holds no model"):
        command.main(["--model", str(tmp_path)])
