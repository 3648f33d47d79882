"""Scaled products: ``C[i, j] = scale_a[i] * scale_b[j] * sum_l A[i, l] B[l, j]`` of 8-bit matrices.

What models quantised to 8 bits multiply by: integer or float8 codes of activations and of weights,
whose scales stand for a matrix, for rows of A and columns of B, or for blocks: 128 steps of the sum
share one, of each row or column or of 128 of them. On a GPU a proved kernel applies the scales to
its sums before they are rounded, and nothing but the result is written. Elsewhere the product comes
first, in int32 or float32, and then the scales in float32; by blocks the operands are scaled and
then multiplied, both in float32.
"""

from __future__ import annotations

import logging
import math
import sys
from dataclasses import dataclass, replace
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
from gemmule.backends.cuda.finished import FinishedLauncher
from gemmule.backends.explained import explained
from gemmule.choose import scaled_choice
from gemmule.core.caches import remembered, table
from gemmule.core.canonical import NAMES, Options, canonical
from gemmule.core.choice import Choice
from gemmule.core.epilogue import FUNCTIONS
from gemmule.core.operand import Form, Operand
from gemmule.core.problem import BYTES, FLOAT8, HALVES, check_problem, matmul_shape, numpy_dtype
from gemmule.plan import Plan, resolve

log = logging.getLogger("gemmule")

OUTS = ("float32", *HALVES)  # of a scaled product
BLOCK = 128  # steps of the sum, and rows or columns, that share a scale by blocks


class Scales(NamedTuple):
    """Scales of A and of B, in any of the shapes that `check_scale` takes; whether of blocks."""

    a: Operand
    b: Operand
    by_blocks: bool

    def words(self) -> str:
        """Return how the scales lie, for people."""
        each = (" x ".join(map(str, one.form.shape)) or "one number" for one in self[:2])
        return f"{' and '.join(each)}, of {'blocks' if self.by_blocks else 'rows and columns'}"


class Scaled(NamedTuple):
    """A scaled product's operands, unwrapped."""

    a: Operand
    b: Operand
    scales: Scales
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
    scales = scales_of(scale_a, scale_b, (*shape, left.form.shape[1]), left)
    given = Scaled(left, right, scales, target)
    if target is None:
        target = empty_like_kind(shape, dtype, left)
    else:
        check_out(target, shape, dtype, [left, right, *scales[:2]])
    if 0 in shape:
        return to_kind(target, left) if out is None else target.original
    launcher = None
    if left.device != "cpu":
        lie = Lie(left.form, right.form, target.form, left.device, kernels_for(scales, shape[1]))
        launcher = fused(lie, dtype, options)
    if launcher is None:
        _apart(given, target, options)
    else:
        launcher.multiply(left, right, target, scales=scales[:2])
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
    scales = scales_of(tensors[2], tensors[3], (*shape, left.form.shape[1]), left)
    ordinal = tensors[0].get_device()
    launcher = None
    if 0 not in shape:
        out = Form.packed(shape, dtype)
        kernels = kernels_for(scales, shape[1])
        launcher = fused(Lie(left.form, right.form, out, left.device, kernels), dtype, options)
    if launcher is None:
        return lambda a, b, scale_a, scale_b: None
    start, mask = launcher.finishing_starter(ordinal), launcher.choice.problem.alignment - 1
    fresh = maker(shape, getattr(torch, dtype), ordinal)
    room = maker((launcher.workspace,), torch.uint8, ordinal) if launcher.workspace else None
    steps = launcher.steps_of(scales[:2])
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


