"""Where the ``gemmule`` script begins: importing it imports nothing that takes long.

Ctrl-C ends the process without a word until a command runs, and again once it has ended: imports
and the interpreter's end are no place for an exception.
"""

from __future__ import annotations

import signal
import sys


def quiet() -> None:
    """Let Ctrl-C end the process, unless whoever started it had the signal ignored."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def main() -> None:
    """Run the command line and leave the process with its exit code.

    Without the extra ``lab`` all but ``gemmule doctor`` say in one line how to install it.
    """
    quiet()
    try:
        from gemmule_lab.cli import run
    except ModuleNotFoundError as error:
        sys.exit(_without(error.name))
    code = run()
    quiet()
    sys.exit(code)


def _without(package: str | None) -> int | str:
    """Return how a process ends in which the command line's packages are missing."""
    if sys.argv[1:] == ["doctor"]:
        from gemmule_lab.doctor import in_plain_words

        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # whoever reads the words may have enough
        return in_plain_words()
    from gemmule.errors import INSTALL

    return (
        f"gemmule: the command line needs {package}, which is not installed: {INSTALL['lab']}. "
        "`gemmule doctor` works without it."
    )
