"""The figures of the matmul ladder on a CPU: how operands come nearer to the multipliers."""

from __future__ import annotations

from pages.figures.drawing import Figure, drawn, lane, plain


def _product(
    f: Figure, a: list[list[str]], b: list[list[str]], c: list[list[str]], side: float = 16
) -> None:
    """Draw A beside B beside C, each with its name below."""
    left = 40.0
    for name, kinds in (("A", a), ("B", b), ("C", c)):
        f.cells(left, 60, kinds, side=side)
        width = side * len(kinds[0])
        f.text(left + width / 2, 60 + side * len(kinds) + 22, name, anchor="middle")
        left += width + 36


@drawn("As the formula says: a row of A by a column of B", 302, 266)
def triple_loop(f: Figure) -> None:
    """One element of C is a row of A times a column of B; the column is read across the rows of B.

    Nothing is kept: each element of A and B is fetched n times, B a line of memory for each."""
    a, b, c = plain(10, 10), plain(10, 10), plain(10, 10)
    a[3] = ["a"] * 10
    for row in range(10):
        b[row][6] = "bad"
    c[3][6] = "y"
    _product(f, a, b, c)
    f.lines(620, 100, "for i:\n for j:\n  for k:")


@drawn("The other order of the loops: along the rows of B and C", 282, 266)
def loop_order(f: Figure) -> None:
    """One element of A times a row of B is added to a row of C: both are read in order.

    The inner loop has unit steps, so the compiler makes vectors of it."""
    a, b, c = plain(10, 10), plain(10, 10), plain(10, 10)
    a[3][6] = "a"
    b[6], c[3] = ["x"] * 10, ["y"] * 10
    _product(f, a, b, c)
    f.lines(620, 100, "for i:\n for k:\n  for j:")


@drawn("Blocks: a piece of B stays in the cache while rows of A pass", 302, 266)
def cache_blocks(f: Figure) -> None:
    """A block of B, 256 by 512, fits the second-level cache; every row of A meets it there.

    B comes from memory once, not once for each row of A; C comes and goes once for each block."""
    a, b, c = plain(10, 10), plain(10, 10), plain(10, 10)
    for row in range(10):
        for column in range(4, 8):
            a[row][column] = "a"
            c[row][column] = "y"
    for row in range(4, 8):
        for column in range(4, 8):
            b[row][column] = "shared"
    _product(f, a, b, c)
    f.frame(40 + 196 + 64, 60 + 64, 64, 64)
    f.lines(600, 100, "the block:\nin the cache")


@drawn("Packed, and a tile of sums in registers", 326, 290)
def packed(f: Figure) -> None:
    """Strips of A, 12 rows high, and of B, two vectors wide, are copied so that they are read in
    order; 24 vectors of sums stay in registers.

    For each step along the sum: two loads of B and twelve broadcasts of A feed 24 multiply-adds.
    Copying converts halves and integers, so that one kernel serves them all."""
    f.cells(60, 70, [["a" if column == 3 else "mute" for column in range(8)] for _ in range(12)],
            side=15)  # fmt: skip
    f.soft(120, 268, "a strip of A, 12 rows", "middle")
    f.frame(60 + 45, 70, 15, 180)
    f.cells(250, 70, [["x" if row == 3 else "mute"] * 4 for row in range(12)], side=15)
    f.soft(280, 268, "of B", "middle")
    f.frame(250, 70 + 45, 60, 15)
    f.arrow(324, 160, 372, 160)
    for row in range(12):
        for vector in range(2):
            f.box(380 + 84 * vector, 70 + 15 * row, 82, 14, "y")
    f.soft(464, 268, "24 registers of sums", "middle")
    f.lines(570, 110, "12 x 32 floats:\n8.7 multiply-adds\nfor each number\nthat is loaded")


@drawn("Packed, by threads: each owns whole blocks of C", 302, 266)
def packed_threads(f: Figure) -> None:
    """C is cut into blocks, each of which one thread computes, packing what it needs of A and B.

    Nothing is shared, so nobody waits; a piece of A or B that two threads need is packed twice."""
    c = [[lane((row // 5) * 2 + column // 5) for column in range(10)] for row in range(10)]
    a = [[lane(0) if row < 5 else lane(2)] * 10 for row in range(10)]
    b = [[lane(0) if column < 5 else lane(1) for column in range(10)] for _ in range(10)]
    _product(f, a, b, c)
    for row in range(2):
        for column in range(2):
            f.frame(432 + 80 * column, 60 + 80 * row, 80, 80)
    f.lines(620, 100, "four blocks,\nfour threads")


@drawn("Few columns: each weight is read once for all of them", 292, 276)
def few_columns(f: Figure) -> None:
    """Four rows of A, a quarter of a share apart, meet the same four columns: sixteen sums stay in
    registers, and each weight is widened once.

    Up to 4 columns the memory sets the time, which is that of one vector."""
    kinds = plain(12, 12)
    for row in (0, 3, 6, 9):
        kinds[row] = ["mute"] * 3 + [lane(row // 3)] * 4 + ["mute"] * 5
        f.frame(60 + 48, 60 + 16 * row, 64, 16)
    f.cells(60, 60, kinds, side=16)
    f.text(48, 160, "A", anchor="end")
    for row in (0, 3, 6, 9):
        f.frame(60 + 48, 60 + 16 * row, 64, 16)
    f.cells(310, 60, [["x" if 3 <= row < 7 else "mute"] * 4 for row in range(12)], side=16)
    f.frame(310, 60 + 48, 64, 64)
    f.text(390, 160, "B, 4 columns")
    f.arrow(494, 156, 526, 156)
    f.cells(540, 120, [[lane(row)] * 4 for row in range(4)], side=18)
    f.soft(576, 212, "16 sums", "middle")


@drawn("Tile registers: 16 by 16 sums, 32 terms an instruction", 312, 276)
def tile_products(f: Figure) -> None:
    """A tile of 16 rows by 32 terms times one of 32 terms by 16 columns, summed into a tile of
    float32; four such sums at once.

    A float16 is the sum of two bfloat16, exactly; so halves of that kind take four products."""
    for row in range(2):
        f.box(60, 70 + 84 * row, 120, 80, "a", "16 x 32")
        f.box(376 + 84, 0 + 70 + 84 * row, 80, 80, "y", "16 x 16")
        f.box(376, 70 + 84 * row, 80, 80, "y", "16 x 16")
    f.text(120, 252, "two tiles of A", anchor="middle")
    for column in range(2):
        f.box(212 + 64 * column, 90, 60, 120, "x", "32 x 16", size=13)
    f.text(276, 252, "two of B", anchor="middle")
    f.text(458, 252, "four of sums", anchor="middle")
    f.lines(564, 110, "one instruction:\n16 x 16 x 32\nmultiply-adds\nin bfloat16")
