"""`quantize`: from a float matrix, wherever it lies, to a `QuantizedMatrix` there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gemmule.core.words import Bits, Float4, Method, ScaleDtype
from gemmule.quant import checks, float4, rounding, second_order
from gemmule.quant.cuda import fragment_order, on_device
from gemmule.quant.layouts import pack_nibbles, row_blocks
from gemmule.quant.library import (
    HOST,
    Array,
    Library,
    closed,
    library_of,
    opened,
    place_of,
    refuse_distributed,
)
from gemmule.quant.matrix import QuantizedMatrix
from gemmule.quant.search import (
    METHODS,
    Piece,
    Task,
    Wanted,
    error_ratio,
    fit,
    squared_error,
    weighted,
)

_ELSEWHERE_ELEMENTS = 1 << 25
"""Elements handled at a time on a GPU: few launches, and 128 MiB a temporary."""


@np.errstate(all="ignore")  # what is not finite is refused by name, and small scales round to 0
def quantize(
    W: Any,
    bits: Bits = 4,
    group_size: int | None = 128,
    symmetric: bool = False,
    scale_dtype: ScaleDtype = "float32",
    *,
    method: Method = "rtn",
    importance: Any = None,
    hessian: Any = None,
    perm: NDArray[np.integer[Any]] | None = None,
    format: Float4 | None = None,  # noqa: A002  the word for it
) -> QuantizedMatrix:
    """Quantise a float matrix to ``bits``-bit codes, on the device where it lies.

    - ``W``: ``(m, n)`` array of NumPy, PyTorch, CuPy or JAX, a DeviceArray, or anything with
      DLPack; float64, float32, float16 or bfloat16, any strides, finite. Sizes may be 0. It is read
      block by block; no whole copy is made. The result multiplies operands of its library.
    - ``bits``: 4 or 8. ``group_size``: columns that share a scale (a positive int; the last group
      of a row may be shorter), -1 for one group a row, None for one for the whole matrix.
    - ``symmetric``: False stores a zero point per group; True fixes it at 2^(bits-1).
    - ``scale_dtype``: ``"float32"``, ``"float16"`` or ``"bfloat16"``; scales are rounded up.
    - ``method``: ``"rtn"`` rounds each weight to the nearest code, the extremes of a group being
      its outer codes. ``"mse"`` also tries ranges cut by up to two fifths (17 times the work) and
      keeps the one of least squared error. ``"hqq"`` finds scales and zero points that are no
      integers by turns with the codes (25 times), which is better again, most of all with
      importance; it needs zero points. ``"gptq"`` rounds column by column, and lets the columns
      that are still to come make up for each error as ``hessian`` says they can; its scales are
      those of ``"hqq"`` (of ``"mse"`` when symmetric) for what a group's weights have become. It
      is computed on the host, in time n^2 m, wherever W lies.
    - ``importance``: ``(n,)``, finite and not negative: how much an error in each column counts,
      such as the mean square of what the column is multiplied by in use. Default: all alike.
    - ``hessian``: ``(n, n)``, for ``"gptq"`` and no other: the second moments ``X^T X`` of what W
      is multiplied by, times any number, as `gemmule.torch.calibrate` gathers them.
    - ``perm``: quantise ``W[:, perm]`` instead, and record it; the result still stands for W. For
      ``"gptq"`` ``numpy.argsort(-numpy.diag(hessian))`` is the order of its authors' *act-order*.
    - ``format``: None, or codes that are 4-bit floats, ``"mxfp4"`` or ``"nvfp4"`` (see
      `gemmule.quant.float4`), whose bits, groups, zero points and scales are fixed: options that
      ask for others are refused. ``"rtn"``: each code is the nearest, ties to even. The scale
      of MXFP4 is that of its specification, ``2^(floor(log2(max |w|)) - 2)`` of 32 columns; that of
      NVFP4 ``max |w| / 6`` of 16 over the matrix's own factor, ``max |W| / 2688``, rounded to e4m3.
      ``"mse"`` also tries the next power of two, or other scales, and keeps that of least error.
      They are computed on the host. ValueError for other methods.

    The result's ``error`` is ``sqrt(sum(importance (w - w')^2) / sum(importance w^2))``; for
    ``"gptq"`` that of products, ``sqrt(trace(E H E^T) / trace(W H W^T))`` with ``E = W - W'``.

    Promised for ``"rtn"``: ``|w - w'| <= scale (1/2 + 6 (2^bits - 1) u)`` for ``w' =
    dequantize("float64")``, u = 2^-53 for a float64 W and 2^-24 else. The scale is
    (max - min) / (2^bits - 1) of the group widened to include 0, when symmetric
    max(max / (2^(bits-1) - 1), -min / 2^(bits-1)), rounded up to ``scale_dtype``: 0 for
    a group of zeros. Zero points are the integers 0 .. 2^bits - 1, by ``"hqq"`` and ``"gptq"``
    numbers of at most 2^17 in size. For ``"rtn"``
    and ``"mse"``: weight 0 comes back as exactly 0. For ``"mse"`` and ``"hqq"``: no group has a
    larger squared error than by ``"rtn"``, up to the rounding of W's dtype. Promised for ``"rtn"``
    and ``"mse"``: the same codes, scales and zero points on the host and on a GPU. Not promised:
    the same for ``"hqq"`` and ``"gptq"``.

    Raises TypeError for what is not a float matrix; ValueError for a wrong shape or option, for a
    NaN or infinity in W (naming the place), where ``scale_dtype`` cannot hold a scale, and for a
    ``hessian`` that is not finite, symmetric and positive semi-definite, or is 0.

    >>> Q = quantize(np.array([[0.0, 0.5, 1.5, 7.5]]), bits=4, group_size=4)
    >>> Q.scales.tolist(), Q.zeros.tolist(), Q.codes.tolist(), Q.error
    ([[0.5]], [[0.0]], [[16, 243]], 0.0)
    """
    if format is not None:
        checks.one_of("format", format, float4.GROUP_SIZES)
        own = float4.GROUP_SIZES[format], float4.SCALE_DTYPES[format]
        _fixed(format, "bits", bits, 4)
        _fixed(format, "group_size", group_size, 128, own[0])
        _fixed(format, "symmetric", symmetric, False)
        _fixed(format, "scale_dtype", scale_dtype, "float32", own[1])
        _fixed(format, "hessian", None if hessian is None else "given", None)
        return float_coded(W, format, method, importance, perm)
    refuse_distributed(W, "W")
    there = on_device.operand_of(W) if method in on_device.METHODS else None
    device = None
    if there is None:
        W, device = opened(W)
        checks.float_matrix(W)
    checks.one_of("scale_dtype", scale_dtype, checks.SCALE_DTYPES)
    _agree(method, symmetric, group_size, importance, hessian)
    n = (W if there is None else there.form).shape[1]
    order = None if perm is None else checks.perm(perm, n)
    weights = None if importance is None else checks.importance(importance, n)
    wanted = Wanted(
        checks.bits(bits),
        checks.group_size(group_size),
        bool(symmetric),
        scale_dtype,
        method,
        order,
        weights if weights is None or order is None else weights[order],
    )
    if there is not None:
        return on_device.quantised(there, wanted)
    if hessian is not None:
        made = second_order.quantised(W, wanted, checks.hessian(hessian, n))
        device = device or place_of(W)
    else:
        made = _Work(W, library_of(W), wanted).matrix()
    if device is not None:
        return made.to(device)
    return made if made.device == "cpu" else made.to(layout=fragment_order.LAYOUT)


def _fixed(form: str, name: str, given: object, *allowed: object) -> None:
    """Raise ValueError where an option says other than a format, or the option's default, does."""
    if given not in allowed:
        raise ValueError(
            f"{name} is {given!r}, and format {form!r} has its own: leave {name} away, or format."
        )