def check_scale(shape: tuple[int, ...], dtype: str, sizes: tuple[int, int], axis: int) -> bool:
    """Tell whether a scale is by blocks; TypeError or ValueError for what is no scale.

    sizes: how many rows A has (or columns B: axis 1), and steps the sum.
    """
    (size, steps), name = sizes, ("scale_a", "scale_b")[axis]
    if dtype != "float32":
        raise TypeError(f"{name} has dtype {dtype}; scales are float32. Convert it first.")
    each = (size, 1) if axis == 0 else (1, size)
    if tuple(shape) in ((), (1,), (1, 1), (size,), each):
        return False
    blocks, apart = -(-steps // BLOCK), -(-size // BLOCK)
    fine, coarse = (one if axis == 0 else one[::-1] for one in ((size, blocks), (apart, blocks)))
    if tuple(shape) not in (fine, coarse):
        of = "rows of A" if axis == 0 else "columns of B"
        raise ValueError(
            f"{name} has shape {tuple(shape)}; required is one number, or one for each of the "
            f"{size} {of}: shape ({size},) or {each}; or by blocks of {BLOCK} of the {steps} steps "
            f"of the sum one for each of those, {fine}, or for {BLOCK} of them each, {coarse}."
        )
    return True


def scales_of(scale_a: Any, scale_b: Any, sizes: tuple[int, int, int], like: Operand) -> Scales:
    """Return both scales of a product of these sizes (m, n, k), checked."""
    found, by_blocks = [], False
    for axis, scale in enumerate((scale_a, scale_b)):
        name = ("scale_a", "scale_b")[axis]
        if scale is None or isinstance(scale, int | float):
            scale = _number(1.0 if scale is None else float(scale), name, like)
        given = unwrap(scale, name)
        check_same_kind(like, given, ("A", name))
        by_blocks |= check_scale(given.form.shape, given.form.dtype, (sizes[axis], sizes[2]), axis)
        found.append(given)
    return Scales(found[0], found[1], by_blocks)


def kernels_for(scales: Scales, columns: int) -> tuple[bool, ...]:
    """Tell which rungs scale so: those that do `by_blocks` (True), others, both or none."""
    of_b = math.prod(scales.b.form.shape)
    if not scales.by_blocks:
        return (False, True) if of_b == 1 else (False,)
    wide = len(scales.b.form.shape) == 2 and scales.b.form.shape[1] == -(-columns // BLOCK)
    return (True,) if of_b == 1 or wide else ()


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


class Lie(NamedTuple):
    """How a scaled product's operands lie, where, and which rungs scale so (`kernels_for`)."""

    a: Form
    b: Form
    out: Form
    device: str
    kernels: tuple[bool, ...]


def finishing(
    given: Scaled, dtype: str, activation: str | None, options: Options
) -> FinishedLauncher | None:
    """Return what computes a scaled product with an epilogue in one go, or None."""
    left, right, scales, out = given
    if left.device == "cpu" or out is None:
        return None
    kernels = kernels_for(scales, out.form.shape[1])
    lie = Lie(left.form, right.form, out.form, left.device, kernels)
    return finished_once(lie, dtype, activation, options)


@remembered(1024)
def finished_once(
    lie: Lie, dtype: str, activation: str | None, options: Options
) -> FinishedLauncher | None:
    """Return `finishing`'s launcher for operands that lie so."""
    choice = _choice(lie, dtype, options, FUNCTIONS[activation])
    return None if choice is None else FinishedLauncher(choice, activation, scaled=True)


@remembered(1024)
def fused(lie: Lie, dtype: str, options: Options) -> FinishedLauncher | None:
    """Return what computes a scaled product on a GPU in one go, or None: no proved kernel does."""
    choice = _choice(lie, dtype, options)
    return None if choice is None else FinishedLauncher(choice, scaled=True, epilogue=False)


def _choice(lie: Lie, dtype: str, options: Options, function: str | None = None) -> Choice | None:
    """Return the choice of a kernel that scales, and applies an epilogue's function if given."""
    a, b, out, device, kernels = lie
    # Strides and alignment are those of bytes: any of them stands for the operands' dtypes.
    left, right = (form._replace(dtype=FLOAT8[0]) for form in (a, b))
    call = canonical("matmul", left, right, out, replace(options, out_dtype=dtype, literal=True))
    problem = replace(call.problem, a=a.dtype, b=b.dtype)
    if a.dtype in BYTES:
        check_problem(replace(problem, out="int32"))
    machine, choice = backends.get("cuda").machine(device), None
    if not (call.swapped or call.outer) and problem.op == "matmul":
        call = replace(call, problem=problem)
        choice = scaled_choice(call, machine, options, kernels, function)
    if choice is None and function is None:
        log.warning("%s, scaled: %s", problem.describe(), without_kernel(kernels))
    return choice


def without_kernel(kernels: tuple[bool, ...]) -> str:
    """Return what is done where no kernel scales: in words, for the log and for `explain`."""
    if False in kernels:
        return "no proved kernel scales it; a pass over the sums does, in float32"
    return "no proved kernel scales it; A and B are scaled first and multiplied in float32"


def apart(a: Form, b: Form, device: str, options: Options, *, by_blocks: bool) -> Plan:
    """Return the plan of the product where no kernel scales: of the operands, or widened ones."""
    forms = (Form.packed(one.shape, "float32") for one in (a, b)) if by_blocks else (a, b)
    return resolve("matmul", *forms, None, device, _plain(options))


def _plain(options: Options) -> Options:
    """Return the options of the product alone."""
    return Options(rung=options.rung, params=options.params, literal=options.rung is not None)


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
    plain = _plain(options)
    operands = (left, right, *given.scales[:2])
    a, b, rows, columns = (one.array if on_host else one.original for one in operands)
    if given.scales.by_blocks:
        rows = rows if rows.ndim == 2 else rows.reshape(-1, 1)
        scaled = _product(_widened(a, rows), _widened(b, columns), plain)
    else:
        wide, rows = _product(a, b, plain), rows.reshape(-1, 1)
        wide = wide.astype(np.float32) if on_host else wide.float()
        scaled = wide * rows * columns.reshape(-1)
    if on_host:
        target.array[...] = scaled.astype(numpy_dtype(target.form.dtype))
    else:
        target.original.copy_(scaled)


def _widened(matrix: Any, scale: Any) -> Any:
    """Return an array's or a tensor's elements, times the scales of their blocks, in float32."""
    for axis, size in enumerate(matrix.shape):
        if scale.ndim == 2 and scale.shape[axis] not in (1, size):
            repeat = "repeat" if isinstance(scale, np.ndarray) else "repeat_interleave"
            scale = getattr(scale, repeat)(BLOCK, axis)[(slice(None),) * axis + (slice(size),)]
    return (matrix.astype(np.float32) if isinstance(matrix, np.ndarray) else matrix.float()) * scale


def _product(a: Any, b: Any, options: Options) -> Any:
    """Return the plain product of two matrices."""
    left, right, _ = unwrap_all(a, b, NAMES["matmul"], None)
    plan = resolve("matmul", left.form, right.form, None, left.device, options)
    return plan.execute(left, right, None)


@dataclass(frozen=True, eq=False, repr=False)
class ScaledPlan:
    """A scaled product of operands and scales like those given; frozen.

    ``plan(A, B, scale_a=, scale_b=)`` computes; `explain()` tells by what rung, why, and
    whether the kernel that multiplies applies the scales.

    >>> import numpy as np, gemmule as gm
    >>> A = np.ones((2, 256), np.int8)
    >>> plan = gm.plan("matmul", A, A.T, scale_a=np.float32([[1, 2], [3, 4]]), scale_b=0.5)
    >>> plan(A, A.T, scale_a=np.float32([[1, 2], [3, 4]]), scale_b=0.5)
    array([[192., 192.],
           [448., 448.]], dtype=float32)
    >>> plan.explain().splitlines()[-1]
    'scales     2 x 2 and 1, of blocks: A and B are scaled first and multiplied in float32'
    """

    options: Options
    lie: Lie
    scales: Scales
    by: FinishedLauncher | Plan  # the kernel that scales, or the plan of a product without

    def __repr__(self) -> str:
        return f"ScaledPlan({self.choice.problem.describe()} on {self.lie.device})"

    @property
    def choice(self) -> Choice:
        """The rung that multiplies, with its parameters and why."""
        return self.by.choice

    def __call__(self, a: Any, b: Any, /, *, scale_a: Any, scale_b: Any, out: Any = None) -> Any:
        """Compute the planned product; ValueError for operands and scales that lie otherwise."""
        given = planned_scaled(a, b, (scale_a, scale_b), self.options)
        if given.lie != self.lie:
            raise ValueError(f"{self!r} was given operands or scales of other shapes or strides.")
        return scaled_product(a, b, scale_a, scale_b, out, self.options)

    def explain(self) -> str:
        """Return what runs, why, what it should cost, and what applies the scales."""
        if isinstance(self.by, FinishedLauncher):
            lines, words = (
                explained("matmul", self.choice, self.by),
                "by the kernel that multiplies",
            )
        else:
            lines, words = [self.by.explain()], without_kernel(self.lie.kernels)
            words = words if self.lie.device != "cpu" else words.partition("; ")[2]
        return "\n".join([*lines, f"scales     {self.scales.words()}: {words}"])


def planned_scaled(a: Any, b: Any, scales: tuple[Any, Any], options: Options) -> ScaledPlan:
    """Return the plan of a scaled product."""
    left, right, _ = unwrap_all(a, b, NAMES["matmul"], None)
    dtype = result_dtype(left.form.dtype, right.form.dtype, options.out_dtype)
    shape = result_shape(left.form.shape, right.form.shape)
    found = scales_of(*scales, (*shape, left.form.shape[1]), left)
    kernels, out = kernels_for(found, shape[1]), Form.packed(shape, dtype)
    lie = Lie(left.form, right.form, out, left.device, kernels)
    by: FinishedLauncher | Plan | None = None
    if left.device != "cpu" and 0 not in shape:
        by = fused(lie, dtype, options)
    if by is None:
        by = apart(left.form, right.form, left.device, options, by_blocks=found.by_blocks)
    return ScaledPlan(options, lie, found, by)
