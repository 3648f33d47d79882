"""The figures of the matvec ladder up to the rungs that share a row: products, threads, lanes."""

from __future__ import annotations

from pages.figures.drawing import LANES, Figure, lane, memory, plain, striped


def product() -> Figure:
    """Draw y = A x."""
    f = Figure(
        "y = A x: one element of y is one row of A times x",
        "A row of A and the whole of x make one element of y. Every element of A is used once.",
        284,
    )
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
    f.lines(
        500,
        92,
        "2 m n operations",
        "on m n + n + m numbers:",
        "two for each element of A.",
        "",
        "So the bytes of A",
        "set the time.",
        size=15,
    )
    return f


def thread_per_row() -> Figure:
    """Draw naive access: neighbouring threads a row apart."""
    f = Figure(
        "A thread walks a row: neighbouring threads read a whole row apart",
        "Each row of A belongs to a thread. At one moment the threads of a warp read one column, "
        "which lies scattered in memory.",
        336,
    )
    f.cells(110, 52, striped(6, 18), side=22)
    for row in range(6):
        f.text(100, 52 + row * 22 + 16, f"thread {row}", kind="soft", anchor="end", size=14)
    f.frame(110 + 4 * 22, 50, 22, 6 * 22 + 4)
    f.lines(
        524,
        74,
        "now: all threads",
        "of the warp read",
        "column 4 of",
        "their own row",
    )
    strip = [lane(row) if column == 1 else "mute" for row in range(6) for column in range(5)]
    memory(f, 110, 222, strip, side=21)
    for row in range(6):
        f.frame(110 + (row * 5 + 1) * 21, 221, 21, 23)
    f.bracket(110 + 21, 110 + 6 * 21, 247, "n elements apart")
    f.note(
        302,
        "A warp's 32 reads touch 32 sectors of 32 bytes; each sector waits in the L1 for "
        "the thread's next reads, and is fetched again where it was pushed out before.",
    )
    return f


def shared_x() -> Figure:
    """Draw x staged by phases."""
    f = Figure(
        "x by phases through shared memory",
        "In each phase the block copies as many values of x as it has threads; after a barrier "
        "every thread goes on along its row with them.",
        330,
    )
    kinds = ["x" if 8 <= i < 16 else "mute" for i in range(28)]
    memory(f, 120, 54, kinds, side=21, label="x")
    f.bracket(120 + 8 * 21, 120 + 16 * 21, 79)
    f.arrow(372, 90, 372, 122)
    f.text(388, 112, "phase 2: one value a thread, then a barrier", kind="soft", size=14)
    memory(f, 288, 124, ["shared"] * 8, side=21, label="shared memory")
    for row in range(4):
        f.arrow(330 + row * 28, 147, 330 + row * 28, 182)
    f.text(470, 170, "every thread reads every value", kind="soft", size=14)
    a = [[lane(row) if 8 <= column < 16 else "mute" for column in range(28)] for row in range(4)]
    f.cells(120, 186, a, side=21)
    for row in range(4):
        f.text(110, 201 + row * 21, f"row {row}", kind="soft", anchor="end", size=14)
    f.note(
        298,
        "x is fetched once a block, not once a thread. But the threads of a warp ask for "
        "the same value of x at the same time, which is one broadcast anyway.",
    )
    return f


def warp_per_row() -> Figure:
    """Draw the lanes of a warp along a row, and the tree of shuffles."""
    f = Figure(
        "A warp shares a row: neighbours read neighbours, then a tree of shuffles",
        "The lanes of a warp take neighbouring elements of one row. Their sums meet in exchanges "
        "at distance 4, 2 and 1 (16 to 1 for 32 lanes).",
        372,
    )
    memory(
        f,
        90,
        54,
        [lane(i) for i in range(31)],
        side=20,
        label="row",
        labels=[str(i % LANES) for i in range(31)],
    )
    for turn, label in enumerate(("one request", "the next", "the next")):
        left = 90 + turn * LANES * 20
        f.bracket(left + 2, left + LANES * 20 - 2, 78, label)
    f.note(
        130,
        "drawn with 8 lanes; a warp has 32, and 32 halves are 64 bytes: 2 sectors, all used",
    )
    _tree(f, 150)
    return f


