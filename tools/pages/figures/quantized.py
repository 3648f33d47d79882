"""The figures of the quantised ladder: packing, unpacking, tables of products."""

from __future__ import annotations

from pages.figures.drawing import Figure, drawn, lane, plain


@drawn("Sixteen bytes: 8 halves, 16 codes of 8 bits, 32 codes of 4 bits", 318, 284)
def packing(f: Figure) -> None:
    """The same 16 bytes hold 8 float16 numbers, 16 bytes or 32 nibbles; in a byte the even column
    is the low nibble.

    A weight is scale x (code - zero). Fewer bytes are less time, as long as taking the codes apart
    costs less than the memory saves."""
    for index, (name, count) in enumerate((("float16", 8), ("8-bit", 16), ("4-bit", 32))):
        y = 56 + index * 52
        f.text(92, y + 22, name, anchor="end")
        width = 640 / count
        for i in range(count):
            size = 13 if count < 32 else 11
            f.box(102 + i * width, y, width - 2, 34, lane(i), str(i), size=size)
    f.text(92, 240, "one byte", anchor="end")
    f.box(102, 218, 150, 34, lane(1), "column 1, high")
    f.box(252, 218, 150, 34, lane(0), "column 0, low")
    f.soft(416, 240, "bits 7 to 4, then 3 to 0")


