"""The figures of the matvec ladder's streaming rungs and of those over column-major storage."""

from __future__ import annotations

from pages.figures.drawing import Figure, drawn, lane, plain


@drawn("Streamed rows: enough bytes under way on every multiprocessor", 356)
def streamed_rows(f: Figure) -> None:
    """The eight warps of a block walk one row, two 16-byte loads a lane. Bars compare the bytes
    under way with the 25 KB that the memory needs."""
    f.note(66, "lanes 256, unroll 2: the 8 warps of a block read a row, two 16-byte loads a lane")
    for u in range(2):
        for warp in range(8):
            f.box(20 + (u * 8 + warp) * 44, 76, 42, 28, lane(warp), f"w{warp}", size=12)
    f.bracket(20, 370, 107, "first load of every lane")
    f.bracket(374, 722, 107, "second load, before the first is used")
    f.soft(20, 172, "bytes under way on one multiprocessor, with 1024 or 2048 threads")
    bars = (
        ("2048 x one half", 4.1, "bad"),
        ("1024 x 16 bytes", 16.4, "x"),
        ("1024 x 2 x 16 bytes", 32.8, "y"),
    )
    for i, (name, kilobytes, kind) in enumerate(bars):
        y = 184 + i * 34
        f.soft(170, y + 18, name, "end")
        f.box(180, y, kilobytes * 13, 26, kind)
        at = 188 + kilobytes * 13
        f.text(at, y + 18, f"{kilobytes:g} KB", size=14)
    f.line(180 + 25.5 * 13, 178, 180 + 25.5 * 13, 290, kind="alarm", dashed=True)
    f.soft(180 + 25.5 * 13, 308, "needed: 4.8 TB/s x 0.7 us / 132 = 25 KB", "middle")
    f.note(340, "about 0.7 us is the latency of the memory, 132 the multiprocessors of an H200")


@drawn("Early rows: the next launch is there before the last one has ended", 330)
def early_rows(f: Figure) -> None:
    """In turn, each launch starts, waits for its first vectors and reads. Begun early, it has
    started and fetched its first vectors by the time the launch before it ends."""
    f.text(20, 70, "in turn", bold=True)
    for i in range(3):
        left = 20 + i * 236
        f.box(left, 80, 56, 34, "bad", "start", size=13)
        f.box(left + 58, 80, 72, 34, "x", "first", size=13)
        f.box(left + 132, 80, 100, 34, lane(i), f"read {i}", size=13)
    f.text(20, 156, "begun early", bold=True)
    for i in range(3):
        left, y = 20 + i * 102, 166 + i * 38
        f.box(left, y, 56, 30, "bad", "start", size=13)
        f.box(left + 58, y, 72, 30, "x", "fetch", size=13)
        f.box(left + 132, y, 70, 30, "shared", "wait", size=13)
        f.box(left + 204, y, 100, 30, lane(i), f"read {i}", size=13)
        if i:
            f.line(left + 204, y - 8, left + 204, y + 38, kind="alarm", dashed=True)
    f.note(304, "fetch: the first vectors of the matrix, into the L2: right whoever wrote them;")
    f.note(320, "x and the matrix are read after the wait, when all that came before can be seen")


@drawn("Clustered rows: the blocks of a cluster share a row", 280, 268)
def clustered_rows(f: Figure) -> None:
    """Four blocks of a cluster take turns along a row; each pushes its sum into the shared memory
    of the first, which adds them in order.

    One launch, no workspace, no atomics; the order of the additions is fixed."""
    f.soft(20, 88, "a row")
    for i in range(8):
        f.box(80 + i * 80, 68, 76, 30, lane(i % 4), f"block {i % 4}", size=13)
    for block in range(4):
        left = 80 + block * 165
        f.box(left, 150, 145, 38, lane(block), f"block {block}: sum")
        f.line(118 + block * 80, 98, left + 72, 150)
    f.box(80, 206, 145, 30, "shared", "inbox of block 0", size=13)
    f.arrow(150, 188, 150, 205)
    for block in range(1, 4):
        f.line(80 + block * 165 + 72, 188, 80 + block * 165 + 72, 222 + 0)
    f.arrow(647, 222, 228, 222)
    f.soft(436, 242, "distributed shared memory", "middle")


@drawn("Memory order: a column-major matrix transposed is a row-major one", 316)
def orders(f: Figure) -> None:
    """A matrix of 2 rows and 3 columns, its addresses by rows and by columns, and its transpose."""
    names = ("a", "b", "c", "d", "e", "f")
    f.text(20, 66, "A, 2 x 3", bold=True)
    grid = [[lane(0)] * 3, [lane(1)] * 3]
    labels = {(r, c): names[r * 3 + c] for r in range(2) for c in range(3)}
    f.cells(20, 78, grid, side=34, labels=labels, size=15)
    f.text(20, 186, "A transposed, 3 x 2", bold=True)
    turned = [[lane(0), lane(1)] for _ in range(3)]
    labels = {(r, c): names[c * 3 + r] for r in range(3) for c in range(2)}
    f.cells(20, 198, turned, side=34, labels=labels, size=15)
    rows = (
        ("A by rows", "abcdef", 78),
        ("A by columns", "adbecf", 116),
        ("A transposed, by rows", "adbecf", 214),
        ("A transposed, by columns", "abcdef", 252),
    )
    f.soft(428, 66, "address", "end")
    for address in range(6):
        f.soft(456 + address * 32, 66, str(address), "middle")
    for label, order, y in rows:
        f.soft(428, y + 21, label, "end")
        kinds = [lane(0) if name in "abc" else lane(1) for name in order]
        f.cells(440, y, [kinds], side=32, labels={(0, i): n for i, n in enumerate(order)}, size=15)
    f.line(648, 132, 690, 132)
    f.line(690, 132, 690, 230)
    f.arrow(690, 230, 648, 230)
    f.text(698, 186, "equal", size=14)
    f.soft(440, 304, "the two middle strips are the same bytes", "middle")


