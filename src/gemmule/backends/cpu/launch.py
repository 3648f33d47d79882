"""The CPU back end: NumPy views in, a rung's bound function on them.

Where the chosen rung takes another dtype or layout, operands are copied here, and only here; the
choice lists each copy. Vectors that are not of unit stride are gathered, results that do not lie
as the rung writes them go through a temporary.
"""

from __future__ import annotations

import functools
import platform
from collections.abc import Callable
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np

from gemmule.backends.base import HostRun
from gemmule.backends.cpu import panels
from gemmule.backends.cpu.calls import binding, scaled
from gemmule.backends.cpu.copies import in_rows, laid
from gemmule.backends.cpu.threads import processors
from gemmule.core.canonical import Call
from gemmule.core.choice import Choice
from gemmule.core.host_rates import HostRates
from gemmule.core.operand import View
from gemmule.core.packing import HostPacked, HostPacking
from gemmule.core.problem import Problem, layout_of, numpy_dtype
from gemmule.core.rung import CpuRung, Machine, Params, Rung
from gemmule.settings import cache_folder, tuning_enabled
from gemmule.storage import rates as stored_rates

Array = np.ndarray[Any, Any]
Sides = tuple[bool, bool]  # of A, of B
NEITHER: Sides = (False, False)
PROCESSORS = Path("/proc/cpuinfo")
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")


class CpuBackend:
    """Host arrays, and rungs of own kernels or BLAS."""

    name = "cpu"

    def machine(self, device: str) -> Machine:
        """Describe the processor; cached."""
        return machine()

    def proved(self, rung: Rung, problem: Problem, machine: Machine, end: str = "", /) -> bool:
        """CPU rungs are proved by the test suite on every machine that runs it."""
        return True

    def adapts(self) -> bool:
        """Host operands may be copied to what a rung takes; the choice lists every copy."""
        return True

    def prepare(self, choice: Choice) -> HostRun:
        """Bind the rung and the copies around it."""
        ready = ready_sides(choice)
        core = _cut(choice, ready)
        scale = _scaled(choice, ready)
        if any(ready):
            return _packed(choice, core, scale, ready)
        if is_direct(choice):
            turned = choice.call.op == "vecmat"
            product = (lambda a, x, y: core(a.T, x, y)) if turned else core
            if panels.pieces(choice) is not None:  # those ways are of one piece
                return HostRun(product, scale)
            bound, fresh = binding.binder(choice), binding.fresh(choice)
            return HostRun(product, scale, bound=bound, fresh=fresh)
        see_a, see_b, see_out = _viewers(choice.call)
        into = _into(choice, core)
        return HostRun(lambda a, b, out: into(see_a(a), see_b(b), see_out(out)), scale)


def machine() -> Machine:
    """Describe the processor, with its measured rates where they are stored; cached."""
    return _machine(processors(), str(cache_folder()), tuning_enabled())


@functools.lru_cache(maxsize=8)
def _machine(threads: int, folder: str, stored: bool) -> Machine:
    name, arch = processor_name(), platform.machine()
    known = stored_rates.read(name, arch, threads) if stored else None
    rates = known or HostRates.default(threads)
    return Machine(
        backend="cpu",
        name=name,
        arch=arch,
        units=threads,
        read_bytes_per_s=rates.read,
        cache_bytes=last_level_cache_bytes(),
        call_s=rates.call,
        rates=rates,
    )


def forget_machine() -> None:
    """Read the stored rates again at the next plan."""
    _machine.cache_clear()


def processor_name(listing: Path = PROCESSORS) -> str:
    """Return what the system calls the processor, its architecture where it has no name."""
    try:
        for line in listing.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


@functools.cache
def last_level_cache_bytes(folder: Path = CACHES) -> int:
    """Return the size of the largest CPU cache, 32 MiB where the system does not tell."""
    units = {"K": 2**10, "M": 2**20, "G": 2**30}
    sizes = [32 * 2**20]
    for path in folder.glob("index*/size"):
        try:
            text = path.read_text().strip()
            sizes.append(int(text[:-1]) * units[text[-1]])
        except (OSError, ValueError, KeyError, IndexError):
            continue
    return max(sizes[1:] or sizes)


def _nothing(a: Any, b: Any, out: Array) -> None:
    """Leave a result without elements as it is."""


