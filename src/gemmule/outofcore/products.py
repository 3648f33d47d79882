"""Products of host operands on a GPU, panel by panel: what fits its memory and what does not.

An operand larger than what may be taken on the device (``GEMMULE_DEVICE_BUDGET``) goes there in
panels; one that would fit goes in panels too where it is large, because copies then run at the
link's speed and beside the kernels. Sums over several panels are kept in the dtype that one kernel
sums in, and rounded once.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gemmule import backends
from gemmule.backends.cuda import driver
from gemmule.backends.cuda.arrays import ordinal_named
from gemmule.choose import choose
from gemmule.core import architectures
from gemmule.core.canonical import Call, Options, canonical
from gemmule.core.choice import duration
from gemmule.core.operand import Form, Operand, c_strides
from gemmule.core.problem import INTEGERS, ITEMSIZE, numpy_dtype
from gemmule.core.rung import CudaRung, LibraryRung
from gemmule.outofcore.buffers import pooled_bytes
from gemmule.outofcore.engine import Job, run
from gemmule.outofcore.schedule import Sizes, Tiling
from gemmule.outofcore.sources import Coded, Dense, Source
from gemmule.outofcore.staging import Finish, link_bytes_per_s
from gemmule.outofcore.tiling import PANEL_BYTES, Demand, chosen, of_rows
from gemmule.plan import Plan, resolve
from gemmule.quant.matrix import QuantizedMatrix
from gemmule.settings import device_budget

Array = np.ndarray[Any, Any]
FREE_SHARE = 0.9  # of the free memory, where no budget is set
LIBRARY_BYTES = 64 << 20  # of a vendor's workspace
SLOW_FLOPS = 10e12  # where no rung says what a tile takes
PROBE_BYTES = 8 << 20
OUT_AXES = {"matvec": (0,), "vecmat": (1,), "matmul": (0, 1)}  # of rows and columns


@dataclass(frozen=True, slots=True)
class Cut:
    """A decision: tiles, what they should take, and the dtype in which sums leave the device."""

    call: Call
    whole: Sizes
    tiling: Tiling
    demand: Demand
    sums: str
    tiles: Tiles


@dataclass(frozen=True, slots=True)
class Blocked:
    """A product of host operands, cut into panels."""

    cut: Cut
    device: str
    sources: tuple[Source, Source]

    def explain(self) -> str:
        """Return how the product is cut, what goes over the link, and what it should take."""
        cut, tiling, demand = self.cut, self.cut.tiling, self.cut.demand
        tile, counts = tiling.tile, tiling.counts(cut.whole)
        expected = demand.forecast(tiling)
        rung = cut.tiles.plan(tile).rung
        return "\n".join(
            (
                f"problem    {cut.call.problem.describe()}",
                f"device     {self.device}, operands on the host",
                f"tiles      {counts.m} x {counts.n} of {tile.m} x {tile.n}; sums in {counts.k} "
                f"parts of {tile.k}, kept in {cut.sums}",
                f"rung       {rung.folder}/{rung.name}: {rung.title}",
                f"panels     {tiling.left_slots} of the left and {tiling.right_slots} of the right "
                "operand at a time",
                f"memory     {int(demand.memory(tiling)):,} of {demand.budget:,} bytes there",
                f"traffic    {expected.bytes_in:,} bytes in, {expected.bytes_out:,} out, at "
                f"{demand.link / 1e9:.1f} GB/s",
                f"expected   {duration(expected.seconds)}",
            )
        )


def budget_bytes(ordinal: int) -> int:
    """Return the bytes that a product of host operands may take on a device."""
    free = driver.memory_bytes(ordinal)[0] + pooled_bytes(ordinal)
    given, most = device_budget(), _rounded(int(FREE_SHARE * free))
    return most if given is None else min(given, most)


def wanted(pair: tuple[Operand, Operand], options: Options, ordinal: int) -> bool:
    """Tell whether a product goes in panels: one operand is large, or they do not fit.

    A named rung is asked about the whole problem as long as that fits.
    """
    sizes = [nbytes_of(one) for one in pair]
    if max(sizes) < PANEL_BYTES and device_budget() is None:
        return False
    return (max(sizes) >= PANEL_BYTES and options.rung is None) or not fits(pair, ordinal)


def fits(pair: tuple[Operand, Operand], ordinal: int) -> bool:
    """Tell whether a product's operands and its result find room on a device together."""
    shapes = [one.form.shape for one in pair]
    rows = shapes[0][:-1]
    cols = shapes[1][:-2] + shapes[1][-1:] if len(shapes[1]) > 1 else ()
    result = 8 * int(np.prod((*rows, *cols[-1:]), dtype=float))
    return 2 * sum(map(nbytes_of, pair)) + result <= budget_bytes(ordinal)


