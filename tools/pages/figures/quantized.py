"""The figures of the quantised ladder: packing, unpacking, tables of products."""

from __future__ import annotations

from pages.figures.drawing import Drawings, Figure, lane, plain


def packing() -> Figure:
    """Draw 16 bytes of halves, of 8-bit and of 4-bit codes."""
    f = Figure(
        "Sixteen bytes: 8 halves, 16 codes of 8 bits, 32 codes of 4 bits",
        "The same 16 bytes hold 8 float16 numbers, 16 bytes or 32 nibbles; in a byte the even "
        "column is the low nibble.",
        318,
    )
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
    f.text(416, 240, "bits 7 to 4, then 3 to 0", kind="soft", size=14)
    f.note(
        284,
        "A weight is scale x (code - zero). Fewer bytes are less time, as long as taking "
        "the codes apart costs less than the memory saves.",
    )
    return f


def int8_codes() -> Figure:
    """Draw the way of a code through a thread's registers."""
    f = Figure(
        "8-bit codes: converted and shifted in registers",
        "16 codes come with one load. Each becomes a float, loses the zero point and meets x; the "
        "scale comes once for the piece.",
        232,
    )
    f.text(20, 62, "one load: 16 codes", kind="soft", size=14)
    f.cells(20, 72, [[lane(i // 4) for i in range(16)]], side=24)
    f.arrow(212, 98, 212, 128)
    steps = (("float", "a"), ("- zero", "mute"), ("x value of x", "x"), ("+ sum", "y"))
    for i, (words, kind) in enumerate(steps):
        f.box(20 + i * 126, 130, 112, 34, kind, words)
        if i:
            f.arrow(8 + i * 126, 147, 19 + i * 126, 147)
    f.text(540, 152, "then once: x scale", kind="soft", size=14)
    f.note(
        200,
        "The zero point goes off in float32: the difference of two bytes does not fit a byte.",
    )
    return f


def int4_codes() -> Figure:
    """Draw shift and mask of a byte."""
    f = Figure(
        "4-bit codes: two a byte, by mask and shift",
        "The low nibble of a byte is masked, the high one shifted; each then goes the way of an "
        "8-bit code.",
        232,
    )
    f.box(30, 96, 90, 40, lane(1), "1011")
    f.box(120, 96, 90, 40, lane(0), "0110")
    f.text(120, 84, "one byte of the matrix", kind="soft", anchor="middle", size=14)
    f.arrow(214, 106, 330, 82)
    f.arrow(214, 126, 330, 156)
    f.text(270, 78, "& 15", kind="soft", anchor="middle", size=14)
    f.text(270, 168, ">> 4", kind="soft", anchor="middle", size=14)
    f.box(336, 62, 150, 36, lane(0), "column 0: 6")
    f.box(336, 138, 150, 36, lane(1), "column 1: 11")
    f.lines(
        510, 86, "- zero, x value of x,", "+ sum; the scale once", "for the piece of 16", size=14
    )
    f.note(
        206,
        "Half the bytes of 8-bit codes, and two more instructions for each pair of weights.",
    )
    return f


def _table(bits: int, title: str, note: str) -> Figure:
    """Draw the table of all products with one value of x, and its look-up."""
    codes = 1 << bits
    f = Figure(
        title,
        f"For each value of x a table holds its product with each of the {codes} weights. "
        "Rows look their products up and add them.",
        322,
    )
    kinds = plain(6, 12)
    for row, column in ((0, 3), (1, 9), (2, 1), (3, 6), (4, 3), (5, 11)):
        kinds[row][column] = "y"
    f.text(190, 62, f"table: {codes} products for each value of x", kind="soft", size=14)
    f.cells(190, 72, kinds, side=24)
    for row in range(6):
        f.text(180, 89 + row * 24, f"x[{row}]", kind="soft", anchor="end", size=14)
        f.cells(60, 72 + row * 24, [[lane(row)]], side=24)
    f.text(72, 238, "codes of", kind="soft", anchor="middle", size=14)
    f.text(72, 256, "one row", kind="soft", anchor="middle", size=14)
    f.text(334, 238, "code 0 .. " + str(codes - 1), kind="soft", anchor="middle", size=14)
    f.arrow(486, 144, 560, 144)
    f.box(566, 126, 110, 36, "y", "add them")
    f.note(288, note)
    return f


def product_table_int8() -> Figure:
    """Draw the table of 256 products a value."""
    return _table(
        8,
        "Product table for 8-bit codes: look-ups instead of products",
        "256 products of 4 bytes a value: 4 MB for 4096 columns, far more than an L1. The look-ups "
        "of a warp are scattered, so each costs a sector from the L2.",
    )


def product_table_int4() -> Figure:
    """Draw the table of 16 products a value."""
    return _table(
        4,
        "Product table for 4-bit codes: 16 products a value",
        "16 products are 64 bytes a value, 256 KB for 4096 columns: the size of one L1. A weight "
        "still needs a look-up where a multiply-add would do.",
    )


FIGURES: Drawings = {
    "packing": packing,
    "int8_codes": int8_codes,
    "int4_codes": int4_codes,
    "product_table_int8": product_table_int8,
    "product_table_int4": product_table_int4,
}
