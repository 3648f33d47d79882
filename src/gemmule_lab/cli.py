"""The ``gemmule`` command. The folder `gemmule_lab.commands` is the list of its commands.

A module ``<name>.py`` there with a module-level ``COMMAND`` is the command ``gemmule <name>``;
nothing else names it. Command modules import only click at the top, and their work when it is asked
for, so that ``gemmule --help`` stays quick.

Exit codes: 0 success, 1 a result was wrong or a part that must work does not, 2 a mistake of the
user. Errors are one line on standard error; ``--debug`` shows the traceback instead.
"""

from __future__ import annotations

import _thread
import difflib
import importlib
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from gemmule.errors import INSTALL

_FOLDER = Path(__file__).parent / "commands"
# What were commands, and the modules that they are now: they concern this package's own evidence.
TOOLS = {
    "counters": "counters",
    "crosscheck": "counters.crosscheck",
    "extremes": "extremes",
    "sanitize": "sanitizer",
}
USER_ERRORS = (ValueError, TypeError, OSError, MemoryError, RuntimeError, ImportError)


# The sections of the commands in ``gemmule --help``, in their order.
SECTIONS = {
    "use": "Use: multiply, quantise, compile ahead",
    "measure": "Measure: speed, accuracy, what others give",
    "maintain": "Maintain: check this machine, tune, judge the kernels",
}
EPILOG = """Every command has --json. Completion of commands, options and rungs' names: in ~/.bashrc

\b
eval "$(_GEMMULE_COMPLETE=bash_source gemmule)"

(zsh_source for zsh; for fish: _GEMMULE_COMPLETE=fish_source gemmule | source)."""
SETTINGS = {"help_option_names": ["-h", "--help"]}


class WrongResultError(Exception):
    """A command found a wrong result, or a part that must work does not: exit code 1.

    found: what the command would return, for ``--json``.
    """

    def __init__(self, message: str, found: Any = None) -> None:
        super().__init__(message)
        self.found = found


class SectionedCommand(click.Command):
    """A command that stands in a section of the list of commands."""

    def __init__(self, *given: Any, section: str, **more: Any) -> None:
        super().__init__(*given, **more)
        self.section = section


def tool_sentence(what: str, module: str) -> str:
    """Return what to do where a command line asks for a tool of the repository."""
    return (
        f"{what} is a tool of gemmule's repository. In a checkout of it: "
        f"PYTHONPATH=tools python -m {module} --help"
    )


class CommandFolder(click.Group):
    """A click group whose commands are the modules of the ``commands`` folder."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the modules in the folder."""
        return sorted(path.stem for path in _FOLDER.glob("[!_]*.py"))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import one command's module, or return None for an unknown name."""
        if cmd_name not in self.list_commands(ctx):
            return None
        module = importlib.import_module(f"gemmule_lab.commands.{cmd_name}")
        command: click.Command = module.COMMAND
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands section by section."""
        found = [self.get_command(ctx, name) for name in self.list_commands(ctx)]
        for section, title in SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl(
                    [
                        (one.name or "", one.get_short_help_str())
                        for one in found
                        if isinstance(one, SectionedCommand) and one.section == section
                    ]
                )

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Resolve as click does, and list the commands when there is none of that name."""
        if args and args[0] in TOOLS:
            raise click.UsageError(tool_sentence(f"gemmule {args[0]}", TOOLS[args[0]]), ctx)
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            known = self.list_commands(ctx)
            near = difflib.get_close_matches(args[0], known, 1, cutoff=0.5) if args else []
            meant = f"Did you mean {near[0]}?" if near else f"There are: {', '.join(known)}."
            first = f"No such command {args[0]!r}." if args else error.message
            raise click.UsageError(f"{first} {meant}", ctx) from None


@click.group(cls=CommandFolder, epilog=EPILOG, context_settings=SETTINGS)
@click.version_option(package_name="gemmule", prog_name="gemmule")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
@click.option("-v", "--verbose", is_flag=True, help="Log each plan: the rung chosen, and why.")
def cli(debug: bool, verbose: bool) -> None:
    """Multiply matrices with vectors and matrices, and see how fast and how right it is."""
    if verbose:
        import logging

        logging.basicConfig(format="%(name)s: %(message)s", stream=sys.stderr)
        logging.getLogger("gemmule").setLevel(logging.DEBUG)


def run(
    arguments: list[str] | None = None, command: click.Command = cli, name: str = "gemmule"
) -> int:
    """Run a command over `arguments` (default ``sys.argv``) and return the exit code."""
    given = sys.argv[1:] if arguments is None else arguments
    try:
        with warnings.catch_warnings(), _interrupts_that_arrive():
            warnings.showwarning = _show_warning
            returned: Any = command.main(args=given, prog_name=name, standalone_mode=False)
    except click.exceptions.Exit as leaving:
        return leaving.exit_code
    except (click.Abort, KeyboardInterrupt):
        _say("stopped.")
        return 130
    except BrokenPipeError:  # the reader of a pipe has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return 2
    except click.ClickException as error:
        more = ""
        if isinstance(error, click.NoSuchOption) and error.ctx and not error.possibilities:
            more = f" {error.ctx.command_path} --help lists them."
        _say(error.format_message() + more)
        return 2
    except WrongResultError as error:
        _say(str(error))
        return 1
    except USER_ERRORS as error:
        if _debug_asked(given):
            raise
        _say(_in_one_line(error))
        return 2
    return returned if type(returned) is int else 0


@contextmanager
def _interrupts_that_arrive() -> Iterator[None]:
    """Send Ctrl-C again where it came in a callback or a destructor, which swallow exceptions.

    Compiling a kernel is full of both.
    """
    before = sys.unraisablehook
    waiting: list[threading.Timer] = []

    def again(event: Any) -> None:
        if not isinstance(event.exc_value, KeyboardInterrupt):
            before(event)
            return
        # Not at once: what is raised in this hook is swallowed as well.
        waiting.append(threading.Timer(0.01, _thread.interrupt_main))
        waiting[-1].daemon = True
        waiting[-1].start()

    sys.unraisablehook = again
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        sys.unraisablehook = before
        for timer in waiting:
            timer.cancel()


def _debug_asked(arguments: list[str]) -> bool:
    """Whether ``--debug`` stands before the command's name."""
    for argument in arguments:
        if not argument.startswith("-"):
            return False
        if argument == "--debug":
            return True
    return False


def _in_one_line(error: BaseException) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name in ("torch", "transformers"):
        return f"this needs {error.name}, which is not installed: {INSTALL['serve']}."
    if isinstance(error, MemoryError) and not str(error):
        return "out of memory."
    if isinstance(error, OSError) and error.errno is not None and error.strerror:
        return f"{error.filename}: {error.strerror}." if error.filename else f"{error.strerror}."
    return " ".join(str(error).split()) or type(error).__name__


def _show_warning(message: Any, *_: Any, **__: Any) -> None:
    _say(f"note: {message}")


def _say(text: str) -> None:
    click.echo(f"gemmule: {text}", err=True)
