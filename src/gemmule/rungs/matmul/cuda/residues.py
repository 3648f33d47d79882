"""Doubles by residues: products of bytes modulo coprime numbers, which tell that of doubles.

Tensor cores multiply bytes some twenty times as fast as doubles. Rows of A and columns of B, scaled
by powers of two and rounded, are integers; modulo each of 15 coprime numbers of 8 bits their
product is one of bytes, exact, and by the Chinese remainder theorem the residues tell the integer.

Integers keep some 51 bits beside a line's norm, so that errors of numbers of one size are below
those of sums of doubles. Where sizes differ by too much for the bound of such sums, as a product of
sizes as float8 tells, and where numbers are not finite, tiles of C are multiplied as doubles.
Plans take it where `precision="float64"` asks for doubles by whatever way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from gemmule.backends.cuda import residues
from gemmule.core import architectures
from gemmule.core.canonical import Call
from gemmule.core.device_model import Terms
from gemmule.core.problem import Problem, longest_int32_sum
from gemmule.core.registry import kernels_in
from gemmule.core.rung import (
    HEADERS_FOLDER,
    Arithmetic,
    Constraint,
    LibraryRung,
    Machine,
    Params,
    same,
)
from gemmule.quant.cuda.dequantise import digest
from gemmule.rungs._cuda.geometry import ceil_div, modelled
from gemmule.rungs._cuda.half_tiles import COUNTED
from gemmule.rungs._cuda.stream import ALONE
from gemmule.rungs._cuda.tiles import EVERY_LAYOUT
from gemmule.rungs.matmul.cuda import wgmma_specialized

HEADERS = ("ptx_f64", "wgmma_bytes", "wgmma_specialized", "wgmma_tiles", "float8", "args")
LONGEST = longest_int32_sum("int8", "int8")


def _bind(problem: Problem, call: Call, params: Params) -> Callable[..., None]:
    return residues.ByResidues(problem, call, kernels_in("matmul", "wgmma_float8"), params)


def _spec(problem: Problem, call: Call) -> residues.Told:
    texts = residues.SOURCE, *(HEADERS_FOLDER / f"{name}.cuh" for name in HEADERS)
    rung = kernels_in("matmul", "wgmma_float8")
    return residues.told(problem, call, RUNG.defaults(), rung, " ".join(map(digest, texts)))


def _choices(problem: Problem, machine: Machine) -> Iterable[Params]:
    """Stand back where sides are no whole tiles: there it was slower than its terms say."""
    whole = not (problem.m | problem.n | problem.k) % residues.WIDTH
    return [RUNG.defaults()] if whole else []


def _terms(problem: Problem, params: Params, machine: Machine) -> Terms:
    """Count the products of all moduli as one long one, and what lies around them as copies."""
    halves = replace(
        problem, a="int8", b="int8", out="int32", k=ceil_div(problem.k * params["moduli"], 2)
    )
    moved = 2 * problem.compulsory_bytes + residues.size_of(problem, params["moduli"])
    more = {"copied": 2 * moved / machine.read_bytes_per_s, "copy_s": 15.0}
    tile = residues.HEIGHT, residues.WIDTH
    return wgmma_specialized.tiled(replace(halves, layout_out="row"), machine, tile, 1, more)


RUNG = LibraryRung(
    title="Residues",
    idea="Doubles as integers modulo 15 numbers of 8 bits: products of bytes, and the remainder.",
    source="Ozaki, Uchino and Imamura 2025: Ozaki scheme II; guards as Schwarz et al. 2025",
    signatures=same("float64"),
    arithmetic=lambda problem: Arithmetic("float64", chain=lambda p, params: max(p.k, 4)),
    after="byte_slices",
    branch="float64, by name of a precision",
    layouts=EVERY_LAYOUT,
    layouts_b=EVERY_LAYOUT,
    params={"moduli": (15, 14, 16)},
    precision="float64",
    constraints=(
        ALONE,
        COUNTED,
        Constraint(f"sums of at most {LONGEST:,} steps", lambda p, params: p.k <= LONGEST),
        Constraint("no plain sums of doubles", lambda p, params: p.precision != "ieee"),
        Constraint("whole elements at every address", lambda p, params: p.alignment >= 8),
    ),
    workspace=lambda problem, params: residues.size_of(problem, params["moduli"]),
    spec=_spec,
    bind=_bind,
    available=lambda: None,
    archs=(architectures.HOPPER,),
    **modelled("matmul/wgmma_int8", _terms, _choices),
)
