"""The figures of the matvec ladder on a CPU: which rows are read, by whom, how far ahead."""

from __future__ import annotations

from pages.figures.drawing import Figure, drawn, lane, memory, plain


def _matrix(f: Figure, kinds: list[list[str]], side: float = 20) -> None:
    """Draw x above a matrix, and y beside it."""
    columns = len(kinds[0])
    f.cells(90, 56, plain(1, columns, "x"), side=side)
    f.text(80, 56 + side * 0.75, "x", anchor="end")
    f.cells(90, 92, kinds, side=side)
    f.text(80, 92 + side * len(kinds) / 2, "A", anchor="end")
    f.cells(106 + columns * side, 92, plain(len(kinds), 1, "y"), side=side)
    f.text(112 + columns * side, 84, "y")


@drawn("One row after another: one stream of memory", 312, 276)
def scalar_loop(f: Figure) -> None:
    """One row of the matrix is walked element by element, with x beside it; the others wait.

    The memory can answer ten requests and more at a time; one row keeps one or two under way."""
    kinds = plain(8, 14)
    kinds[2] = ["a"] * 6 + ["mute"] * 8
    _matrix(f, kinds)
    f.frame(90 + 5 * 20, 92 + 2 * 20, 20, 20)
    f.frame(90 + 5 * 20, 56, 20, 20)
    told = "one multiply-add at a time:\ntotal += A[i, j] * x[j]\n\nstrides are found at run time"
    f.lines(450, 110, told)


@drawn("Four rows at a time: x is loaded once for four products", 292, 276)
def four_rows(f: Figure) -> None:
    """A vector of x meets the same columns of four rows; four running sums, four streams of memory.

    Twelve of sixteen multiply-adds take their weights straight from memory."""
    kinds = plain(8, 14)
    for row in range(4):
        kinds[row] = [lane(row)] * 9 + ["mute"] * 5
        f.frame(90 + 5 * 20, 92 + row * 20, 80, 20)
    _matrix(f, kinds)
    for row in range(4):
        f.frame(90 + 5 * 20, 92 + row * 20, 80, 20)
    f.frame(90 + 5 * 20, 56, 80, 20)
    f.lines(
        450, 110, "a vector of x: one load\nfour rows: four multiply-adds\n\nfour streams under way"
    )


@drawn("Threads claim small shares of the rows, one after another", 292, 276)
def threads(f: Figure) -> None:
    """The rows are cut into more shares than there are threads; whoever is free takes the next.

    A thread that the system does not run takes no share, and nobody waits for it."""
    owners = (0, 1, 0, 1, 1, 0, 1, 1)
    _matrix(f, [[lane(owner)] * 14 for owner in owners])
    f.soft(450, 112, "each strip a share")
    for thread in range(2):
        f.box(450, 128 + 34 * thread, 20, 20, lane(thread))
        f.text(480, 144 + 34 * thread, f"thread {thread}")
    f.lines(450, 212, "thread 0 was away for a while:\nthread 1 took five of eight")


@drawn("Split rows: each thread takes a stretch of every row", 292, 276)
def split_rows(f: Figure) -> None:
    """Two long rows; four threads sum a quarter of each, and one small sum joins the quarters.

    For few long rows: by rows, only two of the four threads would have work."""
    kinds = [[lane(column // 7) for column in range(28)] for _ in range(2)]
    f.cells(40, 60, plain(1, 28, "x"), side=18)
    f.text(552, 74, "x")
    f.cells(40, 90, kinds, side=18)
    f.text(552, 112, "A, two rows")
    for thread in range(4):
        left = 40 + 126 * thread
        f.arrow(left + 63, 130, left + 63, 156)
        f.cells(left + 45, 160, [[lane(thread)] * 2], side=18)
        f.arrow(left + 63, 182, 280 + 6 * thread, 212)
    f.soft(552, 174, "sums of a stretch")
    f.cells(271, 216, plain(1, 2, "y"), side=18)
    f.text(320, 230, "y")


@drawn("Two stretches, half a share apart, each read in order", 292, 256)
def prefetched_rows(f: Figure) -> None:
    """A share of the rows as it lies in memory: one row at work in each half, lines behind each
    already read, lines 3 KiB ahead asked for.

    A processor prefetches best what is read in order, in few places. Four neighbouring rows had
    three quarters of the memory's rate; this has all of it."""
    half = ["l0"] * 6 + ["mute"] * 10
    memory(f, 130, 90, half + half, side=19, label="a share")
    for start in (0, 16):
        f.frame(130 + 19 * (start + 5), 90, 19, 19)
        f.soft(130 + 19 * (start + 5.5), 80, "now", "middle")
        f.arrow(130 + 19 * (start + 6.2), 124, 130 + 19 * (start + 10), 124)
        f.soft(130 + 19 * (start + 8), 144, "3 KiB ahead", "middle")
    f.bracket(130, 130 + 16 * 19, 166, "first half of the rows")
    f.bracket(130 + 16 * 19, 130 + 32 * 19, 166, "second half")
