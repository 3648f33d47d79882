"""Document 003: fast matvec in fp16, int8 and int4 against PyTorch, and its alternatives."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import replace

from gemmule.core.registry import cuda_rungs
from gemmule_lab.records.results import geomean
from gemmule_lab.report.charts import Axes, Line, Mark
from gemmule_lab.studies import pictures as draw
from gemmule_lab.studies import verdicts
from gemmule_lab.studies.grid import Cell, Lane, Step, Study
from gemmule_lab.studies.pictures import Picture
from gemmule_lab.studies.records import Finding, Rows, case_key, decided
from gemmule_lab.studies.verdicts import BITS, formula_gbs, needed, published

SIZES = (512, 1024, 2048, 4096, 8192, 16384)
CPU_SIZES = (512, 1024, 2048, 4096)
EXPERIMENT = "sizes"
CODE_ROWS, CODE_THREADS = 8, 512
DIFFERS, SLIGHTLY = 0.01, 1.5
TUNED = "fp16, best parameters"
FASTER = 1.1
COLUMNS = {
    "torch": "torch",
    "fp16 two_step": "fp16",
    TUNED: "",
    "int8 codes": "int8",
    "int4 codes": "int4",
    "gemmule's choice": "",
}


CPU_COLUMNS = {"torch": "torch", "fp16": "fp16", "int8": "int8", "int4": "int4"}
HALF, ONE_BLOCK = "fp16 two_step", "fp16 one block a row"
ALTERNATIVES = (
    ("fp16 y blocks", ONE_BLOCK),
    ("fp16 x in shared memory", ONE_BLOCK),
    ("int8 product table", "int8 codes, 128 threads"),
    ("int4 product table", "int4 codes, 128 threads"),
    ("int4 codes", "int4 codes, 8 values"),
    ("fp16 16-byte loads", "fp16 scalar loads"),
)
DTYPES = "matrix in fp16, or in int8 or int4 codes with one scale; x and y in fp16"
WHICH = {"": "the main kernels", "-more": "the alternatives"}
SIZE = "n, of an n x n matrix"
CLAIMS = verdicts.Claims("003")


def gpu_lanes(n: int) -> tuple[tuple[Lane, ...], tuple[Lane, ...]]:
    """Return the document's kernels at its own launch parameters, the alternatives, and the peer.

    Those over halves and those over codes are timed apart. Warm means one matrix again and again,
    and codes read in between leave the L2 of an H200 in a state that 33 MB of halves do not get out
    of: the same kernel took 6.6 to 10.4 us, without them 6.5.
    """
    table = published("003")["devices"]["RTX 3090"]["launch"]
    p, rows, *_ = table[SIZES.index(n)]
    tuned = f"h200_{n}"  # of the rung that has it: one for a warp a row or less, or for several
    rung = min(rung.name for rung in cuda_rungs() if tuned in rung.presets)
    narrow = {"p": min(p, CODE_THREADS), "rows": min(rows, CODE_ROWS)}
    warp, block = {"p": 32, "rows": 4}, {"p": 128, "rows": 4}
    halves = (
        Lane("torch", None, peer="torch"),
        Lane(HALF, "two_step", preset=f"rtx3090_{n}"),
        Lane(TUNED, rung, preset=tuned),
        Lane("fp16 two_step, P100 table", "two_step", preset=f"p100_{n}"),
        Lane("fp16 scalar loads", "p_threads", warp),
        Lane("fp16 16-byte loads", "p_threads_vector", warp),
        Lane(ONE_BLOCK, "two_step", block),
        Lane("fp16 y blocks", "y_blocks", {**block, "y": 4}),
        Lane("fp16 x in shared memory", "vector_shared_x", block),
        Lane("gemmule's choice", "auto"),
    )
    codes = (
        Lane("int8 codes", "int8_codes", {**narrow, "values": 8}, form="int8"),
        Lane("int4 codes", "int4_codes", {**narrow, "values": 16}, form="int4"),
        Lane("int4 codes, 8 values", "int4_codes", {**narrow, "values": 8}, form="int4"),
        Lane("int8 codes, 128 threads", "int8_codes", {**block, "values": 8}, form="int8"),
        Lane("int8 product table", "product_table_int8", {**block, "values": 8}, form="int8"),
        Lane("int4 codes, 128 threads", "int4_codes", {**block, "values": 16}, form="int4"),
        Lane("int4 product table", "product_table_int4", {**block, "values": 16}, form="int4"),
    )
    return tuple(replace(lane, form="float16") for lane in halves), codes


CPU_LANES = (
    Lane("torch", None, peer="torch", form="float16"),
    Lane("fp16", "auto", form="float16"),
    Lane("int8", "auto", form="int8"),
    Lane("int4", "auto", form="int4"),
    Lane("int8, no vector decoding", "four_rows", form="int8"),
    Lane("int4, no vector decoding", "four_rows", form="int4"),
)


def steps(backend: str, full: bool) -> Iterable[Step]:
    """Return the grid: the document's sizes, warm and cold; on a CPU the first four unless full."""
    sizes = SIZES if backend == "cuda" or full else CPU_SIZES
    for n in sizes:
        parts = gpu_lanes(n) if backend == "cuda" else (CPU_LANES,)
        for temperature, lanes in itertools.product(("warm", "cold"), parts):
            yield Cell(EXPERIMENT, "matvec", n, n, lanes, temperature, case={"n": n})