def _tree(f: Figure, top: float) -> None:
    """Draw eight sums meeting in three exchanges; every lane ends with the total."""
    names = ("each lane's sum", "+ partner 4 away", "+ partner 2 away", "+ partner 1 away")
    for level, (name, distance) in enumerate(zip(names, (0, 4, 2, 1), strict=True)):
        y = top + level * 52
        f.text(150, y + 19, name, kind="soft", anchor="end", size=14)
        for i in range(LANES):
            kind = lane(i) if level == 0 else "y" if level == 3 else "mute"
            f.box(166 + i * 66, y, 46, 28, kind, str(i) if level < 3 else "y", size=13)
            if level:
                partner = i ^ distance
                f.line(189 + i * 66, y - 24, 189 + i * 66, y, kind="line")
                f.line(189 + partner * 66, y - 24, 189 + i * 66, y, kind="line")
    f.text(
        20,
        top + 214,
        "no shared memory, no barrier: a lane reads its partner's register",
        kind="soft",
        size=14,
    )


def p_threads() -> Figure:
    """Draw one warp over 1, 2 and 4 rows."""
    f = Figure(
        "p lanes a row: a warp carries 32 / p rows",
        "The same warp with p of 8, 4 and 2 lanes to a row covers one, two and four rows.",
        250,
    )
    for panel, p in enumerate((8, 4, 2)):
        left = 20 + panel * 248
        rows = LANES // p
        kinds = [
            [lane(row * p + column % p) if row < rows else "mute" for column in range(12)]
            for row in range(5)
        ]
        f.text(left, 72, f"p = {p}", bold=True)
        f.text(left + 62, 72, f"{rows} row{'s' if rows > 1 else ''} a warp", kind="soft", size=14)
        labels = {
            (row, column): str(row * p + column % p) for row in range(rows) for column in range(12)
        }
        f.cells(left, 86, kinds, side=18, labels=labels, size=11)
    f.note(
        206,
        "drawn with warps of 8 lanes. Small p: each request touches several rows, one "
        "sector of each or more; large p: short rows leave lanes without work.",
    )
    return f


