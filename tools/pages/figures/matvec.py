"""The figures of the matvec ladder up to the rungs that share a row: products, threads, lanes."""

from __future__ import annotations

from pages.figures.drawing import LANES, Figure, drawn, lane, memory, plain, striped


@drawn("y = A x: one element of y is one row of A times x", 284)
def product(f: Figure) -> None:
    """A row of A and the whole of x make one element of y. Every element of A is used once."""
    a = plain(8, 14)
    a[3] = ["a"] * 14
    f.cells(30, 66, [["y" if r == 3 else "mute"] for r in range(8)], side=22)
    f.text(66, 160, "=", size=22)
    f.cells(96, 66, a, side=22)
    f.text(417, 160, "×", size=22)
    f.cells(446, 56, plain(9, 1, "x"), side=22)
    f.text(30, 266, "y, m")
    f.text(96, 266, "A, m rows of n")
    f.text(446, 274, "x, n", size=14)
    told = (
        "2 m n operations\non m n + n + m numbers:\ntwo for each element of A.\n\n"
        "So the bytes of A\nset the time."
    )
    f.lines(500, 92, told, size=15)


@drawn("A thread walks a row: neighbouring threads read a whole row apart", 336, 302)
def thread_per_row(f: Figure) -> None:
    """Each row of A belongs to a thread. At one moment the threads of a warp read one column,
    which lies scattered in memory.

    A warp's 32 reads touch 32 sectors of 32 bytes; each sector waits in the L1 for the thread's
    next reads, and is fetched again where it was pushed out before."""
    f.cells(110, 52, striped(6, 18), side=22)
    for row in range(6):
        f.soft(100, 52 + row * 22 + 16, f"thread {row}", "end")
    f.frame(110 + 4 * 22, 50, 22, 6 * 22 + 4)
    f.lines(524, 74, "now: all threads\nof the warp read\ncolumn 4 of\ntheir own row", size=15)
    strip = [lane(row) if column == 1 else "mute" for row in range(6) for column in range(5)]
    memory(f, 110, 222, strip, side=21)
    for row in range(6):
        f.frame(110 + (row * 5 + 1) * 21, 221, 21, 23)
    f.bracket(110 + 21, 110 + 6 * 21, 247, "n elements apart")


@drawn("x by phases through shared memory", 330, 298)
def shared_x(f: Figure) -> None:
    """In each phase the block copies as many values of x as it has threads; after a barrier every
    thread goes on along its row with them.

    x is fetched once a block, not once a thread. But the threads of a warp ask for the same value
    of x at the same time, which is one broadcast anyway."""
    kinds = ["x" if 8 <= i < 16 else "mute" for i in range(28)]
    memory(f, 120, 54, kinds, side=21, label="x")
    f.bracket(120 + 8 * 21, 120 + 16 * 21, 79)
    f.arrow(372, 90, 372, 122)
    f.soft(388, 112, "phase 2: one value a thread, then a barrier")
    memory(f, 288, 124, ["shared"] * 8, side=21, label="shared memory")
    for row in range(4):
        f.arrow(330 + row * 28, 147, 330 + row * 28, 182)
    f.soft(470, 170, "every thread reads every value")
    a = [[lane(row) if 8 <= column < 16 else "mute" for column in range(28)] for row in range(4)]
    f.cells(120, 186, a, side=21)
    for row in range(4):
        f.soft(110, 201 + row * 21, f"row {row}", "end")


@drawn("A warp shares a row: neighbours read neighbours, then a tree of shuffles", 372)
def warp_per_row(f: Figure) -> None:
    """The lanes of a warp take neighbouring elements of one row. Their sums meet in exchanges at
    distance 4, 2 and 1 (16 to 1 for 32 lanes)."""
    kinds, names = zip(*((lane(i), str(i % LANES)) for i in range(31)), strict=True)
    memory(f, 90, 54, kinds, side=20, label="row", labels=names)
    for turn, label in enumerate(("one request", "the next", "the next")):
        left = 90 + turn * LANES * 20
        f.bracket(left + 2, left + LANES * 20 - 2, 78, label)
    f.note(
        130, "drawn with 8 lanes; a warp has 32, and 32 halves are 64 bytes: 2 sectors, all used"
    )
    _tree(f, 150)


def _tree(f: Figure, top: float) -> None:
    """Draw eight sums meeting in three exchanges; every lane ends with the total."""
    names = ("each lane's sum", "+ partner 4 away", "+ partner 2 away", "+ partner 1 away")
    for level, (name, distance) in enumerate(zip(names, (0, 4, 2, 1), strict=True)):
        y = top + level * 52
        f.soft(150, y + 19, name, "end")
        for i in range(LANES):
            kind = lane(i) if level == 0 else "y" if level == 3 else "mute"
            f.box(166 + i * 66, y, 46, 28, kind, str(i) if level < 3 else "y", size=13)
            if level:
                partner = i ^ distance
                f.line(189 + i * 66, y - 24, 189 + i * 66, y, kind="line")
                f.line(189 + partner * 66, y - 24, 189 + i * 66, y, kind="line")
    f.soft(20, top + 214, "no shared memory, no barrier: a lane reads its partner's register")