def left_out(full: bool) -> Iterator[str]:
    """Yield what the grid lacks."""
    if not full:
        yield "on a CPU the sizes 8192 and 16384"
    yield "int8 and int4 at more than 8 rows a block: ours end there, the document's tables at 32"


@CLAIMS.rule("y-blocks")
def _slightly_slower(rows: Rows) -> Finding:
    warm = rows.where(EXPERIMENT, backend="cuda", temperature="warm")
    ratios = needed(verdicts.speedups(warm, ONE_BLOCK, "fp16 y blocks"))
    words = "time with y blocks over time with one block a row:"
    return verdicts.of_ratios(ratios, 1 < geomean(ratios.values()) <= SLIGHTLY, words)


@CLAIMS.rule("fp16-tuned-over-torch")
def _tuned_over_torch(rows: Rows) -> Finding:
    """Judge our own bar: 1.1 times torch at every size, warm and cold; say where not, and why."""
    ratios: dict[str, float] = {}
    short = []
    read = rows.ceiling("read", "cuda")
    for temperature, n in itertools.product(("warm", "cold"), SIZES):
        here = rows.where(EXPERIMENT, backend="cuda", temperature=temperature, n=n)
        times = [us for name in (TUNED, "torch") for us in here.where(name=name).us().values()]
        if len(times) < 2:
            continue
        ours, torch = times
        ratios[f"{temperature} {n}"] = torch / ours
        if torch / ours < FASTER:
            words = f"{torch / ours:.3f} at {n}, {temperature}"
            if read is not None:
                shares = [formula_gbs(n, 16, us * 1e3) / read for us in (torch, ours)]
                words += f", where torch reads at {shares[0]:.2f} and ours at {shares[1]:.2f} of "
                words += "the measured ceiling"
            short.append(words)
    words = f"{TUNED}, times as fast as torch:"
    found = verdicts.of_ratios(needed(ratios), not short, words)
    return replace(found, figure="; less: ".join([found.figure, *short]))


def deviations() -> list[tuple[str, str, int, float, float]]:
    """Return device, column, n, printed and recomputed GB/s where they differ by over 1 %."""
    found = []
    for device, data in published("003")["devices"].items():
        for column, printed in data["gbs"].items():
            times = data["runtime_ns"][column]
            for n, gbs, ns in zip(SIZES, printed, times, strict=True):
                again = formula_gbs(n, BITS[column], ns)
                if abs(gbs / again - 1) > DIFFERS:
                    found.append((device, column, n, gbs, again))
    return found


@CLAIMS.rule("printed-bandwidths")
def _printed_bandwidths(rows: Rows) -> Finding:
    wrong = deviations()
    words = "; ".join(
        f"{device} {column} {n}: {gbs:.2f} printed, {again:.2f} by formula"
        for device, column, n, gbs, again in wrong
    )
    return decided(not wrong, f"{len(wrong)} of 36 differ by more than 1 %: {words}")


def comparison(rows: Rows) -> Iterator[tuple[str, ...]]:
    """Yield, by size and kernel, the printed figures beside ours, warm and cold; then our CPU's."""
    on_cpu = rows.where(EXPERIMENT, backend="cpu").timed()
    sizes = {int(row.case["n"]) for row in on_cpu}
    for backend, index, n in [
        *(("cuda", index, n) for index, n in enumerate(SIZES)),
        *(("cpu", index, n) for index, n in enumerate(SIZES) if n in sizes),
    ]:
        for name, column in (COLUMNS if backend == "cuda" else CPU_COLUMNS).items():
            printed = [
                cell for device in ("P100", "RTX 3090") for cell in _printed(device, column, index)
            ]
            ours = [
                cell
                for temperature in ("warm", "cold")
                for cell in _ours(rows.where(backend=backend), name, column, temperature, n)
            ]
            kernel = name if backend == "cuda" else f"{name}, on our CPU"
            yield (str(n), kernel, *printed, *ours, _launch(rows, name, n))


