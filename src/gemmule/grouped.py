"""Grouped products: from the operands of `grouped_matmul` to a plan, and the plan.

The way is that of the other products: operands are unwrapped and checked, the call is seen as one
canonical problem, a rung is chosen, and the back end launches it. Where each expert's rows end is
read by the kernel alone on a GPU; on the host it is checked first.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from gemmule import backends
from gemmule.arrays.interop import (
    check_out,
    check_same_kind,
    empty_like_kind,
    mark_written,
    quantized_form,
    to_kind,
    unwrap,
)
from gemmule.backends.base import GroupedRun
from gemmule.backends.cuda import grouped as cuda_grouped
from gemmule.backends.cuda import launch_args
from gemmule.backends.cuda.grouped import GroupedLauncher
from gemmule.backends.explained import explained
from gemmule.core.caches import remembered, table
from gemmule.core.canonical import DEFAULT, Options
from gemmule.core.choice import Choice
from gemmule.core.grouped import grouped
from gemmule.core.operand import Form, Operand, deciding
from gemmule.core.problem import FLOAT8_CODES
from gemmule.core.rung import CpuRung
from gemmule.plan import Plan, resolve
from gemmule.quant.stack import QuantizedStack
from gemmule.tuning.choosing import chosen

NOWHERE = Form.packed((0,), "int32")


def _nothing(a: Operand, w: Operand, ends: Operand, out: Operand) -> None:
    """Leave the result as it is."""


@dataclass(frozen=True, eq=False, repr=False)
class GroupedPlan(Plan):
    """A grouped product, decided once and callable many times: ``plan(A, W, offsets, out=None)``.

    It takes operands of the planned shapes, dtypes and strides; others raise ValueError.
    """

    ends: Form = NOWHERE
    run: GroupedRun = _nothing
    _met: list[Any] = field(default_factory=list, init=False)  # the key of tensors as planned

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle what was asked for; whoever loads the plan chooses on its own machine."""
        return resolve_grouped, (*self.forms, self.ends, None, self.device, self.options)

    def __call__(self, a: Any, b: Any, offsets: Any = None, /, *, out: Any = None) -> Any:
        """Compute the planned product, into `out` where given."""
        key = None
        if getattr(a, "is_cuda", False) and "torch" in sys.modules:
            key = key_of(a, b, offsets, self.options)
            if key is not None and key in self._met:
                given = a, b, offsets
                result = by_key(key, given, self.options, out, trusted=out is None)
                if result is not None:
                    return result
        operands = unwrap_grouped(a, b, offsets, out)
        forms = tuple(one.form for one in operands[:3])
        device = deciding(*operands[:2]).device
        planned = map(_bare, (*self.forms, self.ends))
        if device != self.device or list(map(_bare, forms)) != list(planned):
            raise ValueError(
                f"this plan computes {self.problem.describe()} on {self.device}; given was "
                f"{' and '.join(f'{f.dtype} {f.shape}' for f in forms)} on {device}. Make another."
            )
        self._met[:] = [] if key is None else [key]
        return multiplied(operands, self.options)

    def tune(self, *, max_seconds: float = 30.0) -> Plan:
        """Raise ValueError: how tokens are spread decides, and no plan knows it."""
        raise ValueError(
            "grouped products are not tuned: their time depends on the offsets, which a plan does "
            "not know. Name rung= and params= where you know better."
        )

    def explain(self) -> str:
        """Return what runs, why, what it should cost where tokens choose evenly, and the memory."""
        launcher = getattr(self.run, "__self__", self._run)
        return "\n".join(explained(self.op, self.choice, launcher))


def _bare(form: Form) -> tuple[Any, ...]:
    return form.shape, form.strides, form.dtype


Operands = tuple[Operand, Operand, Operand, Operand | None]


def unwrap_grouped(a: Any, w: Any, offsets: Any, out: Any) -> Operands:
    """Unwrap the operands, and check that they share a library and a device."""
    if offsets is None:
        raise TypeError(
            "offsets are missing. A plan of grouped_matmul is made of A, W and offsets, and called "
            "with them: int32 (experts,), where each expert's rows end."
        )
    left, right, ends = unwrap(a, "A"), unwrap_weights(w), unwrap(offsets, "offsets")
    check_same_kind(left, right, ("A", "W"))
    check_same_kind(left, ends, ("A", "offsets"))
    if out is None:
        return left, right, ends, None
    result = unwrap(out, "out")
    check_same_kind(left, result, ("A", "out"))
    return left, right, ends, result


def unwrap_weights(w: Any) -> Operand:
    """Unwrap the experts' matrices; TypeError for codes that are no stack."""
    right = unwrap(w, "W")
    if right.form.quant is not None and not isinstance(right.array, QuantizedStack):
        raise TypeError(
            "W is a QuantizedMatrix; of experts it must be a stack: gemmule.quantize_experts(W), "
            "or gemmule.QuantizedStack.from_matrix(Q, experts)."
        )
    return right