def p_threads_vector() -> Figure:
    """Draw scalar and 16-byte loads."""
    f = Figure(
        "16-byte loads: eight halves an instruction",
        "A lane takes one element a load, or eight neighbouring halves at once.",
        268,
    )
    f.text(20, 66, "one half a load: 32 lanes fetch 64 bytes", kind="soft", size=14)
    f.cells(20, 76, [[lane(i) for i in range(32)]], side=22)
    f.text(20, 138, "eight halves a load: 32 lanes fetch 512 bytes", kind="soft", size=14)
    f.cells(20, 148, [[lane(i // 8) for i in range(32)]], side=22)
    for i in range(4):
        f.bracket(22 + i * 176, 20 + (i + 1) * 176 - 4, 174, f"lane {i}: 16 bytes")
    f.note(
        226,
        "The same bytes with an eighth of the requests. Addresses must be multiples of 16: "
        "rows of odd length are read one by one.",
    )
    return f


def warp_vector() -> Figure:
    """Draw loads one after another, and four under way at once."""
    f = Figure(
        "Several loads under way: the latency is paid once for four",
        "Above, each load waits before it is used. Below, four loads are issued before the first "
        "is used.",
        278,
    )
    f.text(20, 66, "one load at a time", kind="soft", size=14)
    for i in range(3):
        left = 20 + i * 216
        f.box(left, 76, 34, 26, lane(i), "load", size=12)
        f.box(left + 34, 76, 140, 26, "mute", "wait, about 0.7 us")
        f.box(left + 174, 76, 34, 26, "y", "use", size=12)
    f.text(20, 144, "four at a time (loads = 4)", kind="soft", size=14)
    for i in range(4):
        f.box(20 + i * 36, 154, 34, 26, lane(i), "load", size=12)
        f.box(198 + i * 36, 154, 34, 26, "y", "use", size=12)
    f.box(164, 154, 32, 26, "mute", "wait", size=12)
    f.line(20, 200, 720, 200)
    f.arrow(700, 200, 736, 200)
    f.text(728, 192, "time", kind="soft", anchor="end", size=14)
    f.note(
        236,
        "A matvec is bound by how many bytes are under way (Little's law). The loads also "
        "pass the L1 by: no element of A is read twice.",
    )
    return f


def two_step() -> Figure:
    """Draw a block of p x rows threads, and the slots where its warps meet."""
    f = Figure(
        "Two steps: warps by shuffles, then slots of shared memory",
        "A block of p by rows threads. Each warp sums its share of a row and writes one slot; the "
        "first warp of the row adds the slots.",
        334,
    )
    f.bracket(112, 472, 72, "", up=True)
    f.text(292, 60, "p = 128 threads: 4 warps", kind="soft", anchor="middle", size=14)
    f.text(530, 60, "slots", kind="soft", size=14)
    f.text(694, 60, "y", kind="soft", size=14)
    for row in range(4):
        y = 80 + row * 42
        f.text(100, y + 21, f"row {row}", kind="soft", anchor="end", size=14)
        for warp in range(4):
            f.box(112 + warp * 92, y, 84, 32, lane(row), f"warp {row * 4 + warp}", size=13)
        f.arrow(480, y + 16, 506, y + 16)
        f.cells(510, y + 5, [["shared"] * 4], side=22)
        f.arrow(604, y + 16, 676, y + 16)
        f.box(682, y + 4, 30, 24, "y", str(row), size=13)
    f.text(640, 264, "warp 0 of each row", kind="soft", anchor="middle", size=14)
    f.note(
        292,
        "The m x p layout: blocks of (p, rows) threads; threadIdx.y names the row, "
        "threadIdx.x the thread on it. A slot for each (row, warp), and one barrier before "
        "they are read.",
    )
    return f


def vector_shared_x() -> Figure:
    """Draw a tile of x that all rows of a block share."""
    f = Figure(
        "A tile of x in shared memory for all rows of the block",
        "The block copies 2048 values of x; its four rows multiply from there, 16 bytes at a time.",
        312,
    )
    kinds = ["x" if 7 <= i < 14 else "mute" for i in range(28)]
    memory(f, 120, 54, kinds, side=21, label="x")
    f.text(340, 97, "the next tile: 2048 values", kind="soft", anchor="middle", size=14)
    f.arrow(340, 104, 340, 126)
    f.box(200, 128, 280, 30, "shared", "tile of x, shared memory")
    for row in range(4):
        f.arrow(235 + row * 70, 158, 235 + row * 70, 182)
        f.text(110, 200 + row * 22, f"row {row}", kind="soft", anchor="end", size=14)
    a = [[lane(row) if 7 <= column < 14 else "mute" for column in range(28)] for row in range(4)]
    f.cells(120, 184, a, side=21)
    f.text(500, 148, "barrier before and after", kind="soft", size=14)
    f.note(296, "Every tile costs two barriers, at which the loads of A run dry.")
    return f


def y_blocks() -> Figure:
    """Draw a row cut into sections for several blocks."""
    f = Figure(
        "y blocks share a row; a second kernel adds the sections",
        "Four blocks sum a quarter of the row each into the workspace; a second kernel adds the "
        "four partial sums in order.",
        262,
    )
    f.text(20, 86, "a row", kind="soft", size=14)
    for s in range(4):
        f.box(80 + s * 164, 66, 160, 30, lane(s), f"section {s}: block {s}")
        f.arrow(160 + s * 164, 98, 298 + s * 52, 138)
    f.text(264, 160, "workspace", kind="soft", anchor="end", size=14)
    for s in range(4):
        f.box(276 + s * 52, 140, 48, 30, lane(s), f"sum {s}", size=12)
    f.arrow(484, 155, 560, 155)
    f.text(522, 146, "kernel 2", kind="soft", anchor="middle", size=14)
    f.box(566, 140, 60, 30, "y", "y")
    f.note(
        206,
        "More blocks for few rows, at the price of a second launch and a trip through "
        "memory. The order of the additions is fixed: the same bits on every run.",
    )
    return f