def _printed(device: str, column: str, index: int) -> tuple[str, str, str, str]:
    """Return us, GB/s (and what was printed where that differs), x over torch, x over fp16."""
    data = published("003")["devices"][device]
    times = data["runtime_ns"]
    if not column or column not in times:
        return "", "", "", ""
    ns, n = times[column][index], SIZES[index]
    gbs = f"{formula_gbs(n, BITS[column], ns):.0f}"
    for where, what, size, wrong, _ in deviations():
        if (where, what, size) == (device, column, n):
            gbs += f" ({wrong:.0f} printed)"
    over_half = "" if column in ("torch", "fp16") else f"{times['fp16'][index] / ns:.2f}"
    return f"{ns / 1000:.2f}", gbs, f"{times['torch'][index] / ns:.2f}", over_half


def _ours(rows: Rows, name: str, column: str, temperature: str, n: int) -> tuple[str, ...]:
    """Return us, GB/s, x over torch and x over fp16 of our row, as far as it was measured."""
    here = rows.where(EXPERIMENT, temperature=temperature, n=n)
    case = case_key({"n": n})
    us = here.where(name=name).us().get(case)
    if us is None:
        return "", "", "", ""
    ratios = []
    half = HALF if name in COLUMNS and here.where(backend="cuda") else "fp16"
    for other in ("torch", half):
        theirs = here.where(name=other).us().get(case)
        ratios.append("" if theirs is None or name == other else f"{theirs / us:.2f}")
    bits = BITS[column or "fp16"]
    return f"{us:.2f}", f"{formula_gbs(n, bits, us * 1000):.0f}", *ratios


def _launch(rows: Rows, name: str, n: int) -> str:
    """Return threads a row and rows a block of our row."""
    for row in rows.where(EXPERIMENT, backend="cuda", name=name, n=n):
        if "p" in row.params:
            return f"{row.params['p']} x {row.params['rows']}"
    return ""


def pictures(rows: Rows, backend: str) -> Iterator[Picture]:
    """Yield the drawings of a back end: run times, bandwidths under their ceiling, alternatives."""
    start, marks = f"study-003-{backend}", draw.ceiling_marks(rows, backend)
    shown: tuple[tuple[str, str, draw.Figure, str, Axes, list[Mark]], ...] = (
        ("times", "run time", draw.microseconds, "us of one product",
         Axes(SIZE, "us", log_y=True), []),
        ("rates", "bandwidth", draw.figure("gbs"), "GB/s: matrix, vector and result once each",
         Axes(SIZE, "GB/s"), marks),
    )  # fmt: skip
    for temperature in ("warm", "cold"):
        here = rows.where(EXPERIMENT, backend=backend, temperature=temperature).timed()
        order = {name: index for index, name in enumerate(COLUMNS)}
        names = sorted(here.names(), key=lambda name: order.get(name, len(order)))
        first = [name for name in names if name in order] or names[:6]
        rest = [name for name in names if name not in first]
        for (which, chosen), (file, what, value, fact, axes, ceilings) in itertools.product(
            zip(WHICH, (first, rest), strict=True), shown
        ):
            lines = [one for name in chosen for one in draw.lines_of(here.where(name=name), value)]
            title = (
                f"Matrix times vector in halves and codes, {WHICH[which]}: {what}, {temperature}"
            )
            name = f"{start}-{file}{which}-{temperature}"
            head = draw.head(name, title, here, DTYPES, fact, kept=temperature)
            yield from draw.line_charts(head, lines, axes, ceilings)
        lines = [line for pair in ALTERNATIVES for line in _ratio(here, *pair)]
        fact = "times as fast as the plain form; above 1 it pays"
        title = f"What was tried beside the plain kernels, {temperature}"
        name = f"{start}-alternatives-{temperature}"
        head = draw.head(name, title, here, DTYPES, fact, kept=temperature)
        yield from draw.line_charts(head, lines, Axes(SIZE, "times as fast"))


def _ratio(here: Rows, tried: str, plain: str) -> Iterator[Line]:
    """Yield how many times as fast one kernel is as another over the sizes, if both were timed."""
    times, theirs = (
        {float(row.case["n"]): row.us for row in here.where(name=name)} for name in (tried, plain)
    )
    points = [(n, theirs[n] / us) for n, us in sorted(times.items()) if n in theirs]
    if points:
        yield Line(f"{tried} / {plain.removeprefix(tried.split()[0] + ' ')}", points)


_EACH = ("us", "GB/s", "x torch", "x fp16")
STUDY = Study(
    "003", "Fast matvec in fp16, int8 and int4", steps, left_out, CLAIMS.all(), comparison,
    ("n", "kernel", *(f"{where} {what}" for where in ("P100", "3090", "warm", "cold")
                      for what in _EACH), "p x rows"),
    pictures,
)  # fmt: skip
