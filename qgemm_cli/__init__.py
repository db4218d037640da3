"""The command ``qgemm``: ``main`` runs it.

A package beside ``qgemm``, because importing anything below ``qgemm`` imports PyTorch, which takes seconds: ``qgemm
--help``, a mistyped option and ``qgemm --version`` don't wait for that. ``app.py`` has the options and the help of
every command and imports no PyTorch; ``commands/`` has what each of them does, imported when it runs.
"""

import atexit
import gc
import sys


def main() -> None:
    """Runs the command line in ``sys.argv`` and exits: 0 fine, 1 problems found, 2 it couldn't, 130 interrupted."""
    try:
        from qgemm_cli.app import app
        from qgemm_cli.errors import PIPE_CLOSED
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in ("typer", "rich", "click"):
            raise
        print(f'The qgemm command needs {error.name}: pip install "typer>=0.15" "rich>=13"', file=sys.stderr)
        sys.exit(2)
    atexit.register(_leave_garbage)
    try:
        app(prog_name="qgemm")
    except OSError as error:  # outside of every command: the help can't be written
        print(f"qgemm: {error.strerror or error}", file=sys.stderr)
        sys.exit(2)
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # Typer and Rich end with 1, which stands for problems found
            sys.exit(PIPE_CLOSED)
        raise


def _leave_garbage() -> None:
    """Python looks for garbage at its end: a second, among all that PyTorch and transformers have made.

    Since 3.9 Triton's own classes are nanobind's, which lists on stderr what is left of them: there Python looks once
    instead of twice, half a second less.
    """
    triton = sys.modules.get("triton._C.libtriton")
    if triton is not None and type(triton.ir.attribute).__module__ == "nanobind":
        gc.disable()
    else:
        gc.freeze()
