"""Training for the accuracy table: the splits, the tokenizer, and a model that learns and can be made again."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoTokenizer, LlamaForCausalLM

from benchmarks.accuracy import train
from benchmarks.accuracy.corpus import documents, load_corpus, save_corpus, split_of, texts_of
from benchmarks.accuracy.evaluate import evaluate, unigram_perplexity, windows_of
from benchmarks.accuracy.sentences import sentences_of
from benchmarks.accuracy.train import Size, encode, train_model, train_tokenizer

TINY = Size(32, 1, 2, 64, 320, batch=8, steps=60, learning_rate=2e-2, window=32, warm_up=5)


@pytest.fixture(scope="module")
def corpus() -> dict[str, str]:
    return documents()


def small_corpus(corpus: dict[str, str], documents: int = 40) -> dict[str, str]:
    """A few short documents of every split."""
    short = [name for name, text in corpus.items() if len(text) < 4000]
    return {
        name: corpus[name]
        for split in ("train", "validation", "held-out")
        for name in [one for one in short if split_of(one) == split][:documents]
    }


def test_documents_are_the_standard_library_alone(corpus: dict[str, str]) -> None:
    assert {"json/decoder.py", "pydoc/assert", "docstrings/builtins"} <= set(corpus)
    assert "Return a capitalized version of the string." in corpus["docstrings/builtins"]
    assert not [name for name in corpus if "site-packages" in name or name.startswith(("_sysconfigdata", "config-"))]
    assert list(corpus) == sorted(corpus)
    assert len(set(corpus.values())) == len(corpus)
    assert documents() == corpus


def test_every_document_is_in_one_split_whatever_else_there_is(corpus: dict[str, str]) -> None:
    splits = {split: texts_of(corpus, split) for split in ("train", "validation", "held-out")}
    assert sorted(text for texts in splits.values() for text in texts) == sorted(corpus.values())
    assert 0.03 < len(splits["held-out"]) / len(corpus) < 0.09
    assert texts_of(dict(reversed(corpus.items())), "train") == splits["train"]
    # A name's split is fixed, so that a model and its held-out text stay apart when the corpus grows.
    assert split_of("json/decoder.py") == "train"


def test_a_corpus_goes_through_a_file(tmp_path: Path) -> None:
    save_corpus({"a": "text ü"}, tmp_path / "new" / "corpus.xz")
    assert load_corpus(tmp_path / "new" / "corpus.xz") == {"a": "text ü"}


def test_sentences() -> None:
    source = '''
class A:
    """Give every name a number that it keeps for ever. Short one.

    The second paragraph of this text
    goes over two lines.

    >>> code_that(is_no, sentence, of, any, language, at, all)
    """
    text = "Some other string that is not at all a docstring."
'''
    topic = "The *if* statement is marked up, so this one goes. A plain line of help about one of the statements."
    broken = "def f(:\n    # This file can't be parsed by any Python."
    corpus = {"a.py": source, "again.py": source, "pydoc/if": topic, "bad.py": broken}
    expected = {
        "Give every name a number that it keeps for ever.",
        "The second paragraph of this text goes over two lines.",
        "A plain line of help about one of the statements.",
    }
    found = sentences_of(corpus)
    assert set(found) == expected
    assert len(found) == 3
    assert sentences_of(dict(reversed(corpus.items()))) == found


def test_the_tokenizer_gives_text_back_and_marks_documents(corpus: dict[str, str]) -> None:
    texts = texts_of(small_corpus(corpus), "train")
    tokenizer = train_tokenizer(texts, 320)
    assert len(tokenizer) == 320
    assert train_tokenizer(texts, 320).get_vocab() == tokenizer.get_vocab()
    tokens = encode(tokenizer, ["one é", "two"])
    assert tokens.dtype == torch.int32
    assert (tokens == tokenizer.bos_token_id).nonzero().flatten().tolist() == [
        0,
        len(tokens) - len(tokenizer("two").input_ids) - 1,
    ]
    assert tokenizer.decode(tokens) == f"{train.END}one é{train.END}two"


def data(corpus: dict[str, str]) -> tuple[Tensor, Tensor, int]:
    few = small_corpus(corpus)
    tokenizer = train_tokenizer(texts_of(few, "train"), TINY.vocabulary)
    held_out = encode(tokenizer, texts_of(few, "held-out"))
    return encode(tokenizer, texts_of(few, "train")), held_out[:4096], tokenizer.bos_token_id


@pytest.mark.complete
def test_the_same_seed_gives_the_same_bits_and_the_model_learns(corpus: dict[str, str]) -> None:
    tokens, held_out, end = data(corpus)
    models = [train_model(TINY, tokens, held_out, end, seed=seed) for seed in (3, 3, 4)]
    first, again, other = (model.state_dict() for model in models)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["model.norm.weight"], other["model.norm.weight"])
    unigram = unigram_perplexity(tokens, held_out, TINY.vocabulary)
    for model in models:
        assert evaluate(model, windows_of(held_out, TINY.window)).perplexity < 0.9 * unigram


def test_the_weights_kept_are_the_best_not_the_last(corpus: dict[str, str]) -> None:
    tokens, held_out, end = data(corpus)
    # The last steps are far too large.
    wild = Size(32, 1, 2, 64, 320, batch=4, steps=20, learning_rate=3.0, window=32, warm_up=20)
    model = train_model(wild, tokens, held_out, end)
    assert evaluate(model, windows_of(held_out, 32)).perplexity < 1.5 * TINY.vocabulary


@pytest.mark.complete
def test_a_saved_model_is_what_the_command_says(
    corpus: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save_corpus(small_corpus(corpus), tmp_path / "corpus.xz")
    monkeypatch.setitem(train.SIZES, "small", TINY)
    folder = tmp_path / "model"
    deterministic = torch.are_deterministic_algorithms_enabled()
    try:
        options = f"--size small --corpus {tmp_path / 'corpus.xz'} --device cpu --max-shard-size 20KB"
        train.main([str(folder), *options.split()])
    finally:
        torch.use_deterministic_algorithms(deterministic)
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    model = LlamaForCausalLM.from_pretrained(folder, dtype="auto").eval()
    assert model.dtype == torch.bfloat16
    tokens = load_file(folder / "tokens.safetensors")
    result = evaluate(model, windows_of(tokens["held_out"], TINY.window))
    assert f"held-out perplexity {result.perplexity:.3f}" in capsys.readouterr().out
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = texts_of(small_corpus(corpus), "train")
    assert tokens["calibration"].tolist() == encode(tokenizer, texts)[: train.CALIBRATION_TOKENS].tolist()
    assert json.loads((folder / "sentences.json").read_text()) == sentences_of(small_corpus(corpus))[: train.SENTENCES]
