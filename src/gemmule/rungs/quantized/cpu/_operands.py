"""What the quantised CPU rungs share on the host side: operands, signatures, arithmetic, costs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from gemmule.backends.cpu.copies import in_rows
from gemmule.backends.cpu.simd import BLOCK_BYTES, LANES, codes_per_lane
from gemmule.core.problem import FLOAT4_DTYPE, Problem
from gemmule.core.rung import Arithmetic, Machine, Signature, Suggestion
from gemmule.quant.matrix import QuantizedMatrix
from gemmule.rungs._cpu import SMALL_BYTES, address, spread_s
from gemmule.rungs._cpu_convert import narrowed, widened

Floats = NDArray[np.float32]
Run = Callable[[QuantizedMatrix, NDArray[Any], NDArray[Any]], None]
T = TypeVar("T")
Core = Callable[["Stored", NDArray[Any], NDArray[Any]], None]

# Rows of one task of a parallel kernel: enough to hide the launch, few enough to balance.
ROWS_PER_TASK = (64, 16, 32, 128, 256)

# Shares of the rows that each thread takes of one vector's product.
SHARES_PER_THREAD = (4, 1, 2, 8)

# Below this many bytes of codes one thread is as fast as two: a launch costs about 8 us
# (two cores of an EPYC 9005, November 2026).
SERIAL_BYTES = 200_000


INTEGER_CODES = ("uint4", "uint8")


@dataclass(frozen=True, slots=True)
class Stored:
    """The parts of a quantised matrix as kernels take them: contiguous arrays and their steps.

    m, n: stored rows and columns. group: columns of a group, n where a row has one group.
    scale_step: elements from one row's scales to the next row's; 0 with one scale for the matrix.
    factors: see `QuantizedMatrix.factors`; they are no kernel's business but `bound`'s.
    """

    codes: NDArray[np.uint8]
    scales: NDArray[Any]
    zeros: Floats | None
    factors: Floats | None
    m: int
    n: int
    bits: int
    group: int
    scale_step: int
    _kept: dict[Any, Any] = field(default_factory=dict)

    def kept(self, make: Callable[..., T], *arguments: Any) -> T:
        """Return ``make(self, *arguments)``, the same object ever after, whoever asks at once."""
        key = make, arguments
        found = self._kept.get(key)
        if found is None:
            found = self._kept.setdefault(key, make(self, *arguments))
        return cast("T", found)

    @property
    def row_bytes(self) -> int:
        """Bytes from one row of codes to the next."""
        return -(-self.n * self.bits // 8)

    @property
    def zeros_address(self) -> int:
        """Address of the zero points; 0 without any."""
        return 0 if self.zeros is None else address(self.zeros)


def stored(matrix: QuantizedMatrix) -> Stored:
    """Return the parts of a matrix in layout ``row``."""
    m, n = matrix.stored_shape
    size = matrix.group_size
    zeros = None if matrix.symmetric else matrix.zeros
    return Stored(
        codes=np.ascontiguousarray(matrix.codes),
        scales=np.ascontiguousarray(matrix.scales),
        zeros=None if zeros is None else np.ascontiguousarray(zeros),
        factors=matrix.factors,
        m=m,
        n=n,
        bits=matrix.bits,
        group=n if size is None or size == -1 else size,
        scale_step=0 if size is None else matrix.n_groups,
    )


def takes_floats(problem: Problem, matrix: QuantizedMatrix) -> bool:
    """Whether a product reads and writes float32 vectors as they are."""
    plain = matrix.perm is None and matrix.factors is None
    return plain and problem.b == "float32" == problem.out


def bound(core: Core, working: str, *, by_columns: bool = False) -> Run:
    """Return ``run(A, x, y)`` around a core that takes and fills contiguous `working` arrays.

    Applies A's permutation (to x, or to y when A is transposed) and its factors (the other way),
    converts dtypes, and answers empty problems. x may be a vector or a matrix of columns.
    by_columns: the core takes both where their columns lie behind each other, too.
    """
    dtype = np.dtype(working)

    def lies(array: NDArray[Any]) -> bool:
        return array.flags.c_contiguous or (by_columns and array.flags.f_contiguous)

    def run(matrix: QuantizedMatrix, x: NDArray[Any], y: NDArray[Any]) -> None:
        parts = matrix.kept(stored)
        if (  # in one place, as each call of a function costs a small product 0.1 us
            matrix.perm is None
            and parts.factors is None
            and x.dtype == dtype == y.dtype
            and x.flags.c_contiguous
            and y.flags.c_contiguous
            and x.size
            and y.size
        ):
            core(parts, x, y)
            return
        if y.size == 0 or x.shape[0] == 0:
            y[...] = 0
            return
        scattered = matrix.perm is not None and matrix.transposed
        if matrix.perm is not None and not matrix.transposed:
            x = x[matrix.perm]
        x = widened(x, dtype)
        x = x if lies(x) else in_rows(x)
        if matrix.transposed:
            x = times_factors(parts, x)
        direct = not scattered and y.dtype == dtype and lies(y)
        order: Literal["C", "F"] = "F" if lies(y) and not y.flags.c_contiguous else "C"
        result = y if direct else np.empty(y.shape, dtype, order)
        core(parts, x, result)
        if not matrix.transposed:
            result[...] = times_factors(parts, result)
        if not direct:
            where: Any = matrix.perm if scattered else ...
            with np.errstate(all="ignore"):
                if scattered:
                    y[where] = result.astype(y.dtype, copy=False)
                else:
                    narrowed(result, y)

    return run


def times_factors(parts: Stored, rows: NDArray[Any]) -> NDArray[Any]:
    """Return what belongs to stored rows, x or y, times the rows' factors; itself without any."""
    if parts.factors is None:
        return rows
    with np.errstate(all="ignore"):  # NaN and Inf are the caller's
        product: NDArray[Any] = rows * (parts.factors if rows.ndim == 2 else parts.factors[:, 0])
    return product


