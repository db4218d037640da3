"""Float and int8 Llamas in folders: loaded, compared and damaged."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.rewriting import rewrite_file
from safetensors.torch import load_file
from torch import distributed, nn
from transformers import LlamaForCausalLM
from transformers.distributed import DistributedConfig

import qgemm
from qgemm import QuantLinear
from qgemm.integrations.transformers.tensor_parallel import NEEDS_FSDP

IDS = torch.tensor([[1, 2, 3, 4]])
# Whether experts are split by expert.
BY_EXPERT = (False,) if NEEDS_FSDP else (False, True)


def tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**model.state_dict(), **dict(model.named_buffers())}


def assert_same(model: nn.Module, other: nn.Module) -> None:
    ours, theirs = tensors(model), tensors(other)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype, name
        assert torch.equal(tensor, theirs[name]), name
    # By name: a module with a parametrized weight has a class of its own.
    names = [[type(module).__qualname__ for module in one.modules()] for one in (model, other)]
    assert names[0] == names[1]


def quantized_names(model: nn.Module) -> set[str]:
    return {name for name, module in model.named_modules() if isinstance(module, QuantLinear)}


def load(folder: Path, **kwargs: Any) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(folder, **kwargs)


def in_two(plan: Any = "auto", by_expert: bool = False) -> DistributedConfig:
    """What two processes load a model by. Until transformers 5.18 a flag stands for the size of expert parallelism."""
    has_size = hasattr(DistributedConfig, "ep_size")
    experts: dict[str, Any] = {"ep_size": 2} if has_size else {"enable_expert_parallel": True}
    return DistributedConfig(tp_size=2, tp_plan=plan, **(experts if by_expert else {}))


@contextmanager
def second_of_two() -> Iterator[None]:
    """This is the second of two processes, the only one on its machine, of which the first isn't there."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"RANK": "1", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}.items():
            patch.setenv(name, value)
        distributed.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
        try:
            yield
        finally:
            distributed.destroy_process_group()


def load_part(
    folder: Path, kind: Any = LlamaForCausalLM, by_expert: bool = False, config: Any = None, **options: Any
) -> Any:
    """What the ``second_of_two`` processes loads."""
    with second_of_two():
        return kind.from_pretrained(folder, distributed_config=config or in_two(by_expert=by_expert), **options)


def load_int8(folder: Path, **kwargs: Any) -> LlamaForCausalLM:
    return load(folder, quantization_config=qgemm.QGemmConfig(), **kwargs)


def edit_weights(folder: Path, **changes: torch.Tensor | None) -> None:
    """Replaces tensors of a checkpoint in one file, or removes them. Dots in names are written as two underscores."""
    path = folder / "model.safetensors"
    stored = load_file(path)
    for name, value in changes.items():
        name = name.replace("__", ".")
        assert name in stored, name
        if value is None:
            del stored[name]
        else:
            stored[name] = value
    rewrite_file(path, stored)