@np.errstate(all="ignore")
def float_coded(
    W: Any, form: str, method: str, importance: Any = None, perm: Any = None, matrices: int = 1
) -> QuantizedMatrix:
    """Return a matrix, or several behind each other, in codes that are 4-bit floats."""
    refuse_distributed(W, "W")
    checks.one_of("format", form, float4.GROUP_SIZES)
    check_method(method, form=form)
    W, device = opened(W)
    checks.float_matrix(W)
    shape, device = tuple(W.shape), device or place_of(W)
    order = None if perm is None else checks.perm(perm, shape[1])
    counts = None if importance is None else checks.importance(importance, shape[1])
    if counts is not None and order is not None:
        counts = counts[order]
    host = closed(W) if isinstance(W, np.ndarray) or device is None else closed(W).to_host()
    made = float4.coded(host, form, method, order, counts, matrices)
    matrix = QuantizedMatrix.from_parts(
        made.codes,
        made.scales,
        made.factors,
        shape=(shape[0], shape[1]),
        bits=float4.BITS,
        group_size=float4.GROUP_SIZES[form],
        perm=perm,
    )
    matrix = replace(matrix, error=made.error)
    return matrix if device is None else matrix.to(device)


def check_method(method: str, *, symmetric: bool = False, form: str | None = None) -> None:
    """Raise ValueError for a method that is unknown, or finds what codes of this kind lack."""
    checks.one_of("method", method, (*METHODS, "gptq"))
    if form is not None and method not in float4.METHODS:
        raise ValueError(
            f"method {method!r} finds scales and zero points of integers; of format {form!r} take "
            f"one of {', '.join(float4.METHODS)}"
        )
    if method == "hqq" and symmetric:
        raise ValueError("method 'hqq' finds zero points, and symmetric=True has none: use 'mse'")


