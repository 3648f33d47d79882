"""Scaled products: ``C[i, j] = scale_a[i] * scale_b[j] * sum_l A[i, l] B[l, j]`` of 8-bit matrices.

What models quantised to 8 bits multiply by: integer or float8 codes of activations and of weights,
whose scales stand for a matrix, or for rows of A and columns of B. On a GPU a proved kernel applies
the scales to its sums before they are rounded, and nothing but the result is written; elsewhere the
product comes first, in int32 or float32, and then the scales in float32.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from gemmule import backends
from gemmule.arrays.interop import (
    check_out,
    check_same_kind,
    empty_like_kind,
    mark_written,
    to_kind,
    unwrap,
    unwrap_all,
)
from gemmule.backends.cuda.device_array import DeviceArray
from gemmule.backends.cuda.scaled import ScaledLauncher
from gemmule.choose import scaled_choice
from gemmule.core.caches import remembered, table
from gemmule.core.canonical import NAMES, Options, canonical
from gemmule.core.operand import Form, Operand
from gemmule.core.problem import BYTES, FLOAT8, HALVES, check_problem, matmul_shape, numpy_dtype
from gemmule.plan import resolve

OUTS = ("float32", *HALVES)  # of a scaled product


class Scaled(NamedTuple):
    """A scaled product's operands, unwrapped; scales are vectors of one number, or one each."""

    a: Operand
    b: Operand
    scale_a: Operand
    scale_b: Operand
    out: Operand | None


def scaled_product(a: Any, b: Any, scale_a: Any, scale_b: Any, out: Any, options: Options) -> Any:
    """Return the scaled product; PyTorch learns nothing of it."""
    if out is None and getattr(a, "is_cuda", False) and "torch" in sys.modules:
        result = _of_tensors((a, b, scale_a, scale_b), options)
        if result is not None:
            return result
    left, right, target = unwrap_all(a, b, NAMES["matmul"], out)
    dtype = result_dtype(left.form.dtype, right.form.dtype, options.out_dtype)
    shape = result_shape(left.form.shape, right.form.shape)
    scales = _scales(scale_a, scale_b, shape, left)
    given = Scaled(left, right, scales[0], scales[1], target)
    if target is None:
        target = empty_like_kind(shape, dtype, left)
    else:
        check_out(target, shape, dtype, [*given[:4]])
    if 0 in shape:
        return to_kind(target, left) if out is None else target.original
    launcher = None
    if left.device != "cpu":
        launcher = fused(left.form, given.b.form, target.form, left.device, dtype, options)
    if launcher is None:
        _apart(given, target, options)
    else:
        launcher.multiply(left, right, scales, target)
    if out is None:
        return to_kind(target, left)
    mark_written(target)
    return target.original


_bound: dict[Any, Any] = table()  # calls of tensors met before, by what tells those apart
MOST = 4096


def _of_tensors(tensors: tuple[Any, ...], options: Options) -> Any | None:
    """Return the product of PyTorch's CUDA tensors met before, or None: the general path has it.

    What tells tensors apart stands in the key; what is left are addresses.
    """
    kind, key = sys.modules["torch"].Tensor, [options]
    for one in tensors:
        if type(one) is not kind:
            return None
        key += (one.dtype, one.shape, one.stride(), one.get_device())
    call = _bound.get(tuple(key))
    if call is None:
        if len(_bound) >= MOST:
            _bound.clear()
        call = _bound[tuple(key)] = _bound_call(tensors, options)
    return call(*tensors)


def _bound_call(tensors: tuple[Any, ...], options: Options) -> Any:
    """Return what multiplies tensors like these by one launch, or returns None: it did nothing."""
    from gemmule.dispatch.torch import maker  # only where PyTorch is

    torch = sys.modules["torch"]
    left, right, _ = unwrap_all(tensors[0], tensors[1], NAMES["matmul"], None)
    dtype = result_dtype(left.form.dtype, right.form.dtype, options.out_dtype)
    shape = result_shape(left.form.shape, right.form.shape)
    scales = _scales(tensors[2], tensors[3], shape, left)
    ordinal = tensors[0].get_device()
    launcher = None
    if 0 not in shape:
        out = Form.packed(shape, dtype)
        launcher = fused(left.form, right.form, out, left.device, dtype, options)
    pairs = zip(scales, tensors[2:], strict=True)
    if launcher is None or any(one.pointer != given.data_ptr() for one, given in pairs):
        return lambda a, b, scale_a, scale_b: None
    start, mask = launcher.scaled_starter(ordinal), launcher.choice.problem.alignment - 1
    fresh = maker(shape, getattr(torch, dtype), ordinal)
    room = maker((launcher.workspace,), torch.uint8, ordinal) if launcher.workspace else None
    steps = tuple(launcher.step_of(one) for one in scales)
    device_of, stream_of = torch._C._cuda_getDevice, torch._C._cuda_getCurrentRawStream

    def call(a: Any, b: Any, scale_a: Any, scale_b: Any) -> Any | None:
        first, second = a.data_ptr(), b.data_ptr()
        if (first | second) & mask or not (first and second) or device_of() != ordinal:
            return None
        if scale_a.is_neg() or scale_b.is_neg():
            return None
        out, owner = fresh(), None if room is None else room()
        work = 0 if owner is None else owner.data_ptr()
        ends = (scale_a.data_ptr(), scale_b.data_ptr(), *steps)
        start(stream_of(ordinal), first, second, out.data_ptr(), work, ends)
        return out

    return call


