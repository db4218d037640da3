"""How much the outputs of two language models differ over a text: divergence, agreement, perplexity."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import qgemm
from qgemm.checkpoint.errors import CheckpointError
from qgemm.checkpoint.gguf import GgufModel
from qgemm.streaming.loading import plan_loading
from qgemm.streaming.source import open_source
from qgemm_cli.checkpoint import FLOAT, Checkpoint
from qgemm_cli.output import bars_on_a_terminal
from qgemm_cli.tokenizer import load_tokenizer, read_text

_CHARACTERS_A_TOKEN = 16
_ROWS = 16  # of logits at a time, in float64: with a vocabulary of 150,000 they take 20 MB


def load_model(checkpoint: Checkpoint, device: torch.device) -> nn.Module:
    """Loads the model in ``checkpoint``, in eval mode: a quantized one with qgemm, a float one with transformers.

    Raises ``CheckpointError`` for a checkpoint that neither can load.
    """
    if checkpoint.place is not None and checkpoint.contents is not None:
        return qgemm.load_quantized(checkpoint.place, device)
    return load_float(checkpoint, build_float(checkpoint), device)


def build_float(checkpoint: Checkpoint) -> Any:
    """Builds the float model in ``checkpoint`` on meta; raises as ``load_model`` does."""
    if checkpoint.place is None:
        raise CheckpointError(f"{checkpoint.path} is a single file: to run a model, give its folder")
    if checkpoint.format != FLOAT or checkpoint.folder is None:
        raise CheckpointError(checkpoint.refusal or checkpoint.problems[0])
    # The model on meta was built from a checked config; its class and the safe parts of its config are used here.
    with open_source(checkpoint.folder) as source:
        return plan_loading(source, drop=["*"]).model


def load_float(checkpoint: Checkpoint, built: Any, device: torch.device) -> nn.Module:
    """Loads the float model in ``checkpoint``, in eval mode; ``built`` is the model on meta."""
    with bars_on_a_terminal():
        model = type(built).from_pretrained(
            checkpoint.folder,
            config=built.config,
            dtype=built.config.dtype,
            local_files_only=True,
            use_safetensors=True,
        )
    loaded: nn.Module = model.to(device).eval()
    return loaded


def read_tokens(text: Path, folders: list[Path], most: int, gguf: GgufModel | None = None) -> Tensor:
    """The first ``most`` tokens of a text file, int64 ``[T]``, by the tokenizer that ``load_tokenizer`` finds.

    Raises ``ValueError`` if there is none, or if the text is too short to predict anything.
    """
    tokenizer = load_tokenizer(folders, "pass --tokenizer FOLDER", gguf)
    # On average a token has at least one character, so a huge file needn't be read whole.
    content = read_text(text, _CHARACTERS_A_TOKEN * most)
    tokens = torch.tensor(tokenizer(content, verbose=False)["input_ids"][:most], dtype=torch.int64)
    if tokens.numel() < 2:
        raise ValueError(f"{text} has {tokens.numel()} tokens; it must have at least 2")
    return tokens


@torch.inference_mode()
def compare_logits(
    a: nn.Module, b: nn.Module, tokens: Tensor, window: int, advance: Callable[[float], object]
) -> dict[str, Any]:
    """Runs both models over ``tokens`` ``[T]``, in independent windows.

    The divergence is ``sum(p_a * (log p_a - log p_b))`` over the vocabulary, in nats, for each token.
    """
    limits = (getattr(model.config, "max_position_embeddings", None) for model in (a, b))
    window = min([window, *(limit for limit in limits if isinstance(limit, int) and limit > 0)])
    is_causal = all(type(model).__name__.endswith(("ForCausalLM", "LMHeadModel")) for model in (a, b))
    divergences, agreements = [], []
    losses: dict[str, list[Tensor]] = {"a": [], "b": []}
    for ids in tokens.split(window):
        parts = (_logits(a, ids).split(_ROWS), _logits(b, ids).split(_ROWS), ids.roll(-1).split(_ROWS))
        for logits_a, logits_b, following in zip(*parts, strict=True):
            log_a, log_b = (logits.double().log_softmax(-1) for logits in (logits_a, logits_b))
            divergences.append((log_a.exp() * (log_a - log_b)).sum(-1).cpu())
            agreements.append((log_a.argmax(-1) == log_b.argmax(-1)).cpu())
            for name, log in (("a", log_a), ("b", log_b)):
                losses[name].append(-log.cpu().gather(1, following[:, None])[:, 0])
        for parts_of_one in losses.values():
            parts_of_one[-1] = parts_of_one[-1][:-1]  # the token after the last one of a window isn't known
        advance(ids.numel())
    divergence, agreement = torch.cat(divergences), torch.cat(agreements)
    perplexities = {name: float(torch.cat(parts).mean().exp()) for name, parts in losses.items()}
    return {
        "tokens": tokens.numel(),
        "window": window,
        "mean_kl": float(divergence.mean()),
        "max_kl": float(divergence.max()),
        "top1_agreement": float(agreement.double().mean()),
        "perplexity_a": perplexities["a"] if is_causal else None,
        "perplexity_b": perplexities["b"] if is_causal else None,
    }


def _logits(model: nn.Module, ids: Tensor) -> Tensor:
    device = next(model.parameters()).device
    logits = getattr(model(input_ids=ids[None].to(device)), "logits", None)
    if not isinstance(logits, Tensor) or logits.shape[:2] != (1, ids.numel()):
        raise ValueError(f"{type(model).__name__} returns no logits per token: --text is for language models")
    return logits[0]
