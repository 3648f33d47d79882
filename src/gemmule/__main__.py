"""The ``gemmule`` command, also ``python -m gemmule``; the package gemmule_lab does its work."""

from __future__ import annotations

import sys
from typing import NoReturn

from gemmule.errors import INSTALL


def main() -> NoReturn:
    """Run the command line; without the extra ``lab`` say in one line how to install it."""
    try:
        from gemmule_lab.cli import main as lab
    except ModuleNotFoundError as error:
        sys.exit(
            f"gemmule: the command line needs {error.name}, which is not installed: "
            f"{INSTALL['lab']}"
        )
    lab()


if __name__ == "__main__":
    main()
