"""Product table for 8-bit codes, document 003's second alternative.

Adds to `int8_codes`: since a code has 256 values, a first launch computes all 256 products with
each value of x, scale and zero point included, and the row kernel only looks up and adds. Codes are
unsigned, so that each one is an index. The table, 256 n float32 in the workspace (4 MiB at n =
4096), outgrows the L1: every weight costs a scattered 4-byte read of the L2, far dearer than the
multiply-add it saves. The document's authors found no gain either.
"""

from __future__ import annotations

from gemmule.core.rung import CudaRung
from gemmule.rungs._cuda.codes import card

RUNG = CudaRung(
    title="Product table, 8-bit codes",
    idea="All 256 products of each value of x, computed once; rows look them up.",
    source="document 003, precomputed result table, int8",
    after="int8_codes",
    branch="products looked up, which loses here",
    **card("product_table_int8", 8, (8, 16), fill="fill_table_int8"),
)
