"""The figures of the quantised ladder on a CPU: how codes become numbers, in few steps."""

from __future__ import annotations

from pages.figures.drawing import Figure, drawn, lane, memory, plain


@drawn("One weight at a time: mask, subtract, scale, multiply", 274, 258)
def unpack_loop(f: Figure) -> None:
    """A byte holds two codes, the even column in the low four bits; each code less its zero point,
    times the scale of its group, is a weight.

    It is the definition, and what every other kernel must agree with."""
    labels = ["0", "1", "2", "3", "4", "5", "6", "7"]
    memory(f, 120, 64, [lane(i // 2) for i in range(8)], side=34, label="columns", labels=labels)
    f.bracket(120, 120 + 8 * 34, 104, "a group: one scale, one zero point")
    f.box(120, 150, 68, 30, "l0", "byte 0")
    f.arrow(194, 165, 236, 165)
    f.box(240, 150, 110, 30, "mute", "byte & 15")
    f.arrow(356, 165, 398, 165)
    f.box(402, 150, 140, 30, "mute", "(code - zero)")
    f.arrow(548, 165, 590, 165)
    f.box(594, 150, 130, 30, "y", "scale * ... * x")
    f.soft(240, 206, "the odd column: byte >> 4")


@drawn("Four rows, x split into even and odd columns", 282, 266)
def four_rows(f: Figure) -> None:
    """x is split once into its even and its odd elements. Low halves of bytes meet the even ones,
    high halves the odd ones, so no code is moved; four rows share each x.

    The zero point goes off each code before the product, where that is exact."""
    memory(f, 150, 60, ["x"] * 8, side=24, label="x, even")
    memory(f, 420, 60, ["l3"] * 8, side=24, label="odd")
    for row in range(4):
        f.soft(140, 117 + 32 * row, f"row {row}", "end")
        for byte in range(8):
            f.box(150 + 58 * byte, 100 + 32 * row, 28, 24, "x", "low", size=11)
            f.box(178 + 58 * byte, 100 + 32 * row, 28, 24, "l3", "high", size=11)
    f.frame(150, 98, 58, 124)
    f.lines(620, 120, "one byte of\neach of four\nrows at a time")


@drawn("A register as look-up table: 16 weights at once", 322, 286)
def vector_decode(f: Figure) -> None:
    """The sixteen possible weights of a group, scale and zero point included, fill one vector
    register; a permutation by sixteen codes looks sixteen weights up in one instruction.

    A shift, a look-up and a multiply-add for sixteen products. Two rows half a share apart are at
    work, each read in order."""
    weights = [lane(code % 8) for code in range(16)]
    numbers = [str(code) for code in range(16)]
    memory(f, 160, 62, weights, side=30, label="table", labels=numbers)
    f.soft(160, 112, "scale * (code - zero) for each code, made once for a group")
    codes = [3, 9, 0, 15, 7, 7, 12, 1, 4, 10, 2, 8, 14, 5, 6, 11]
    memory(f, 160, 132, ["mute"] * 16, side=30, label="codes", labels=[str(c) for c in codes])
    f.arrow(400, 168, 400, 194)
    found = [lane(code % 8) for code in codes]
    memory(f, 160, 198, found, side=30, label="weights", labels=["w"] * 16)
    f.soft(160, 250, "then a multiply-add with sixteen elements of x, which lie in that order")


@drawn("x in signed bytes: 64 products an instruction, in integers", 302, 266)
def int8_activations(f: Figure) -> None:
    """Each 32 activations become signed bytes with one scale; an instruction multiplies 64 codes
    with 64 of them and adds the products by fours.

    Sums are exact until they are scaled. Only where the caller permits it: activations="int8"."""
    for lane_of in range(6):
        for part in range(4):
            left = 60 + 100 * lane_of + 23 * part
            f.box(left, 64, 22, 22, lane(lane_of), "c", size=12)
            f.box(left, 96, 22, 22, "x", "x", size=12)
        f.arrow(105 + 100 * lane_of, 122, 105 + 100 * lane_of, 148)
        f.box(72 + 100 * lane_of, 152, 68, 24, "y", "int32")
    f.soft(670, 80, "codes")
    f.soft(670, 112, "bytes of x")
    f.soft(670, 169, "sums")
    f.soft(60, 210, "of a block of 32: integer sum x scale of the weights x scale of x")


@drawn("Panels: the table holds weights times x[i]", 272, 256)
def vector_panels(f: Figure) -> None:
    """Across the rows, all codes of a row meet the same x[i]; so the table of a group is made of
    weight times x[i], and a code costs a shift, a look-up and an addition.

    Four rows share each load and store of y, whose panel stays in the nearest cache."""
    for row in range(4):
        f.box(60, 64 + 34 * row, 44, 26, "x", f"x[{row}]", size=13)
        f.arrow(108, 77 + 34 * row, 140, 77 + 34 * row)
        f.cells(144, 66 + 34 * row, [[lane((row + k) % 8) for k in range(16)]], side=22)
        f.arrow(500, 77 + 34 * row, 560, 120)
    f.soft(320, 56, "tables: weight * x[i]", "middle")
    f.box(564, 106, 120, 28, "y", "panel of y")


@drawn("A few columns: a looked-up weight meets four of them", 272, 256)
def few_columns(f: Figure) -> None:
    """Sixteen weights of a row, looked up once, are multiplied with the same sixteen elements of
    four columns: four sums for each row, sixteen for four rows, all in registers.

    Lanes run along the row, so each sum is a whole register that is added up at the end."""
    f.cells(80, 110, [[lane(0)] * 16], side=18)
    f.soft(224, 100, "16 weights", "middle")
    for column in range(4):
        top = 64 + 34 * column
        f.arrow(376, 119, 412, top + 9)
        f.cells(420, top, [["x"] * 8], side=18)
        f.arrow(570, top + 9, 600, top + 9)
        f.box(606, top - 2, 90, 22, "y", f"sum {column}", size=13)
    f.soft(492, 212, "four columns", "middle")


@drawn("Sixteen rows in the lanes: no sum over lanes at the end", 292, 276)
def sixteen_rows(f: Figure) -> None:
    """64 bytes of sixteen rows are transposed and decoded once; a lane holds a row. Every weight
    meets the activation of its column, the same in all lanes, straight from memory.

    After the decoding nothing but multiply-adds is in the loop."""
    rows = [[lane(row % 8)] * 6 for row in range(8)]
    f.cells(60, 66, rows, side=18)
    f.soft(114, 232, "16 rows (8 drawn)", "middle")
    f.arrow(184, 138, 236, 138)
    f.soft(210, 126, "turn", "middle")
    for column in range(6):
        f.cells(250, 66 + 26 * column, [[lane(row) for row in range(8)]], side=18)
        f.arrow(454, 75 + 26 * column, 426, 75 + 26 * column)
        f.box(458, 66 + 26 * column, 64, 18, "x", f"x[{column}]", size=12)
    f.soft(322, 244, "a column of all rows", "middle")
    f.lines(560, 100, "one multiply-add:\n16 rows by one\nnumber of x")


@drawn("Tile registers: codes exact in bfloat16, x as a sum of three", 282, 266)
def tile_registers(f: Figure) -> None:
    """Codes less their zero points are exact in bfloat16; a float32 is the sum of three bfloat16.
    Tiles of 48 rows by 32 columns meet three tiles of x.

    So nothing is rounded but sums. A float16 takes two pieces, a bfloat16 one."""
    for row in range(3):
        f.box(60, 64 + 50 * row, 130, 46, "a", "16 x 32 codes", size=13)
        f.box(440, 64 + 50 * row, 110, 46, "y", "16 x 16 sums", size=13)
    for piece in range(3):
        f.box(
            240 + 54 * piece, 84, 50, 110, f"l{1 + piece}", ("high", "mid", "low")[piece], size=13
        )
    f.soft(320, 222, "x: 32 x 16, three pieces", "middle")
    f.soft(125, 236, "48 rows", "middle")
    f.arrow(404, 138, 434, 138)
    f.lines(580, 110, "48 rows share\neach tile of x")


@drawn("Many columns: decoded near the multipliers, once for all", 282, 266)
def packed_codes(f: Figure) -> None:
    """Some rows are decoded into the second-level cache, where the register tile of the float
    ladder reads them until all columns have passed.

    Decoding a weight costs the same for one column as for a thousand."""
    f.cells(60, 80, plain(4, 10, "l3"), side=16)
    f.soft(140, 68, "codes, from memory", "middle")
    f.arrow(228, 112, 276, 112)
    f.soft(252, 100, "decode", "middle")
    f.box(284, 74, 150, 76, "shared", "rows as floats")
    f.soft(359, 172, "second-level cache", "middle")
    f.arrow(440, 112, 480, 112)
    f.box(488, 74, 120, 76, "y", "12 x 32 sums")
    f.soft(548, 172, "registers", "middle")
    f.arrow(548, 214, 548, 182)
    f.box(488, 216, 120, 26, "x", "packed columns", size=13)