def _bound(choice: Choice, ready: Sides = NEITHER) -> Callable[..., None]:
    """Return the rung's function over canonical arrays, looping over a batch it does not take.

    Of `ready` operands of a batch it takes a tuple with what was packed of each entry.
    """
    rung, problem = choice.rung, choice.problem
    if not isinstance(rung, CpuRung):
        raise TypeError(f"rung {rung.folder}/{rung.name} is for {rung.backend}, not for CPUs.")
    if problem.batch > 1 and 0 in choice.call.out_shape:
        return _nothing  # NumPy and loops would still count through a batch of any length
    bind, packing = rung.bind, rung.packing
    if packing is not None and any(ready):
        bind = functools.partial(_binding, packing, ready)
    if problem.batch == 1 or (rung.batched and not problem.batch_invariant):
        return bind(problem, choice.params)
    core = bind(problem.alone(), choice.params)

    def loop(a: Any, b: Any, out: Array) -> None:
        for i in range(problem.batch):
            core(a[i] if isinstance(a, np.ndarray | tuple) else a, b[i], out[i])

    return loop


def _cut(choice: Choice, ready: Sides = NEITHER) -> Callable[..., None]:
    """Return `_bound`, in pieces where that takes long, so that Ctrl-C is heard in between."""
    split = None if any(ready) else panels.pieces(choice)
    if split is None:
        return _bound(choice, ready)

    return panels.in_panels(choice, split, lambda problem: _bound(_part(choice, problem)))


def _part(choice: Choice, problem: Problem) -> Choice:
    params = choice.rung.check_params(problem, choice.params)
    return replace(choice, problem=problem, params=params)


def is_direct(choice: Choice) -> bool:
    """Whether operands go to the rung as they are, with no view, copy or temporary.

    A vecmat's matrix goes there as its transpose, which is a view that costs nothing.
    """
    call, problem = choice.call, choice.problem
    if problem != call.problem or call.outer:
        return False
    if call.op == "matmul":
        shapes = (call.a.shape, call.b.shape, call.out.shape)
        rows = call.out.strides == (problem.n, 1) or call.out.shape[-1] == 0
        plain = problem.op == "matmul" and not call.swapped and problem.quant is None
        return plain and rows and all(len(shape) == 2 for shape in (*shapes, call.out_shape))
    vectors = len(call.out_shape) == 1 and _unit(call.b) and _unit(call.out)
    return vectors and problem.op == "matvec" and call.swapped == (call.op == "vecmat")


def _unit(view: View) -> bool:
    return view.strides[-1] == 1 or view.shape[-1] <= 1


def _binding(
    packing: HostPacking, ready: Sides, problem: Problem, params: Params
) -> Callable[..., None]:
    return packing.bind(problem, params, ready)


def ready_sides(choice: Choice) -> Sides:
    """Tell of A and of B whether what was packed of them before serves this choice."""
    call, problem, rung = choice.call, choice.problem, choice.rung
    if not isinstance(rung, CpuRung) or rung.packing is None or call.op != "matmul":
        return NEITHER
    if call.outer or call.swapped or problem != call.problem or problem.op != "matmul":
        return NEITHER  # it is seen otherwise than it was packed
    alone = problem.batch == 1
    planes = (
        (1 if alone or problem.shared_a else problem.batch),
        (1 if alone or problem.shared_b else problem.batch),
    )
    a, b = (
        one is not None and rung.name in one.rungs and one.planes == count
        for one, count in zip(call.ready, planes, strict=True)
    )
    return a, b


def _packed(
    choice: Choice, core: Callable[..., None], scale: Callable[..., None], ready: Sides
) -> HostRun:
    """Return the run that reads what was packed of the `ready` operands."""
    a, b = (choice.rung.name if one else None for one in ready)
    see_a, see_b, see_out = _viewers(choice.call, ready)
    into = _into(choice, core)
    return HostRun(lambda a, b, out: into(see_a(a), see_b(b), see_out(out)), scale, (a, b))


def _planes(problem: Problem) -> Callable[[tuple[HostPacked, ...]], Any]:
    """Return what shows the packed entries of a batch as `_bound` takes them."""
    if problem.batch == 1:
        return lambda packed: packed[0]
    return lambda packed: packed if len(packed) == problem.batch else packed * problem.batch


def _scaled(choice: Choice, ready: Sides) -> Callable[[Any, Array, Array, complex, complex], None]:
    """Return ``run(a, b, out, alpha, beta)``."""

    @functools.cache
    def product() -> Callable[[Any, Array, Array], None]:
        summed = scaled.summed(choice)
        return _into(summed, _cut(summed, ready))

    scale = scaled.scaling(choice, product)
    see_a, see_b, see_out = _viewers(choice.call, ready)

    def run(a: Any, b: Array, out: Array, alpha: complex, beta: complex) -> None:
        scale(see_a(a), see_b(b), see_out(out), alpha, beta)

    return run


