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

from collections.abc import Iterable

from gemmule.core.architectures import SINCE_AMPERE
from gemmule.core.device_model import Numbers
from gemmule.core.problem import Problem
from gemmule.core.rung import CudaRung, Machine, Params, Step
from gemmule.rungs._cuda import fragments
from gemmule.rungs._cuda.geometry import CTYPE, ceil_div, modelled, starts_early
from gemmule.rungs._cuda.tiles import EVERY_LAYOUT
from gemmule.storage.models import numbers

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


def _blocks(problem: Problem, params: Params) -> int:
    return ceil_div(problem.m, 16 * params["down"] * params["rows"]) * _passes(problem)


def _waves_s(problem: Problem, params: Params, machine: Machine, own: Numbers) -> float:
    """Return how long blocks take, as many at a time as registers allow.

    1024 stored columns take as long as the first of them says, of one block a multiprocessor, and
    more for each other that it takes at a time; a round of the widest ones takes some beside.
    """
    eights, along, bits = _eights(problem), params["along"], fragments.bits(problem)
    a_unit = ceil_div(_blocks(problem, params), machine.units)
    if eights == 4:
        return float(a_unit * (own["round_s"][along] + own["wide_wave_s"] * problem.k / 1024))
    at_once, of_shape = AT_ONCE[along] // eights, own["wave_s"][eights][along][bits]
    first, more = of_shape["first"], of_shape["more"]
    full, rest = divmod(a_unit, at_once)
    waves = full * (first + more * (at_once - 1)) + (first + more * (rest - 1) if rest else 0.0)
    if fragments.split(problem) > 1:
        waves *= own["tiny_groups"]
    elif fragments.shift(problem) == 0:
        waves *= own["small_groups"][eights][bits]
    return float(waves * problem.k / 1024)


def _seconds(problem: Problem, params: Params, machine: Machine) -> float:
    """Return how long a product takes: what the memory and the L2 need, or blocks in waves.

    Codes come from the memory, x again and again from the L2, whose reads are faster.
    """
    own, eights = numbers(machine, "quantized/fragment_columns"), _eights(problem)
    of_x = 2 * eights * 8 * problem.k * _blocks(problem, params)
    moved = problem.compulsory_bytes * _passes(problem) + of_x / own["l2_rate"]
    reading = own["read"][eights] * moved / machine.read_bytes_per_s
    waves = _waves_s(problem, params, machine, own)
    return float(machine.call_s + own["packed_s"][eights] + max(reading, waves))


def _choices(problem: Problem, machine: Machine) -> Iterable[Params]:
    """Take more warps a block, or more blocks at a time where they leave less idle."""
    warps: tuple[int, ...] = (8, 4)
    if _eights(problem) > 1:
        least = numbers(machine, "quantized/fragment_columns")["blocks_of_a_unit"] * machine.units
        warps = (4,) if ceil_div(problem.m, 32) * _passes(problem) >= least else (8,)
    return [{"down": 1, "along": along, "tiles": 2, "rows": 2} for along in warps]


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
    **modelled(_choices, _seconds),
)
