"""Document 003: fast matvec in fp16, int8 and int4 against PyTorch, and its alternatives."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace

from gemmule.core.registry import cuda_rungs
from gemmule_lab.records.results import geomean
from gemmule_lab.records.study import Rows, StudyRow, case_key
from gemmule_lab.report.charts import Line
from gemmule_lab.studies import rules
from gemmule_lab.studies.charted import chart
from gemmule_lab.studies.grid import Cell, Lane, Step, Study
from gemmule_lab.studies.rules import Judged, document, needed, share

SIZES = (512, 1024, 2048, 4096, 8192, 16384)
CPU_SIZES = (512, 1024, 2048, 4096)
EXPERIMENT, SWEEP, CHOSEN = "sizes", "p x rows x values", "chosen"
CODE_ROWS, CODE_THREADS = 8, 512
DIFFERS, SLIGHTLY, FASTER, LARGE = 0.01, 1.5, 1.1, 2048
WIDTHS, VALUES = (128, 512), (8, 16, 32)  # threads of a row, values that one takes in a step
SECTIONS = [(p, v, y) for p in WIDTHS for v in VALUES for y in (2, 4, 8, 16) if p // y >= 32]
SHARED = [(p, v) for p in (32, 128) for v in VALUES]
TUNED = "fp16, best parameters"
BITS = {"torch": 16, "fp16": 16, "int8": 8, "int4": 4}
INT8, INT4 = "int8 codes", "int4 codes"
HALF, ONE_BLOCK = "fp16 two_step", "fp16 one block a row"
SWEPT = "best of the sweep"
COLUMNS = {  # of the table: kernel -> the document's column
    "torch": "torch", HALF: "fp16", TUNED: "", f"fp16, {SWEPT}": "", "fp16, chosen": "",
    "int8 codes": "int8", "int8 codes, 128 threads": "", f"int8, {SWEPT}": "", "int8, chosen": "",
    "int4 codes": "int4", "int4 codes, 128 threads": "", f"int4, {SWEPT}": "", "int4, chosen": "",
}  # fmt: skip
ALTERNATIVES = (
    ("fp16 y blocks", ONE_BLOCK),
    ("fp16 x in shared memory", ONE_BLOCK),
    ("int8 product table", "int8 codes, 128 threads"),
    ("int4 product table", "int4 codes, 128 threads"),
    ("int4 codes", "int4 codes, 8 values"),
    ("fp16 16-byte loads", "fp16 scalar loads"),
)
DTYPES = "matrix in fp16, or in int8 or int4 codes with one scale; x and y in fp16"
CLAIMS = rules.Claims("003")
PRINTED = document("003")["printed"]
Pairs = Sequence[tuple[str, str]]
# The alternatives beside the plain kernel with as many threads a row, rows a block, and loads.
Y_PAIRS = [
    (f"fp16 {y} sections of {p // y} x 1 x {v}", f"fp16 {p} x 1 x {v}") for p, v, y in SECTIONS
]
X_PAIRS = [(f"fp16 shared x {p} x 4 x {v}", f"fp16 {p} x 4 x {v}") for p, v in SHARED]


def gpu_lanes(n: int) -> tuple[tuple[Lane, ...], tuple[Lane, ...]]:
    """Return the document's kernels at its own launch parameters, the alternatives, and the peer.

    Those over halves and those over codes are timed apart. Warm means one matrix again and again,
    and codes read in between leave the L2 of an H200 in a state that 33 MB of halves do not get out
    of: the same kernel took 6.6 to 10.4 us, without them 6.5.
    """
    p, rows, *_ = PRINTED["RTX 3090"]["launch"][SIZES.index(n)]
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
        Lane("int8 codes", "int8_codes", {**narrow, "values": 8}, form=INT8),
        Lane("int4 codes", "int4_codes", {**narrow, "values": 16}, form=INT4),
        Lane("int4 codes, 8 values", "int4_codes", {**narrow, "values": 8}, form=INT4),
        Lane("int8 codes, 128 threads", "int8_codes", {**block, "values": 8}, form=INT8),
        Lane("int8 product table", "product_table_int8", {**block, "values": 8}, form=INT8),
        Lane("int4 codes, 128 threads", "int4_codes", {**block, "values": 16}, form=INT4),
        Lane("int4 product table", "product_table_int4", {**block, "values": 16}, form=INT4),
        Lane("int8, gemmule's choice", "auto", form=INT8),
        Lane("int4, gemmule's choice", "auto", form=INT4),
    )
    return tuple(replace(lane, form="float16") for lane in halves), codes


def sweep_lanes() -> tuple[tuple[Lane, ...], tuple[Lane, ...]]:
    """Return p x rows x values of each kernel: the best of them are tuned on the device at hand.

    With them come both alternatives at the same points: y sections of a row with as many threads of
    it in all, and x in shared memory. Halves and codes apart, as in `gpu_lanes`.
    """
    halves = [
        (f"fp16 {p} x {r} x {v}", "two_step", {"p": p, "rows": r, "values": v})
        for p, r, v in itertools.product((32, *WIDTHS, 256), (1, 4), VALUES)
        if p * r <= 512 or (p * r <= 1024 and v < 32)
    ]
    halves += [
        (name, "y_blocks", {"y": y, "p": p // y, "rows": 1, "values": v})
        for (name, _), (p, v, y) in zip(Y_PAIRS, SECTIONS, strict=True)
    ]
    halves += [
        (name, "vector_shared_x", {"p": p, "rows": 4, "values": v, "tile": 4096})
        for (name, _), (p, v) in zip(X_PAIRS, SHARED, strict=True)
    ]
    codes = [
        (form, f"{p} x {r} x {v}", {"p": p, "rows": r, "values": v})
        for form, widths in (("int8", (8, 16)), ("int4", (16, 32)))
        for p, r, v in itertools.product((32, 128), (1, 4), widths)
    ]
    return tuple(Lane(*one, form="float16") for one in halves), tuple(
        Lane(f"{form} {at}", f"{form}_codes", params, form=f"{form} codes")
        for form, at, params in codes
    )


CPU_LANES = (
    Lane("torch", None, peer="torch", form="float16"),
    Lane("fp16", "auto", form="float16"),
    Lane("int8", "auto", form=INT8),
    Lane("int4", "auto", form=INT4),
    Lane("int8, no vector decoding", "four_rows", form=INT8),
    Lane("int4, no vector decoding", "four_rows", form=INT4),
)


def steps(backend: str, full: bool) -> Iterable[Step]:
    """Return the grid: the document's sizes, warm and cold; on a CPU the first four unless full."""
    gpu, kept = backend == "cuda", ("warm", "cold")
    sizes = SIZES if gpu or full else CPU_SIZES
    grids = [(EXPERIMENT, n, gpu_lanes(n) if gpu else (CPU_LANES,)) for n in sizes]
    grids += [(SWEEP, n, sweep_lanes()) for n in sizes if gpu]
    for experiment, n, parts in grids:
        for temperature, lanes in itertools.product(kept, parts):
            yield Cell(experiment, "matvec", n, n, lanes, temperature, case={"n": n})