def result_dtype(a: str, b: str, out_dtype: str | None) -> str:
    """Return the dtype of a scaled product; TypeError for operands or results that it has not."""
    for kinds in (BYTES, FLOAT8):
        if a in kinds and b in kinds:
            break
    else:
        raise TypeError(
            f"scales go with products of int8 and uint8, or of float8; given were {a} and {b}. "
            "Multiply other matrices without, and scale the result."
        )
    if out_dtype not in (None, *OUTS):
        raise TypeError(
            f"out_dtype is {out_dtype}; a scaled product is {', '.join(OUTS)} (the default is "
            f"{OUTS[0]})."
        )
    return out_dtype or OUTS[0]


def result_shape(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, int]:
    """Return the shape of a scaled product; ValueError for what are no two matrices that fit."""
    if len(a) != 2 or len(b) != 2:
        raise ValueError(
            f"a scaled product is of two matrices; got shapes {tuple(a)} and {tuple(b)}. Reshape "
            "batches of A to rows."
        )
    rows, columns = matmul_shape(tuple(a), tuple(b))
    return rows, columns


def check_scale(shape: tuple[int, ...], dtype: str, name: str, size: int, axis: int) -> None:
    """Raise TypeError or ValueError for what is no scale of `size` rows (columns: axis 1)."""
    if dtype != "float32":
        raise TypeError(f"{name} has dtype {dtype}; scales are float32. Convert it first.")
    each = (size, 1) if axis == 0 else (1, size)
    if tuple(shape) not in ((), (1,), (1, 1), (size,), each):
        of = "rows of A" if axis == 0 else "columns of B"
        raise ValueError(
            f"{name} has shape {tuple(shape)}; required is one number, or one for each of the "
            f"{size} {of}: shape ({size},) or {each}."
        )


def _scales(
    scale_a: Any, scale_b: Any, shape: tuple[int, int], like: Operand
) -> tuple[Operand, Operand]:
    """Return both scales of a result of this shape, as vectors."""
    of_a = _scale(scale_a, "scale_a", shape[0], 0, like)
    return of_a, _scale(scale_b, "scale_b", shape[1], 1, like)


def _scale(scale: Any, name: str, size: int, axis: int, like: Operand) -> Operand:
    """Return a scale as a vector where the operands are: of one number, or of one each."""
    if scale is None or isinstance(scale, int | float):
        scale = _number(1.0 if scale is None else float(scale), name, like)
    given = unwrap(scale, name)
    check_same_kind(like, given, ("A", name))
    check_scale(given.form.shape, given.form.dtype, name, size, axis)
    if len(given.form.shape) == 1:
        return given
    return unwrap(scale.reshape(-1), name)


def _number(value: float, name: str, like: Operand) -> Any:
    """Return one number in an array of the operands' library, on their device."""
    if like.library == "numpy":
        return np.full(1, value, np.float32)
    if like.library == "torch":
        torch = sys.modules["torch"]
        return torch.full((1,), value, dtype=torch.float32, device=like.original.device)
    if like.library == "gemmule" and like.device != "cpu":
        one = np.full(1, value, np.float32)
        return DeviceArray.from_host(one, int(like.device.partition(":")[2]))
    raise TypeError(
        f"{name} is a number, beside operands of {like.library}; give it as an array of one "
        "float32 there."
    )


@remembered(1024)
def fused(
    a: Form, b: Form, out: Form, device: str, dtype: str, options: Options
) -> ScaledLauncher | None:
    """Return what computes a scaled product on a GPU in one go, or None: no proved kernel does."""
    # Strides and alignment are those of bytes: any of them stands for the operands' dtypes.
    left, right = (form._replace(dtype=FLOAT8[0]) for form in (a, b))
    call = canonical("matmul", left, right, out, replace(options, out_dtype=dtype, literal=True))
    problem = replace(call.problem, a=a.dtype, b=b.dtype)
    if a.dtype in BYTES:
        check_problem(replace(problem, out="int32"))
    if call.swapped or call.outer or problem.op != "matmul":
        return None
    machine = backends.get("cuda").machine(device)
    choice = scaled_choice(replace(call, problem=problem), machine, options.rung, options.params)
    return None if choice is None else ScaledLauncher(choice)


def _apart(given: Scaled, target: Operand, options: Options) -> None:
    """Multiply, then scale in float32: what is written between is a result of 4 bytes each."""
    left, right = given.a, given.b
    on_host = left.device == "cpu"
    if not on_host and options.rung is not None:
        raise ValueError(f"rung {options.rung} takes no scales for operands like these.")
    if not on_host and left.library != "torch":
        raise TypeError(
            f"no proved kernel computes this scaled product on {left.device}, and what would scale "
            f"afterwards takes tensors of PyTorch, not arrays of {left.library}. Give those, or "
            "multiply without scales."
        )
    plain = Options(rung=options.rung, params=options.params, literal=options.rung is not None)
    operands = (left, right, given.scale_a, given.scale_b)
    a, b, rows, columns = (one.array if on_host else one.original for one in operands)
    wide = _product(a, b, plain)
    if on_host:
        scaled = wide.astype(np.float32) * rows[:, None] * columns
        target.array[...] = scaled.astype(numpy_dtype(target.form.dtype))
    else:
        target.original.copy_(wide.float().mul_(rows[:, None]).mul_(columns))


def _product(a: Any, b: Any, options: Options) -> Any:
    """Return the plain product of two matrices."""
    left, right, _ = unwrap_all(a, b, NAMES["matmul"], None)
    plan = resolve("matmul", left.form, right.form, None, left.device, options)
    return plan.execute(left, right, None)
