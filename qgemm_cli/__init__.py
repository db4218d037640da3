"""The command ``qgemm``: ``main`` runs it.

It is a package beside ``qgemm`` because importing anything below ``qgemm`` imports PyTorch, which takes seconds, and
``qgemm --help``, a mistyped option or ``qgemm --version`` shouldn't wait for that. ``app.py`` has the options and the
help of every command and doesn't import PyTorch; ``commands/`` implements the commands, and is imported when one runs.
"""

import atexit
import gc
import sys


def main() -> None:
    """Runs the command line in ``sys.argv`` and exits: 0 success, 1 problems found, 2 failure, 130 interrupted."""
    try:
        from qgemm_cli.app import app
        from qgemm_cli.errors import PIPE_CLOSED
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in ("typer", "rich", "click"):
            raise
        print(f'The qgemm command needs {error.name}: pip install "typer>=0.15" "rich>=13"', file=sys.stderr)
        sys.exit(2)
    # At its end, Python would collect garbage for a second, among all the objects that PyTorch and transformers made.
    atexit.register(gc.freeze)
    try:
        app(prog_name="qgemm")
    except OSError as error:  # outside of any command: the help can't be written
        print(f"qgemm: {error.strerror or error}", file=sys.stderr)
        sys.exit(2)
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # Typer and Rich would exit with 1, which means problems found
            sys.exit(PIPE_CLOSED)
        raise
