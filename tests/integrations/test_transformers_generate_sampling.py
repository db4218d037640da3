"""The loop's sampler: scores are those of transformers' processors, bit for bit, and draws have their distribution."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.generation import LogitsProcessor, logits_process

from qgemm.integrations.transformers.generate.sampling import Progress, Sampler
from qgemm.integrations.transformers.generate.stopping import Stops

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
VOCABULARY = 24
PROMPT = torch.tensor([[1, 2, 3, 3], [9, 4, 3, 0]], device=DEVICE)
PROCESSORS: dict[str, list[Any]] = {
    "none": [],
    "temperature": [logits_process.TemperatureLogitsWarper(0.3)],
    "top_k": [logits_process.TopKLogitsWarper(5)],
    "top_p": [logits_process.TopPLogitsWarper(0.6)],
    "min_p": [logits_process.MinPLogitsWarper(0.1)],
    "typical_p": [logits_process.TypicalLogitsWarper(0.5)],
    "epsilon_cutoff": [logits_process.EpsilonLogitsWarper(0.02)],
    "renormalize": [logits_process.TopKLogitsWarper(5), logits_process.LogitNormalization()],
    "repetition_penalty": [logits_process.RepetitionPenaltyLogitsProcessor(1.7)],
    "penalty of new tokens": [logits_process.RepetitionPenaltyLogitsProcessor(1.7, prompt_ignore_length=4)],
    "min_new_tokens": [logits_process.MinNewTokensLengthLogitsProcessor(4, 2, [5, 6], device=str(DEVICE))],
    "min_length": [logits_process.MinLengthLogitsProcessor(6, [5], device=str(DEVICE))],
    "all": [
        logits_process.RepetitionPenaltyLogitsProcessor(1.7),
        logits_process.MinNewTokensLengthLogitsProcessor(4, 2, [5, 6], device=str(DEVICE)),
        logits_process.TemperatureLogitsWarper(0.8),
        logits_process.TopKLogitsWarper(12),
        logits_process.TopPLogitsWarper(0.9),
        logits_process.MinPLogitsWarper(0.02),
    ],
}


def progress_of(batch: int, logits: Tensor) -> Progress:
    progress = Progress(batch, 8, torch.zeros(batch, 1), DEVICE)
    progress.logits = logits
    return progress


def sampler_of(processors: list[LogitsProcessor], do_sample: bool = True, prompt_length: int = 4) -> Sampler:
    return Sampler(processors, Stops([], DEVICE), prompt_length, do_sample, padding=None)


@pytest.mark.parametrize("processors", PROCESSORS.values(), ids=PROCESSORS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])  # bf16 has ties
def test_scores_are_those_of_transformers(processors: list[LogitsProcessor], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    sampler = sampler_of(processors)
    ids = PROMPT
    progress = progress_of(2, torch.empty((2, VOCABULARY), dtype=dtype, device=DEVICE))
    sampler.begin(PROMPT, VOCABULARY)
    for _ in range(4):
        progress.logits.copy_(3 * torch.randn((2, VOCABULARY), generator=generator))
        expected = logits_process.LogitsProcessorList(processors)(ids, progress.logits.float())
        assert torch.equal(sampler.scores(progress.logits, progress), expected)
        sampler(progress)
        assert (expected.gather(1, progress.token) > -torch.inf).all()
        ids = torch.cat([ids, progress.token], dim=1)
    assert torch.equal(progress.rows[:4, :2].T, ids[:, 4:])


@pytest.mark.parametrize("name", ["none", "top_k", "all"])
def test_draws_have_the_distribution_of_the_scores(name: str) -> None:
    """Chi-square over 40,000 rows of one distribution; a right sampler fails at one seed of a million."""
    rows = 40_000
    sampler = sampler_of(PROCESSORS[name])
    logits = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(1)).to(DEVICE).expand(rows, -1).clone()
    progress = progress_of(rows, logits)
    sampler.begin(PROMPT[:1].expand(rows, -1), VOCABULARY)
    torch.manual_seed(0)
    wanted = sampler.scores(logits, progress)[0].softmax(-1).double().cpu() * rows
    sampler(progress)
    counts = torch.bincount(progress.token[:, 0].cpu(), minlength=VOCABULARY).double()
    possible = wanted > 0
    assert counts[~possible].sum() == 0
    chi_square = ((counts - wanted)[possible] ** 2 / wanted[possible]).sum().item()
    freedom = int(possible.sum()) - 1
    # Wilson and Hilferty: the cube root is nearly normal. 4.75 standard deviations are one in a million.
    assert (chi_square / freedom) ** (1 / 3) < 1 - 2 / (9 * freedom) + 4.75 * (2 / (9 * freedom)) ** 0.5


def test_draws_are_those_of_multinomial() -> None:
    logits = torch.randn((64, VOCABULARY), generator=torch.Generator().manual_seed(2)).to(DEVICE)
    progress = progress_of(64, logits)
    torch.manual_seed(3)
    expected = torch.multinomial(logits.softmax(-1), 1)
    torch.manual_seed(3)
    sampler_of([])(progress)
    assert torch.equal(progress.token, expected)


@pytest.mark.parametrize("vocabulary", [1, 24, 97, 512, 32_000])  # 97 is in one part
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_is_the_first_of_the_largest(vocabulary: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randint(0, 30, (64, vocabulary), generator=generator).to(DEVICE, dtype)
    progress = progress_of(64, logits)
    sampler_of([], do_sample=False)(progress)
    largest = logits == logits.amax(-1, keepdim=True)
    assert torch.equal(progress.token[:, 0], (largest.cumsum(-1) == 0).sum(-1))


def test_a_sampler_takes_over_what_another_ignores() -> None:
    sampler, other = sampler_of(PROCESSORS["repetition_penalty"]), sampler_of(PROCESSORS["penalty of new tokens"])
    progress = progress_of(2, torch.randn((2, VOCABULARY), generator=torch.Generator().manual_seed(0)).to(DEVICE))
    for each in (sampler, other):
        each.begin(PROMPT, VOCABULARY)
    expected = other.scores(progress.logits, progress)
    assert not torch.equal(sampler.scores(progress.logits, progress), expected)
    sampler.adopt(other)
    sampler.begin(PROMPT, VOCABULARY)
    assert torch.equal(sampler.scores(progress.logits, progress), expected)


def test_keys_tell_samplers_apart() -> None:
    keys = {sampler_of(processors).key for processors in PROCESSORS.values()}
    assert len(keys) == len(PROCESSORS) - 1, "which tokens a penalty ignores is the prompt's affair"
    assert sampler_of([logits_process.TemperatureLogitsWarper(0.3)]).key in keys
    assert sampler_of([logits_process.TemperatureLogitsWarper(0.4)]).key not in keys
    assert sampler_of([], do_sample=False).key not in keys
    assert sampler_of(PROCESSORS["min_length"], prompt_length=5).key not in keys
