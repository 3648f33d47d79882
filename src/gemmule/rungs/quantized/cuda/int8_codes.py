"""8-bit codes, document 003's int8 kernel.

`two_step` over a quantised matrix: a thread loads 8 or 16 codes at once and as many values of x,
subtracts the zero point in float32 (in 8 bits the difference would wrap) and scales the sum of each
piece. Half the bytes of float16 are read, and yet it takes about as long as the best rung for
float16: a multiply-add has two more instructions beside it, and the issue slots are more than half
in use, so the loads are no longer all that a warp waits for. The document's form is one scale and
zero point for the matrix; rows and groups of a multiple of 32 columns work too.
"""

from __future__ import annotations

from gemmule.core.rung import CudaRung
from gemmule.rungs._cuda.codes import card

RUNG = CudaRung(
    title="8-bit codes",
    idea="Half the bytes a weight: codes are converted and shifted by the zero point in registers.",
    source="document 003, int8",
    after="any_codes",
    **card("int8_codes", 8, (16, 8)),
)
