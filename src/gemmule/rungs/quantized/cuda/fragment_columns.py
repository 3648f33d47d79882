"""Several columns of x over codes in fragment order: what one costs, nearly, up to sixteen.

The instruction has eight columns; `fragment_codes` fills them with pieces of one x. Here they are
columns of X, packed by a first launch as the instruction wants them, in any layout and dtype that X
has, with the sums that zero points meet; then each fragment of codes, taken apart once, meets all
of them. A float32 takes three columns, one for each of its parts. What the memory does not ask, the
caches do: 16 columns of x are four times the bytes of the codes they meet, so several rows of tiles
share what a warp loads of x, and the warps of a block work on different rows with the same columns
at about the same time.
"""

from __future__ import annotations

from gemmule.core.architectures import SINCE_AMPERE
from gemmule.core.device_model import Terms
from gemmule.core.problem import FLOAT4, Problem
from gemmule.core.rung import CudaRung, Machine, Params, Step
from gemmule.rungs._cuda import fragments
from gemmule.rungs._cuda.geometry import CTYPE, ceil_div, modelled, starts_early
from gemmule.rungs._cuda.terms import rounds
from gemmule.rungs._cuda.tiles import EVERY_LAYOUT

_TURN = 8  # tiles to whole multiples of which x is packed
AT_ONCE = {8: 2, 4: 4}  # blocks of so many warps on a multiprocessor, by their registers


def _wide(problem: Problem) -> int:
    """Return the columns of an instruction that one column of x takes."""
    return fragments.split(problem) * (3 if problem.b == "float32" else 1)


def _eights(problem: Problem) -> int:
    """Return how many instructions side by side hold the columns of a pass: 1, 2 or 4."""
    return next((e for e in (1, 2) if 8 * e // _wide(problem) >= problem.n), 4)


def _passes(problem: Problem) -> int:
    return ceil_div(problem.n, 8 * _eights(problem) // _wide(problem))


def _packs(problem: Problem) -> int:
    """Return how many warps pack x: one for each tile and eight columns."""
    tiles = ceil_div(fragments.tiles_across(problem.k, problem), _TURN) * _TURN
    return _passes(problem) * tiles * _eights(problem)


def _steps(problem: Problem, params: Params, machine: Machine) -> tuple[Step, ...]:
    bits, split, eights = fragments.bits(problem), fragments.split(problem), _eights(problem)
    shape = ", ".join(str(params[name]) for name in ("down", "along", "tiles", "rows"))
    height = 16 * params["down"] * params["rows"]
    product = Step(
        kernel=f"fragment_columns<{fragments.template(problem)}, {shape}, {eights}>",
        grid=(ceil_div(problem.m, height) * _passes(problem), 1, 1),
        block=(32 * params["down"] * params["along"], 1, 1),
        pdl=starts_early(machine) and problem.k > 0,
    )
    if problem.k == 0:
        return (product,)
    pack = Step(
        kernel=f"pack_operands<{CTYPE[problem.b]}, {bits}, {split}, {eights}>",
        grid=(ceil_div(_packs(problem), 8), 1, 1),
        block=(256, 1, 1),
    )
    return (pack, product)


def _workspace(problem: Problem, params: Params, machine: Machine) -> int:
    of_tile = fragments.tile_columns(problem) * 8 * 2 + 8 * 4
    return _packs(problem) * of_tile


def _chain(problem: Problem, params: Params) -> int:
    """Count a tile's products, the sum of its x, a warp's tiles, then parts and warps."""
    turns = ceil_div(fragments.tiles_across(problem.k, problem), params["along"])
    own = 2 * fragments.tile_columns(problem) + turns + params["tiles"]
    return int(own + params["along"] * _wide(problem))


def _terms(problem: Problem, params: Params, machine: Machine) -> Terms:
    """Read codes from the memory, x again and again from the L2; or wait for blocks in rounds."""
    eights, along, split = _eights(problem), params["along"], fragments.split(problem)
    blocks = ceil_div(problem.m, 16 * params["down"] * params["rows"]) * _passes(problem)
    of_x = 2 * eights * 8 * problem.k * blocks / machine.read_bytes_per_s
    again = problem.matrix_bytes * (_passes(problem) - 1) / machine.read_bytes_per_s
    tiles, bits = fragments.tiles_across(problem.k, problem), fragments.bits(problem)
    taken = ceil_div(blocks, machine.units)
    alone = ceil_div(blocks, machine.units * AT_ONCE[along] // (2 if eights == 4 else 1))
    small = split if fragments.shift(problem) <= 0 else 0
    work = {"group_s": taken * tiles * eights * small, f"round_s {along}": taken}
    work["across_s"] = taken * params["rows"] * eights * fragments.across(problem)
    work["float_s"] = taken * tiles * (fragments.form(problem) in FLOAT4.values())
    waited = {f"alone_s {bits} {eights}": alone * ceil_div(tiles, along)}
    packed = _workspace(problem, params, machine) / machine.read_bytes_per_s
    more = {f"packed_s {eights}": 1.0, "packed": packed}, {"x": of_x, "again": again}, work, waited
    return rounds(problem, machine, (blocks, 1, tiles), f"{bits} {eights}", *more)


RUNG = CudaRung(
    title="Fragments and several columns",
    idea="Columns of x are packed as operands; each fragment of codes meets all of them.",
    archs=SINCE_AMPERE,
    source="PTX ISA: mma.sync; skinny products on tensor cores as in Marlin (Frantar et al., 2024)",
    op="matmul",
    after="fragment_codes",
    branch="several columns",
    layouts_b=EVERY_LAYOUT,
    params={"down": (1,), "along": (8, 4), "tiles": (2,), "rows": (2,)},
    constraints=(fragments.FITS,),
    workspace=_workspace,
    steps=_steps,
    **fragments.along(_chain),
    **modelled("quantized/fragment_columns", _terms),
)
