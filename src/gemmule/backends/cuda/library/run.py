"""Launching a product of cuBLAS on operands: addresses, workspace, stream, device.

As the launcher of kernels does: on the operands' device and the caller's current stream, with
temporaries from the operands' own allocator, and nothing waits. What the library was told is
prepared once for each device, so a captured graph and many threads may use it.
"""

from __future__ import annotations

from gemmule.backends.cuda import arrays as device_arrays
from gemmule.backends.cuda import driver, launch_args
from gemmule.backends.cuda.library import cublas, rescale
from gemmule.core.canonical import Call
from gemmule.core.operand import Operand
from gemmule.core.problem import Problem


class LibraryRun:
    """A prepared choice of the library's product.

    exchanged: the canonical second operand is the library's first. `rank`: which of the heuristic's
    algorithms. A batch that the library does not walk itself is walked here, with the outer axes.
    """

    def __init__(
        self, gemm: cublas.Gemm, problem: Problem, call: Call, *, exchanged: bool, rank: int = 0
    ) -> None:
        self.gemm, self.exchanged, self.rank = gemm, exchanged, rank
        walked = call.outer if gemm.batch == problem.batch else (*call.outer, problem.batch)
        views, dtypes = (call.a, call.b, call.out), (problem.a, problem.b, problem.out)
        self.offsets = launch_args.offsets(walked, views, dtypes)
        self.devices: dict[int, cublas.Prepared] = {}

    def __call__(self, a: Operand, b: Operand, out: Operand, alpha: complex, beta: complex) -> None:
        """Start the product on operands of the prepared forms: out = alpha a b + beta out.

        The library is told of an alpha in which it rounds nothing, and of others nothing.
        """
        ordinal = int(out.device[5:])
        prepared = self.prepared(ordinal)
        stream = device_arrays.current_stream(out, ordinal)
        rounds = rescale.wanted(alpha, out.form.dtype)
        kept = rescale.old_bytes(out, beta) if rounds else 0
        own = -(-prepared.workspace_bytes // 256) * 256
        work, owner = device_arrays.workspace(out, own + kept)
        old = work + own
        start = prepared.starter(1.0, 0.0) if rounds else prepared.starter(alpha, beta)
        if kept:
            rescale.keep(out, old, stream)
        with driver.on_device(ordinal):
            for left, right, result in self.offsets:
                first, second = a.pointer + left, b.pointer + right
                if self.exchanged:
                    first, second = second, first
                start(stream, first, second, out.pointer + result, work if own else 0)
        if rounds:
            rescale.rescale(out, old, (alpha, beta), stream)
        del owner  # its allocator reuses the memory in stream order

    @property
    def is_one_call(self) -> bool:
        """Whether one call of the library is the whole product."""
        return self.offsets == ((0, 0, 0),)

    def prepared(self, ordinal: int) -> cublas.Prepared:
        """Return the product as prepared on a device, once."""
        found = self.devices.get(ordinal)
        if found is None:
            found = self.devices[ordinal] = cublas.Prepared(self.gemm, ordinal, self.rank)
        return found


def by_columns(
    dtype: str, layout: str, shape: tuple[int, int], strides: tuple[int, int]
) -> cublas.Matrix:
    """Return a matrix as the library sees it; one by rows is, by columns, its transpose."""
    (rows, columns), (row_step, column_step) = shape, strides
    if layout == "row":
        return by_columns(dtype, "col", (columns, rows), (column_step, row_step))
    # A single column's stride means nothing, and may be less than the library takes.
    step = column_step if columns > 1 else rows
    return cublas.Matrix(dtype, rows, columns, max(step, rows, 1))
