"""Product table for 4-bit codes, the alternative that document 003's authors could not test.

The table of `product_table_int8` with 16 entries for each value of x: 16 n float32 in the workspace
(256 KiB at n = 4096), a cache line of 64 bytes for each column. It nearly fits an L1; a look-up
still costs a load where an addition and a multiply-add would do, and here it loses.
"""

from __future__ import annotations

from gemmule.core.rung import CudaRung
from gemmule.rungs._cuda.codes import card

RUNG = CudaRung(
    title="Product table, 4-bit codes",
    idea="All 16 products of each value of x, computed once; rows look them up.",
    source="document 003, precomputed result table, int4 (proposed there, not measured)",
    after="int4_codes",
    branch="products looked up, which loses here",
    **card("product_table_int4", 4, (8, 16), fill="fill_table_int4"),
)
