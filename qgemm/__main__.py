"""``python -m qgemm``: the ``qgemm`` command, implemented in ``qgemm_cli``."""

from qgemm_cli import main

main()
