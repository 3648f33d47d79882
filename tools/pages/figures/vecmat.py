"""The figures of the vecmat ladder: sums across the rows of a matrix stored by rows."""

from __future__ import annotations

from pages.figures.drawing import Figure, drawn, lane, memory, plain


@drawn("y = x A: one element of y is a column of A, but A lies by rows", 300, 292)
def product(f: Figure) -> None:
    """x stands before the rows of A; one column of A times x makes one element of y. The elements
    of a column lie a whole row apart in memory.

    Read by columns this is A transposed times x, with A transposed lying by columns."""
    kinds = plain(7, 14)
    for row in range(7):
        kinds[row][5] = "a"
    f.cells(40, 60, plain(7, 1, "x"), side=24)
    f.cells(86, 60, kinds, side=24)
    f.cells(86, 246, [["y" if c == 5 else "mute" for c in range(14)]], side=24)
    f.arrow(218, 228, 218, 246)
    f.text(52, 250, "x, m", anchor="middle")
    f.text(434, 150, "A, m rows of n")
    f.text(434, 264, "y, n")
    f.lines(560, 90, "neighbouring results\nuse neighbouring\nelements of each row", size=15)


def _columns(f: Figure, x: float, y: float, side: float = 22) -> None:
    """Draw a stored matrix whose columns belong to threads, with the row read now."""
    f.cells(x, y, [[lane(c) for c in range(12)] for _ in range(6)], side=side)
    f.frame(x, y + 2 * side, 12 * side, side)


@drawn("The same kernel over the other order: neighbours read neighbours", 294, 246)
def thread_per_row(f: Figure) -> None:
    """A thread walks down each column of the stored matrix. At one moment a warp reads neighbours
    of one row.

    The kernel takes any strides, so it computes row and column offsets for every element: a_row =
    1 and a_col = n are found at run time."""
    _columns(f, 110, 60)
    f.soft(100, 120, "now", "end")
    f.soft(242, 214, "a thread for each result", "middle")
    told = (
        "each request is one piece of a row:\n64 bytes of halves a warp, all used\n\n"
        "but there are only n threads: 4096 on\n132 x 2048 places, and each has four\n"
        "loads of A on their way at most"
    )
    f.lines(400, 84, told)


@drawn("x by phases through shared memory, a thread for each column", 286, 258)
def shared_x(f: Figure) -> None:
    """The block copies one value of x a thread; then every thread multiplies that stretch of its
    column.

    Here staging x helps, but not because x is fetched less often: a thread has 16 loads of A on
    their way in place of 4."""
    f.cells(60, 60, [["x" if 2 <= r < 5 else "mute"] for r in range(7)], side=22)
    f.text(71, 234, "x", anchor="middle")
    f.arrow(90, 115, 146, 115)
    f.cells(150, 82, [["shared"]] * 3, side=22)
    f.soft(161, 172, "shared", "middle")
    f.arrow(180, 115, 226, 115)
    kinds = [[lane(c) if 2 <= r < 5 else "mute" for c in range(12)] for r in range(7)]
    f.cells(230, 60, kinds, side=22)
    told = (
        "128 rows a phase, between\ntwo barriers; the compiler\nunrolls this loop 16 times,\n"
        "the plain one 4 times"
    )
    f.lines(510, 96, told)


@drawn("A thread per result, coalesced: what is missing is threads", 306, 284)
def col_thread_per_row(f: Figure) -> None:
    """32 threads read 32 neighbours of a row at once. 4096 threads are 32 blocks, for 132
    multiprocessors.

    Sectors are used whole, and yet most of the chip has nothing to do."""
    _columns(f, 40, 60)
    memory(f, 130, 212, ["mute"] * 4 + [lane(i) for i in range(12)] + ["mute"] * 4, side=16)
    f.bracket(130 + 64, 130 + 64 + 192, 229, "one request")
    f.soft(440, 76, "multiprocessors with a block")
    kinds = [["y" if r * 22 + c < 32 else "mute" for c in range(22)] for r in range(6)]
    f.cells(440, 86, kinds, side=13)
    f.soft(440, 186, "32 of 132, one block of 128 each")