@drawn("p lanes a row: a warp carries 32 / p rows", 250, 206)
def p_threads(f: Figure) -> None:
    """The same warp with p of 8, 4 and 2 lanes to a row covers one, two and four rows.

    drawn with warps of 8 lanes. Small p: each request touches several rows, one sector of each or
    more; large p: short rows leave lanes without work."""
    for panel, p in enumerate((8, 4, 2)):
        left = 20 + panel * 248
        rows = LANES // p
        kinds = [
            [lane(row * p + column % p) if row < rows else "mute" for column in range(12)]
            for row in range(5)
        ]
        f.text(left, 72, f"p = {p}", bold=True)
        f.soft(left + 62, 72, f"{rows} row{'s' if rows > 1 else ''} a warp")
        labels = {
            (row, column): str(row * p + column % p) for row in range(rows) for column in range(12)
        }
        f.cells(left, 86, kinds, side=18, labels=labels, size=11)


@drawn("16-byte loads: eight halves an instruction", 268, 226)
def p_threads_vector(f: Figure) -> None:
    """A lane takes one element a load, or eight neighbouring halves at once.

    The same bytes with an eighth of the requests. Addresses must be multiples of 16: rows of odd
    length are read one by one."""
    f.soft(20, 66, "one half a load: 32 lanes fetch 64 bytes")
    f.cells(20, 76, [[lane(i) for i in range(32)]], side=22)
    f.soft(20, 138, "eight halves a load: 32 lanes fetch 512 bytes")
    f.cells(20, 148, [[lane(i // 8) for i in range(32)]], side=22)
    for i in range(4):
        f.bracket(22 + i * 176, 20 + (i + 1) * 176 - 4, 174, f"lane {i}: 16 bytes")


@drawn("Several loads under way: the latency is paid once for four", 278, 236)
def warp_vector(f: Figure) -> None:
    """Above, each load waits before it is used. Below, four loads are issued before the first is
    used.

    A matvec is bound by how many bytes are under way (Little's law). The loads also pass the L1
    by: no element of A is read twice."""
    f.soft(20, 66, "one load at a time")
    for i in range(3):
        left = 20 + i * 216
        f.box(left, 76, 34, 26, lane(i), "load", size=12)
        f.box(left + 34, 76, 140, 26, "mute", "wait, about 0.7 us")
        f.box(left + 174, 76, 34, 26, "y", "use", size=12)
    f.soft(20, 144, "four at a time (loads = 4)")
    for i in range(4):
        f.box(20 + i * 36, 154, 34, 26, lane(i), "load", size=12)
        f.box(198 + i * 36, 154, 34, 26, "y", "use", size=12)
    f.box(164, 154, 32, 26, "mute", "wait", size=12)
    f.line(20, 200, 720, 200)
    f.arrow(700, 200, 736, 200)
    f.soft(728, 192, "time", "end")


@drawn("Two steps: warps by shuffles, then slots of shared memory", 334, 292)
def two_step(f: Figure) -> None:
    """A block of p by rows threads. Each warp sums its share of a row and writes one slot; the
    first warp of the row adds the slots.

    The m x p layout: blocks of (p, rows) threads; threadIdx.y names the row, threadIdx.x the
    thread on it. A slot for each (row, warp), and one barrier before they are read."""
    f.bracket(112, 472, 72, "", up=True)
    f.soft(292, 60, "p = 128 threads: 4 warps", "middle")
    f.soft(530, 60, "slots")
    f.soft(694, 60, "y")
    for row in range(4):
        y = 80 + row * 42
        f.soft(100, y + 21, f"row {row}", "end")
        for warp in range(4):
            f.box(112 + warp * 92, y, 84, 32, lane(row), f"warp {row * 4 + warp}", size=13)
        f.arrow(480, y + 16, 506, y + 16)
        f.cells(510, y + 5, [["shared"] * 4], side=22)
        f.arrow(604, y + 16, 676, y + 16)
        f.box(682, y + 4, 30, 24, "y", str(row), size=13)
    f.soft(640, 264, "warp 0 of each row", "middle")


@drawn("A tile of x in shared memory for all rows of the block", 312, 296)
def vector_shared_x(f: Figure) -> None:
    """The block copies 2048 values of x; its four rows multiply from there, 16 bytes at a time.

    Every tile costs two barriers, at which the loads of A run dry."""
    kinds = ["x" if 7 <= i < 14 else "mute" for i in range(28)]
    memory(f, 120, 54, kinds, side=21, label="x")
    f.soft(340, 97, "the next tile: 2048 values", "middle")
    f.arrow(340, 104, 340, 126)
    f.box(200, 128, 280, 30, "shared", "tile of x, shared memory")
    for row in range(4):
        f.arrow(235 + row * 70, 158, 235 + row * 70, 182)
        f.soft(110, 200 + row * 22, f"row {row}", "end")
    a = [[lane(row) if 7 <= column < 14 else "mute" for column in range(28)] for row in range(4)]
    f.cells(120, 184, a, side=21)
    f.soft(500, 148, "barrier before and after")


@drawn("y blocks share a row; a second kernel adds the sections", 262, 206)
def y_blocks(f: Figure) -> None:
    """Four blocks sum a quarter of the row each into the workspace; a second kernel adds the four
    partial sums in order.

    More blocks for few rows, at the price of a second launch and a trip through memory. The order
    of the additions is fixed: the same bits on every run."""
    f.soft(20, 86, "a row")
    for s in range(4):
        f.box(80 + s * 164, 66, 160, 30, lane(s), f"section {s}: block {s}")
        f.arrow(160 + s * 164, 98, 298 + s * 52, 138)
    f.soft(264, 160, "workspace", "end")
    for s in range(4):
        f.box(276 + s * 52, 140, 48, 30, lane(s), f"sum {s}", size=12)
    f.arrow(484, 155, 560, 155)
    f.soft(522, 146, "kernel 2", "middle")
    f.box(566, 140, 60, 30, "y", "y")
