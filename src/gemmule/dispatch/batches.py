"""How operands with one more batch axis, each or one of them, multiply as one product."""

from __future__ import annotations

from collections.abc import Sequence

from gemmule.core.operand import Ints

AXES = {"matvec": (2, 1), "vecmat": (1, 2), "matmul": (2, 2)}  # of both operands, without batches


def aligned(
    op: str, shapes: Sequence[Ints], batched: Sequence[bool]
) -> tuple[list[Ints], tuple[int, ...]]:
    """Return the shapes to multiply in, and the axes of the result to remove, one by one.

    shapes: of both operands, the batch axis first where `batched` says that there is one. Axes of 1
    lie behind it, as many as the other operand has batch axes more; a matmul's 1-D operand becomes
    a row or a column.
    """
    ranks = [len(shape) - has for shape, has in zip(shapes, batched, strict=True)]
    single = [op == "matmul" and rank == 1 for rank in ranks]
    deepest = max(max(rank - axes, 0) for rank, axes in zip(ranks, AXES[op], strict=True))
    found = []
    for place, (shape, has) in enumerate(zip(shapes, batched, strict=True)):
        seen = tuple(shape)
        if single[place]:
            seen = (*seen[:-1], 1, seen[-1]) if place == 0 else (*seen, 1)
        if has:
            seen = (seen[0], *[1] * (1 + deepest + AXES[op][place] - len(seen)), *seen[1:])
        found.append(seen)
    column = (-1,) if single[1] else ()
    return found, (*column, -1 if single[1] else -2) if single[0] else column
