"""4-bit codes, document 003's int4 kernel.

Adds to `int8_codes`: two codes a byte, the even column in the low nibble, taken apart by shift and
mask. A quarter of the bytes of float16 are read; the instructions are as many as before, and at
middle sizes they set the time. `values` is how many a thread takes from one load: 8, 16 or 32 (4, 8
or 16 bytes); the document found 16 better than 8. An odd row leaves half a byte, which the columns
dealt out one by one take care of.
"""

from __future__ import annotations

from gemmule.core.rung import CudaRung
from gemmule.rungs._cuda.codes import card

RUNG = CudaRung(
    title="4-bit codes",
    idea="A quarter of the bytes of float16: two codes a byte, taken apart by shift and mask.",
    source="document 003, int4, with 8 against 16 values a thread",
    after="int8_codes",
    **card("int4_codes", 4, (16, 8, 32)),
)