def _agree(
    method: str, symmetric: bool, group_size: int | None, importance: Any, hessian: Any
) -> None:
    """Raise ValueError for a method beside what it cannot be beside."""
    check_method(method, symmetric=symmetric)
    if (method == "gptq") != (hessian is not None):
        raise ValueError(
            "method 'gptq' needs hessian=, the second moments X^T X of the inputs, such as "
            "gemmule.torch.calibrate(..., hessian=True) gathers"
            if hessian is None
            else f"hessian is for method 'gptq', but method is {method!r}"
        )
    if method == "gptq" and importance is not None:
        raise ValueError("method 'gptq' takes no importance: the diagonal of hessian is that")
    if method == "gptq" and group_size is None:
        raise ValueError("method 'gptq' finds scales row by row; group_size=-1 is one a row")


@dataclass(frozen=True, slots=True)
class _Work:
    """One matrix to be quantised, its options checked."""

    W: Array
    library: Library
    wanted: Wanted

    def matrix(self) -> QuantizedMatrix:
        """Return the quantised matrix, block of rows by block of rows."""
        m, n = self.W.shape
        library, whole = self.library, self.wanted.group_size is None
        codes = library.empty((m, -(-n * self.wanted.bits // 8)), "uint8")
        scales, zeros = self._start()
        if whole and m and n:
            scales, zeros = self._fitted(self._pieces, 0)
        wrong = norm = 0.0
        for rows, piece in zip(self._blocks(), self._pieces(), strict=True):
            at = slice(None) if whole else rows
            if not whole:
                scales[rows], found = self._fitted(_only(piece), rows.start)
                if not self.wanted.symmetric:
                    zeros[rows] = found
            scale, zero = scales[at], zeros if self.wanted.symmetric else zeros[at]
            steps = rounding.steps(
                piece[0], scale, zero, self.wanted.bits, self.wanted.method != "hqq"
            )
            # Squares beyond float32: the error is not known.
            wrong += library.cast(squared_error(piece, steps, scale, zero), "float64").sum()
            norm += library.cast(weighted(piece[0] ** 2, piece[1]), "float64").sum()
            block = library.cast(steps.reshape(len(steps), -1)[:, :n], "uint8")
            codes[rows] = pack_nibbles(block) if self.wanted.bits == 4 else block
        return self._closed(codes, scales, zeros, error_ratio(float(wrong), float(norm)))

    def _start(self) -> tuple[Array, Any]:
        """Return scales of 1, and zero points of 0; the middle of the codes when symmetric."""
        groups = rounding.group_count(self.W.shape[1], self.wanted.group_size)
        shape = (1, 1) if self.wanted.group_size is None else (self.W.shape[0], groups)
        scales, zeros = (self.library.empty(shape, t) for t in (self.wanted.scale_dtype, "float32"))
        scales[...], zeros[...] = 1, 0
        return scales, 2.0 ** (self.wanted.bits - 1) if self.wanted.symmetric else zeros

    def _blocks(self) -> Iterator[slice]:
        on_host = self.library is HOST or (self.library.is_torch and not self.W.is_cuda)
        size = () if on_host else (_ELSEWHERE_ELEMENTS,)
        return row_blocks(*self.W.shape, *size)

    def _pieces(self) -> Iterator[Piece]:
        """Yield blocks of rows as groups, and how much their columns count, None for all alike."""
        order = (
            None
            if self.wanted.perm is None
            else self.library.asarray(self.wanted.perm.astype(np.int64))
        )
        for rows in self._blocks():
            block = rounding.compute_block(self.W, rows, order)
            groups = rounding.grouped(block, self.wanted.group_size)
            yield groups, self._importance_of(groups)

    def _importance_of(self, groups: Array) -> Array | None:
        n, filled = self.W.shape[1], groups.shape[1] * groups.shape[2]
        if self.wanted.importance is None and (filled == n or self.wanted.method != "hqq"):
            return None  # zeros that fill up a group come back exactly: no error
        weights = np.zeros(filled, "float64" if groups.dtype.itemsize == 8 else "float32")
        weights[:n] = 1.0 if self.wanted.importance is None else self.wanted.importance
        return self.library.asarray(weights).reshape(1, *groups.shape[1:])

    def _fitted(
        self, pieces: Callable[[], Iterator[Piece]], first_row: int
    ) -> tuple[Array, Array | float]:
        """Return scales and zero points for a block of rows, or one of each for the matrix."""
        whole, ends = self.wanted.group_size is None, []
        row = first_row
        for groups, _ in pieces():
            ends.append(rounding.limits(groups))
            rounding.refuse_non_finite(*ends[-1], groups, row, self.wanted.perm)
            row += len(groups)
        low, high = ends[0]
        if whole:
            stack = self.library.xp.stack
            low = stack([end[0].min() for end in ends]).min().reshape(1, 1)
            high = stack([end[1].max() for end in ends]).max().reshape(1, 1)
        task = Task(pieces, self.wanted.bits, self.wanted.symmetric, self.wanted.scale_dtype, whole)
        scales, zeros = fit(task, self.wanted.method, low, high)
        checks.scales_fit(scales, self.wanted.group_size, first_row)
        return scales, zeros

    def _closed(
        self, codes: Array, scales: Array, zeros: Any, error: float | None
    ) -> QuantizedMatrix:
        codes, scales = closed(codes), closed(scales)
        zeros = None if self.wanted.symmetric else closed(zeros)
        shape, device = (self.W.shape[0], self.W.shape[1]), getattr(codes, "device", "cpu")
        perm, kind = self.wanted.perm, (self.wanted.bits, self.wanted.group_size)
        if device == "cpu":
            made = QuantizedMatrix.from_parts(
                codes, scales, zeros, shape=shape, bits=kind[0], group_size=kind[1], perm=perm
            )
        else:
            there = None if perm is None else closed(self.library.asarray(perm))
            made = QuantizedMatrix(codes, scales, zeros, there, shape, *kind, device=device)
        return replace(made, error=error)


def _only(piece: Piece) -> Callable[[], Iterator[Piece]]:
    return lambda: iter([piece])
