"""``.mat`` and ``.mtx`` files, through SciPy's parsers, which fail on damage in any way."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gemmule.lab.files.sources import Source, check_shape, check_size, pick

Matrix = NDArray[Any]


def _scipy_io(source: Source) -> Any:
    try:
        import scipy.io
    except ImportError:
        raise ValueError(
            f"{source.path.suffix} files need SciPy: pip install 'gemmule[io]', or save the matrix "
            "as .npy."
        ) from None
    return scipy.io


def _guarded(source: Source, read: Callable[[], Any]) -> Any:
    """Return what a SciPy reader returns; on a broken file its many errors become ValueError."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # SciPy warns of oddities that the checks below judge
            return read()
    except NotImplementedError:
        raise ValueError(
            f"{source.path} is a MATLAB 7.3 (HDF5) file, which is not read. Save it in MATLAB with "
            "save(..., '-v7'), or the matrix as .npy."
        ) from None
    except OSError:
        raise
    except Exception as error:  # a parser fed with damaged bytes fails in any way
        raise ValueError(f"{source} is not readable: {type(error).__name__}: {error}.") from None


def read_mat(source: Source, limit: int) -> Matrix:
    """Return one variable of a MATLAB file (up to version 7), column-major as it lies there."""
    io = _scipy_io(source)
    listed: Any = _guarded(source, lambda: io.whosmat(source.path))
    shapes = {str(name): (shape, kind) for name, shape, kind in listed}
    name = pick(source, shapes, "variable")
    shape, kind = shapes[name]
    if kind not in _MATLAB_BYTES:
        raise TypeError(f"{source} is a MATLAB {kind}; a full numeric matrix is needed.")
    # Complex doubles at worst: the listing does not tell real from complex.
    check_size(source, math.prod(shape) * _MATLAB_BYTES[kind], limit)
    content = _guarded(source, lambda: io.loadmat(source.path, variable_names=[name]))
    value = content.get(name)
    if not isinstance(value, np.ndarray) or value.dtype.hasobject:
        raise TypeError(f"{source} is not a full numeric matrix; save one with save('-v7').")
    return value


_MATLAB_BYTES = {
    "double": 16, "single": 8, "int8": 1, "uint8": 1, "int16": 2, "uint16": 2, "int32": 4,
    "uint32": 4, "int64": 8, "uint64": 8,
}  # fmt: skip


def read_mtx(source: Source, limit: int) -> Matrix:
    """Return a Matrix Market file as a full matrix."""
    io = _scipy_io(source)
    rows, cols, _, _, field, _ = _guarded(source, lambda: io.mminfo(source.path))
    check_shape(source, (int(rows), int(cols)))
    # Sparse files become full matrices; while that happens, both forms are alive.
    check_size(source, 2 * int(rows) * int(cols) * (16 if field == "complex" else 8), limit)
    read = _guarded(source, lambda: io.mmread(source.path))
    matrix: Matrix = read if isinstance(read, np.ndarray) else read.toarray()
    return matrix
