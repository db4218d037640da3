"""``in_options``: translates qgemm's messages about arguments to the options of the command that was given.

qgemm's errors and warnings name arguments: ``max_shard_size is 'big'``, ``pass resume=False``. A command's parameters
have the names of these arguments, so its signature tells which option stands for which, and no message is written
twice.
"""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

from typer.models import OptionInfo

# Arguments whose option has another name.
_CALLED = {"calibration": "text", "format": "to", "resume_folder": "resume"}


def in_options(message: str, command: Callable[..., Any]) -> str:
    """``message`` with the options of ``command``, a function in ``app.py``, in place of arguments of those names."""
    options = options_of(command)
    options |= {argument: options[name] for argument, name in _CALLED.items() if name in options}
    for argument, (shown, opposite, value) in options.items():
        message = _replaced(message, argument, shown, opposite, value)
    return message


def options_of(command: Callable[..., Any]) -> dict[str, tuple[str, str, str]]:
    """By parameter: its option, the option that means False (the same if there is none), and its value's name."""
    options = {}
    hints = typing.get_type_hints(command, include_extras=True)
    for name in inspect.signature(command).parameters:
        kind, *details = typing.get_args(hints[name]) or (hints[name],)
        info = next((detail for detail in details if isinstance(detail, OptionInfo)), None)
        if info is not None:
            # Inside Annotated, Typer treats an option's own name as its first argument, the default.
            named = [given for given in (info.default, *(info.param_decls or ())) if isinstance(given, str)]
            option = (named or [f"--{name.replace('_', '-')}"])[0]
            is_switch = kind is bool and not named
            is_file = kind is Path or Path in typing.get_args(kind)
            opposite = option.replace("--", "--no-", 1) if is_switch else option
            options[name] = option, opposite, "FILE" if is_file else "..."
    return options


def _replaced(message: str, argument: str, shown: str, opposite: str, value: str) -> str:
    made = rf"\b{argument}=\[((?:\w+\(\)(?:, )?)+)\]"  # recipe=[SmoothQuant(), GPTQ()]
    message = re.sub(made, lambda found: f"{shown} {_methods(found[1])}", message)
    forms = [
        (rf"\b{argument}=False\b", opposite),
        (rf"\b{argument}=True\b", shown),
        (rf"\b{argument}=(\[\.\.\.\]|\.\.\.|batches\b)", f"{shown} {value}"),
        (rf"\b{argument}=", f"{shown} "),
    ]
    if "_" in argument:
        forms.append((rf"\b{argument}\b", shown))
    else:  # a common word is only an argument where it can't be anything else
        forms.append((rf"^{argument}(?=:| (is|was|holds|comes)\b)", shown))
        forms.append((rf"\b(in|as|pass) {argument}\b", rf"\1 {shown}"))
    for form, replacement in forms:
        message = re.sub(form, replacement, message)
    return message


def _methods(made: str) -> str:
    """``smoothquant,gptq`` for ``SmoothQuant(), GPTQ()``."""
    return made.replace("()", "").replace(" ", "").lower()
