"""The command as such: help, version, errors, exit codes, and what it imports."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
from processes import run_process

import qgemm
import qgemm_cli
from cli.command import run, run_failing
from qgemm_cli.app import app
from qgemm_cli.output import printable

ROOT = Path(__file__).parent.parent.parent
COMMANDS = [command.name or command.callback.__name__ for command in app.registered_commands if command.callback]


def run_python(code: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


IMPORTED = """
import sys
from qgemm_cli import main
for command in sys.argv[1:]:
    sys.argv[1:] = command.split()
    try:
        main()
    except SystemExit:
        imported = sorted({"torch", "transformers", "qgemm"} & set(sys.modules))
        print(f"{command} imported: {imported}", flush=True)
"""


def test_help_version_and_typing_mistakes_wait_for_no_import() -> None:
    commands = ["--version", "--help", *(f"{command} --help" for command in COMMANDS), "inspekt"]
    result = run_python(IMPORTED, *commands)
    assert len(commands) > 4
    assert [line for line in result.stdout.splitlines() if " imported: " in line] == [
        f"{command} imported: []" for command in commands
    ]
    assert result.stdout.startswith(f"{qgemm.__version__}\n")
    assert (result.stdout + result.stderr).count("Usage") == len(commands) - 1


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_has_examples(command: str) -> None:
    examples = run(command, "--help").stdout.split("Examples")[1]
    assert f"qgemm {command} " in examples
    if command == "quantize":
        assert '--scheme "*.mlp.*=int4" --scheme "*=int8"' in examples


@pytest.mark.slow
def test_python_m_and_version() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "qgemm", "--version"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert (result.stdout.strip(), result.returncode) == (qgemm.__version__, 0)


def test_at_its_end_libraries_find_nothing_to_complain_of() -> None:
    """Triton 3.9 does of all that is left then."""
    code = "import sys, triton.language; from qgemm_cli import main; sys.argv[1:] = ['--version']; main()"
    result = run_python(code)
    assert (result.stdout, result.stderr) == (f"{qgemm.__version__}\n", "")


def test_without_typer_it_says_what_to_install() -> None:
    result = run_python("import sys; sys.modules['typer'] = None\nfrom qgemm_cli import main; main()")
    assert result.returncode == 2
    assert result.stderr == 'The qgemm command needs typer: pip install "typer>=0.15" "rich>=13"\n'


def fail_with(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def examine(*_: Any) -> None:
        warnings.warn("look\nout", stacklevel=1)
        print("a library prints")
        raise error

    monkeypatch.setattr("qgemm_cli.commands.inspect.examine", examine)


def test_ctrl_c(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fail_with(monkeypatch, KeyboardInterrupt())
    result = run("inspect", tmp_path, exit_code=130)
    assert result.stdout == ""
    assert result.stderr.splitlines() == ["warning: look out", "a library prints", "interrupted"]


def test_an_interrupt_that_says_how_it_goes_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fail_with(monkeypatch, KeyboardInterrupt("half is done\x1b[2J"))
    result = run("inspect", tmp_path, exit_code=130)
    assert result.stderr.splitlines()[-1] == "interrupted: half is done\\x1b[2J"


@pytest.mark.slow(quick=["2"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_of_a_process(number: signal.Signals) -> None:
    code = """
import sys, time, types
def examine(*_):
    print("here", flush=True)
    time.sleep(60)
sys.modules["qgemm_cli.commands.inspect"] = types.SimpleNamespace(examine=examine, show=None)
from qgemm_cli import main
main()
"""
    command = [sys.executable, "-c", code, "inspect", "."]
    process = subprocess.Popen(
        command,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # a CI may have it ignored
    )
    assert process.stderr is not None
    assert process.stderr.readline() == "here\n"
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert (out, err, process.returncode) == ("", "interrupted\n", 130)


WITHOUT_A_READER = """
import os
reader, writer = os.pipe()
os.close(reader)
os.dup2(writer, 1)
from qgemm_cli import main
main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [[], ["--json"]])
def test_a_reader_that_has_had_enough(arguments: list[str], int8_folder: Path, tmp_path: Path) -> None:
    script = tmp_path / "code.py"
    script.write_text(WITHOUT_A_READER)
    result = run_process(script, "inspect", int8_folder, *arguments, transformers=True)
    assert (result.stderr, result.returncode) == ("", 141)


@pytest.mark.slow
@pytest.mark.parametrize("argument", ["--help", "--version"])
def test_a_reader_of_the_help_that_has_had_enough(argument: str) -> None:
    result = run_python(WITHOUT_A_READER, argument)
    assert (result.stderr, result.returncode) == ("", 141)


def test_help_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(**_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("qgemm_cli.app.app", fail)
    with pytest.raises(SystemExit) as ended:
        qgemm_cli.main()
    assert (ended.value.code, capsys.readouterr().err) == (2, "qgemm: No space left on device\n")


def test_names_that_standard_output_has_no_letters_for(monkeypatch: pytest.MonkeyPatch, int8_folder: Path) -> None:
    folder = int8_folder.with_name("\u91cf\u5316")
    folder.symlink_to(int8_folder)
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    app(["compare", str(int8_folder), str(folder)], standalone_mode=False)
    sys.stdout.flush()
    assert rb"\u91cf\u5316" in written.getvalue()


def test_an_error_is_one_line_and_debug_shows_where(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fail_with(monkeypatch, RuntimeError("CUDA error\nlong \x1b[2J story"))
    result = run("inspect", tmp_path, exit_code=2)
    last = result.stderr.splitlines()[-1]
    assert last == r"qgemm: RuntimeError: CUDA error long \x1b[2J story (--debug shows where)"
    assert "Traceback" in run("inspect", tmp_path, "--debug", exit_code=2).stderr


def test_a_mistaken_option_is_exit_code_2(tmp_path: Path) -> None:
    assert "No such option" in run("inspect", tmp_path, "--nonsense", exit_code=2).stderr
    assert "neither a folder" in run_failing("inspect", tmp_path / "nowhere", "--json")


def test_an_empty_name_is_not_the_current_folder(float_folder: Path, int8_folder: Path) -> None:
    for command in (("quantize", float_folder, ""), ("convert", int8_folder, "", "--to", "qgemm")):
        assert "the destination's name is empty" in run(*command, exit_code=2).stderr


def test_colours_and_width_of_a_terminal(int8_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "40")
    narrow = run("inspect", int8_folder).stdout
    assert "\x1b[1m" in narrow
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.delenv("FORCE_COLOR")
    plain = run("inspect", int8_folder).stdout
    assert "\x1b" not in plain
    assert "model.layers.{0..1}.post_attention_layernorm" in plain  # not cut: a pipe has no width


def test_names_are_safe_to_show() -> None:
    assert printable("a\x00b\u202ec") == r"a\x00b\u202ec"
    assert printable("a" * 10 + "b" * 10, limit=6) == "aaa...bbb"
