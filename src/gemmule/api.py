"""The public functions. Each turns its keywords into options and asks `gemmule.lookup`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeVar, Unpack, overload

import numpy as np
from numpy.typing import NDArray

from gemmule.arrays import transfer
from gemmule.arrays.interop import unwrap, unwrap_all
from gemmule.core import scalars
from gemmule.core.canonical import DEFAULT, NAMES, Options, canonical
from gemmule.core.epilogue import Epilogue
from gemmule.core.grouped import Routing
from gemmule.core.operand import deciding, multiply_by
from gemmule.core.problem import HALVES
from gemmule.core.words import Op
from gemmule.finished import EpiloguePlan, ScaledPlan, planned_scaled
from gemmule.finished import planned as planned_epilogue
from gemmule.general import device_of, untraced
from gemmule.grouped import planned_grouped
from gemmule.lookup import multiply, multiply_finished, multiply_grouped, multiply_scaled
from gemmule.options import options_of, shows, split, split_epilogue, split_scaled
from gemmule.plan import Plan, resolve
from gemmule.quant.matrix import QuantizedMatrix
from gemmule.quant.stack import QuantizedStack
from gemmule.typing import Choices, Grouped, Keywords, Planned, Scalar, Scaled

if TYPE_CHECKING:
    from gemmule.backends.cuda.device_array import DeviceArray
    from gemmule.outofcore.through import HostPlan
    from gemmule.typing import (
        FloatMatrix,
        Floats,
        Foreign,
        Host,
        HostMatrix,
        Inexact,
        OwnMatrix,
        Same,
        Scales,
        Tensor,
        TensorMatrix,
    )

Result = TypeVar("Result")
Element = TypeVar("Element", bound=np.generic)


@overload
def matvec(
    A: FloatMatrix[Inexact], x: Floats[Inexact], /, **options: Unpack[Same]
) -> Floats[Inexact]: ...
@overload
def matvec(A: HostMatrix, x: Host, /, **options: Unpack[Keywords]) -> Host: ...
@overload
def matvec(A: OwnMatrix, x: DeviceArray, /, **options: Unpack[Keywords]) -> DeviceArray: ...
@overload
def matvec(A: TensorMatrix[Tensor], x: Tensor, /, **options: Unpack[Keywords]) -> Tensor: ...
@overload
def matvec(A: Foreign, x: Foreign, /, **options: Unpack[Keywords]) -> Any: ...
@shows(Keywords)
def matvec(A: Any, x: Any, /, **keywords: Unpack[Keywords]) -> Any:
    """Return the matrix-vector product ``A x``.

    Parameters
    ----------
    A : array (..., m, n) or QuantizedMatrix (m, n). Any strides; used where it lies.
    x : array (..., n). Batch dimensions broadcast.
    out : array of exactly the result's shape and dtype that overlaps no input; returned.
    out_dtype : dtype name of the result, of the same kind as the default.
    precision : ``"float32"`` (at least IEEE SGEMM's accuracy), ``"ieee"`` (plain float32 FMA) or
        ``"tf32"``, which permits operands rounded to TF32; of float64 ``"float64"`` permits matrix
        products by integers, within DGEMM's bound.
    accumulate : ``"float16"`` permits half-precision sums.
    batch_invariant : give each vector of a batch the bits that it would get alone, at the price of
        one matvec for each (docs/batch_invariance.md).
    activations : ``"int8"`` permits x rounded to 8 bits, 32 terms a scale (quantised A only).
    rung, params : take this rung of the ladder, with these parameter values.
    device : ``"cuda"`` copies host arrays to the GPU and the result back.

    Returns
    -------
    array (..., m) of the library and device of the operands. Mixed floats promote; halves
    multiply and accumulate in float32; 8-bit integers give int32 (ValueError where a sum could
    pass it: above 131,071 products of int8, 65,793 of int8 with uint8, 33,025 of uint8, unless
    ``out_dtype="int64"``), other integers int64 or uint64 modulo 2^64.

    Raises
    ------
    ValueError for shapes, strides, `out` and options; TypeError for dtypes and for operands of
    different libraries or devices; DeviceError and CompileError for the GPU and its toolchain.

    Promised: every element is within the rung's derived componentwise bound of the exact product,
    NaN and Inf spread by the IEEE rules, sizes of 0 are legal, inputs are unchanged. Not promised:
    the same bits on another device, or from another rung.

    >>> import numpy as np, gemmule as gm
    >>> gm.matvec(np.array([[1.0, 2.0], [3.0, 4.0]]), np.array([1.0, 10.0]))
    array([21., 43.])
    """
    if not keywords:
        return multiply("matvec", A, x, None, DEFAULT, None)
    return multiply("matvec", A, x, *split("matvec", keywords))


@overload
def vecmat(
    x: Floats[Inexact], A: FloatMatrix[Inexact], /, **options: Unpack[Same]
) -> Floats[Inexact]: ...
@overload
def vecmat(x: Host, A: HostMatrix, /, **options: Unpack[Keywords]) -> Host: ...
@overload
def vecmat(x: DeviceArray, A: OwnMatrix, /, **options: Unpack[Keywords]) -> DeviceArray: ...
@overload
def vecmat(x: Tensor, A: TensorMatrix[Tensor], /, **options: Unpack[Keywords]) -> Tensor: ...
@overload
def vecmat(x: Foreign, A: Foreign, /, **options: Unpack[Keywords]) -> Any: ...
@shows(Keywords)
def vecmat(x: Any, A: Any, /, **keywords: Unpack[Keywords]) -> Any:
    """Return the vector-matrix product ``x A``, that is ``A^T x``; A is never copied to be turned.

    x : array (..., m); A : array (..., m, n) or QuantizedMatrix; result (..., n). Options, errors
    and promises are those of `matvec`. There is no complex conjugation.

    >>> import numpy as np, gemmule as gm
    >>> gm.vecmat(np.array([1.0, 10.0]), np.array([[1.0, 2.0], [3.0, 4.0]]))
    array([31., 42.])
    """
    if not keywords:
        return multiply("vecmat", x, A, None, DEFAULT, None)
    return multiply("vecmat", x, A, *split("vecmat", keywords))


@overload
def matmul(
    A: FloatMatrix[Inexact], B: Floats[Inexact], /, **options: Unpack[Same]
) -> Floats[Inexact]: ...
@overload
def matmul(
    A: Floats[Inexact], B: FloatMatrix[Inexact], /, **options: Unpack[Same]
) -> Floats[Inexact]: ...
@overload
def matmul(A: HostMatrix, B: HostMatrix, /, **options: Unpack[Scaled]) -> Host: ...  # type: ignore[overload-overlap]
@overload
def matmul(A: OwnMatrix, B: OwnMatrix, /, **options: Unpack[Scaled]) -> DeviceArray: ...
@overload
def matmul(
    A: TensorMatrix[Tensor], B: TensorMatrix[Tensor], /, **options: Unpack[Scaled]
) -> Tensor: ...
@overload
def matmul(A: Foreign, B: Foreign, /, **options: Unpack[Scaled]) -> Any: ...
@shows(Scaled)
def matmul(A: Any, B: Any, /, **keywords: Unpack[Scaled]) -> Any:
    """Return the matrix product ``A B`` by the array-API rules.

    A : array (..., m, k) or (k,); B : array (..., k, n) or (k,); either may be a QuantizedMatrix.
    A 1-D operand counts as a row on the left or a column on the right, and its axis is removed
    from the result; batch dimensions broadcast; 0-D operands are a ValueError. A product with a
    single column or row runs as a matvec. Options, errors and promises are those of `matvec`;
    the vectors of `batch_invariant` are the rows of A, beside a quantised A the columns of B.

    scale_a, scale_b : float32, of two matrices of int8 and uint8, or of float8: one number, or one
        for each row of A, for each column of B. Element (i, j) is then ``scale_a[i] * scale_b[j]``
        times the product's. By blocks a scale goes with 128 steps of the sum, for each row or
        128 rows of A, each column or 128 columns of B: DeepSeek's models have shapes
        ``(m, ceil(k / 128))`` and ``(ceil(k / 128), ceil(n / 128))``. The result is float32, or
        what `out_dtype` names of bfloat16 and float16. Sums are int32 or float32, scaled in float32
        and rounded once, on a GPU by the kernel that multiplies where one is proved. Beside them
        go `out`, `out_dtype`, `rung`,
        `params` and `epilogue`, no batches.
    epilogue : a `gemmule.Epilogue`: scalars, bias, activation, gate and residual of a result of
        floats, computed before it is rounded, on a GPU by the kernel that multiplies where one is
        proved. Beside it goes no `device`; it has no gradients.

    >>> import numpy as np, gemmule as gm
    >>> gm.matmul(np.eye(2), np.array([[1.0, 2.0], [3.0, 4.0]]))
    array([[1., 2.],
           [3., 4.]])
    """
    if not keywords:
        return multiply("matmul", A, B, None, DEFAULT, None)
    if "out" in keywords and len(keywords) == 1:
        return multiply("matmul", A, B, keywords["out"], DEFAULT, None)
    if "scale_a" in keywords or "scale_b" in keywords:
        return multiply_scaled(A, B, *split_scaled(keywords))
    if keywords.get("epilogue") is not None:
        return multiply_finished(A, B, *split_epilogue(keywords))
    keywords.pop("epilogue", None)
    return multiply("matmul", A, B, *split("matmul", keywords))


@overload
def grouped_matmul(
    A: Host, W: Host | QuantizedStack, offsets: Host | None = None, /, **options: Unpack[Grouped]
) -> Host: ...
@overload
def grouped_matmul(A: Any, W: Any, offsets: Any = None, /, **options: Unpack[Grouped]) -> Any: ...
@shows(Grouped)
def grouped_matmul(A: Any, W: Any, offsets: Any = None, /, **keywords: Unpack[Grouped]) -> Any:
    """Multiply rows of A each with its expert's matrix: sorted by expert, or found by indices.

    Parameters
    ----------
    A : array (tokens, k): first the rows of expert 0, then those of expert 1, and so on. With
        `indices` in any order, or (tokens, top_k, k), a row of its own for each slot.
    W : array (experts, k, n) of A's dtype: float64, float32, float16 or bfloat16, any strides, used
        where it lies; weights kept as (experts, n, k) are passed transposed. Or a `QuantizedStack`.
    offsets : int32 array (experts,), contiguous, where A is: the row of A at which each expert's
        rows end, as `torch.nn.functional.grouped_mm` has them. Experts may have no rows.
    indices : int32 or int64 array (tokens, top_k), contiguous, in the place of offsets: the experts
        of each token, one a slot. One that is none of 0 to experts - 1 names no expert.
    weights : array (tokens, top_k) of any float dtype, contiguous, beside indices: what the slots'
        products are multiplied with before those of a token are added up.
    epilogue : ``"silu_gate"``: W's columns are gates, then as many ups, and the result has n / 2
        columns, ``silu(gate) * up``.
    out : array of exactly the result's shape and dtype that overlaps no input; returned.
    out_dtype : dtype name of the result; by default A's.
    rung, params : take this rung of the ladder, with these parameter values.

    Returns
    -------
    array of the library and device of the operands. By offsets (tokens, n): row i is
    ``A[i] @ W[e]`` for the expert e whose rows hold i; rows behind the last end are not written: in
    a fresh result on a GPU they hold anything, on the host zeros. By indices (tokens, top_k, n):
    row (t, j) is ``A[t] @ W[indices[t, j]]``, zeros where that names no expert; with weights
    (tokens, n), their sum over j.

    Raises
    ------
    ValueError for shapes, strides and `out`, and on the host for offsets that do not rise from 0 to
    at most `tokens`; TypeError for dtypes and for operands of different libraries or devices;
    DeviceError and CompileError for the GPU and its toolchain.

    Promised: every element is within the rung's derived componentwise bound of the exact product,
    carried through gate and weights, which take sums in float32 (float64) before anything is
    rounded; the same bits in every run; on a GPU offsets and indices are read by kernels alone, so
    nothing waits for them, and a graph that was captured takes others; matrices of experts without
    rows are not read. Not promised: anything of the result's rows where a GPU is given offsets that
    do not rise, but nothing else is read or written then.

    >>> import numpy as np, gemmule as gm
    >>> W = np.stack([np.eye(2), 10 * np.eye(2), 100 * np.eye(2)])
    >>> gm.grouped_matmul(np.ones((3, 2)), W, np.array([1, 1, 3], np.int32))
    array([[  1.,   1.],
           [100., 100.],
           [100., 100.]])
    >>> experts, shares = np.array([[0, 2]]), np.array([[0.5, 0.25]])
    >>> gm.grouped_matmul(np.ones((1, 2)), W, indices=experts, weights=shares)
    array([[25.5, 25.5]])
    """
    if not keywords and offsets is not None:
        return multiply_grouped(A, W, offsets, None, DEFAULT)
    around = (
        keywords.pop("indices", None),
        keywords.pop("weights", None),
        keywords.pop("epilogue", None),
    )
    unknown = keywords and keywords.keys() - Grouped.__annotations__.keys()
    if unknown:
        raise TypeError(
            f"grouped_matmul() got an unexpected keyword argument {min(unknown)!r}; its options "
            f"are {', '.join(Grouped.__annotations__)}."
        )
    out, options, _ = split("grouped_matmul", keywords)
    plain = offsets is not None and all(one is None for one in around)
    return multiply_grouped(A, W, offsets, out, options, None if plain else Routing(*around))


@overload
def gemv(
    A: FloatMatrix[Inexact], x: Floats[Inexact], y: None = None, /, **scale: Unpack[Scales]
) -> Floats[Inexact]: ...
@overload
def gemv(
    A: TensorMatrix[Tensor], x: Tensor, y: None = None, /, **scale: Unpack[Scales]
) -> Tensor: ...
@overload
def gemv(A: Foreign, x: Foreign, y: None = None, /, **scale: Unpack[Scales]) -> Any: ...
@overload
def gemv(A: Any, x: Any, y: Result, /, **scale: Unpack[Scales]) -> Result: ...
def gemv(
    A: Any,
    x: Any,
    y: Any = None,
    /,
    *,
    alpha: Scalar = 1,
    beta: Scalar = 0,
    device: str | None = None,
) -> Any:
    """Compute ``y = alpha A x + beta y`` in place and return y.

    A : (m, n), x : (n,), y : (m,) of the result's dtype (or a wider out_dtype of its kind); no
    batches. Without y (then beta must be 0) the result is a new array. With beta = 0, y is
    never read, so it may hold NaN; with alpha = 0, A and x are not read. Both scalars are applied
    in the dtype that the product is summed in, and the result is rounded once; to integer results
    they are exact, modulo 2^64 (2^32 for int32). Raises as `matvec`; TypeError for a scalar of
    another kind than the result, ValueError for one that its dtype (of floats: a double) cannot
    hold.

    >>> import numpy as np, gemmule as gm
    >>> y = np.array([1.0, 1.0])
    >>> gm.gemv(np.eye(2), np.array([2.0, 3.0]), y, alpha=2, beta=-1)
    array([3., 5.])
    """
    return untraced(_blas, "matvec", (A, x, y), (alpha, beta), (2, 1), device)


@overload
def gemm(
    A: FloatMatrix[Inexact], B: Floats[Inexact], C: None = None, /, **scale: Unpack[Scales]
) -> Floats[Inexact]: ...
@overload
def gemm(
    A: TensorMatrix[Tensor], B: Tensor, C: None = None, /, **scale: Unpack[Scales]
) -> Tensor: ...
@overload
def gemm(A: Foreign, B: Foreign, C: None = None, /, **scale: Unpack[Scales]) -> Any: ...
@overload
def gemm(A: Any, B: Any, C: Result, /, **scale: Unpack[Scales]) -> Result: ...
def gemm(
    A: Any,
    B: Any,
    C: Any = None,
    /,
    *,
    alpha: Scalar = 1,
    beta: Scalar = 0,
    device: str | None = None,
) -> Any:
    """Compute ``C = alpha A B + beta C`` in place and return C.

    A : (m, k), B : (k, n), C : (m, n) of the result's dtype; no batches. As `gemv` otherwise.

    >>> import numpy as np, gemmule as gm
    >>> gm.gemm(np.eye(2), np.ones((2, 2)), alpha=3)
    array([[3., 3.],
           [3., 3.]])
    """
    return untraced(_blas, "matmul", (A, B, C), (alpha, beta), (2, 2), device)


def _blas(
    op: str,
    arrays: tuple[Any, Any, Any],
    scale: tuple[Any, Any],
    ndim: tuple[int, int],
    device: str | None,
) -> Any:
    (a, b, c), (alpha, beta) = arrays, scale
    if "torch" in sys.modules:
        from gemmule.dispatch.tracked import refuse_blas  # only where PyTorch is

        refuse_blas("gemv" if op == "matvec" else "gemm", arrays)
    left, right, out = unwrap_all(a, b, NAMES[op], c)
    if (len(left.form.shape), len(right.form.shape)) != ndim:
        name = "gemv" if op == "matvec" else "gemm"
        raise ValueError(
            f"{name} takes operands of {ndim[0]} and {ndim[1]} dimensions; got shapes "
            f"{left.form.shape} and {right.form.shape}. Use {op} for batches."
        )
    dtype = None if out is None else out.form.dtype
    options = Options(out_dtype=dtype)
    form = None if out is None else out.form
    result = canonical(op, left.form, right.form, form, options).problem.out
    first, second = (
        scalars.checked(name, value, result) for name, value in (("alpha", alpha), ("beta", beta))
    )
    if out is None and second != 0:
        raise ValueError(f"beta is {beta}, but no array to add to was given. Pass it, or beta=0.")
    # A library's product is scaled behind its sums, but halves are rounded by then.
    options = Options(out_dtype=dtype, scaled=first not in (0, 1, -1) and result in HALVES)
    away = device_of(left, right, device)
    if away is not None:
        from gemmule.outofcore.through import through_device

        return through_device(op, (left, right), out, away, options, (first, second))
    plan = resolve(op, left.form, right.form, form, deciding(left, right).device, options)
    return plan.execute(left, right, out, first, second)


@overload
def plan(op: Op | str, a: Any, b: Any, /, **options: Unpack[Choices]) -> Plan: ...
@overload
def plan(
    op: Op | str, a: Any, b: Any, /, *, device: str | None, **options: Unpack[Choices]
) -> Plan | HostPlan: ...
@overload
def plan(op: str, a: Any, b: Any, offsets: Any, /, **options: Unpack[Choices]) -> Plan: ...
@overload
def plan(
    op: Op | str, a: Any, b: Any, /, *, epilogue: Epilogue, **options: Unpack[Choices]
) -> EpiloguePlan: ...
@overload
def plan(
    op: Op | str, a: Any, b: Any, /, *, scale_a: Any, scale_b: Any = ..., **options: Unpack[Choices]
) -> ScaledPlan: ...
@shows(Planned)
def plan(
    op: Op | str,
    a: Any,
    b: Any,
    offsets: Any = None,
    /,
    *,
    device: str | None = None,
    epilogue: Epilogue | None = None,
    **choices: Unpack[Planned],
) -> Plan | HostPlan | EpiloguePlan | ScaledPlan:
    """Choose once how to compute ``op`` on operands like `a` and `b`; call the plan many times.

    op : ``"matvec"`` (A, x), ``"vecmat"`` (x, A), ``"matmul"`` (A, B, an epilogue, scales) or
    ``"grouped_matmul"`` (A, W, offsets). The plan is frozen; it takes operands of the same shapes,
    dtypes and layouts, and explains itself. With ``device="cuda"`` and host operands it is a plan
    of what goes to the GPU when, and of how many bytes that are.

    >>> import numpy as np, gemmule as gm
    >>> A, x = np.eye(3), np.arange(3.0)
    >>> p = gm.plan("matvec", A, x)
    >>> p(A, x)
    array([0., 1., 2.])
    >>> p.explain().splitlines()[0]
    'problem    matvec A 3 x 3 row, float64 x float64 -> float64'
    """
    if op == "grouped_matmul":
        return planned_grouped(a, b, offsets, options_of("plan", choices))
    if not isinstance(op, str) or op not in NAMES:
        raise ValueError(f"op is {op!r}; it must be one of {', '.join(NAMES)}, grouped_matmul.")
    if offsets is not None:
        raise ValueError(f"{op} takes two operands; offsets go with grouped_matmul.")
    scales = choices.pop("scale_a", None), choices.pop("scale_b", None)
    options = options_of("plan", choices)
    if any(scale is not None for scale in scales):
        if op != "matmul" or device is not None or epilogue is not None:
            raise ValueError("scales are planned with matmul alone: no epilogue=, no device=.")
        return planned_scaled(a, b, scales, options)
    if epilogue is not None:
        if op != "matmul" or device is not None:
            raise ValueError("an epilogue goes with matmul of operands where they lie: no device=.")
        return planned_epilogue(a, b, epilogue, options)
    left, right, _ = unwrap_all(a, b, NAMES[op])
    away = None if device is None else device_of(left, right, device)
    if away is not None:
        from gemmule.outofcore.through import planned

        return planned(op, (left, right), away, options)
    return resolve(op, left.form, right.form, None, deciding(left, right).device, options)


@overload
def asarray(a: NDArray[Element], /) -> NDArray[Element]: ...
@overload
def asarray(a: QuantizedMatrix, /, *, device: str = ...) -> QuantizedMatrix: ...
@overload
def asarray(a: Any, /, *, device: str = ...) -> Any: ...
def asarray(a: Any, /, *, device: str = "cpu") -> Any:
    """Return `a` as an array on `device`: an ndarray on ``"cpu"``, a DeviceArray on ``"cuda"``.

    A host array is copied to the GPU once and stays there, with no other library installed; a
    QuantizedMatrix moves with all its parts. ``"cuda:1"`` names a device.

    >>> import numpy as np, gemmule as gm
    >>> gm.asarray(np.ones(2)).tolist()
    [1.0, 1.0]
    """
    if device != "cpu" or isinstance(a, QuantizedMatrix):
        from gemmule.outofcore.upload import upload

        return upload(a, device)
    operand = unwrap(a, "a")
    return operand.array if operand.device == "cpu" else transfer.to_host(operand)


multiply_by(matmul)