@drawn("A thread per column of a column-major matrix", 286)
def col_transposed(f: Figure) -> None:
    """Columns lie in one piece each. Each thread walks down its column, so the threads of a warp
    read a whole column apart."""
    f.cells(110, 60, [[lane(c) for c in range(6)] for _ in range(6)], side=24)
    for column in range(6):
        f.arrow(122 + column * 24, 64, 122 + column * 24, 196)
    f.text(100, 134, "A", anchor="end")
    f.soft(182, 226, "threads 0 to 5", "middle")
    f.soft(330, 80, "memory: column after column")
    strip = [lane(c) for c in range(6) for _ in range(4)]
    f.cells(330, 90, [strip], side=16)
    for column in range(6):
        f.frame(330 + column * 64, 89, 16, 18)
    f.bracket(338, 402, 110, "m elements apart")
    told = (
        "The same bytes and the same loop as\nthread_per_row, seen by someone whose\n"
        "matrices lie by columns."
    )
    f.lines(330, 172, told)
    f.soft(20, 268, "outlined: what the threads of a warp read at one moment")


def _sections(f: Figure, x: float, y: float, *, wide: bool) -> None:
    """Draw a matrix cut into the blocks of block and multiply, one of them marked."""
    rows, columns = 8, 12
    kinds = [[lane((r // 4) * 3 + c // 4) for c in range(columns)] for r in range(rows)]
    f.cells(x, y, kinds, side=20)
    f.frame(x + 80, y, 80, 80)
    if wide:
        f.bracket(x + 80, x + 160, y - 2, "WIDTH", up=True)


@drawn("Transposed block and multiply: a thread per column and section", 330, 278)
def block_multiply_transposed(f: Figure) -> None:
    """The stored columns are drawn as rows, since each lies in one piece. A block of threads takes
    WIDTH elements of each of its columns; sections meet by atomic additions.

    Each thread reads along its own line: addresses of a warp lie a column apart, and only narrow
    sections let the L1 keep the sectors until they are used up."""
    f.soft(20, 90, "stored")
    f.soft(20, 108, "columns")
    _sections(f, 90, 84, wide=True)
    for row in range(4):
        f.arrow(172, 94 + row * 20, 248, 94 + row * 20)
    f.arrow(336, 164, 420, 164)
    f.soft(378, 154, "atomicAdd", "middle", size=13)
    f.cells(424, 84, [[lane(0)] if r < 4 else [lane(3)] for r in range(8)], side=20)
    f.soft(452, 168, "sums")
    f.lines(
        500, 100, "outlined: one block of\nthreads, a thread a line;\nx[section] in shared memory"
    )


@drawn("Transpose first, then block and multiply", 300, 272)
def transpose_then(f: Figure) -> None:
    """Tiles of 32 by 32 are copied through shared memory into a transposed matrix, which is then
    read coalesced.

    The matrix is read, written and read again: three times the bytes of one pass, and a workspace
    of its size."""
    tile = plain(6, 6)
    for r in range(2):
        for c in range(2):
            tile[r][c + 2] = "x"
    f.cells(30, 70, tile, side=24)
    f.soft(102, 238, "A as it lies", "middle")
    f.arrow(182, 106, 246, 106)
    f.box(250, 82, 96, 50, "shared", "32 x 33 tile", size=13)
    f.arrow(350, 106, 414, 142)
    turned = plain(6, 6)
    for r in range(2):
        for c in range(2):
            turned[r + 2][c] = "x"
    f.cells(418, 70, turned, side=24)
    f.soft(490, 238, "the copy", "middle")
    f.arrow(570, 142, 630, 142)
    f.box(634, 116, 106, 50, "y", "block_multiply", size=13)


@drawn("Banks of shared memory: one pad column spreads a column over all banks", 352, 322)
def banks(f: Figure) -> None:
    """With a pitch of 8 words a column of a tile lies in one of 8 banks; with a pitch of 9 it lies
    in all of them.

    Drawn with 8 banks; there are 32 of 4 bytes. Numbers name the rows of the tile; a bank serves
    one word a pass, so words of one bank wait for each other."""
    for panel, pitch in enumerate((8, 9)):
        left = 20 + panel * 380
        f.text(left, 64, f"rows of {pitch} words", bold=True)
        told = ("every element of a column in bank 2", "a column meets every bank once")
        f.soft(left, 84, told[panel])
        kinds, labels = plain(8, 8), {}
        for row in range(8):
            for column in range(8):
                at = row * pitch + column
                if column == 2 and at // 8 < 8:
                    kinds[at // 8][at % 8] = "bad" if pitch == 8 else "y"
                    labels[at // 8, at % 8] = str(row)
        f.cells(left + 60, 116, kinds, side=22, labels=labels)
        for bank in range(8):
            f.soft(left + 71 + bank * 22, 110, str(bank), "middle", size=13)
        f.soft(left + 52, 110, "bank", "end")
        last = "8 passes" if pitch == 8 else "1 pass"
        f.text(left + 252, 210, last, size=15, bold=True)
