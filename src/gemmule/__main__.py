"""``python -m gemmule`` is the ``gemmule`` command."""

from gemmule.lab.cli import main

main()
