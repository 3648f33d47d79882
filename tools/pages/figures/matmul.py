"""The figures of the matmul ladder: reuse, tiles, registers, tensor cores."""

from __future__ import annotations

from pages.figures.drawing import Figure, drawn, lane, plain


@drawn("C = A B: an element of C is a row of A times a column of B", 300)
def product(f: Figure) -> None:
    """Row i of A and column j of B make element (i, j) of C."""
    a, b, c = plain(6, 9), plain(9, 7), plain(6, 7)
    a[2] = ["a"] * 9
    for row in range(9):
        b[row][4] = "x"
    c[2][4] = "y"
    f.cells(24, 90, a, side=20)
    f.text(114, 236, "A, m x k", anchor="middle")
    f.text(222, 156, "×", size=22, anchor="middle")
    f.cells(246, 60, b, side=20)
    f.text(316, 266, "B, k x n", anchor="middle")
    f.text(410, 156, "=", size=22, anchor="middle")
    f.cells(434, 90, c, side=20)
    f.text(504, 236, "C, m x n", anchor="middle")
    told = (
        "2 m n k operations\non m k + k n + m n\nnumbers: reuse\ndecides, not the\nbytes of memory"
    )
    f.lines(590, 100, told, size=15)


@drawn("Reuse: a row of A serves a row of C, a column of B a column of C", 258, 240)
def reuse(f: Figure) -> None:
    """Every element of A is used by the n elements of a row of C, every element of B by the m
    elements of a column.

    Whoever fetches an element anew for every use reads k (m n + m n) elements in all."""
    for panel in range(2):
        left = 20 + panel * 380
        a, b, c = plain(5, 5), plain(5, 5), plain(5, 5)
        for i in range(5):
            if panel == 0:
                a[1][i], c[1][i] = "a", "y"
            else:
                b[i][3], c[i][3] = "x", "y"
        f.cells(left, 60, a, side=20)
        f.cells(left + 120, 60, b, side=20)
        f.cells(left + 240, 60, c, side=20)
        for index, name in enumerate("ABC"):
            f.text(left + 50 + index * 120, 182, name, anchor="middle")
        words = "row of A: n uses" if panel == 0 else "column of B: m uses"
        f.soft(left + 170, 208, words, "middle")


@drawn("Naive: a thread an element, everything from global memory", 304, 270)
def naive(f: Figure) -> None:
    """The threads of a warp compute neighbours in a row of C: they read one element of A, and
    neighbouring elements of B.

    The element of A is a broadcast: one sector for 32 threads, neither coalesced nor scattered.
    Caches catch the rest: two loads for every multiply-add."""
    a, b, c = plain(6, 8), plain(8, 9), plain(6, 9)
    a[2] = ["a"] * 8
    for column in range(8):
        c[2][column] = lane(column)
        b[3][column] = lane(column)
    f.cells(24, 80, a, side=20)
    f.frame(24 + 3 * 20, 80 + 40, 20, 20)
    f.cells(230, 60, b, side=20)
    f.frame(230, 60 + 60, 160, 20)
    f.cells(450, 80, c, side=20)
    f.frame(450, 80 + 40, 160, 20)
    for x, name in ((104, "A"), (320, "B"), (540, "C")):
        f.text(x, 242, name, anchor="middle")
    f.lines(640, 110, "outlined: one\nstep of a warp\n(8 lanes)")


