"""GPTQ: rounding column by column, each error made up for by the columns that are still to come.

After Frantar, Ashkboos, Hoefler and Alistarh (2022), https://arxiv.org/abs/2210.17323. What is made
small is the error of the products, ``trace(E H E^T)`` with ``E = W - W'``: H, the second moments
``X^T X`` of a layer's inputs, tells which errors cancel in a sum. It is computed by NumPy on the
host, rows in blocks that bound the memory, and columns in blocks that are matrix products.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gemmule.quant import checks, rounding
from gemmule.quant.layouts import pack_nibbles
from gemmule.quant.library import HOST, Array, library_of
from gemmule.quant.matrix import QuantizedMatrix
from gemmule.quant.search import Task, Wanted, error_ratio, fit

DAMPING = 0.01  # of the mean of H's diagonal, added to each of its elements
COLUMNS = 128  # whose errors reach the columns behind them in one product
_ROW_ELEMENTS = 1 << 24  # of the weights that are worked on at a time

Floats = NDArray[np.floating[Any]]


def quantised(W: Array, wanted: Wanted, hessian: NDArray[np.float64]) -> QuantizedMatrix:
    """Return a matrix rounded by GPTQ, on the host.

    W: of NumPy, PyTorch or CuPy, anywhere. hessian: as `checks.hessian` returns it, in the order of
    W's columns. ValueError where it is not positive, and as `gemmule.quantize` has it.
    """
    m, n = W.shape
    order = wanted.perm
    moments = hessian if order is None else hessian[np.ix_(order, order)]
    size, factor = rounding.group_columns(n, wanted.group_size), inverse_factor(moments)
    codes = np.empty((m, n), np.uint8)
    groups = rounding.group_count(n, wanted.group_size)
    scales = HOST.empty((m, groups), wanted.scale_dtype)
    zeros = np.zeros((m, groups), np.float32)
    scales[...] = 1
    wrong = norm = 0.0
    step = max(1, _ROW_ELEMENTS // max(n, 1))
    for first in range(0, m if n else 0, step):
        rows = slice(first, min(first + step, m))
        block = _on_host(rounding.compute_block(W, rows, _index(W, order)))
        pieces = rounding.grouped(block, wanted.group_size)
        rounding.refuse_non_finite(*rounding.limits(pieces), pieces, first, order)
        work = _Rows(block.T.copy(), factor.astype(block.dtype), size, wanted, first)
        codes[rows], scales[rows], zeros[rows] = work.codes, work.scales, work.zeros
        off = block - work.weights()
        wrong += float(np.sum((off @ moments) * off, dtype=np.float64))
        norm += float(np.sum((block @ moments) * block, dtype=np.float64))
    made = QuantizedMatrix.from_parts(
        pack_nibbles(codes) if wanted.bits == 4 else codes,
        scales,
        None if wanted.symmetric else zeros,
        shape=(m, n),
        bits=wanted.bits,
        group_size=wanted.group_size,
        perm=order,
    )
    return replace(made, error=error_ratio(max(wrong, 0.0), norm))


def inverse_factor(hessian: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the upper U of ``inverse(H + damping) = U^T U``; ValueError where H has none.

    With the order of the columns turned about, Cholesky's factor of H itself is U's inverse.
    """
    if not len(hessian):
        return hessian
    damped = hessian / np.diag(hessian).mean() + DAMPING * np.eye(len(hessian))
    try:
        lower = np.linalg.cholesky(damped[::-1, ::-1])
    except np.linalg.LinAlgError:
        raise ValueError(
            "hessian is not positive semi-definite, so it is no X^T X: sum it in float32 or "
            "float64 over the rows x of the layer's inputs, as gemmule.torch.calibrate does"
        ) from None
    return np.triu(np.linalg.inv(lower[::-1, ::-1]))


class _Rows:
    """Some rows of a matrix while they are rounded: a line of `current` is a column of W."""

    def __init__(
        self, current: Floats, factor: Floats, size: int, wanted: Wanted, first_row: int
    ) -> None:
        self.current, self.factor, self.size = current, factor, size
        self.wanted, self.first_row = wanted, first_row
        n, m = current.shape
        shape = (m, -(-n // size))
        self.scales: Any = HOST.empty(shape, wanted.scale_dtype)
        self.zeros = np.empty(shape, np.float32)
        self.whole_zeros = wanted.symmetric
        weigh = (1 / np.diag(factor)) ** 2
        self.weigh = weigh / weigh.max()
        self.codes = np.empty((m, n), np.uint8)
        for start, stop in _blocks(n, size):
            errors = self._round(start, stop)
            current[stop:] -= factor[start:stop, stop:].T @ errors

    def _round(self, start: int, stop: int) -> Floats:
        """Round columns start to stop, whose own values are fed; return errors for those behind."""
        errors = np.empty((stop - start, self.current.shape[1]), self.current.dtype)
        for column in range(start, stop):
            group = column // self.size
            if column % self.size == 0:
                self._fit(group)
            scale, zero = self.scales[:, group, None], self.zeros[:, group, None]
            values = self.current[column][:, None, None]
            code = rounding.steps(values, scale, zero, self.wanted.bits, self.whole_zeros)
            self.codes[:, column] = code[:, 0, 0]
            code -= rounding.spread(zero, code)
            code *= rounding.spread(scale, code)
            error = errors[column - start]
            np.divide((values - code)[:, 0, 0], self.factor[column, column], out=error)
            self.current[column + 1 : stop] -= self.factor[column, column + 1 : stop, None] * error
        return errors

    def _fit(self, group: int) -> None:
        """Find a group's scales and zero points for what its weights have become."""
        columns = slice(group * self.size, (group + 1) * self.size)
        values = np.ascontiguousarray(self.current[columns].T)[:, None, :]
        weigh = self.weigh[columns].astype(values.dtype).reshape(1, 1, -1)
        low, high = rounding.limits(values)
        task = Task(
            lambda: iter([(values, weigh)]),
            self.wanted.bits,
            self.wanted.symmetric,
            self.wanted.scale_dtype,
        )
        scales, zeros = fit(task, "mse" if self.wanted.symmetric else "hqq", low, high)
        checks.scales_fit(scales, self.wanted.group_size, self.first_row, group)
        self.scales[:, group] = scales[:, 0]
        self.zeros[:, group] = zeros if isinstance(zeros, float) else zeros[:, 0]

    def weights(self) -> Floats:
        """Return what the codes stand for, (rows, columns)."""
        return rounding.decode(self.codes, self.scales, self.zeros, self.size, self.current.dtype)


def _blocks(n: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield spans of about `COLUMNS` columns of which none ends within a group that it starts."""
    if size <= COLUMNS:
        step = COLUMNS // size * size
        yield from ((start, min(start + step, n)) for start in range(0, n, step))
        return
    for first in range(0, n, size):
        last = min(first + size, n)
        yield from ((start, min(start + COLUMNS, last)) for start in range(first, last, COLUMNS))


def _index(W: Array, order: NDArray[np.int32] | None) -> Array | None:
    return None if order is None else library_of(W).asarray(order.astype(np.int64))


def _on_host(block: Array) -> Floats:
    if isinstance(block, np.ndarray):
        return block
    host: Floats = block.cpu().numpy() if library_of(block).is_torch else block.get()
    return host
