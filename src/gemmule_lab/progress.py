"""What a command is doing, and for how long yet, on a terminal; silence elsewhere.

While a kernel is compiled, which the first products of a process may wait for, that is told too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

import click
from rich import progress as rich_progress
from rich.console import Console
from rich.progress import Progress, ProgressColumn, Task
from rich.text import Text

from gemmule.core.waiting import watched

Item = TypeVar("Item")
_on: ContextVar[Console | None] = ContextVar("the console on which progress is shown", default=None)


class _Compiling(ProgressColumn):
    """Tells what is being compiled now."""

    what = ""

    def render(self, task: Task) -> Text:
        """Return a few words, or none."""
        return Text(f"compiling {self.what}" if self.what else "", style="yellow")


@contextmanager
def _shown(columns: Iterable[ProgressColumn]) -> Iterator[Progress]:
    """Show a line of columns on standard error, if that is a terminal, until the block ends."""
    console, compiling = Console(stderr=True), _Compiling()

    def tell(what: str) -> None:
        compiling.what = what

    shown = Progress(
        *columns, compiling, console=console, transient=True, disable=not console.is_terminal
    )
    token = _on.set(console if console.is_terminal else None)
    try:
        with shown, watched(tell):
            yield shown
    finally:
        _on.reset(token)


def say(text: str) -> None:
    """Print a line on standard error, above what shows the progress."""
    console = _on.get()
    if console is None:
        click.echo(text, err=True)
    else:
        console.print(Text(text))


@contextmanager
def bar() -> Iterator[Progress]:
    """Show a bar for each task that is added, with the time left."""
    names, left = (
        rich_progress.TextColumn("{task.description}", markup=False),
        rich_progress.TextColumn("left"),
    )
    sizes = rich_progress.BarColumn(bar_width=16), rich_progress.MofNCompleteColumn()
    with _shown(
        [
            names,
            *sizes,
            rich_progress.TimeElapsedColumn(),
            left,
            rich_progress.TimeRemainingColumn(),
        ]
    ) as shown:
        yield shown


@contextmanager
def working(words: str) -> Iterator[Callable[[str], None]]:
    """Show what is being done, for as long as it takes; yields what changes the words."""
    with _shown(
        [
            rich_progress.SpinnerColumn(),
            rich_progress.TextColumn("{task.description}", markup=False),
            rich_progress.TimeElapsedColumn(),
        ]
    ) as shown:
        task = shown.add_task(words, total=None)
        yield lambda other: shown.update(task, description=other)


def tracked(items: Iterable[Item], total: int, description: str) -> Iterator[Item]:
    """Yield `items` while a bar shows how many of `total` are done."""
    with bar() as progress:
        task = progress.add_task(description, total=total)
        for item in items:
            yield item
            progress.advance(task)