@drawn("Block and multiply: sections of the reduction, sums by atomics", 330)
def block_multiply(f: Figure) -> None:
    """The reduction is cut into sections of WIDTH. A block of threads sums one section for its
    results; the sections meet by atomic additions."""
    kinds = [[lane((r // 2) * 3 + c // 4) for c in range(12)] for r in range(8)]
    f.cells(90, 60, kinds, side=22)
    f.frame(90 + 88, 60 + 44, 88, 44)
    f.cells(50, 60, [["shared" if 2 <= r < 4 else "x"] for r in range(8)], side=22)
    f.text(61, 258, "x", anchor="middle")
    f.line(84, 104, 84, 148)
    f.soft(372, 134, "WIDTH rows in shared memory")
    f.soft(372, 154, "a thread for each column")
    for column in range(3):
        f.arrow(134 + column * 88, 238, 134 + column * 88, 262)
    f.cells(90, 264, [[lane(c // 4) for c in range(12)]], side=22)
    f.soft(372, 280, "sums: 4 sections arrive by atomicAdd")
    f.soft(20, 318, "Many more blocks, coalesced as before. The order of the additions varies.")


@drawn("Block columns: 16 bytes of columns a lane, a strip a block", 318)
def block_columns(f: Figure) -> None:
    """Lanes side by side own 16 bytes of columns each; the other threads of the block take other
    rows of the strip, and their sums meet in shared memory."""
    for row in range(8):
        for strip in range(3):
            for vector in range(4):
                kind = lane(row % 4 * 2 + (vector > 1)) if strip == 1 else "mute"
                f.box(110 + strip * 128 + vector * 31, 60 + row * 19, 29, 17, kind)
        f.soft(100, 73 + row * 19, f"threads {row % 4}", "end", size=13)
    f.frame(235, 57, 129, 157)
    f.soft(300, 234, "the strip of a block", "middle")
    told = (
        "a cell: 16 bytes, 8 halves\n4 lanes side by side here;\n2 to 32 in the kernel\n"
        "8 loads in flight a thread"
    )
    f.lines(510, 84, told)
    f.arrow(300, 242, 300, 262)
    f.box(238, 264, 124, 22, "shared", "sums of the block", size=13)
    f.arrow(364, 275, 420, 275)
    f.box(424, 264, 124, 22, "y", "y", size=13)
    f.soft(20, 310, "Every load is a piece of a row, and a thread has several under way.")


@drawn("Clustered columns: a cluster shares the rows of a strip", 330, 284)
def clustered_columns(f: Figure) -> None:
    """Each lane sums one 16-byte vector of columns. Four blocks of a cluster take the rows in
    turn, then push their sums to the block that owns each quarter of the columns.

    Every block finishes a share of the columns. One launch, no atomics: partial sums go through
    the distributed shared memory of the cluster, always in the same order."""
    for row in range(8):
        for vector in range(4):
            f.box(120 + vector * 62, 60 + row * 19, 60, 17, lane(row % 4))
        f.soft(112, 73 + row * 19, f"block {row % 4}", "end", size=13)
    f.soft(180, 234, "a strip: 16 bytes a lane")
    for block in range(4):
        y = 60 + block * 44
        f.soft(470, y + 21, f"block {block}", "end")
        f.cells(480, y + 2, [[lane(block)] * 4], side=28)
        f.box(650, y, 84, 32, "shared", "quarter " + str(block), size=13)
        for source in range(4):
            f.line(594, 76 + source * 44, 648, y + 16)
    f.soft(536, 246, "sums of a block", "middle")
    f.soft(692, 246, "inboxes", "middle")


@drawn("Split columns: any number of blocks, a workspace, a second kernel", 300, 266)
def split_columns(f: Figure) -> None:
    """Blocks of the whole grid take rows of a strip in turn and write partial sums; a second
    kernel adds them in fixed order.

    The second kernel is started before the first has ended (programmatic dependent launch) and
    waits on the device: about a microsecond."""
    for row in range(8):
        for vector in range(4):
            f.box(100 + vector * 52, 60 + row * 19, 50, 17, lane(row))
        f.soft(92, 73 + row * 19, f"block {row}", "end", size=13)
    f.soft(204, 234, "a strip of columns", "middle")
    f.arrow(318, 134, 376, 134)
    for row in range(8):
        f.box(380, 60 + row * 19, 130, 17, lane(row))
    f.soft(445, 234, "workspace", "middle")
    f.arrow(520, 134, 606, 134)
    f.soft(562, 124, "add_splits", "middle")
    f.box(612, 124, 120, 22, "y", "y")
