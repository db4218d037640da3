"""Tokens are checked one by one: those of ``generate`` have the largest logit, and another token is seen."""

from __future__ import annotations

from typing import Any

import torch
from test_benchmarks_accuracy_outliers import tiny_llama

from benchmarks.accuracy.vllm_tokens import MAX_GAP, Checked, gaps_of_answers, prompts_of, table


def test_prompts_of_many_lengths() -> None:
    prompts = prompts_of(torch.arange(1000), 8, 3)
    assert [len(prompt) for prompt in prompts] == [1, 2, 3, 1, 2, 3, 1, 2]
    assert prompts[1] == [124, 125]


def test_gaps_of_the_largest_logit_and_of_others() -> None:
    model: Any = tiny_llama()
    prompts = [[5, 6, 7], [8]]
    answers = []
    for prompt in prompts:
        out = model.generate(torch.tensor([prompt]), max_new_tokens=6, do_sample=False, pad_token_id=0, eos_token_id=-1)
        answers.append(out[0, len(prompt) :].tolist())
    found = gaps_of_answers(model, prompts, answers)
    assert [each.tolist() for each in found] == [[0.0] * 6] * 2
    answers[1][2] = int(model(torch.tensor([[8, *answers[1][:2]]])).logits[0, -1].argmin())
    found = gaps_of_answers(model, prompts, answers)
    assert not found[0].any()
    assert found[1][2] > MAX_GAP
    assert not found[1][:2].any()


def test_a_row_a_scheme() -> None:
    _, (row,) = table([Checked("int8", "bfloat16", 2048, 2040, 64, 60, 0.0371)])
    assert row == ["int8", "bfloat16", "2,040 of 2,048", "60 of 64", "0.037"]
