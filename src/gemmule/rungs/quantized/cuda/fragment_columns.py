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
from gemmule.core.problem import Problem
from gemmule.core.rung import CudaRung, Machine, Params, Step, Suggestion
from gemmule.rungs._cuda import fragments
from gemmule.rungs._cuda.geometry import CTYPE, ceil_div, quickest, starts_early
from gemmule.rungs._cuda.tiles import EVERY_LAYOUT

_TURN = 8  # tiles to whole multiples of which x is packed
# By instructions side by side, eights of columns: what the launch that packs takes, and what 1024
# stored columns take by the warps of a block and the bits of a code, of one block a multiprocessor
# and each more of those that it takes at a time; what a round of blocks takes beside; groups of one
# tile, and parts of one.
_PACKED_S = {1: 2.3e-6, 2: 2.4e-6, 4: 2e-6}
_WAVE_S = {
    (1, 8, 4): (1.0e-6, 0.36e-6),
    (1, 8, 8): (1.48e-6, 0.85e-6),
    (1, 4, 4): (1.5e-6, 0.36e-6),
    (1, 4, 8): (2.6e-6, 0.6e-6),
    (2, 8, 4): (1.0e-6, 0.9e-6),
    (2, 8, 8): (1.15e-6, 0.9e-6),
    (2, 4, 4): (1.0e-6, 0.9e-6),
    (2, 4, 8): (1.15e-6, 0.9e-6),
}
_WIDE_WAVE_S, _ROUND_S = 2e-6, {8: 2.6e-6, 4: 1e-6}  # four side by side
_READ = {1: 1.0, 2: 1.2, 4: 1.6}
_AT_ONCE, _SMALL_GROUPS, _TINY_GROUPS = (
    {8: 2, 4: 4},
    {(1, 4): 1.13, (1, 8): 1.13, (2, 4): 1.0, (2, 8): 1.5},
    1.4,
)


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


def _blocks(problem: Problem, params: Params) -> int:
    return ceil_div(problem.m, 16 * params["down"] * params["rows"]) * _passes(problem)


def _waves_s(problem: Problem, params: Params, machine: Machine) -> float:
    """Return how long blocks take, as many at a time as registers allow."""
    eights, along = _eights(problem), params["along"]
    a_unit = ceil_div(_blocks(problem, params), machine.units)
    if eights == 4:
        return a_unit * (_ROUND_S[along] + _WIDE_WAVE_S * problem.k / 1024)
    at_once = _AT_ONCE[along] // eights
    first, more = _WAVE_S[eights, along, fragments.bits(problem)]
    full, rest = divmod(a_unit, at_once)
    waves = full * (first + more * (at_once - 1)) + (first + more * (rest - 1) if rest else 0.0)
    if fragments.split(problem) > 1:
        waves *= _TINY_GROUPS
    elif fragments.shift(problem) == 0:
        waves *= _SMALL_GROUPS[eights, fragments.bits(problem)]
    return float(waves * problem.k / 1024)


def _seconds(problem: Problem, params: Params, machine: Machine) -> float:
    """Return how long a product takes: what the memory and the L2 need, or blocks in waves.

    One H200 (November 2026): 93 random products of 2 to 315 columns. Codes come from the memory, x
    again and again from the L2, which reads 1.5 times as fast.
    """
    of_x = 2 * _eights(problem) * 8 * problem.k * _blocks(problem, params)
    reading = (problem.compulsory_bytes * _passes(problem) + of_x / 4) / machine.read_bytes_per_s
    reading *= _READ[_eights(problem)]
    seconds = _PACKED_S[_eights(problem)] + max(reading, _waves_s(problem, params, machine))
    return float(machine.call_s + seconds)


def _suggest(problem: Problem, machine: Machine) -> Suggestion | None:
    """Take more warps a block, or more blocks at a time where they leave less idle."""
    warps: tuple[int, ...] = (8, 4)
    if _eights(problem) > 1:
        many = ceil_div(problem.m, 32) * _passes(problem) >= 4 * machine.units
        warps = (4,) if many else (8,)
    shapes = [{"down": 1, "along": along, "tiles": 2, "rows": 2} for along in warps]
    return quickest(shapes, lambda params: _seconds(problem, params, machine))


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
    suggest=_suggest,
    steps=_steps,
    **fragments.along(_chain),
)