def signatures(*dtypes: str, codes: tuple[str, ...] = INTEGER_CODES) -> tuple[Signature, ...]:
    """Return the signatures of codes with these activation dtypes."""
    pairs: list[tuple[str, str]] = []
    for dtype in dtypes:
        pairs.append((dtype, dtype))
        if dtype in ("float16", "bfloat16"):
            pairs.append((dtype, "float32"))
    return tuple((a, b, out) for a in codes for b, out in pairs)


FLOAT32_SIGNATURES = signatures("float32", "float16", "bfloat16")
ALL_CODES = (*INTEGER_CODES, FLOAT4_DTYPE)
VECTOR_SIGNATURES = signatures("float32", "float16", "bfloat16", codes=ALL_CODES)
ALL_SIGNATURES = signatures("float32", "float16", "bfloat16", "float64", codes=ALL_CODES)


def working_dtype(problem: Problem) -> str:
    """Return the dtype sums are kept in: float64 for float64 activations, else float32."""
    return "float64" if problem.b == "float64" else "float32"


def _takes(problem: Problem, *, transposed: bool | None = None, lanes: bool = False) -> bool:
    """Whether codes are stored in layout ``row``, and the product runs across stored rows or not.

    transposed: None for either way. lanes: no 32-bit lane may hold codes of two groups.
    """
    spec = problem.quant
    if spec is None or spec.layout != "row" or transposed not in (None, spec.transposed):
        return False
    size = spec.group_size
    return not lanes or size is None or size == -1 or size % codes_per_lane(spec.bits) == 0


takes_row, takes_row_along, takes_row_across = (
    functools.partial(_takes, transposed=way) for way in (None, False, True)
)
takes_lanes, takes_lanes_along, takes_lanes_across = (
    functools.partial(_takes, transposed=way, lanes=True) for way in (None, False, True)
)


Chain = Callable[[Problem, Any], int]