def nbytes_of(one: Operand) -> int:
    """Return the bytes of an operand's elements, or of a quantised matrix's parts."""
    if one.form.quant is not None:
        return int(one.array.nbytes)
    return int(np.prod(one.form.shape, dtype=np.int64)) * ITEMSIZE[one.form.dtype]


def blocked(
    op: str, pair: tuple[Operand, Operand], device: str, options: Options, *, added: bool = False
) -> Blocked:
    """Return how a product of one matrix and a vector, or of two matrices, is cut.

    `options` names the result's dtype. added: sums are added to something on the host, so that they
    must not be rounded before.
    """
    ordinal = ordinal_named(device)
    device = f"cuda:{ordinal}"
    sources = source(pair[0], ordinal), source(pair[1], ordinal, as_column=True)
    budget = budget_bytes(ordinal)
    sized = [(one.form, nbytes_of(one)) for one in pair]
    slow = sources[0].slow_axis, sources[1].slow_axis
    link = link_bytes_per_s(ordinal, min(budget, PROBE_BYTES))
    cut = cut_of(op, (sized[0], sized[1]), device, options, (budget, link, slow), added)
    return Blocked(cut, device, sources)


Sized = tuple[Form, int]  # and bytes


@functools.lru_cache(maxsize=256)
def cut_of(
    op: str,
    sized: tuple[Sized, Sized],
    device: str,
    options: Options,
    given: tuple[int, float, tuple[int, int]],
    added: bool,
) -> Cut:
    """Return the tiles in which a product of these forms and bytes goes to a device."""
    budget, link, slow = given
    forms = sized[0][0], sized[1][0]
    call = canonical(op, *forms, None, options)
    left, right = forms[0].shape, forms[1].shape
    whole = Sizes(left[0] if len(left) == 2 else 1, right[1] if len(right) == 2 else 1, left[-1])
    out = call.problem.out
    sums = _sums_dtype(forms, out)
    tiles = Tiles(op, forms, device, replace(options, out_dtype=sums))
    bytes_each = [nbytes / max(1, math.prod(form.shape)) for form, nbytes in sized]
    rounded = Tiles(op, forms, device, options)

    def expected(tile: Sizes) -> tuple[float, int]:
        seconds, workspace = tiles.expected(tile)
        return seconds, max(workspace, rounded.expected(tile)[1])

    demand = Demand(
        whole, (bytes_each[0], bytes_each[1], ITEMSIZE[sums]), budget, link, expected, *slow
    )
    coded = [form.quant is not None for form in forms]
    tiling = of_rows(demand, in_left=coded[0]) if any(coded) else chosen(demand)
    if (
        tiling.tile.k >= whole.k and sums != out and not added
    ):  # each sum is one kernel's, which rounds it
        sums, tiles = out, rounded
    return Cut(call, whole, tiling, demand, sums, tiles)


def _rounded(budget: int) -> int:
    """Return a size rounded down to four significant bits: decisions are kept by budget."""
    bits = max(0, budget.bit_length() - 4)
    return budget >> bits << bits


def source(operand: Operand, ordinal: int, *, as_column: bool = False) -> Source:
    """Return a host operand as what panels are taken of."""
    if isinstance(operand.array, QuantizedMatrix):
        return Coded.of(operand.array, ordinal)
    return Dense.of(operand, ordinal, as_column=as_column)


def _sums_dtype(forms: tuple[Form, Form], out: str) -> str:
    """Return the dtype of sums that several kernels add to: never narrower than one sums in."""
    if out in INTEGERS:
        return out
    plain = [form.dtype for form in forms if form.quant is None]
    return "float64" if "float64" in (*plain, out) else "float32"


