"""What CUDA rungs that work row by row share: launches, alignment, chains, signatures."""

from __future__ import annotations

from collections.abc import Callable

from gemmule.core.problem import ITEMSIZE, Problem
from gemmule.core.rung import Arithmetic, Constraint, Machine, Params, Signature, Step, floats
from gemmule.rungs._cuda.geometry import accumulator, ceil_div, instance, type_arguments

Rounds = Callable[[Problem], Arithmetic]
Steps = Callable[[Problem, Params, Machine], tuple[Step, ...]]

WIDE = 16  # bytes of the widest load

# The dtypes of document 003 and their float relatives, without quantisation.
ROW_SIGNATURES: tuple[Signature, ...] = (
    *floats("float16", "bfloat16", "float32", "float64"),
    ("int8", "int8", "int32"),
    ("uint8", "uint8", "int32"),
)
FLOAT_SIGNATURES: tuple[Signature, ...] = floats("float32", "float64", "float16", "bfloat16")

VALUES = (8, 16, 32)

# Document 003's tables: name, threads of a row (blockDim.x), rows of a block (blockDim.y).
DOCUMENT_LAYOUTS: tuple[tuple[str, int, int], ...] = (
    ("p100_512", 32, 4),
    ("p100_1024", 32, 4),
    ("p100_2048", 32, 4),
    ("p100_4096", 128, 8),
    ("p100_8192", 256, 4),
    ("p100_16384", 512, 2),
    ("rtx3090_512", 32, 16),
    ("rtx3090_1024", 32, 32),
    ("rtx3090_2048", 32, 32),
    ("rtx3090_4096", 256, 1),
    ("rtx3090_8192", 256, 4),
    ("rtx3090_16384", 512, 2),
)
# The best of all declared sets for fp16 squares on a newer card: name, p, rows, values. What the
# document's own lack are bytes under way: 16 to 64 KB a multiprocessor here, and blocks small
# enough that one loads while another sums.
NEWER_LAYOUTS: tuple[tuple[str, int, int, int], ...] = (
    ("h200_512", 32, 8, 16),
    ("h200_1024", 64, 2, 16),
    ("h200_2048", 32, 8, 32),
    ("h200_4096", 32, 8, 32),
    ("h200_8192", 128, 1, 32),
    ("h200_16384", 256, 1, 32),
)
VALUES_FIT = Constraint(
    "a thread takes at most 64 bytes of the row in one step; in blocks of more than 512 threads "
    "at most 32 bytes and 16 values",
    lambda problem, params: _step_fits(
        params["values"], ITEMSIZE[problem.a], params["p"] * params["rows"]
    ),
)
BLOCK_FITS = Constraint(
    "p x rows is at most 1024 threads and at least a warp",
    lambda problem, params: 32 <= params["p"] * params["rows"] <= 1024,
)


def _step_fits(values: int, itemsize: int, threads: int) -> bool:
    if threads > 512:
        return values <= 16 and values * itemsize <= 32
    return values * itemsize <= 64


def newer_presets(*, several_warps: bool) -> dict[str, dict[str, int]]:
    """Return the newer card's presets with more than a warp for a row, or the others."""
    return {
        name: {"p": p, "rows": rows, "values": values}
        for name, p, rows, values in NEWER_LAYOUTS
        if (p > 32) == several_warps
    }


def load_alignment(problem: Problem) -> int:
    """Return the ALIGN argument of rows.cuh: 16, or 1 where only single elements are aligned."""
    return WIDE if problem.alignment >= WIDE else 1


def row_blocks(problem: Problem, rows: int) -> int:
    """Return how many blocks of `rows` rows the whole batch takes."""
    return ceil_div(problem.m, rows) * problem.batch


def thread_steps(kernel: str, *, smem_of_x: bool = False) -> Steps:
    """Return the `steps` of a rung whose `block` threads take a row each.

    smem_of_x: shared memory holds as many values of x.
    """

    def steps(problem: Problem, params: Params, machine: Machine) -> tuple[Step, ...]:
        block = params["block"]
        name = instance(kernel, type_arguments(problem), block)
        smem = block * ITEMSIZE[problem.b] if smem_of_x else 0
        return (Step(name, (row_blocks(problem, block), 1, 1), (block, 1, 1), smem),)

    return steps


def shared_row_steps(kernel: str, *names: str, aligned: bool = True) -> Steps:
    """Return the `steps` of a rung whose threads share rows: `p` of them, or a warp, each.

    names: parameters that the kernel's template takes behind the types, and behind the alignment
    if `aligned`. A block has `rows` (or `warps`) rows.
    """

    def steps(problem: Problem, params: Params, machine: Machine) -> tuple[Step, ...]:
        align = (load_alignment(problem),) if aligned else ()
        template = (type_arguments(problem), *align, *(params[name] for name in names))
        p, rows = params.get("p", 32), params["rows" if "rows" in params else "warps"]
        grid = (row_blocks(problem, rows), 1, 1)
        return (Step(instance(kernel, *template), grid, (p, rows, 1)),)

    return steps


def sums_of(name: str) -> Callable[[Problem, Params, Machine], int]:
    """Return the `workspace` of a rung that leaves so many sums, a parameter's value, a result."""

    def workspace(problem: Problem, params: Params, machine: Machine) -> int:
        each: int = params[name] * ITEMSIZE[accumulator(problem)]
        return problem.m * problem.batch * each

    return workspace


def share_chain(problem: Problem, columns: int, threads: int, values: int) -> int:
    """Return the most additions in one thread's share of `columns` columns (share_of_row)."""
    width = min(values, WIDE // ITEMSIZE[problem.a]) if load_alignment(problem) == WIDE else 1
    return ceil_div(columns // width, threads) * width + ceil_div(columns % width, threads)


def tree(lanes: int) -> int:
    """Return the additions on the way through a tree over `lanes`, a power of two."""
    return lanes.bit_length() - 1


def sums(chain: Callable[[Problem, Params], int], *, unordered: bool = False) -> Rounds:
    """Return a rung's `arithmetic`: sums in the accumulator of args.cuh, of exact products."""
    return lambda problem: Arithmetic(accumulator(problem), chain, unordered=unordered)
