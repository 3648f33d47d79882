"""The figures of the vecmat ladder on a CPU: sums across the way in which the matrix lies."""

from __future__ import annotations

from pages.figures.drawing import Figure, drawn, lane, memory, plain


def _matrix(f: Figure, kinds: list[list[str]], top: float = 56) -> None:
    """Draw x before a matrix, and y below it."""
    rows, columns = len(kinds), len(kinds[0])
    f.cells(60, top, plain(rows, 1, "x"), side=20)
    f.text(50, top + 10 * rows + 5, "x", anchor="end")
    f.cells(96, top, kinds, side=20)
    f.cells(96, top + 20 * rows + 14, plain(1, columns, "y"), side=20)
    f.text(86, top + 20 * rows + 30, "y", anchor="end")


@drawn("Down a column: a new line of memory for every element", 318, 282)
def scalar_loop(f: Figure) -> None:
    """One column of a row-major matrix is walked; of each line of 64 bytes one element is used.

    Sixteen floats come for each one that is used, unless the cache still holds them at the next."""
    kinds = plain(8, 16)
    for row in range(8):
        kinds[row] = ["mute"] * 4 + ["bad"] * 2 + ["a"] + ["bad"] * 5 + ["mute"] * 4
    _matrix(f, kinds)
    f.arrow(226, 60, 226, 212)
    f.lines(450, 90, "one element of y at a time\n\na line holds 16 floats,\nthis uses one of them")


@drawn("Along the rows: each row is added to all of y", 298, 282)
def axpy_columns(f: Figure) -> None:
    """Row i times x[i] is added to y: the matrix is read in order, but y is loaded and stored once
    for each row.

    Two thirds of what moves between registers and cache is y."""
    kinds = plain(8, 16)
    kinds[2] = ["a"] * 16
    _matrix(f, kinds)
    f.frame(60, 96, 20, 20)
    f.frame(96, 96, 320, 20)
    f.frame(96, 230, 320, 20)
    f.lines(450, 90, "a row:\ny += x[i] * A[i, :]\n\ny comes and goes for each row")


@drawn("Panels: eight rows pass over a slice of y that stays near", 318, 282)
def panels(f: Figure) -> None:
    """A slice of y stays in the first-level cache; eight rows at a time are added to it in one load
    and one store of y.

    The slice is as long as the cache allows: short runs leave the memory's prefetchers cold."""
    kinds = plain(8, 16)
    for row in range(8):
        kinds[row] = ["mute"] * 4 + [lane(row)] * 8 + ["mute"] * 4
    _matrix(f, kinds)
    f.frame(176, 56, 160, 160)
    f.frame(176, 230, 160, 20)
    f.lines(450, 90, "8 multiply-adds\nfor one load and\none store of y")


@drawn("Panels by threads: each owns a share of y", 298, 282)
def panel_threads(f: Figure) -> None:
    """Each thread takes some columns of the matrix and the results below them.

    Nothing is shared and nothing is added at the end; a short y leaves little for each."""
    _matrix(f, [[lane(column // 4) for column in range(16)] for _ in range(8)])
    for thread in range(4):
        f.frame(96 + 80 * thread, 230, 80, 20)
    f.lines(450, 90, "four threads\n\neach reads a piece\nof every row")


@drawn("Split: each thread takes some rows, and has a y of its own", 318, 282)
def split_columns(f: Figure) -> None:
    """Each thread sums whole rows into a y of its own; the four are added at the end.

    Rows are read from end to end, which memory likes better than pieces of them; the sum at the end
    is worth it where y is short."""
    kinds = [[lane(row // 2)] * 12 for row in range(8)]
    f.cells(60, 56, plain(8, 1, "x"), side=20)
    f.text(50, 142, "x", anchor="end")
    f.cells(96, 56, kinds, side=20)
    for thread in range(4):
        f.arrow(344, 76 + 40 * thread, 376, 76 + 40 * thread)
        f.cells(380, 66 + 40 * thread, [[lane(thread)] * 12], side=20)
    f.soft(500, 54, "a y for each thread", "middle")
    f.arrow(500, 208, 500, 232)
    f.cells(380, 236, plain(1, 12, "y"), side=20)
    f.text(634, 252, "y")


@drawn("Four stretches of a share, each read in order", 292, 256)
def prefetched_columns(f: Figure) -> None:
    """A thread's share of the rows as it lies in memory: four rows at work, a quarter of the share
    apart, and lines 3 KiB ahead of each asked for.

    Four rows share each load and store of y; each is part of a stretch that is read in order."""
    quarter = ["l0"] * 3 + ["mute"] * 5
    memory(f, 130, 90, quarter * 4, side=19, label="a share")
    for start in range(0, 32, 8):
        f.frame(130 + 19 * (start + 2), 90, 19, 19)
        f.arrow(130 + 19 * (start + 3.2), 124, 130 + 19 * (start + 6), 124)
        f.soft(130 + 19 * (start + 4), 146, "ahead", "middle")
    f.bracket(130, 130 + 8 * 19, 164, "a quarter of the rows")
    f.soft(130 + 19 * 2.5, 80, "now", "middle")