@drawn("Square tiles: phase by phase through shared memory", 330, 290)
def shared_tile(f: Figure) -> None:
    """A block computes one tile of C. In each phase it stages one tile of A and one of B, and all
    its threads multiply from there.

    Each element is fetched from global memory once a tile, not once a thread: 32 times less often.
    Now shared memory feeds every multiply-add with two reads."""
    a, b, c = plain(6, 9), plain(9, 6), plain(6, 6)
    for r in range(3):
        for k in range(9):
            a[r][k] = lane(k // 3)
            b[k][3 + r] = lane(k // 3)
        for k in range(3):
            c[r][3 + k] = "y"
    f.cells(24, 90, a, side=20)
    f.cells(236, 60, b, side=20)
    f.cells(390, 90, c, side=20)
    f.frame(24 + 60, 90, 60, 60)
    f.frame(236 + 60, 60 + 60, 60, 60)
    for x, y, name in ((114, 236, "A"), (296, 262, "B"), (450, 236, "C")):
        f.text(x, y, name, anchor="middle")
    f.box(560, 80, 70, 70, lane(1), "as")
    f.box(650, 80, 70, 70, lane(1), "bs")
    f.soft(640, 70, "phase 1, shared memory", "middle")
    f.lines(560, 180, "barrier\n32 products a thread\nbarrier")


@drawn("Rectangular tile: one tile of A meets two tiles of B", 306, 250)
def rectangular_tile(f: Figure) -> None:
    """The block computes two tiles of C side by side; each value of A read from shared memory
    meets two of B.

    Three reads of shared memory feed two multiply-adds, where the square tile needs four. The two
    tiles of B lie in one array with rows of 2 TILE; in all 3 TILE x TILE elements."""
    a, b, c = plain(6, 6), plain(6, 9), plain(6, 9)
    for r in range(3):
        for k in range(3):
            a[r][k] = "a"
            b[r][k], b[r][3 + k] = lane(1), lane(5)
            c[r][k], c[r][3 + k] = lane(1), lane(5)
    f.cells(24, 70, a, side=20)
    f.cells(176, 70, b, side=20)
    f.cells(388, 70, c, side=20)
    for x, name in ((84, "A"), (266, "B"), (478, "C")):
        f.text(x, 212, name, anchor="middle")
    f.soft(690, 76, "shared memory", "middle")
    f.box(600, 88, 44, 44, "a", "as")
    f.box(652, 88, 44, 44, lane(1), "bs")
    f.box(696, 88, 44, 44, lane(5), "bs")
    f.lines(600, 160, "3 reads\n2 products", size=15)


@drawn("Register tile: eight values of A meet eight of B in registers", 330)
def register_tile(f: Figure) -> None:
    """A thread reads a short column of A and a short row of B from shared memory and adds all
    their products to a square of sums in its registers."""
    f.cells(30, 92, plain(8, 1, "a"), side=24)
    f.text(42, 308, "8 of A", anchor="middle")
    f.cells(76, 62, [["x"] * 8], side=24)
    f.text(280, 80, "8 of B", kind="ink")
    f.cells(76, 92, plain(8, 8, "y"), side=24)
    f.text(172, 308, "64 sums", anchor="middle")
    rows = (
        ("tile", "reads", "products"),
        ("square", "2", "1"),
        ("rectangular", "3", "2"),
        ("register, 4", "8", "16"),
        ("register, 8", "16", "64"),
    )
    for index, row in enumerate(rows):
        y = 118 + index * 28
        for x, word, anchor in zip((400, 560, 670), row, ("start", "end", "end"), strict=True):
            f.text(x, y, word, kind="soft" if index == 0 else "ink", anchor=anchor)
    f.line(400, 126, 672, 126)
    f.lines(400, 272, "reads of shared memory for\nproducts, a thread and step")


@drawn("Vector tile: 16-byte accesses, and two buffers that take turns", 270, 240)
def vector_tile(f: Figure) -> None:
    """While the sums of one buffer are computed, the next panel is fetched into registers and then
    stored in the other buffer.

    One barrier a step instead of two. Shared memory is read 16 bytes at a time, so the 64
    multiply-adds of a step need four loads."""
    f.soft(102, 82, "one buffer", "end")
    for turn in range(3):
        left = 112 + turn * 208
        f.box(left, 64, 104, 28, "mute", f"load {turn}", size=13)
        f.box(left + 106, 64, 98, 28, "y", f"multiply {turn}", size=13)
    f.soft(102, 148, "loads", "end")
    f.soft(102, 180, "sums", "end")
    for turn in range(5):
        f.box(112 + turn * 104, 130, 102, 28, lane(turn % 2), f"load {turn}", size=13)
        if turn:
            words = f"multiply {turn - 1}"
            f.box(112 + turn * 104, 162, 102, 28, lane((turn - 1) % 2), words, size=13)
    f.arrow(112, 206, 640, 206)
    f.soft(650, 211, "time")


@drawn("Tensor core: one instruction multiplies 16 x 16 by 16 x 8", 356, 320)
def tensor_core(f: Figure) -> None:
    """A warp's fragments of A and B make a fragment of C in one instruction. Copies fill a ring of
    four stages ahead of the arithmetic.

    cp.async copies from global to shared memory past the registers; ldmatrix reads fragments.
    16-byte chunks are permuted in their line, so that no bank is hit twice."""
    f.cells(24, 64, plain(8, 8, "a"), side=14)
    f.text(80, 196, "A, 16 x 16", anchor="middle", size=14)
    f.cells(160, 64, plain(8, 4, "x"), side=14)
    f.text(188, 196, "B, 16 x 8", anchor="middle", size=14)
    f.arrow(224, 120, 292, 120)
    f.soft(258, 110, "mma", "middle")
    f.cells(298, 64, plain(8, 4, "y"), side=14)
    f.text(330, 196, "C, 16 x 8", anchor="middle", size=14)
    told = (
        "2048 multiply-adds by 32 lanes at once;\neach lane holds 8, 4 and 4 numbers of\n"
        "the fragments, sums in float32"
    )
    f.lines(410, 84, told)
    f.soft(20, 232, "ring of stages in shared memory")
    words = ("multiplied now", "has arrived", "on its way", "copy starts")
    for stage, (kind, word) in enumerate(zip(("y", "a", "mute", "x"), words, strict=True)):
        f.box(20 + stage * 150, 244, 140, 44, kind, word)
        if stage:
            f.arrow(20 + stage * 150, 266, 11 + stage * 150, 266)


@drawn("Bytes on tensor cores: 4 x 4 bytes are transposed on the way in", 300, 250)
def tensor_core_int8(f: Figure) -> None:
    """The instruction wants four bytes of a register along the reduction. Where the matrix lies
    the other way, four registers are transposed by byte permutations.

    ldmatrix transposes pairs of bytes, not bytes. A row-major A and a column-major B need none of
    it and are copied by cp.async. Sums are int32 and exact."""
    letters = "abcdefghijklmnop"
    before = [[lane(r)] * 4 for r in range(4)]
    after = [[lane(c) for c in range(4)] for _ in range(4)]
    places = [(r, c) for r in range(4) for c in range(4)]
    across = {(r, c): letters[4 * r + c] for r, c in places}
    down = {(r, c): letters[4 * c + r] for r, c in places}
    f.cells(110, 80, before, side=34, size=14, labels=across)
    f.cells(430, 80, after, side=34, size=14, labels=down)
    for row in range(4):
        f.soft(100, 102 + row * 34, f"register {row}", "end")
        f.soft(576, 102 + row * 34, f"register {row}")
    f.arrow(256, 148, 420, 148)
    f.soft(338, 138, "prmt, 8 times", "middle")
    f.soft(178, 70, "along the columns", "middle")
    f.soft(498, 70, "along the reduction", "middle")


@drawn("Few columns: every vector of A meets every column", 310, 294)
def few_columns(f: Figure) -> None:
    """Eight lanes walk a row, four rows side by side. Each vector of A is multiplied with the same
    stretch of every column of B.

    A tile of C for 128 columns would compute 128 where 8 are wanted."""
    a = plain(8, 14)
    for row in range(4):
        a[row][4:8] = [lane(row)] * 4
    f.cells(40, 60, a, side=20)
    f.text(180, 244, "A, streamed once", anchor="middle")
    b = plain(14, 5)
    for row in range(4, 8):
        b[row] = [lane(c + 4) for c in range(5)]
    f.cells(370, 52, b, side=14)
    f.text(405, 266, "B, 2 to 16 columns", anchor="middle")
    f.arrow(456, 130, 510, 130)
    f.cells(516, 90, [["y"] * 5 if row < 4 else ["mute"] * 5 for row in range(8)], side=20)
    f.text(566, 272, "C", anchor="middle")
    f.lines(624, 104, "4 rows share\neach vector of\nB, all columns\neach vector of A")


@drawn("Few columns on tensor cores: the order of the steps is free", 300, 248)
def few_columns_tensor(f: Figure) -> None:
    """A lane loads 16 neighbouring bytes of its row; the instruction wants its steps apart. Both
    operands keep to one order, so the sum is the same.

    A sum does not ask in which order its products come, as long as the columns of B are loaded in
    the same one. So fragments need no shared memory and no ldmatrix."""
    f.soft(20, 66, "what the instruction calls its 16 steps, by lane")
    wanted = [lane(i // 2 % 4) for i in range(16)]
    f.cells(20, 76, [wanted], side=30, labels={(0, i): str(i) for i in range(16)})
    f.soft(20, 146, "what a lane loads: 8 neighbouring halves")
    numbers = {(0, i): str(i) for i in range(24)}
    f.cells(20, 156, [[lane(i // 8) for i in range(24)]], side=30, labels=numbers)
    f.bracket(22, 138, 188, "first mma")
    f.bracket(142, 258, 188, "second mma")
    f.lines(520, 90, "lane t: 2t, 2t+1, 2t+8, 2t+9")


@drawn("Few columns, unpacked: each warp copies what it multiplies", 312, 292)
def few_columns_unpacked(f: Figure) -> None:
    """Warps take turns along the sum. Each copies its chunk of the rows and of the columns into a
    ring of its own; blocks begin at different chunks.

    Floats become doubles on their way from the ring to the tensor cores."""
    for block, start in enumerate((0, 8)):
        top = 66 + block * 84
        f.soft(20, top + 34, f"block {block}")
        rows = [[lane(chunk % 4) for chunk in range(16)] for _ in range(3)]
        f.cells(100, top, rows, side=20)
        f.bracket(100 + 20 * start, 100 + 20 * (start + 4), top + 66, "first")
    f.text(260, 264, "A, along the sum", anchor="middle")
    columns = [[lane(chunk % 4)] * 3 for chunk in range(12)]
    f.cells(470, 40, columns, side=16)
    f.text(494, 264, "B as it lies", anchor="middle")
    f.lines(556, 90, "a color: a warp,\nwith a ring of\nthree stages;\nthey meet once,\nat the end")
