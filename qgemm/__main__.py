"""``python -m qgemm``: the command ``qgemm``, which ``qgemm_cli`` has."""

from qgemm_cli import main

main()