def formula_gbs(n: int, bits: int, ns: float) -> float:
    """Return the document's bandwidth in GB/s: matrix, float16 vector and result, each once.

    >>> formula_gbs(512, 16, 1.0)
    526336.0
    """
    return (n * n * bits / 8 + 2 * 2 * n) / ns


@CLAIMS.rule("int8-over-fp16", "int8")
@CLAIMS.rule("int4-over-fp16", "int4")
def _codes_over_halves(rows: Rows, form: str) -> Judged:
    """Judge the headline by what is chosen for the device, codes beside halves, cold."""
    cold, ratios = rows.where(backend="cuda", temperature="cold"), dict[str, float]()
    for experiment, ours, half in (
        (CHOSEN, f"{form}, chosen", "fp16, chosen"),
        (EXPERIMENT, f"{form}, gemmule's choice", "gemmule's choice"),
    ):
        here = Rows(row for row in cold.where(experiment) if int(row.case["n"]) >= LARGE)
        ratios = ratios or here.faster(ours, half)
    every = list(needed(ratios).values())
    words = f"{rules.spread(every)} times as fast as halves; {every[-1]:.2f} at the largest"
    best, plain = (_row(cold.where(n=SIZES[-1]), f"{one}, {SWEPT}") for one in (form, "fp16"))
    if best and plain:
        words += f", {plain.us / best.us:.2f} by its own kernels, each at the best of the sweep"
    return Judged(min(every) > 1, words, every[-1])


