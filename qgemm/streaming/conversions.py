"""The source of each tensor of a float model: applies transformers' renamings and conversions to names and shapes.

Names in files may differ from those in the model, and some tensors are made of others (the experts of a layer are one
tensor in memory, many in files). transformers describes that by a list of renamings and conversions for each model.
They are applied here as ``from_pretrained`` of transformers 5.17 to 5.24 does, but values are read only when they are
needed, one expert at a time if each expert is made of its own tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from qgemm.checkpoint.errors import CheckpointError
from qgemm.checkpoint.safetensors_file import StoredTensor
from qgemm.streaming.float_tensors import ConversionTurn, FloatTensor, made_float, merged_experts, stored_float
from qgemm.streaming.source import Source

# An input of a conversion: the pattern that it matched, its name in the files, and the dtype to cast it to.
_Input: TypeAlias = "tuple[str, str, torch.dtype]"


def find_tensors(model: Any, source: Source) -> tuple[dict[str, FloatTensor], list[str]]:
    """How each tensor of ``model`` is made from the files, and the names of tensors in the files that aren't used.

    Reads no values. Raises ``CheckpointError`` if shapes differ, or if tensors can't be made into the model's.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    transforms = get_model_conversion_mapping(model)
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    wanted = model.state_dict()
    prefix = model.base_model_prefix
    dtype_of = _dtype_rule(model, wanted)
    found: dict[str, FloatTensor] = {}
    conversions: dict[str, tuple[Any, list[_Input]]] = {}
    unplaced = []
    for name in sorted(source.tensors, key=dot_natural_key):
        stored = source.tensors[name]
        target, pattern = rename_source_key(name, renamings, converters, prefix, wanted)
        if target not in wanted and name in wanted:
            target, pattern = rename_source_key(name, [], [], prefix, wanted)
        if target not in wanted:
            unplaced.append(name)
        elif stored.dtype is None:
            raise CheckpointError(f"{stored.path}: tensor {name} is of a dtype that qgemm doesn't read")
        elif pattern is None:
            _check_shape(target, stored.shape, wanted[target], name, stored.path)
            if wanted[target].is_floating_point():
                _check_is_float(name, stored)
            if target in found:
                raise CheckpointError(
                    f"{stored.path}: tensor {name} is {target} of the model, and so is another one in "
                    "the files; remove one of them"
                )
            found[target] = stored_float(source, name, dtype_of(target))
        else:
            _check_is_float(name, stored)
            _, inputs = conversions.setdefault(target, (by_pattern[pattern], []))
            inputs.append((pattern, name, dtype_of(target)))
    return found | _find_converted(model, source, conversions, wanted), unplaced


def _find_converted(
    model: Any, source: Source, conversions: dict[str, tuple[Any, list[_Input]]], wanted: Mapping[str, Tensor]
) -> dict[str, FloatTensor]:
    """How the results of ``conversions`` are made, which are given by their targets."""
    found: dict[str, FloatTensor] = {}
    turn = ConversionTurn()
    for target, (converter, inputs) in conversions.items():
        run = partial(_convert, model, converter, target, inputs)
        shapes = _try(run, source, target, inputs)
        convert = partial(run, read=partial(_read, source))
        for name, value in shapes.items():
            first = inputs[0][1]
            _check_shape(name, tuple(value.shape), wanted.get(name), first, source.tensors[first].path)
            experts = _split_by_expert(converter, inputs, len(value) if value.ndim > 1 else 0)
            if experts and len(shapes) == 1:
                found[name] = merged_experts(source, *experts, value.dtype)
            else:
                described = {"made": name, "dtype": str(value.dtype), "shape": list(value.shape)}
                found[name] = made_float(value, partial(turn.value, convert, name), partial(dict, described))
    return found


def _split_by_expert(converter: Any, inputs: list[_Input], count: int) -> tuple[list[list[str]], int] | None:
    """What each of ``count`` experts is made of, in order, and along which dimension; None if experts share tensors.

    Each has its own if the tensors of each pattern are stacked, and the stacks are then concatenated.
    """
    stack, *joins = [(type(each).__name__, getattr(each, "dim", 0)) for each in converter.operations]
    join, dim = joins[0] if joins else ("Concatenate", 1)
    if stack != ("MergeModulelist", 0) or join != "Concatenate" or dim < 1 or len(joins) > 1:
        return None
    of_pattern = {pattern: [name for own, name, _ in inputs if own == pattern] for pattern in converter.source_patterns}
    given = [names for names in of_pattern.values() if names]
    if {len(names) for names in given} != {count}:
        return None
    return [list(names) for names in zip(*given, strict=True)], dim - 1


def _dtype_rule(model: Any, wanted: dict[str, Tensor]) -> Callable[[str], torch.dtype]:
    """The rule for a tensor's dtype in the model: the one the class builds it with, or float32 if the class says so."""
    from transformers.core_model_loading import build_glob_alternation

    plan = model._get_dtype_plan(model.config.dtype)
    if not plan:
        return lambda name: wanted[name].dtype
    pattern, glob_of, _ = build_glob_alternation(list(plan))

    def dtype_of(name: str) -> torch.dtype:
        match = pattern.search(name)
        dtype: torch.dtype = plan[glob_of[str(match.lastgroup)]] if match else wanted[name].dtype
        return dtype

    return dtype_of


def _check_shape(target: str, shape: tuple[int, ...], wanted: Tensor | None, name: str, path: Path) -> None:
    if wanted is None:
        raise CheckpointError(f"{path}: tensor {name} would become {target}, which the model doesn't have")
    if shape != tuple(wanted.shape):
        raise CheckpointError(f"{path}: {target} has shape {list(shape)}; the model's is {list(wanted.shape)}")


def _check_is_float(name: str, tensor: StoredTensor) -> None:
    if tensor.dtype is not None and not tensor.dtype.is_floating_point:
        raise CheckpointError(
            f"{tensor.path}: tensor {name} is {tensor.dtype}, where the model has float values. This checkpoint is "
            "probably quantized already. Start from the float checkpoint"
        )


def _convert(
    model: Any,
    converter: Any,
    target: str,
    inputs: list[_Input],
    read: Callable[[str, torch.dtype], Tensor],
) -> dict[str, Tensor]:
    own = deepcopy(converter)
    for pattern, name, dtype in inputs:
        own.add_tensor(target, name, pattern, partial(read, name, dtype))
    made = own.convert(target, model=model, config=model.config)
    return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


def _read(source: Source, name: str, dtype: torch.dtype) -> Tensor:
    tensor = source.tensors[name]
    return source.read_rows(name, 0, tensor.shape[0] if tensor.shape else 1).to(dtype)


def _try(run: Callable[..., dict[str, Tensor]], source: Source, target: str, inputs: list[_Input]) -> dict[str, Tensor]:
    """Runs a conversion on meta."""

    def read(name: str, dtype: torch.dtype) -> Tensor:
        return torch.empty(source.tensors[name].shape, dtype=dtype, device="meta")

    try:
        return run(read=read)
    except Exception as error:  # transformers' code may raise anything for unexpected shapes
        first, rest = inputs[0][1], len(inputs) - 1
        raise CheckpointError(
            f"{source.folder}: {first} and {rest} more can't be combined into {target}: {error}"
        ) from error
