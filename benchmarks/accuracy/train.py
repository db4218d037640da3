"""Trains a language model of Llama's architecture, and its tokenizer, on the text of ``corpus.py``.

    python -m benchmarks.accuracy.train FOLDER --size full      # 31.5 million parameters: minutes on a large GPU
    python -m benchmarks.accuracy.train FOLDER --size small     # 3.0 million parameters: ten minutes on two cores

``FOLDER`` gets what ``from_pretrained`` reads, the model in bfloat16, and the text to measure with, so that it doesn't
depend on another machine's Python: ``tokens.safetensors`` has the ids of held-out text (``"held_out"``) and of text for
calibration (``"calibration"``, which the model was trained on), ``sentences.json`` sentences for ``minilm.py``.

On a CPU the same seed gives the same bits with the same versions and as many threads; on a GPU not quite, since the
gradient of attention is added up in any order. The weights kept are those with the least loss on the validation split,
a tenth of the run apart: the text is short, so that a long run learns it by heart.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks.accuracy.corpus import Split, documents, load_corpus, texts_of
from benchmarks.accuracy.evaluate import evaluate, unigram_perplexity, windows_of
from benchmarks.accuracy.sentences import sentences_of

END = "<|end|>"
"""The token between documents, and before the first."""
HELD_OUT_TOKENS, CALIBRATION_TOKENS, VALIDATION_TOKENS = 200_000, 500_000, 65_536
SENTENCES = 4000
WINDOW = 512


@dataclass(frozen=True)
class Size:
    """A model and how it is trained: ``steps`` of ``batch`` windows of ``WINDOW`` tokens."""

    hidden: int
    layers: int
    heads: int
    intermediate: int
    vocabulary: int
    batch: int
    steps: int
    learning_rate: float
    window: int = WINDOW
    weight_decay: float = 0.1
    warm_up: int = 100


SIZES = {
    "full": Size(512, 8, 8, 1536, 8192, batch=32, steps=3000, learning_rate=1e-3),
    "small": Size(256, 3, 4, 512, 4096, batch=4, steps=1000, learning_rate=3e-3, weight_decay=0.01),
}


def train_tokenizer(texts: Sequence[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with ``vocabulary`` tokens, ``END`` among them."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=[END], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(texts, trainer, length=len(texts))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=END, eos_token=END)


def encode(tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> Tensor:
    """The ids ``[n]``, int32, of all texts, ``END`` before each of them."""
    end = tokenizer.bos_token_id
    parts = [torch.tensor([end, *ids], dtype=torch.int32) for ids in tokenizer(list(texts)).input_ids]
    return torch.cat(parts)


def build_model(size: Size, end: int) -> LlamaForCausalLM:
    """The model with random weights, float32, its embeddings tied to its head."""
    config = LlamaConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        max_position_embeddings=2 * size.window,
        tie_word_embeddings=True,
        bos_token_id=end,
        eos_token_id=end,
    )
    return LlamaForCausalLM(config)


def train_model(
    size: Size,
    tokens: Tensor,
    validation: Tensor,
    end: int,
    *,
    seed: int = 0,
    device: str | torch.device = "cpu",
) -> LlamaForCausalLM:
    """A model trained on ``tokens`` ``[n]``, in float32, with the weights that did best on ``validation`` ``[m]``.

    AdamW in float32, the model under bfloat16 autocast; the learning rate rises over ``size.warm_up`` steps, then falls
    along a cosine to nothing at ``size.steps``. Every pass goes over all windows in another order, cut at another
    place.
    """
    torch.manual_seed(seed)
    model: Any = build_model(size, end)
    model.to(device)
    decayed = [weight for weight in model.parameters() if weight.ndim > 1]
    others = [weight for weight in model.parameters() if weight.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": size.weight_decay}, {"params": others, "weight_decay": 0.0}],
        lr=size.learning_rate,
        betas=(0.9, 0.95),
        fused=True,
    )
    held_out = windows_of(validation, min(size.window, len(validation)))
    batches = _batches(tokens.to(device), size, seed)
    best, best_loss = model.state_dict(), math.inf
    every = max(1, size.steps // 10)
    with tqdm(total=size.steps, desc="train", unit="step", disable=None) as bar:
        for step in range(size.steps):
            cosine = math.cos(math.pi * step / size.steps)
            rate = size.learning_rate * min(1.0, (step + 1) / size.warm_up) * (1 + cosine) / 2
            for group in optimizer.param_groups:
                group["lr"] = rate
            windows = next(batches)
            with torch.autocast(torch.device(device).type, torch.bfloat16):
                loss = model(input_ids=windows, labels=windows, use_cache=False).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            bar.update()
            if (step + 1) % 10 == 0:
                bar.set_postfix(loss=f"{loss.item():.3f}", validation=f"{best_loss:.3f}")
            if (step + 1) % every == 0 or step + 1 == size.steps:
                best_loss, best = _keep_the_better(model, held_out, best_loss, best)
                line = f"step {step + 1}: loss {loss.item():.3f}, least validation loss so far {best_loss:.3f}"
                tqdm.write(line, file=sys.stderr)
    model.load_state_dict(best)
    trained: LlamaForCausalLM = model.eval()
    return trained


def _keep_the_better(
    model: Any, windows: Tensor, best_loss: float, best: dict[str, Any]
) -> tuple[float, dict[str, Any]]:
    with torch.autocast(model.device.type, torch.bfloat16):
        loss = math.log(evaluate(model, windows, batch=16, progress=False).perplexity)
    if loss < best_loss:
        return loss, {name: tensor.clone() for name, tensor in model.state_dict().items()}
    return best_loss, best


def _batches(tokens: Tensor, size: Size, seed: int) -> Iterator[Tensor]:
    """Batches of windows ``[batch, window]`` for ever, each pass in another order and from another first token."""
    generator = torch.Generator().manual_seed(seed)
    batch = min(size.batch, (len(tokens) - 1) // size.window)
    if batch < 1:
        raise ValueError(f"{len(tokens)} tokens make no window of {size.window}: give more text")
    while True:
        first = int(torch.randint(len(tokens) % size.window + 1, (), generator=generator))
        windows = windows_of(tokens[first:], size.window)
        for chosen in torch.randperm(len(windows), generator=generator).split(batch):
            if len(chosen) == batch:
                yield windows[chosen.to(tokens.device)]


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains what the command line asks for and saves it."""
    args = _parse(arguments)
    # cuBLAS reads it when it starts; without it, its sums may differ from run to run.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    size = SIZES[args.size] if args.steps is None else replace(SIZES[args.size], steps=args.steps)
    corpus = load_corpus(args.corpus) if args.corpus else documents()
    tokenizer = train_tokenizer(texts_of(corpus, "train"), size.vocabulary)
    splits: tuple[Split, ...] = ("train", "validation", "held-out")
    train, validation, held_out = (encode(tokenizer, texts_of(corpus, split)) for split in splits)
    held_out = held_out[:HELD_OUT_TOKENS]
    print(f"{len(train):,} tokens to train on, {len(held_out):,} held out")
    model: Any = train_model(
        size,
        train,
        validation[:VALIDATION_TOKENS],
        tokenizer.bos_token_id,
        seed=args.seed,
        device=args.device,
    )
    # The weights alone: the frequencies of the rotary embedding, which aren't saved, stay in float32.
    for weight in model.parameters():
        weight.data = weight.data.to(torch.bfloat16)
    model.save_pretrained(args.folder, max_shard_size=args.max_shard_size)
    tokenizer.save_pretrained(args.folder)
    calibration = train[:CALIBRATION_TOKENS]
    # The largest vocabulary has 8,192 tokens.
    tensors = {"held_out": held_out.to(torch.int16), "calibration": calibration.to(torch.int16)}
    save_file(tensors, args.folder / "tokens.safetensors")
    (args.folder / "sentences.json").write_text(
        json.dumps(sentences_of(corpus)[:SENTENCES], indent=0), encoding="utf-8"
    )
    saved: Any = LlamaForCausalLM.from_pretrained(args.folder, dtype="auto")
    parameters = sum(weight.numel() for weight in saved.parameters())
    result = evaluate(saved.to(args.device).eval(), windows_of(held_out, size.window))
    unigram = unigram_perplexity(train, held_out, size.vocabulary)
    print(f"{parameters / 1e6:.1f} million parameters, held-out perplexity {result.perplexity:.3f}")
    print(f"(by the frequency of tokens alone it would be {unigram:.0f})")


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a language model and its tokenizer on Python's standard library."
    )
    parser.add_argument("folder", type=Path, help="where to save the model")
    parser.add_argument("--size", choices=SIZES, default="full" if torch.cuda.is_available() else "small")
    parser.add_argument(
        "--corpus", type=Path, help="a file of benchmarks.accuracy.corpus, instead of this Python's text"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, help="how many steps, instead of the size's own number")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--max-shard-size", default="5GB", help="of a file of weights (default: %(default)s)")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
