"""Quantised matrices: 8-bit and 4-bit codes with a scale and a zero point for each group.

A weight is ``w = scale * (code - zero)``; where codes are floats of 4 bits, scale times what the
code stands for. `quantize` makes a `QuantizedMatrix` from floats,
`QuantizedMatrix.from_parts` from codes, scales and zero points that already exist.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self, TypeAlias, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from gemmule.core.operand import Factor, multiplied
from gemmule.core.problem import FLOAT4, FLOAT8_CODES
from gemmule.errors import DeviceError
from gemmule.quant import checks as checks
from gemmule.quant import float4, library, places, shards
from gemmule.quant import rounding as rounding
from gemmule.quant.cuda import dequantise, fragment_order
from gemmule.quant.files import FilePath, check_target, named_dtype, read_tensors, write_tensors
from gemmule.quant.layouts import get_layout, row_blocks, row_codes
from gemmule.quant.shards import QuantizedShards

Array: TypeAlias = Any
"""A NumPy array, or another device's array that a `Transfer` made from one."""

T = TypeVar("T")
Given = TypeVar("Given")  # what a matrix is multiplied with


def _gone() -> None:
    """Stand for a weak reference to what is not there."""


@dataclass(frozen=True, slots=True, eq=False, repr=False, weakref_slot=True)
class QuantizedMatrix(Factor):
    """A matrix of b-bit codes: ``w = scale * (code - zero)``.

    Build one with `quantize`, `from_parts` or `load`, which check everything; the bare
    constructor checks nothing. Arrays are never written to after that (host arrays are read-only).

    - ``stored_shape``: ``(m, n)`` of the stored matrix. Groups run along its n columns.
    - ``codes``: uint8, 2-D, in the order ``layout``; for ``row``: ``(m, n)`` for 8 bits and
      ``(m, ceil(n / 2))`` for 4 bits (low nibble = even column, tail nibble 0).
    - ``scales``: float32, float16 or bfloat16, ``(m, n_groups)``: ``(m, ceil(n / group_size))``,
      ``(m, 1)`` for group size -1 (a row), ``(1, 1)`` for None (the whole matrix). The layout says
      in which order they lie in memory.
      Of dtype float8_e8m0fnu or float8_e4m3fn they say that codes are 4-bit floats, MXFP4 or NVFP4
      (see `format` and `gemmule.quant.float4`). Codes of dtype float8_e4m3fn, of 8 bits, are what
      they are, in layout ``row`` alone; they have no zero points, and only stacks of experts are
      multiplied.
    - ``zeros``: float32 of the shape of ``scales``, or None for ``2^(bits-1)`` everywhere. 4-bit
      floats have no zero points: of MXFP4 None, of NVFP4 `factors`.
    - ``perm``: None, or int32 ``(n,)``, a permutation: stored column j is column ``perm[j]`` of the
      matrix. So ``stored = W[:, perm]`` and ``W @ x = stored @ x[perm]`` (GPTQ's act-order, with
      ``perm = argsort(g_idx)``).
    - ``transposed``: whether this is the view ``.T``: the matrix is then the transpose of all that.
    - ``device``: where the arrays lie; ``"cpu"`` means NumPy arrays.
    - ``error``: what `quantize` says of it, None where nothing is known.

    >>> import gemmule as gm, numpy as np
    >>> Q = gm.quantize(np.eye(3, dtype=np.float32), bits=4, group_size=2)
    >>> Q.shape, Q.codes.shape, Q.scales.shape, Q.T.shape
    ((3, 3), (3, 2), (3, 2), (3, 3))
    """

    codes: Array
    scales: Array
    zeros: Array | None
    perm: Array | None
    stored_shape: tuple[int, int]
    bits: int
    group_size: int | None
    layout: str = "row"
    transposed: bool = False
    device: str = "cpu"
    error: float | None = None
    _kept: dict[Any, Any] = field(default_factory=dict, init=False)

    def kept(self, make: Callable[[Self], T]) -> T:
        """Return ``make(self)``, the same object ever after, since the parts never change.

        Threads that ask at once may each make one, and all are given the same: one may hold the
        address of another's parts.
        """
        found: T | None = self._kept.get(make)
        return self._kept.setdefault(make, make(self)) if found is None else found

    def __getstate__(self) -> list[Any]:
        """Copies and pickles take the parts alone: what was kept may hold their addresses."""
        return [{} if f.name == "_kept" else getattr(self, f.name) for f in fields(self)]

    @classmethod
    def from_parts(
        cls,
        codes: NDArray[np.uint8],
        scales: NDArray[Any],
        zeros: NDArray[np.float32] | None = None,
        *,
        shape: tuple[int, int],
        bits: int,
        group_size: int | None,
        perm: NDArray[np.integer[Any]] | None = None,
        layout: str = "row",
        transposed: bool = False,
    ) -> Self:
        """Build a matrix from existing parts, all checked; see the class for each one's form.

        ``shape`` is that of the stored matrix, before any transposition. Scales may be negative
        or zero and must be finite; zero points need not be integers, and lie within 2^32 of 0. The
        parts are not copied, unless they are not C-contiguous, and ``perm`` always is; do not
        change them afterwards.

        Signed codes are made unsigned first: ``codes.view(np.uint8) ^ 0x80`` with ``zeros + 128``.

        Raises TypeError for a wrong dtype or kind; ValueError for a wrong shape, a value out of
        range, a scale that is not finite, a zero point beyond 2^32, bits set where no code is, or a
        ``perm`` that is no permutation.

        >>> codes = np.array([[0, 128, 255]], np.uint8)
        >>> one, zero = np.ones((1, 1), np.float32), np.full((1, 1), 128, np.float32)
        >>> Q = QuantizedMatrix.from_parts(codes, one, zero, shape=(1, 3), bits=8, group_size=-1)
        >>> Q.dequantize().tolist()
        [[-128.0, 0.0, 127.0]]
        """
        shape = checks.shape(shape)
        bits, group_size = checks.bits(bits), checks.group_size(group_size)
        order = get_layout(layout)
        if (
            hasattr(codes, "dtype")
            and rounding.dtype_name(codes) == FLOAT8_CODES
            and (zeros is not None or perm is not None or group_size is None)
        ):
            raise ValueError("codes of float8 have no zero points and no perm, and groups or rows")
        return cls(
            codes=checks.codes(
                codes, shape, bits, order, floats=rounding.dtype_name(scales) in FLOAT4
            ),
            scales=checks.scales(scales, shape, bits, group_size, order),
            zeros=checks.zeros_or_factors(zeros, scales, shape, group_size, order),
            perm=None if perm is None else checks.perm(perm, shape[1]),
            stored_shape=shape,
            bits=bits,
            group_size=group_size,
            layout=layout,
            transposed=bool(transposed),
        )

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the matrix, after transposition."""
        m, n = self.stored_shape
        return (n, m) if self.transposed else (m, n)

    @property
    def T(self) -> Self:
        """The transpose, as a view of the same arrays; the same object as long as this one lives.

        So what products keep with it, such as where its codes lie, is found in the next one too.
        """
        found: Self | None = self._kept.get("T")
        if found is None:  # not `or`, which would ask for the length of what was found
            found = self._kept.get("T of", _gone)()
        if found is None:
            made = replace(self, transposed=not self.transposed)
            made._kept["T of"] = weakref.ref(self)  # weak: a ring would outlive its last user
            found = self._kept.setdefault("T", made)
        return found

    @property
    def ndim(self) -> int:
        """2."""
        return 2

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of ``numpy.asarray(Q)``: float32."""
        return np.dtype(np.float32)

    @property
    def symmetric(self) -> bool:
        """Whether no zero points are stored: of integers all are ``2^(bits-1)``, of floats 0."""
        return self.zeros is None or self.format is not None

    @property
    def format(self) -> str | None:
        """``"mxfp4"`` or ``"nvfp4"`` where codes are 4-bit floats, ``"float8"``, or None."""
        if rounding.dtype_name(self.codes) == FLOAT8_CODES:
            return "float8"
        return FLOAT4.get(self.scale_dtype)

    @property
    def factors(self) -> Array | None:
        """Of NVFP4 what each row's scales are multiplied by, float32 ``(m, 1)``; else None."""
        return self.zeros if self.format == "nvfp4" else None

    @property
    def n_groups(self) -> int:
        """Groups along one row of the stored matrix."""
        return rounding.group_count(self.stored_shape[1], self.group_size)

    @property
    def dtype_name(self) -> str:
        """``"int4"``, ``"int8"``, ``"mxfp4"``, ``"nvfp4"`` or ``"float8"``."""
        return self.format or f"int{self.bits}"

    @property
    def scale_dtype(self) -> str:
        """``"float32"``, ``"float16"`` or ``"bfloat16"``; of 4-bit floats one of 8 bits."""
        return rounding.dtype_name(self.scales)

    @property
    def parts(self) -> tuple[Array, ...]:
        """Codes, scales, and where there are any zero points and permutation."""
        every = (self.codes, self.scales, self.zeros, self.perm)
        return tuple(part for part in every if part is not None)

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales, zero points and permutation together."""
        return sum(int(part.nbytes) for part in self.parts)

    def __len__(self) -> int:
        """Rows of the matrix, as NumPy counts."""
        return self.shape[0]

    def __getitem__(self, rows: slice) -> Self:
        """Return rows ``first:last`` as a matrix of their own: an expert, a share of a layer.

        The parts are copied, at worst by way of the host; codes and scales stay exactly as they
        are. Of a transposed matrix slice before transposing: its rows are the columns that groups
        run along. TypeError for anything but a slice of step 1, ValueError for a transposed matrix.

        >>> import gemmule as gm, numpy as np
        >>> gm.quantize(np.eye(8), bits=4)[2:5].shape
        (3, 8)
        """
        if not isinstance(rows, slice) or rows.step not in (None, 1):
            raise TypeError(
                f"Q[{rows!r}]: a quantised matrix is cut by rows, Q[first:last]; "
                "for elements call Q.dequantize() first."
            )
        if self.transposed:
            raise ValueError("rows of a transposed matrix: slice first, then transpose, Q.T[a:b].T")
        first, last, _ = rows.indices(len(self))
        return shards.cut(self, 0, first, max(first, last))[0]

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Refuse NumPy's files, which would hold the floats; all else works on an array of them."""
        if func.__name__ in ("save", "savez", "savez_compressed", "savetxt"):
            raise TypeError(
                f"np.{func.__name__} of a QuantizedMatrix would write its weights as floats: write "
                "Q.save('Q.safetensors'), or give np.asarray(Q) where floats are meant."
            )
        return func._implementation(*args, **kwargs)

    @overload
    def __matmul__(self, other: Factor) -> Any: ...
    @overload
    def __matmul__(self, other: Given) -> Given: ...
    def __matmul__(self, other: Any) -> Any:
        """Return ``self @ other`` by `gemmule.matmul`: of other's library, dtype and axes."""
        return multiplied(self, other)

    @overload
    def __rmatmul__(self, other: Factor) -> Any: ...
    @overload
    def __rmatmul__(self, other: Given) -> Given: ...
    def __rmatmul__(self, other: Any) -> Any:
        """Return ``other @ self`` by `gemmule.matmul`: of other's library, dtype and axes."""
        return multiplied(other, self)

    def matvec(self, x: Given) -> Given:
        """Return ``self @ x``; with `rmatvec` what SciPy's ``aslinearoperator`` asks of a matrix.

        >>> import gemmule as gm, numpy as np
        >>> from scipy.sparse.linalg import aslinearoperator  # doctest: +SKIP
        >>> aslinearoperator(gm.quantize(np.eye(3), bits=8)).matvec(np.ones(3))  # doctest: +SKIP
        array([1., 1., 1.])
        """
        return self @ x

    def rmatvec(self, y: Given) -> Given:
        """Return ``self.T @ y``."""
        return self.T @ y

    def __repr__(self) -> str:
        codes = f"bits={self.bits}, group_size={self.group_size}, symmetric={self.symmetric}"
        if self.format:
            group = f", group_size={self.group_size}" if self.format == "float8" else ""
            codes = f"format={self.format!r}{group}"
        return (
            f"QuantizedMatrix(shape={self.shape}, {codes}, scale_dtype={self.scale_dtype!r}, "
            f"perm={'no' if self.perm is None else 'yes'}, transposed={self.transposed}, "
            f"layout={self.layout!r}, device={self.device!r}, nbytes={self.nbytes})"
        )

    @np.errstate(all="ignore")
    def dequantize(self, dtype: str = "float32") -> Array:
        """Return the matrix as floats: an array of ``shape``, transposition and perm applied.

        ``dtype``: ``"float32"``, ``"float64"``, ``"float16"`` or ``"bfloat16"``. float64 computes
        in float64, where integer zero points make each weight exact; the others compute
        ``scale * (code - zero)`` in float32, correctly rounded for integer zero points, and round
        once more to a narrower dtype. Overflow gives infinity. The result of a transposed matrix
        is column-major. A matrix on a GPU gives a `DeviceArray` there, of the same bits, which
        PyTorch and others take by DLPack; DeviceError for float64 on a GPU.

        >>> import gemmule as gm, numpy as np
        >>> gm.quantize(np.array([[0.0, 15.0, 3.2]]), bits=4).dequantize("float16").tolist()
        [[0.0, 15.0, 3.0]]
        """
        target = named_dtype(checks.one_of("dtype", dtype, checks.FLOAT_DTYPES))
        if self.device != "cpu" and dtype != "float64" and self.format != "float8":
            floats = dequantise.whole(self, dtype)
            return floats.T if self.transposed else floats
        compute = np.dtype(np.float64 if dtype == "float64" else np.float32)
        host = self._on_host("dequantize").to(layout="row")
        m, n = self.stored_shape
        weights = np.empty((m, n), target)
        columns = slice(None) if self.perm is None else self.perm
        for rows in row_blocks(m, n):
            if self.format == "float8":
                scales = rounding.per_column(self.scales[rows].astype(compute), n, self.group_size)
                weights[rows, columns] = host.codes[rows].astype(compute) * scales
                continue
            if self.group_size is not None and self.format:
                factors = None if self.factors is None else self.factors[rows]
                weights[rows, columns] = float4.weights_of(
                    row_codes(host.codes, rows, n, self.bits),
                    self.scales[rows],
                    factors,
                    self.group_size,
                    compute,
                )
                continue
            per_group = slice(None) if self.group_size is None else rows
            zeros = 2.0 ** (self.bits - 1) if self.zeros is None else self.zeros[per_group]
            codes = row_codes(host.codes, rows, n, self.bits)
            weights[rows, columns] = rounding.decode(
                codes, self.scales[per_group], zeros, self.group_size, compute
            )
        return weights.T if self.transposed else weights

    def to(self, device: str | None = None, layout: str | None = None) -> Self:
        """Return this matrix on another device and/or in another layout; None leaves as it is.

        device: ``"cpu"``, ``"cuda"`` or ``"cuda:N"``. Without a layout a matrix of layout ``row``
        comes from the host to a GPU in layout ``mma16``, which the fast kernels read. On a GPU a
        matrix is put in order by the GPU. 4-bit floats stay what they are where kernels that read
        them are proved; elsewhere they become 8-bit codes of the same weights on the way there, of
        twice the bytes, with a warning in the log, and stay so; of NVFP4 a scale times its factor
        is rounded to float32. ValueError for an unknown layout or device, DeviceError where there
        is no GPU.

        >>> import gemmule as gm, numpy as np
        >>> Q = gm.quantize(np.ones((3, 3)), bits=4)
        >>> Q.to(layout="mma16").codes.shape
        (1, 512)
        """
        target = self.layout if layout is None else get_layout(layout).name
        name = self.device if device is None else library.mover(device)[0]
        floats = self.format == "float8"
        if layout is None and self.device == "cpu" != name and target == "row" and not floats:
            target = fragment_order.LAYOUT
        given = self
        moves = self.device == "cpu" != name
        form = FLOAT4.get(self.scale_dtype)
        if moves and form and not places.reads_floats(form, name):
            given = float4.widened(self.to("cpu", "row"))
        there = places.on(given, name)
        if target == given.layout:
            return there
        put = places.in_layout if name == "cpu" else places.reordered
        return put(there, target)

    def shard(self, dim: int, mesh: Any) -> QuantizedShards[Self]:
        """Return this process's part of the matrix, cut along `dim` over a PyTorch device mesh.

        Every process of the 1-D `mesh` holds the whole matrix and keeps a copy of its own part,
        rows (dim 0) or columns (dim 1) of the matrix as it is turned now. Rows are cut as DTensor
        cuts them, columns between groups (an even number of 4-bit ones). The result stands wherever
        a matrix does, beside DTensors of that mesh. ValueError for another `dim` or mesh, TypeError
        for what is no mesh.
        """
        return shards.shard(self, dim, mesh)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        """Return the matrix as floats on the host, by default float32."""
        if copy is False:
            raise ValueError("a quantised matrix becomes an array only by a copy: use copy=None")
        name = "float32" if dtype is None else np.dtype(dtype).name
        floats: NDArray[Any] = places.on(self, "cpu").dequantize(name)
        return floats

    def save(self, path: FilePath, *, overwrite: bool = False) -> None:
        """Write the matrix to ``path``, a ``.safetensors`` file, its codes in layout ``row``.

        The file appears when it is complete. Everything comes back exactly with `load`: codes,
        scales in their dtype, zero points, perm, transposition and ``error``; a matrix on a GPU is
        fetched. Raises ValueError for another suffix, FileExistsError where something of that name
        exists, unless ``overwrite``, OSError as `open` does.
        """
        check_target(path, overwrite=overwrite)
        host = places.on(self, "cpu").to(layout="row")
        parts = {"codes": host.codes, "scales": host.scales, "zeros": host.zeros, "perm": host.perm}
        tensors = {name: part for name, part in parts.items() if part is not None}
        if host.codes.nbytes % 8:  # keep the floats behind the codes aligned
            tensors["codes"] = tensors.pop("codes")
        form = self.stored_shape, self.bits, self.group_size, self.transposed
        metadata = checks.to_metadata(*form, floats=self.format is not None)
        if self.error is not None:
            metadata["error"] = repr(float(self.error))
        write_tensors(path, tensors, metadata, overwrite=overwrite)

    @classmethod
    def load(cls, path: FilePath, mmap: bool = True) -> Self:
        """Read a matrix that `save` wrote.

        With ``mmap`` the codes stay in the file and are read when used; the file must not change
        while the matrix lives. Without, they are copied. The file need not be trusted: ValueError,
        naming file and fault, for everything that is not a well-formed quantised matrix; OSError
        as `open` raises it; ImportError for bfloat16 scales without ml_dtypes.

        >>> import tempfile, pathlib, gemmule as gm
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder) / "w.safetensors"
        ...     gm.quantize(np.ones((2, 3)), bits=8, group_size=-1).save(path)
        ...     QuantizedMatrix.load(path, mmap=False).shape
        (2, 3)
        """
        tensors, metadata = read_tensors(path, mmap=mmap)
        try:
            made = cls.from_parts(**checks.file_parts(tensors, metadata))
            return replace(made, error=checks.file_error(metadata))
        except (TypeError, ValueError) as error:  # a wrong dtype in a file is a wrong value
            raise ValueError(f"{path}: {error}") from error

    def _on_host(self, action: str) -> Self:
        if self.device != "cpu":
            raise DeviceError(f"cannot {action} on {self.device}: call .to('cpu') first")
        return self