def in_lanes(problem: Problem, params: Any) -> int:
    """Return the longest chain of roundings from a weight to the result, of sums in 16 lanes.

    3 for the weight (code - zero, times scale, times x where x joins the scale first); at most 8
    steps of padding, and 15 over the lanes.
    """
    return -(-problem.reduction // LANES) + 8 + 15 + 3


def in_one_sum(problem: Problem, params: Any) -> int:
    """Return the longest chain of sums whose order the compiler chooses."""
    return problem.reduction + 3


def float_arithmetic(chain: Chain = in_one_sum) -> Callable[[Problem], Arithmetic]:
    """Return the arithmetic of a rung that sums in float32 (float64 for float64 activations).

    Where a caller permits 8-bit activations, a rung that keeps them as they are says so too: its
    results are within that wider bound.
    """

    def arithmetic(problem: Problem) -> Arithmetic:
        permitted = problem.quant is not None and problem.quant.activations == "int8"
        working = working_dtype(problem)
        bits = 8 if permitted else None
        return Arithmetic(working, chain, product=working, activations_bits=bits)

    return arithmetic


def rounded_arithmetic(problem: Problem) -> Arithmetic:
    """Return the arithmetic of a rung that rounds activations to 8 bits and sums in lanes."""
    return Arithmetic("float32", in_lanes, product="float32", activations_bits=8)


def read_time(
    efficiency: float, columns_at_once: int = 1, *, alone: bool = False
) -> Callable[[Problem, Machine], Suggestion | None]:
    """Return a heuristic: the bytes at `efficiency` of what may be read, and a call.

    columns_at_once: columns of B that one pass over the codes serves. alone: on one thread.
    """

    def suggest(problem: Problem, machine: Machine) -> Suggestion | None:
        rates, columns = machine.rates, problem.n if problem.op == "matmul" else 1
        nbytes = problem.matrix_bytes
        threads = 1 if alone or nbytes < SMALL_BYTES else machine.units
        if nbytes <= machine.cache_bytes // 2:
            rate = rates.core_cached * threads
        else:
            rate = rates.core_read if threads == 1 else machine.read_bytes_per_s
        passes = -(-columns // columns_at_once)
        calls = rates.call + (rates.spread if threads > 1 else 0)
        return Suggestion({}, passes * nbytes / (efficiency * rate) + calls)

    return suggest


def columns_time(
    efficiency: float,
    panel: int,
    per_fma: Mapping[str, float],
    *,
    codes_per_fma: Mapping[str, float] | None = None,
    spreads: int = 1,
    rounded: bool = False,
) -> Callable[[Problem, Machine], Suggestion | None]:
    """Return a heuristic for a few columns: to read the codes, or to multiply whole panels.

    per_fma, codes_per_fma: by codes' dtype the products, and the codes made ready, that a core
    handles for each float32 multiply-add that it can do: ratios, so that they travel. spreads: how
    often shares are given out. rounded: for 8-bit activations alone.
    """

    def suggest(problem: Problem, machine: Machine) -> Suggestion | None:
        reading = read_time(efficiency, columns_at_once=max(1, problem.n))(problem, machine)
        spec = problem.quant
        if reading is None or (rounded and (spec is None or spec.activations != "int8")):
            return None
        codes = "uint4" if problem.a == FLOAT4_DTYPE else problem.a
        work = -(-problem.n // panel) * panel / per_fma[codes]
        if codes_per_fma is not None:
            work += 1 / codes_per_fma[codes]
        busy = problem.m * problem.k * work / (machine.rates.fma * machine.units)
        return Suggestion({}, max(reading.expected_s, busy + spreads * spread_s(machine)))

    return suggest


def with_arranged(
    multiply_adds: float,
    panel: int,
    suggest: Callable[[Problem, Machine], Suggestion | None],
    *,
    shared: bool = False,
) -> Callable[[Problem, Machine], Suggestion | None]:
    """Return a heuristic that also counts the arranging of x, which is done ahead.

    multiply_adds: of float32, that a core could do in the time that an element takes, in panels of
    so many columns (Xeon with AMX, November 2026: 95 a ns). shared: by all threads, not one.
    """

    def arranging(problem: Problem, machine: Machine) -> Suggestion | None:
        found = suggest(problem, machine)
        if found is None:
            return None
        elements = problem.k * -(-problem.n // panel) * panel
        more = elements * multiply_adds / machine.rates.fma
        more /= machine.units if shared else 1
        return replace(found, expected_s=found.expected_s + more)

    return arranging


@dataclass(frozen=True, slots=True)
class Blocks:
    """How a row splits into blocks of 64 bytes, and which group each lane of each belongs to.

    first: for each block the group of its first lane; lanes: for each block and lane the group,
    counted from `first`. pieces: how many whole groups a block holds, 1 for a part of one, 0 where
    groups and blocks do not fit.
    """

    count: int
    columns: int
    pieces: int
    first: NDArray[np.int32]
    lanes: NDArray[np.int32]


@functools.lru_cache(maxsize=64)
def blocks_of(n: int, bits: int, group: int) -> Blocks:
    """Return the blocks of rows of `n` codes in groups of `group`.

    Who takes their addresses has to keep them: they may be forgotten here.
    """
    width = codes_per_lane(bits)
    columns = LANES * width
    count = -(-n * bits // (8 * BLOCK_BYTES))
    pieces = 1
    if group < n and group % columns != 0:
        pieces = columns // group if columns % group == 0 else 0
    starts = width * np.arange(count * LANES, dtype=np.int64).reshape(count, LANES)
    groups = np.minimum(starts, n - 1) // group
    first = groups[:, 0].astype(np.int32)
    lanes = (groups - groups[:, :1]).astype(np.int32)
    return Blocks(count, columns, pieces, first, lanes)


def scale_dtype_of(parts: Stored) -> str:
    """Return the dtype name of the scales."""
    return str(parts.scales.dtype.name)