def grouped_product(a: Any, w: Any, offsets: Any, out: Any, options: Options) -> Any:
    """Return the grouped product of the user's operands; PyTorch learns nothing of it."""
    if getattr(a, "is_cuda", False) and "torch" in sys.modules:
        result = of_tensors(a, w, offsets, options, out, trusted=out is None)
        if result is not None:
            return result
    return multiplied(unwrap_grouped(a, w, offsets, out), options)


class Bound(NamedTuple):
    """A call of tensors met before: ``call(*operands, out)``, and what its result looks like.

    call: returns None where nothing was done; out: None, or a tensor for the result. extents: bytes
    of the operands, from the first element to behind the last, 0 of codes.
    """

    call: Callable[..., Any]
    form: tuple[Any, ...] = ()  # dtype, shape, strides, device
    extents: tuple[int, ...] = ()
    nbytes: int = 0

    def takes(self, out: Any, operands: tuple[Any, ...]) -> bool:
        """Tell whether `out` is a plain tensor such as a fresh result is, apart from operands."""
        if type(out) is not sys.modules["torch"].Tensor or out.requires_grad or out.is_neg():
            return False
        if (out.dtype, out.shape, out.stride(), out.get_device()) != self.form:
            return False
        begin = out.data_ptr()
        end = begin + self.nbytes
        for one, extent in zip(operands, self.extents, strict=True):
            if extent and one.data_ptr() < end and begin < one.data_ptr() + extent:
                return False
        return not begin & 15


_bound: dict[Any, Bound] = table()  # calls of tensors met before, by what tells those apart
MOST = 4096


def of_tensors(
    a: Any, w: Any, ends: Any, options: Options, out: Any = None, *, trusted: bool = True
) -> Any | None:
    """Return the product of PyTorch's CUDA tensors met before, or None: the general path has it.

    What tells tensors apart stands in the key; what is left are addresses. out: a tensor to be
    written; trusted: it is such as a fresh result is.
    """
    key = key_of(a, w, ends, options)
    return None if key is None else by_key(key, (a, w, ends), options, out, trusted=trusted)


def key_of(a: Any, w: Any, ends: Any, options: Options) -> Any | None:
    """Return what tells such tensors apart, None where these are others."""
    torch = sys.modules["torch"]
    tensor = torch.Tensor
    if type(a) is not tensor or type(ends) is not tensor:
        return None
    matrices: tuple[Any, ...]
    if type(w) is QuantizedStack:
        matrices = w.matrix.kept(quantized_form), w.experts, w.device
    elif type(w) in (tensor, torch.nn.Parameter):
        matrices = w.dtype, w.shape, w.stride(), w.get_device()
    else:
        return None
    rows = a.dtype, a.shape, a.stride(), a.get_device()
    limits = ends.dtype, ends.shape, ends.stride(), ends.get_device()
    return *rows, *matrices, *limits, None if options is DEFAULT else options


def by_key(
    key: Any, operands: tuple[Any, Any, Any], options: Options, out: Any, *, trusted: bool
) -> Any | None:
    """Return the product of operands that this key tells from others, as `of_tensors`."""
    bound = _bound.get(key)
    if bound is None:
        if len(_bound) >= MOST:
            _bound.clear()
        bound = _bound[key] = _bound_call(*operands, options)
    if trusted:
        return bound.call(*operands, out)
    return written(bound, operands, out)


def written(bound: Bound, operands: tuple[Any, ...], out: Any) -> Any | None:
    """Return the user's `out`, filled, or None: nothing was done."""
    if not bound.takes(out, operands) or bound.call(*operands, out) is None:
        return None
    sys.modules["torch"]._C._increment_version([out])
    return out


def nobody(*given: Any) -> None:
    """Do nothing."""


def _bound_call(a: Any, w: Any, ends: Any, options: Options) -> Bound:
    """Return the call of tensors like these."""
    from gemmule.dispatch.torch import extent, maker  # only where PyTorch is

    torch = sys.modules["torch"]
    operands = unwrap_grouped(a, w, ends, None)
    left, right, third, _ = operands
    plan = resolve_grouped(left.form, right.form, third.form, None, left.device, options)
    launcher = getattr(plan.run, "__self__", None)
    ordinal = a.get_device()
    if not isinstance(launcher, GroupedLauncher) or 0 in (*w.shape, *a.shape):
        return Bound(nobody)
    start, mask = launcher.starter(ordinal), plan.problem.alignment - 1
    coded = isinstance(w, QuantizedStack)
    dtype, shape = getattr(torch, plan.problem.out), plan.choice.call.out_shape
    fresh = maker(shape, dtype, ordinal)
    device_of, stream_of = torch._C._cuda_getDevice, torch._C._cuda_getCurrentRawStream

    def call(a: Any, w: Any, ends: Any, out: Any) -> Any | None:
        x, at = a.data_ptr(), ends.data_ptr()
        matrices = launch_args.packed_addresses(w.matrix) if coded else w.data_ptr()
        lies = x if coded else x | matrices
        if lies & mask or not (x and matrices and at) or device_of() != ordinal:
            return None
        if a.is_neg() or (not coded and w.is_neg()):
            return None
        result = fresh() if out is None else out
        left, right = (matrices, x) if coded else (x, matrices)
        start(stream_of(ordinal), left, right, result.data_ptr(), at)
        return result

    extents = tuple(extent(one.form) for one in (left, right, third))
    packed = Form.packed(shape, plan.problem.out)
    return Bound(call, (dtype, shape, packed.strides, ordinal), extents, extent(packed))