class Tiles:
    """What products of panels cost and how they are launched: each size is a problem of its own."""

    def __init__(self, op: str, forms: tuple[Form, Form], device: str, options: Options) -> None:
        self.op, self.forms, self.device, self.options = op, forms, device, options
        self.turned = tuple(_is_column_major(form) for form in self.forms)
        self.known: dict[Sizes, tuple[float, int]] = {}

    def expected(self, tile: Sizes) -> tuple[float, int]:
        """Return seconds and workspace bytes of a tile's product."""
        if tile not in self.known:
            self.known[tile] = self._expected(tile)
        return self.known[tile]

    def _expected(self, tile: Sizes) -> tuple[float, int]:
        flops = 2.0 * tile.m * tile.n * tile.k
        call = canonical(self.op, *self._forms(tile), self.options)
        machine = backends.get("cuda").machine(self.device)
        try:
            named = self.options.rung, self.options.params
            choice = choose(call, machine, *named, scaled=self.options.scaled)
        except (TypeError, ValueError):  # converted to one dtype first, in a workspace
            return flops / SLOW_FLOPS, 8 * (tile.m + tile.n) * tile.k
        rung, workspace = choice.rung, LIBRARY_BYTES
        if isinstance(rung, CudaRung):
            workspace = rung.workspace(choice.problem, choice.params, choice.machine)
        elif isinstance(rung, LibraryRung) and rung.archs != architectures.LISTED:
            workspace = rung.workspace(choice.problem, choice.params)  # of kernels of ours
        return choice.expected_s or flops / SLOW_FLOPS, workspace

    def _forms(self, tile: Sizes) -> tuple[Form, Form, Form]:
        """Return the forms of a tile's operands and of its sums."""
        sides = ((tile.m, tile.k), (tile.k, tile.n))
        made = []
        for form, (rows, cols), turned in zip(self.forms, sides, self.turned, strict=True):
            if form.quant is not None:
                made.append(form._replace(shape=(rows, cols)))
            elif len(form.shape) == 1:
                made.append(Form((rows * cols,), (1,), form.dtype, 16))
            else:
                made.append(Form((rows, cols), (1, rows) if turned else (cols, 1), form.dtype, 16))
        shape = tuple((tile.m, tile.n)[axis] for axis in OUT_AXES[self.op])
        dtype = self.options.out_dtype or made[0].dtype
        return made[0], made[1], Form(shape, c_strides(shape), dtype, 16)

    def plan(self, tile: Sizes) -> Plan:
        """Return the plan of a full tile."""
        return resolve(self.op, *self._forms(tile), self.device, self.options)

    def launch(
        self, left: Operand, right: Operand, out: Operand, alpha: complex, beta: complex
    ) -> None:
        """Launch out = alpha * left * right + beta * out."""
        plan = resolve(self.op, left.form, right.form, out.form, self.device, self.options)
        plan.launch(left, right, out, alpha, beta)


def _is_column_major(form: Form) -> bool:
    return len(form.shape) == 2 and abs(form.strides[0]) < abs(form.strides[1])


def multiply(
    op: str,
    pair: tuple[Operand, Operand],
    out: Array,
    device: str,
    options: Options,
    scale: tuple[complex, complex] = (1.0, 0.0),
) -> None:
    """Set out = alpha * product + beta * out, for one matrix and a vector or two matrices.

    options name the result's dtype, which `out` has; scale: alpha and beta, checked.
    """
    alpha, beta = scale
    target = _as_matrix(op, out)
    if alpha == 0 or pair[0].form.shape[-1] == 0:
        finish = finishing(out.dtype.name, 1, beta)
        wide = numpy_dtype(_sums_dtype((pair[0].form, pair[1].form), out.dtype.name))
        for rows in range(0, target.shape[0], 1024):
            part = target[rows : rows + 1024]
            finish(part, np.zeros(part.shape, wide))
    elif out.size:
        made = blocked(op, pair, device, options, added=beta != 0)
        run(_job(made, target, (alpha, beta), op))


def _as_matrix(op: str, out: Array) -> Array:
    if out.ndim == 2:
        return out
    return out[:, None] if op == "matvec" else out[None, :]


def _job(made: Blocked, target: Array, scale: tuple[complex, complex], op: str) -> Job:
    alpha, beta = scale
    # A part of a sum may be zero or overflow times alpha where the whole is and does not.
    split = made.cut.tiling.tile.k < made.cut.whole.k
    return Job(
        whole=made.cut.whole,
        tiling=made.cut.tiling,
        left=made.sources[0],
        right=made.sources[1],
        target=target,
        sums=made.cut.sums,
        finish=finishing(target.dtype.name, alpha if split else 1, beta),
        out_axes=OUT_AXES[op],
        launch=made.cut.tiles.launch,
        alpha=1 if split else alpha,
        ordinal=ordinal_named(made.device),
        spare_bytes=max(0, made.cut.demand.budget - int(made.cut.demand.memory(made.cut.tiling))),
    )


def finishing(out: str, alpha: complex, beta: complex) -> Finish:
    """Return how sums go into their part of the result: result = alpha * sums + beta * result.

    Computed in the sums' dtype. With beta = 0 the result is not read. Integers are exact modulo
    their size.
    """
    if alpha == 1 and beta == 0:

        def set_to(part: Array, sums: Array) -> None:
            with np.errstate(over="ignore", invalid="ignore"):
                part[...] = sums

        return set_to
    if out in INTEGERS:
        bits = 8 * ITEMSIZE[out]
        unsigned = np.dtype(f"uint{bits}")
        factors = [np.array(int(one.real) % 2**bits, unsigned) for one in (alpha, beta)]

        def add_integers(part: Array, sums: Array) -> None:
            scaled = factors[0] * sums.view(unsigned)
            part[...] = (scaled + factors[1] * part.astype(unsigned)).view(part.dtype)

        return add_integers

    def add(part: Array, sums: Array) -> None:
        with np.errstate(over="ignore", invalid="ignore"):
            number = sums.dtype.type
            scaled = sums if alpha == 1 else number(alpha.real) * sums
            if beta != 0:
                scaled = scaled + number(beta.real) * part.astype(sums.dtype)
            part[...] = scaled

    return add