def _viewers(call: Call, ready: Sides = NEITHER) -> list[Callable[[Any], Any]]:
    """Return what shows A, x or B, and the result as a canonical call sees them."""
    views = [_viewer(view) for view in (call.a, call.b, call.out)]
    for side, is_ready in enumerate(ready):
        if is_ready:
            views[side] = _planes(call.problem)
    if call.problem.quant is not None:
        views[0] = attrgetter("T") if call.transposed_quant else (lambda matrix: matrix)
    return views


def _into(choice: Choice, core: Callable[..., None]) -> Callable[[Any, Array, Array], None]:
    """Return the product of operands that are seen as the canonical call has them."""
    call, one = choice.call, _adapted(choice, core)

    def every(left: Any, right: Array, target: Array) -> None:
        for index in np.ndindex(call.outer):
            inner = left[index] if isinstance(left, np.ndarray) else left
            one(inner, right[index], target[index])

    return every if call.outer else one


_MOST_AXES = 32  # of an array that NumPy shows with other strides


def _viewer(view: View) -> Callable[[Any], Any]:
    """Return what shows an array as `view`; the common cases avoid as_strided, which costs 5 us."""
    shape, steps = view

    def see(array: Array) -> Array:
        strides = tuple([step * array.itemsize for step in steps])
        for candidate in (array, array.T):
            if candidate.shape == shape and candidate.strides == strides:
                return candidate
        if array.ndim > _MOST_AXES:  # then as_strided takes none; of these axes most have one entry
            array = array[(slice(0, 1),) * array.ndim].reshape(-1)
        # Bytes are shown as uint8: as_strided does not know float8.
        known = array.view(np.uint8) if array.itemsize == 1 else array
        return np.lib.stride_tricks.as_strided(known, shape, strides).view(array.dtype)

    return see


def _adapted(choice: Choice, core: Callable[..., None]) -> Callable[[Any, Array, Array], None]:
    """Return the rung on one canonical product, converting operands to what it takes."""
    columns = "col" in getattr(choice.rung, "layouts_out", ())
    if choice.problem == choice.call.problem:
        return _converted(choice.problem, core, as_given=True, columns=columns)
    split = panels.sizes(choice)
    if split is None:
        return _converted(choice.problem, core, columns=columns)

    def build(problem: Problem) -> Callable[[Any, Array, Array], None]:
        return _converted(problem, _bound(_part(choice, problem)), columns=columns)

    return panels.in_panels(choice, split, build)


def _converted(
    problem: Problem, core: Callable[..., None], *, as_given: bool = False, columns: bool = False
) -> Callable[[Any, Array, Array], None]:
    """Return a rung's function for `problem` on operands of any dtypes and layouts.

    columns: it writes results whose columns lie behind each other as well.
    """
    is_matvec = problem.op == "matvec"
    out_dtype = numpy_dtype(problem.out)

    def one(a: Any, b: Array, out: Array) -> None:
        if not as_given:
            if isinstance(a, np.ndarray):
                a = as_layout(a, problem.a, problem.layout_a, problem.shared_a)
            if not is_matvec:
                b = as_layout(b, problem.b, problem.layout_b, problem.shared_b)
        if is_matvec:
            b = np.ascontiguousarray(b, dtype=numpy_dtype(problem.b))
        whole = out.flags.c_contiguous or (columns and out.ndim == 2 and out.T.flags.c_contiguous)
        if out.dtype == out_dtype and whole:
            core(a, b, out)
            return
        temporary = np.empty(out.shape, dtype=out_dtype)
        core(a, b, temporary)
        with np.errstate(all="ignore"):
            laid(temporary, out)

    return one


def as_layout(array: Array, dtype: str, layout: str, shared: bool) -> Array:
    """Return `array` in dtype and layout, copying only where it is not so already."""
    if shared and array.ndim == 3:
        one = as_layout(array[0], dtype, layout, shared=False)
        return np.broadcast_to(one, array.shape)
    with np.errstate(all="ignore"):
        array = array.astype(numpy_dtype(dtype), copy=False)
    steps = tuple(step // array.itemsize for step in array.strides[-2:])
    if layout == "row" and layout_of((array.shape[-2], array.shape[-1]), steps) != "row":
        return in_rows(array)
    return array