def multiplied(operands: Operands, options: Options) -> Any:
    """Return the grouped product of unwrapped operands, of the library of A."""
    left, right, ends, out = operands
    form = None if out is None else out.form
    plan = resolve_grouped(left.form, right.form, ends.form, form, left.device, options)
    call = plan.choice.call
    if left.device == "cpu":
        _check_ends(ends.array, call.problem.m)
    target = out
    if target is None:
        target = empty_like_kind(call.out_shape, call.problem.out, left)
        if left.device == "cpu":
            target.array[ends.array[-1] if ends.array.size else 0 :] = 0
    else:
        check_out(target, call.out_shape, call.problem.out, [left, right, ends])
    plan.run(left, right, ends, target)
    if out is None:
        return to_kind(target, left)
    mark_written(out)
    return out.original


def planned_grouped(a: Any, w: Any, offsets: Any, options: Options) -> GroupedPlan:
    """Return the plan of a grouped product of operands like these."""
    left, right, ends, _ = unwrap_grouped(a, w, offsets, None)
    return resolve_grouped(left.form, right.form, ends.form, None, left.device, options)


@remembered(4096)
def resolve_grouped(
    a: Form, w: Form, ends: Form, out: Form | None, device: str, options: Options
) -> GroupedPlan:
    """Return the plan for operands of these forms on `device`; cached."""
    call = grouped(a, w, ends, out, options)
    backend = backends.get("cpu" if device == "cpu" else "cuda")
    choice = chosen(call, backend.machine(device), device, options)
    run = _on_host(choice, options) if device == "cpu" else cuda_grouped.prepare(choice)
    return GroupedPlan("grouped", choice, options, (a, w), device, _whole, None, ends, run)


def _whole(a: Operand, b: Operand, out: Operand, alpha: complex, beta: complex) -> None:
    raise ValueError("a grouped product is run with its offsets: call the plan.")


def _on_host(choice: Choice, options: Options) -> GroupedRun:
    """Return the run of a CPU rung: each group by the matrix product chosen for its size."""
    rung = choice.rung
    if not isinstance(rung, CpuRung):
        raise TypeError(f"rung {rung.folder}/{rung.name} is for {rung.backend}, not for CPUs.")
    core = rung.bind(choice.problem, choice.params)
    # What the rung promises of its sums holds where no weight is rounded to a half.
    widened = choice.problem.b == FLOAT8_CODES  # whose floats and sums are float32
    of_group = Options(out_dtype="float32" if widened else choice.problem.out, exact=True)

    calls: dict[int, Any] = {}  # by the rows of a group, all else being alike

    def product(a: Any, w: Any, c: Any) -> None:
        call = calls.get(len(a))
        if call is not None and call(a, w, c) is not None:
            return
        left, right, out = unwrap(a, "A"), unwrap(w, "W"), unwrap(c, "out")
        plan = resolve("matmul", left.form, right.form, out.form, "cpu", of_group)
        if plan.fast_path is not None and len(calls) < MOST:
            calls[len(a)] = plan.fast_path.call
        plan.execute(left, right, out)

    return lambda a, w, ends, out: core(a.array, w.array, ends.array, out.array, product)


def _check_ends(ends: np.ndarray[Any, Any], tokens: int) -> None:
    """Raise ValueError unless the ends rise from 0 to at most `tokens`."""
    if ends.size and (ends[0] < 0 or ends[-1] > tokens or np.any(ends[1:] < ends[:-1])):
        raise ValueError(
            f"offsets are {ends[:8].tolist()}{' ...' if ends.size > 8 else ''}; they must be the "
            f"ends of the groups, which rise from 0 to at most {tokens} (the rows of A)."
        )


def of_no_slots(target: Operand, like: Operand) -> None:
    """Write sums over no slots, which are zeros: those of a product that has no terms."""
    rows, columns = target.form.shape
    a, b = (empty_like_kind(one, target.form.dtype, like) for one in ((rows, 0), (0, columns)))
    plan = resolve("matmul", a.form, b.form, target.form, target.device, DEFAULT)
    plan.launch(a, b, target, 1.0, 0.0)