@CLAIMS.rule("fp16-over-torch", TUNED, 1.0, ("warm",))
@CLAIMS.rule("printed-parameters", HALF, 1.0, ("warm",))
@CLAIMS.rule("fp16-tuned-over-torch", TUNED, FASTER, ("warm", "cold"))
def _over_torch(rows: Rows, ours: str, bar: float, kept: tuple[str, ...]) -> Judged:
    """Judge a kernel beside torch at every size; say where it falls short, and why."""
    ratios, short, read = [], [], rows.ceiling("read", "cuda")
    for temperature, n in itertools.product(kept, SIZES):
        here = rows.where(backend="cuda", temperature=temperature, n=n)
        named = here.where(EXPERIMENT)
        times = [us for name in (ours, "torch") for us in named.where(name=name).us().values()]
        if len(times) < 2:
            continue
        if ours == TUNED and (swept := _row(here, f"fp16, {SWEPT}")):
            times[0] = min(times[0], swept.us)
        ratios.append(times[1] / times[0])
        if ratios[-1] <= bar:
            short.append(f"{ratios[-1]:.3f} at {n}, {temperature}")
        if ratios[-1] <= bar and read is not None:
            shares = [formula_gbs(n, 16, us * 1e3) / read for us in times]
            short[-1] += " (ours at {:.2f}, torch at {:.2f} of the read ceiling)".format(*shares)
    words = f"{rules.spread(needed(ratios))} times as fast as torch"
    words += f"; less: {'; '.join(short)}" if short else ""
    return Judged(not short, words, geomean(ratios))


@CLAIMS.rule("y-blocks", Y_PAIRS, ("fp16 y blocks", ONE_BLOCK), 1.0, SLIGHTLY)
@CLAIMS.rule("shared-x", X_PAIRS, ("fp16 x in shared memory", ONE_BLOCK), 1 / 1.02, 1e9)
def _alternative(
    rows: Rows, alike: Pairs, once: tuple[str, str], low: float, high: float
) -> Judged:
    """Judge an alternative's time over the plain kernel's at the same points of the sweep.

    Where that was not run, at the parameters that both have in the main experiment.
    """
    warm, words, means = rows.where(backend="cuda", temperature="warm"), [], []
    for experiment, pairs, what in (
        (SWEEP, alike, "as many threads of a row"),
        (EXPERIMENT, [once], "128 threads"),
    ):
        here = warm.where(experiment)
        if ratios := [r for ours, plain in pairs for r in here.faster(plain, ours).values()]:
            means.append(geomean(ratios))
            words.append(f"{what} {rules.spread(ratios)}")
    best = [_best(warm.where(SWEEP), {pair[at] for pair in alike}) for at in (0, 1)]
    if both := [best[0][n] / best[1][n] for n in best[0] if n in best[1]]:
        words.append(f"the best of each {rules.spread(both)}")
    told, mean = f"times the time of one block a row: {'; '.join(words)}", needed(means)[0]
    return Judged(low < mean <= high, told, mean)


def _best(rows: Rows, names: Collection[str]) -> dict[str, float]:
    """Return the least time of some kernels, case by case."""
    found: dict[str, float] = {}
    for case, us in (item for name in names for item in rows.where(name=name).us().items()):
        found[case] = min(us, found.get(case, us))
    return found


def deviations() -> list[tuple[str, str, int, float, float]]:
    """Return device, column, n, printed and recomputed GB/s where they differ by over 1 %."""
    return [
        (device, column, n, gbs, again)
        for device, data in PRINTED.items()
        for column, printed in data["gbs"].items()
        for n, gbs, ns in zip(SIZES, printed, data["runtime_ns"][column], strict=True)
        if abs(gbs / (again := formula_gbs(n, BITS[column], ns)) - 1) > DIFFERS
    ]


@CLAIMS.rule("printed-bandwidths")
def _printed_bandwidths(rows: Rows) -> Judged:
    wrong = deviations()
    told = ["{} {} {}: {:.2f} printed, {:.2f} by formula".format(*one) for one in wrong]
    words = f"{len(wrong)} of 36 differ by more than 1 %: {'; '.join(told)}"
    return Judged(not wrong, words, len(wrong))


def comparison(rows: Rows) -> Iterator[tuple[str, ...]]:
    """Yield, by size and kernel, the printed figures beside ours, warm and cold; then our CPU's."""
    both = (("cuda", COLUMNS, ""), ("cpu", dict(zip(BITS, BITS, strict=True)), ", on our CPU"))
    for (backend, columns, where), n in itertools.product(both, SIZES):
        kept = [rows.where(backend=backend, n=n, temperature=one) for one in ("warm", "cold")]
        for name, column in columns.items():
            printed = [cell for device in PRINTED for cell in _printed(device, column, n)]
            found = [_row(here, name) for here in kept]
            ours = [cell for pair in zip(kept, found, strict=True) for cell in _ours(*pair)]
            if any(found) or (backend == "cuda" and any(printed)):
                ran = [row.params for row in found if row and "p" in row.params]
                launch = f"{ran[0]['p']} x {ran[0]['rows']}" if ran else ""
                yield (str(n), f"{name}{where}", *printed, *ours, launch)


def _row(here: Rows, name: str) -> StudyRow | None:
    """Return our row at one size and temperature; of a sweep the fastest of a plain kernel."""
    form, _, what = name.partition(", ")
    rung = "two_step" if form == "fp16" else f"{form}_codes"
    if what == SWEPT:
        some = [row for row in here.where(SWEEP).timed() if row.params.get("rung") == rung]
        return min(some, key=lambda row: row.us, default=None)
    named = here.where(name=name).timed()
    return next(iter(named.where(EXPERIMENT) or named.where(CHOSEN)), None)