@drawn("8-bit codes: converted and shifted in registers", 232, 200)
def int8_codes(f: Figure) -> None:
    """16 codes come with one load. Each becomes a float, loses the zero point and meets x; the
    scale comes once for the piece.

    The zero point goes off in float32: the difference of two bytes does not fit a byte."""
    f.soft(20, 62, "one load: 16 codes")
    f.cells(20, 72, [[lane(i // 4) for i in range(16)]], side=24)
    f.arrow(212, 98, 212, 128)
    steps = (("float", "a"), ("- zero", "mute"), ("x value of x", "x"), ("+ sum", "y"))
    for i, (words, kind) in enumerate(steps):
        f.box(20 + i * 126, 130, 112, 34, kind, words)
        if i:
            f.arrow(8 + i * 126, 147, 19 + i * 126, 147)
    f.soft(540, 152, "then once: x scale")


@drawn("4-bit codes: two a byte, by mask and shift", 232, 206)
def int4_codes(f: Figure) -> None:
    """The low nibble of a byte is masked, the high one shifted; each then goes the way of an 8-bit
    code.

    Half the bytes of 8-bit codes, and two more instructions for each pair of weights."""
    f.box(30, 96, 90, 40, lane(1), "1011")
    f.box(120, 96, 90, 40, lane(0), "0110")
    f.soft(120, 84, "one byte of the matrix", "middle")
    f.arrow(214, 106, 330, 82)
    f.arrow(214, 126, 330, 156)
    f.soft(270, 78, "& 15", "middle")
    f.soft(270, 168, ">> 4", "middle")
    f.box(336, 62, 150, 36, lane(0), "column 0: 6")
    f.box(336, 138, 150, 36, lane(1), "column 1: 11")
    f.lines(510, 86, "- zero, x value of x,\n+ sum; the scale once\nfor the piece of 16")


def _table(f: Figure, codes: int) -> None:
    """Draw the table of all products with one value of x, and its look-up."""
    kinds = plain(6, 12)
    for row, column in ((0, 3), (1, 9), (2, 1), (3, 6), (4, 3), (5, 11)):
        kinds[row][column] = "y"
    f.soft(190, 62, f"table: {codes} products for each value of x")
    f.cells(190, 72, kinds, side=24)
    for row in range(6):
        f.soft(180, 89 + row * 24, f"x[{row}]", "end")
        f.cells(60, 72 + row * 24, [[lane(row)]], side=24)
    f.soft(72, 238, "codes of", "middle")
    f.soft(72, 256, "one row", "middle")
    f.soft(334, 238, f"code 0 .. {codes - 1}", "middle")
    f.arrow(486, 144, 560, 144)
    f.box(566, 126, 110, 36, "y", "add them")


@drawn("Product table for 8-bit codes: look-ups instead of products", 322, 288)
def product_table_int8(f: Figure) -> None:
    """For each value of x a table holds its product with each of the 256 weights. Rows look their
    products up and add them.

    256 products of 4 bytes a value: 4 MB for 4096 columns, far more than an L1. The look-ups of a
    warp are scattered, so each costs a sector from the L2."""
    _table(f, 256)


@drawn("Product table for 4-bit codes: 16 products a value", 322, 288)
def product_table_int4(f: Figure) -> None:
    """For each value of x a table holds its product with each of the 16 weights. Rows look their
    products up and add them.

    16 products are 64 bytes a value, 256 KB for 4096 columns: the size of one L1. A weight still
    needs a look-up where a multiply-add would do."""
    _table(f, 16)


@drawn("Any codes: where is it, whose is it, what is it worth", 232, 204)
def any_codes(f: Figure) -> None:
    """Row and column lead to the place of a code, to its group and through the permutation to the
    value of x.

    Two divisions and a table look-up stand beside each multiply-add."""
    f.box(20, 96, 130, 40, "a", "row i, column j")
    for y, words, kind in (
        (62, "place of the code", lane(0)),
        (104, "group: scale, zero", "mute"),
        (146, "perm[j]: value of x", "x"),
    ):
        f.arrow(154, 116, 236, y + 17)
        f.box(242, y, 190, 34, kind, words)
    f.arrow(438, 121, 520, 121)
    f.box(526, 104, 130, 34, "y", "+ sum")


@drawn("Several columns: a block for each column and each eight rows", 196, 182)
def any_columns(f: Figure) -> None:
    """Each block walks the codes of its rows for one column of x; nothing is shared.

    The codes are read once a column, mostly from the L2."""
    for i in range(4):
        f.box(60 + i * 150, 66, 130, 34, lane(i), f"x, column {i}")
        f.arrow(125 + i * 150, 102, 125 + i * 150, 122)
        f.box(60 + i * 150, 124, 130, 34, "a", "all codes")


@drawn("Eight pieces of one x are the eight columns of an instruction", 292, 278)
def fragment_codes(f: Figure) -> None:
    """Column q of the operand holds the piece of x that belongs to tile q; of a tile's products
    only its own column counts.

    Columns do not mix, so what the other seven hold costs nothing and harms nothing."""
    f.soft(30, 62, "8 tiles: 16 rows x 64 codes, 512 bytes each")
    for q in range(8):
        f.box(30 + q * 56, 72, 52, 44, lane(q % 4), f"tile {q}", size=12)
    f.soft(30, 146, "8 columns: pieces of x")
    for q in range(8):
        f.box(30 + q * 56, 156, 52, 34, "x", f"x {q}", size=12)
    f.soft(30, 218, "tile 3 times all columns: one of 8 counts")
    for q in range(8):
        f.box(
            30 + q * 56, 226, 52, 26, "y" if q == 3 else "mute", "sum" if q == 3 else "-", size=12
        )
    f.lines(500, 92, "a lane loads codes of\nevery tile, but x, scales\nand zeros of one")


@drawn("Turned in registers, with x in three parts", 252, 226)
def transposed_fragments(f: Figure) -> None:
    """movmatrix exchanges rows and columns of packed codes; x times a row's scale is cut into
    three bfloat16.

    The parts add up to the float32 exactly, so no product is rounded before its sum."""
    f.box(30, 76, 150, 40, lane(0), "rows g, 4 codes")
    f.arrow(184, 96, 290, 96)
    f.soft(237, 84, "movmatrix", "middle")
    f.box(296, 76, 180, 40, lane(1), "rows 2 t, 2 t + 1")
    f.box(30, 156, 150, 34, "x", "x times scale")
    f.arrow(184, 173, 290, 173)
    f.soft(237, 161, "24 bits", "middle")
    for i, words in enumerate(("high 8", "middle 8", "low 8")):
        f.box(296 + i * 96, 156, 90, 34, "x", words)
    f.lines(600, 96, "three columns of\nan instruction")


@drawn("The blocks of a cluster share the rows of a strip", 252, 244)
def clustered_fragments(f: Figure) -> None:
    """Each block sums its rows and pushes every share of the columns to the block that owns it.

    Sums are added in the order of the blocks: the same bits on every run."""
    for i in range(4):
        f.box(40, 60 + i * 38, 200, 34, lane(i), f"block {i}: its rows")
        f.arrow(246, 77 + i * 38, 400, 77 + i * 38)
        f.box(406, 60 + i * 38, 220, 34, "y", f"block {i}: its columns")
    f.soft(322, 226, "all to all, then one barrier", "middle")


@drawn("Every fragment of codes meets all columns", 222, 206)
def fragment_columns(f: Figure) -> None:
    """A tile of codes is taken apart once and multiplied with one operand for each eight columns
    of x.

    x comes from the L2: packed beforehand, two bytes for each byte of codes."""
    f.box(40, 96, 150, 44, lane(0), "16 rows of codes")
    for i, words in enumerate(("columns 0 to 7", "columns 8 to 15")):
        f.arrow(194, 118, 290, 88 + i * 66)
        f.box(296, 70 + i * 66, 150, 36, "x", words)
        f.arrow(450, 88 + i * 66, 520, 88 + i * 66)
        f.box(526, 70 + i * 66, 120, 36, "y", "16 x 8 sums")
