"""A table for a terminal of any width: columns where they fit, else a few lines for each row."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from gemmule_lab.report.tables import TableData

WORDS_WIDTH = 14  # a column of words takes at least so much; longer ones are wrapped
LONGEST_WORD = 28  # and so much for a longer word, such as the name of a rung; beyond, it is cut
BETWEEN = 3  # characters from column to column


@dataclass(frozen=True, slots=True)
class Fitted:
    """What rich prints of a table, knowing the width when it prints."""

    data: TableData

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield columns, or lines where those do not fit."""
        columns = range(len(self.data.header))
        widths = [self._least(column) for column in columns]
        spare = options.max_width - sum(widths) - BETWEEN * len(widths) - 1
        if spare >= 0:
            for column in columns:  # what is left goes to those that would like more, in turn
                more = min(spare, max(map(len, self._texts(column))) - widths[column])
                widths[column], spare = widths[column] + more, spare - more
            yield self._columns(widths)
            return
        yield Text(self.data.title, style="italic")
        for index, row in enumerate(self.data.rows):
            yield from self._lines(row, best=index in self.data.best)

    def _texts(self, column: int) -> list[str]:
        return [self.data.header[column], *(row[column] for row in self.data.rows)]

    def _least(self, column: int) -> int:
        """Return the characters that a column needs: its numbers whole, its words to be read."""
        title, *cells = self._texts(column)
        longest = max(map(len, cells), default=0)
        if not self.data.numeric[column]:
            words = (len(word) for cell in cells for word in cell.split())
            longest = max(min(longest, WORDS_WIDTH), min(max(words, default=0), LONGEST_WORD))
        return max(longest, *map(len, title.split()), 0)

    def _columns(self, widths: list[int]) -> Table:
        data = self.data
        table = Table(title=Text(data.title), title_justify="left", row_styles=["", "dim"])
        for name, numeric, width in zip(data.header, data.numeric, widths, strict=True):
            table.add_column(
                Text(name), justify="right" if numeric else "left", overflow="fold", width=width
            )
        for index, row in enumerate(data.rows):
            style = "bold green" if index in data.best else None
            table.add_row(*(Text(cell) for cell in row), style=style)
        return table

    def _lines(self, row: tuple[str, ...], *, best: bool) -> RenderResult:
        """Yield the first cell of a row, and below it each other with its column's name."""
        head, *rest = zip(self.data.header, row, strict=True)
        if head[1]:  # a group of rows tells it once
            yield Text(head[1], style="bold green" if best else "bold")
        told = Text("; ").join(
            Text.assemble((f"{name} ", "dim"), cell) for name, cell in rest if cell
        )
        yield Padding(told, (0, 0, 0, 2))
