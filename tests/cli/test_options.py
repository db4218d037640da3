"""What qgemm says of arguments is said of options, for every option of every command."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer

from qgemm_cli.app import app, convert, quantize
from qgemm_cli.options import in_options, options_of

COMMANDS = [command.callback for command in app.registered_commands if command.callback]
OPTIONS = [
    pytest.param(command, argument, id=f"{command.__name__} {option[0]}")
    for command in COMMANDS
    for argument, option in options_of(command).items()
]


def test_the_options_are_those_that_the_commands_take() -> None:
    made: Any = typer.main.get_command(app)
    for command in COMMANDS:
        of_typer = {
            option.name: (option.opts[0], (option.secondary_opts or option.opts)[0])
            for option in made.commands[command.__name__].params
            if option.param_type_name == "option" and option.name != "help"
        }
        assert {name: option[:2] for name, option in options_of(command).items()} == of_typer


@pytest.mark.parametrize(("command", "argument"), OPTIONS)
@pytest.mark.parametrize(
    ("message", "wanted"),
    [
        ("{name} is 'bad'; it must be good", "{option} is 'bad'; it must be good"),
        ("{name}: 'x' matches nothing", "{option}: 'x' matches nothing"),
        ("{name} holds 3", "{option} holds 3"),
        ("mend it, or pass these in {name}", "mend it, or pass these in {option}"),
        ("pass {name}=True to replace it", "pass {option} to replace it"),
        ("left (2 x {name}='a.*')", "left (2 x {option} 'a.*')"),
        ("{name}=[...] gives more", "{option} {value} gives more"),
    ],
)
def test_every_option(command: Callable[..., Any], argument: str, message: str, wanted: str) -> None:
    option, _, value = options_of(command)[argument]
    said = in_options(message.format(name=argument), command)
    assert said == wanted.format(option=option, value=value)


@pytest.mark.parametrize(
    ("message", "wanted"),
    [
        ("pass resume=False to start over", "pass --no-resume to start over"),
        ("choose a smaller max_shard_size", "choose a smaller --max-shard-size"),
        ("scheme 'int8' needs a scale: skip these layers", None),
        ("the device is full, and can't resume", None),
        ("--skip re:(: unbalanced", None),
        ("model.skip is no name", None),
    ],
)
def test_words_of_every_day_stay(message: str, wanted: str | None) -> None:
    assert in_options(message, quantize) == (wanted or message)


def test_arguments_of_other_names() -> None:
    def command(
        text: Annotated[Path | None, typer.Option()] = None, recipe: Annotated[str, typer.Option()] = ""
    ) -> None: ...

    assert in_options("pass calibration=batches, which finds them", command) == "pass --text FILE, which finds them"
    assert in_options("pass them as calibration", command) == "pass them as --text"
    assert in_options("or recipe=[SmoothQuant(), GPTQ()]", command) == "or --recipe smoothquant,gptq"


def test_a_command_has_its_own_options_alone() -> None:
    assert in_options("scheme is 'int3'", convert) == "--scheme is 'int3'"
    assert in_options("skip is 'a'", convert) == "skip is 'a'"
    assert in_options("pass overwrite=True to replace them", convert) == "pass --overwrite to replace them"
