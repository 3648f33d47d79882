"""What a product across stored rows in vector registers works on."""

from __future__ import annotations

from typing import NamedTuple


class PanelsJob(NamedTuple):
    """What one product across the rows works on; the steps of scales count elements.

    x: ``(quads, 4)`` float32, four rows each, then the rows left over, each with three zeros; as it
    is where strips of columns are multiplied (`_strip_kernels`), and lanes are the tables then.
    y: results of ``part_bytes`` each in the order of the lanes, one for each part. lowest:
    `_lifted.LOWEST_BYTES`.
    """

    codes: int
    row_bytes: int
    m: int
    scales: int
    zeros: int
    scale_step: int
    groups: int
    first: int
    lanes: int
    x: int
    y: int
    block_step: int
    part_bytes: int
    lowest: int