def _cells(us: float, n: int, bits: int, peak: float | None, torch: float | None) -> list[str]:
    """Return us, GB/s by the document's formula, share of peak, x over torch."""
    rate = formula_gbs(n, bits, us * 1000)
    return [f"{us:.2f}", f"{rate:.0f}", share(rate, peak), f"{torch / us:.2f}" if torch else ""]


def _printed(device: str, column: str, n: int) -> list[str]:
    """Return the cells of what a document printed, with its own GB/s where those differ."""
    data, index = PRINTED[device], SIZES.index(n)
    times = data["runtime_ns"]
    if column not in times:
        return [""] * len(_EACH)
    us, torch = (times[name][index] / 1000 for name in (column, "torch"))
    cells = _cells(us, n, BITS[column], data["peak_gbs"], torch)
    wrong = [gbs for *where, gbs, _ in deviations() if where == [device, column, n]]
    cells[1] += f" ({wrong[0]:.0f} printed)" if wrong else ""
    return cells


def _ours(here: Rows, row: StudyRow | None) -> list[str]:
    """Return the cells of our row at one size and temperature."""
    if row is None:
        return [""] * len(_EACH)
    torch = here.where(EXPERIMENT, name="torch").us().get(case_key(row.case))
    bits = BITS[row.name.split()[0].strip(",")]
    return _cells(row.us, int(row.case["n"]), bits, here.figure("datasheet_gbs"), torch)


def _printed_lines(*forms: str) -> list[Line]:
    """Return the printed bandwidths as shares of each device's peak."""
    return [
        Line(
            f"{form} on its {device}, printed",
            [
                (float(n), 100 * formula_gbs(n, BITS[form], ns) / data["peak_gbs"])
                for n, ns in zip(SIZES, data["runtime_ns"][form], strict=True)
            ],
        )
        for device, data in PRINTED.items()
        for form in forms
        if form in data["runtime_ns"]
    ]


_TIME = {"each": ("warm", "cold"), "over": "n", "value": "us", "unit": "us", "log": True}
_GBS = {"each": ("warm", "cold"), "over": "n", "value": "gbs", "unit": "GB/s", "limit": "read"}
_WHAT = "Matrix times vector in halves and codes"
_CODES = [f"{form} codes, 128 threads" for form in ("int8", "int4")]
_MAIN = ["torch", HALF, TUNED, *_CODES, "gemmule's choice"]
CHARTS = (
    chart("lines", "rates", f"{_WHAT}: bandwidth", EXPERIMENT, DTYPES,
          "GB/s: matrix, vector and result once each", names=_MAIN, **_GBS),
    chart("lines", "times", f"{_WHAT}: run time", EXPERIMENT, DTYPES, "us of one product",
          names=_MAIN, **_TIME),
    chart("lines", "chosen", f"{_WHAT}: what is chosen for this device", CHOSEN,
          "x in fp16; codes with scales and zeros for groups of 128", "us of one product",
          each=["cold"], over="n", value="us", unit="us", log=True),
    chart("lines", "alternatives", "What was tried beside the plain kernels", EXPERIMENT,
          DTYPES, "times as fast as the plain form; above 1 it pays", each=("warm", "cold"),
          over="n", pairs=ALTERNATIVES, value="us", unit="times as fast"),
    chart("lines", "alike", "Sections of a row, and x in shared memory, like with like",
          SWEEP, DTYPES, "times as fast as the plain form with as many threads, rows and values",
          each=("warm", "cold"), over="n", pairs=[*Y_PAIRS[-8:-4], *X_PAIRS[-2:]], value="us",
          unit="times as fast"),
    *(
        chart("lines", f"shares-{file}", f"Bandwidth as a share of each device's peak, {file}",
              EXPERIMENT, DTYPES, "percent of each data sheet", each=["warm"], over="n",
              value="use", unit="% of peak", names=names, beside=_printed_lines(*forms))
        for file, forms, names in (
            ("halves", ("torch", "fp16"), ["torch", TUNED]),
            ("codes", ("int8", "int4"), _CODES),
        )
    ),
)  # fmt: skip
_WHERE, _EACH = ("P100", "3090", "warm", "cold"), ("us", "GB/s", "of peak", "x torch")
HEADER = ("n", "kernel", *map(" ".join, itertools.product(_WHERE, _EACH)), "p x rows")
STUDY = Study("003", steps, CLAIMS.all(), (HEADER, comparison), CHARTS)
