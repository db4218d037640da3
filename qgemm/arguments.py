"""Checks of public functions' arguments, made before any work begins. A mistake gives an error of one sentence."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn


def check_model(model: Any) -> None:
    """Raises ``TypeError`` unless ``model`` is a module."""
    if isinstance(model, nn.Module):
        return
    way_out = ""
    if isinstance(model, str | os.PathLike):
        way_out = ": load the model first (from_pretrained), or pass a folder's path to qgemm.quantize_checkpoint"
    elif isinstance(model, Mapping):
        way_out = ": make the model, and load these into it (load_state_dict)"
    elif isinstance(model, type) and issubclass(model, nn.Module):
        way_out = ": make one of that class first"
    raise TypeError(f"model is {shown(model)}; it must be an nn.Module{way_out}")


def as_path(argument: str, path: Any) -> Path:
    """Returns ``path`` as a ``Path``; raises ``TypeError``, naming ``argument``, unless it is one."""
    if not isinstance(path, str | os.PathLike) or isinstance(os.fspath(path), bytes):
        raise TypeError(f"{argument} is {shown(path)}; it must be a path")
    return Path(path)


def as_new_folder(argument: str, path: Any) -> Path:
    """Returns ``path``, a folder that exists or can be made; raises ``NotADirectoryError`` if a file is in the way."""
    folder = as_path(argument, path)
    for each in (folder, *folder.parents):
        if os.path.lexists(each):
            if not os.path.isdir(each):
                what = "a file" if os.path.exists(each) else "a link to what isn't there"
                raise NotADirectoryError(f"{argument} is {str(path)!r}, but {each} is {what}: name a folder")
            break
    return folder


def as_scales(scales: Any) -> dict[str, Any] | None:
    """Returns ``input_scales`` as a dictionary; raises ``TypeError`` unless it is a mapping whose keys are names."""
    if scales is None:
        return None
    if not isinstance(scales, Mapping) or not all(isinstance(name, str) for name in scales):
        raise TypeError(
            f"input_scales is {shown(scales)}; it must be a mapping of layers' names to scales: of statistics, pass "
            "calibration=calibration, or calibration.input_scales(scheme)"
        )
    return dict(scales)


def shown(value: object) -> str:
    """The value and its type, as errors show them."""
    name = type(value).__name__
    return f"{shortened(value, 60)}, {'an' if name[0] in 'AEIOaeio' else 'a'} {name}"


def shortened(value: object, length: int = 80) -> str:
    """The value as errors show it, in at most ``length`` characters."""
    text = repr(value)
    return text if len(text) <= length else text[: length - 3] + "..."
