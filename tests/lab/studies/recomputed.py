"""The verdicts on the five documents, computed anew from the rows with none of the studies' code.

Rows are read as plain JSON, the printed figures are typed off the documents, and each rule is
written by its words. ``python tests/lab/studies/recomputed.py`` prints what it finds.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

EVIDENCE = Path(__file__).resolve().parents[3] / "evidence"
RECORDS = {"003": "nvidia-h100-80gb-hbm3"}  # with the sweeps; the others' are of an H200
Row = dict[str, Any]
HOLDS: dict[str, Callable[[], bool]] = {}
PRINTED_BEST = {  # mean ms by width 8 .. 256
    "block": (0.2132, 0.1765, 0.1558, 0.1511, 0.1547, 0.1699),
    "transposed": (1.8483, 1.9505, 2.6159, 2.5748, 2.3792, 2.2979),
    "then": (0.4765, 0.4642, 0.4410, 0.4321, 0.4334, 0.4501),
}
NAIVE_T, TRANSPOSED, THEN = 3.1646, 2.5748, 0.4321
ALGORITHMS = {
    "block_multiply": "naive",
    "block_multiply_transposed": "naive transposed",
    "transpose_then": "naive transposed",
}
WIDTHS, SIZES = (8, 16, 32, 64, 128, 256), (512, 1024, 2048, 4096, 8192, 16384)


def load(number: str) -> tuple[list[Row], list[Row]]:
    """Return the rows, of equal ones the last that was measured, and the environments."""
    kept: dict[str, Row] = {}
    environments = []
    for line in (
        (EVIDENCE / RECORDS.get(number, "nvidia-h200") / f"study-{number}.jsonl")
        .read_text()
        .splitlines()
    ):
        one = json.loads(line)
        if one["line"] == "environment":
            environments.append(one)
            continue
        key = json.dumps(
            [one[k] for k in ("device", "backend", "experiment", "case", "name", "temperature")],
            sort_keys=True,
        )
        if one["times_us"] or one["figures"] or key not in kept:
            kept[key] = one
    return list(kept.values()), environments


ROWS = {number: load(number) for number in ("000", "001", "002", "003", "004")}


def find(number: str, experiment: str, name: str | None = None, **asked: Any) -> list[Row]:
    found = [r for r in ROWS[number][0] if r["experiment"] == experiment]
    found = [r for r in found if name is None or r["name"] == name]
    warmth = asked.pop("kept", None)
    found = [r for r in found if warmth is None or r["temperature"] == warmth]
    return [r for r in found if all(r["case"].get(k) == v for k, v in asked.items())]


def us(rows: Iterable[Row]) -> dict[str, float]:
    return {
        json.dumps(r["case"], sort_keys=True): r["times_us"]["median"]
        for r in rows
        if r["times_us"]
    }


def faster(
    number: str, experiment: str, ours: str, plain: str, kept: str = "warm", least: int = 0
) -> list[float]:
    """Return how many times as fast one implementation is as another, case by case."""
    mine, theirs = (us(find(number, experiment, name, kept=kept)) for name in (ours, plain))
    both = [case for case in mine if case in theirs and json.loads(case).get("n", 0) >= least]
    return [theirs[case] / mine[case] for case in both]


def mean(ratios: Iterable[float]) -> float:
    values = list(ratios)
    return math.exp(sum(map(math.log, values)) / len(values))


def ceiling(number: str, name: str) -> float:
    return max(
        float(e["ceilings"][name]["value"]) for e in ROWS[number][1] if name in e["ceilings"]
    )


def counters(number: str, experiment: str, name: str, **case: Any) -> dict[str, float]:
    (row,) = [r for r in find(number, experiment, name, **case) if r["figures"]]
    return dict(row["figures"])


def claim(name: str) -> Callable[[Callable[[], bool]], Callable[[], bool]]:
    def mark(holds: Callable[[], bool]) -> Callable[[], bool]:
        HOLDS[name] = holds
        return holds

    return mark


# ---- 000

GRID = "rows x columns"
HOLDS["000/tiling"] = lambda: (
    mean(faster("000", GRID, "shared_x", "thread_per_row", "cold")) <= 1.02
)
HOLDS["000/result-size"] = lambda: 512 == 2048
HOLDS["000/small-x"] = lambda: max(n / (m * n + m + n) for m in (256,) for n in (256, 16384)) < 0.01


@claim("000/l2")
def _() -> bool:
    one, m, n = counters("000", "counters", "thread_per_row"), 16384, 1024
    misses_of_x = one["load sectors"] - one["load sectors hit in L1"] - 4 * m * n / 32
    return max(misses_of_x, 0) / (m / 32 * n) > 0.5


@claim("000/rows")
def _() -> bool:
    gbs = {
        (r["case"]["m"], r["case"]["n"]): r["figures"]["gbs"]
        for r in find("000", GRID, "thread_per_row", kept="warm")
    }
    sizes = sorted({m for m, _ in gbs})
    grows = min(gbs[sizes[-1], n] / gbs[sizes[0], n] for n in sizes)
    rows = [[gbs[m, n] for n in sizes] for m in sizes]
    return grows >= 10 and max(max(row) / min(row) for row in rows) <= 2


# ---- 001

TOTAL = "host to host"


def totals(name: str, part: str | None = None) -> dict[int, float]:
    rows = [r for r in find("001", TOTAL, name) if r["times_us"]]
    return {
        r["case"]["n"]: r["figures"][part] if part else r["times_us"]["median"]
        for r in rows
        if not part or part in r["figures"]
    }


def overtakes(cpu: str, gpu: str) -> float:
    left, right = totals(cpu), totals(gpu)
    sizes = sorted(set(left) & set(right))
    last = max(n for n in sizes if left[n] <= right[n])
    after = min(n for n in sizes if n > last)
    low, high = (math.log(left[n] / right[n]) for n in (last, after))
    return last * (after / last) ** (-low / (high - low))


def slope(times: dict[int, float], least: int, *, log: bool = True) -> tuple[float, float]:
    """Return the slope of a line through log time, and the squares that it leaves."""
    pairs = [
        (math.log(n) if log else float(n), math.log(t)) for n, t in times.items() if n >= least
    ]
    x, y = (statistics.fmean(one) for one in zip(*pairs, strict=True))
    up = sum((a - x) * (b - y) for a, b in pairs) / sum((a - x) ** 2 for a, _ in pairs)
    return up, sum((b - y - up * (a - x)) ** 2 for a, b in pairs)


def like(ours: str, plain: str) -> float:
    return mean(faster("001", "kernels", ours, plain))


def parts(n: int) -> dict[str, float]:
    figures = find("001", TOTAL, "shared tile", n=n)[0]["figures"]
    return {k: v for k, v in figures.items() if not k.startswith("first") and k != "gflops"}


HOLDS["001/break-even-library"] = lambda: 20.5 <= overtakes("eigen", "cublas") <= 82
HOLDS["001/break-even-own"] = lambda: 32 <= overtakes("cpu loop", "shared tile") <= 128
HOLDS["001/cpu-slow"] = lambda: (
    totals("cpu loop")[1000 if 1000 in totals("cpu loop") else 1001] > 1e5
    and totals("cpu loop")[1000] > 10 * totals("shared tile")[1000]
)
HOLDS["001/exponential"] = lambda: all(
    slope(totals(name), 1000, log=False)[1] < slope(totals(name), 1000)[1]
    for name in ("eigen", "cublas")
)
HOLDS["001/eigen-45"] = lambda: totals("eigen")[10000] > 45e6
HOLDS["001/cublas-10"] = lambda: totals("cublas")[26000] < 10e6
HOLDS["001/memory-end"] = lambda: counters("001", "largest", "the next size")["largest n"] == 26000
HOLDS["001/naive-scales"] = lambda: (
    abs(slope(totals("cpu loop"), 256)[0] - slope(totals("naive", "kernel"), 256)[0]) < 0.3
)
HOLDS["001/launch-gain"] = lambda: like("naive, fused", "naive, blocks of one thread") >= 5
HOLDS["001/shared-alone"] = lambda: like("shared tile 32", "naive, fused") >= 5
HOLDS["001/sums-in-c"] = lambda: like("naive, fused", "naive, sums in C") > 1.02
HOLDS["001/fmaf"] = lambda: like("shared tile 32", "shared tile 32, multiply and add apart") <= 1.02
HOLDS["001/tile-1"] = lambda: 1 / 1.1 <= like("shared tile 1", "naive, blocks of one thread") <= 1.1
HOLDS["001/other-approach"] = lambda: (
    counters("001", "barriers", "rectangular_tile")["barrier stall cycles"]
    < counters("001", "barriers", "shared_tile")["barrier stall cycles"]
)
HOLDS["001/kernel-1024"] = lambda: max(parts(1024), key=lambda k: parts(1024)[k]) == "kernel"
HOLDS["001/order"] = lambda: (
    [[2, 3], [4, 7]] == [[3, 4], [4, 6]]
)  # (A^T B^T)^T beside B A's, by hand
HOLDS["001/epsilon"] = lambda: bool(abs(math.nan - 1.0) > 1.2e-7)


@claim("001/loading")
def _() -> bool:
    names = ("allocate", "host to device", "device to host", "free")
    small = [
        sum(r["figures"][part] for part in names)
        for r in find("001", TOTAL, "shared tile")
        if r["case"]["n"] <= 101
    ]
    return 125 <= statistics.median(small) <= 500


@claim("001/shared-gain")
def _() -> bool:
    naive, shared = totals("naive", "kernel"), totals("shared tile", "kernel")
    return mean(naive[n] / shared[n] for n in naive if n >= 512 and n in shared) >= 5


@claim("001/shared-init")
def _() -> bool:
    naive, shared = totals("naive", "kernel"), totals("shared tile", "kernel")
    return mean(shared[n] / naive[n] for n in naive if n <= 31 and n in shared) <= 1.1


@claim("001/equal-small")
def _() -> bool:
    loop = {n: t for n, t in totals("cpu loop").items() if n <= 64}
    kernels = [totals(name, "kernel") for name in ("naive", "shared tile")]
    return all(0.5 <= mean(k[n] / loop[n] for n in loop if n in k) <= 2 for k in kernels)


@claim("001/malloc-64")
def _() -> bool:
    first = counters("001", "first call", "shared_tile", n=64)
    making = first["context us"] + first["first cudaMalloc us"]
    later = max(parts(64), key=lambda k: parts(64)[k]) == "allocate"
    return later or making > first["load us"] + first["first launch us"]


@claim("001/banks")
def _() -> bool:
    one = counters("001", "counters", "shared_tile")
    # Lane i stores and reads word i of a row of 32, or all lanes read one word.
    apart = len({lane % 32 for lane in range(32)}) == 32
    return apart and one["bank conflicts, loads"] < 0.01 * one["shared load wavefronts"]


def profiled(name: str) -> float:
    return counters("001", "counters", "shared_tile")[name]


HOLDS["001/peak"] = lambda: profiled("SM throughput percent") > 80
HOLDS["001/barrier"] = lambda: 7 <= profiled("barrier stall cycles") <= 28


@claim("001/balanced")
def _() -> bool:
    both = [profiled(f"{unit} throughput percent") for unit in ("SM", "memory")]
    return max(both) / min(both) <= 1.25


@claim("001/computing")
def _() -> bool:
    rows = find("001", "kernels", "shared tile 32", kept="warm")
    best = max(rows, key=lambda r: r["case"]["n"])
    return best["figures"]["gflops"] > 0.8 * ceiling("001", "fma float32")


# ---- 002

KERNELS = ("naive", "shared_tile", "rectangular_tile")


def falls(count: Callable[[dict[str, float]], float], plain: str, tile: str) -> float:
    return count(counters("002", "counters", plain)) / count(counters("002", "counters", tile))


def requests(one: dict[str, float]) -> float:
    return one["load requests"]


def shares(figure: str, limit: str) -> list[float]:
    rows = [find("002", GRID, name, kept="warm", m=4096, n=4096)[0] for name in KERNELS]
    return [r["figures"][figure] / ceiling("002", limit) for r in rows]


HOLDS["002/tiles"] = lambda: all(
    mean(faster("002", GRID, tile, "naive", kept)) > 1.02
    for tile in KERNELS[1:]
    for kept in ("warm", "cold")
)
HOLDS["002/tile-width"] = lambda: abs(falls(requests, "naive", "shared_tile") / 32 - 1) <= 0.05
HOLDS["002/rectangular"] = lambda: falls(requests, "shared_tile", "rectangular_tile") > 1.02
HOLDS["002/tile-traffic"] = lambda: (
    falls(lambda c: c["load sectors"] - c["load sectors hit in L1"], "naive", "shared_tile") > 1.02
)
HOLDS["002/low-use"] = lambda: max(shares("gbs", "read")) < 0.1
HOLDS["002/compute-bound"] = lambda: min(shares("gflops", "fma float32")) >= 0.6
HOLDS["002/coalesced"] = lambda: len({(32 * 7) // 8 for _lane in range(32)}) > 4

# ---- 003


def beats(ours: str, bar: float, *kept: str) -> bool:
    for warmth, n in ((warmth, n) for warmth in kept for n in SIZES):
        (torch,) = us(find("003", "sizes", "torch", kept=warmth, n=n)).values()
        times = [*us(find("003", "sizes", ours, kept=warmth, n=n)).values()]
        swept = find("003", "p x rows x values", kept=warmth, n=n) if ours == BEST else []
        times += us(r for r in swept if r["params"].get("rung") == "two_step").values()
        if torch / min(times) <= bar:
            return False
    return True


def small(ours: str, plain: str) -> list[float]:
    return faster("003", "sizes", ours, plain)


BEST = "fp16, best parameters"
HOLDS["003/fp16-over-torch"] = lambda: beats(BEST, 1.0, "warm")
HOLDS["003/printed-parameters"] = lambda: beats("fp16 two_step", 1.0, "warm")
HOLDS["003/fp16-tuned-over-torch"] = lambda: beats(BEST, 1.1, "warm", "cold")
for _form in ("int8", "int4"):
    HOLDS[f"003/{_form}-over-fp16"] = lambda form=_form: (  # type: ignore[misc]
        min(faster("003", "chosen", f"{form}, chosen", "fp16, chosen", "cold", 2048)) > 1
    )
    HOLDS[f"003/{_form}-kernel"] = lambda form=_form: (  # type: ignore[misc]
        min(faster("003", "sizes", f"{form} codes", "fp16 two_step", least=2048)) > 1
    )
HOLDS["003/vector-loads"] = lambda: mean(small("fp16 16-byte loads", "fp16 scalar loads")) > 1.02


def alike(rung: str) -> list[float]:
    """Return an alternative's time over two_step's with as many threads, rows and values."""
    swept = [r for r in find("003", "p x rows x values", kept="warm") if r["params"].get("rung")]
    keys = ("p", "rows", "values")
    plain = {
        (r["case"]["n"], *(r["params"][k] for k in keys)): r["times_us"]["median"]
        for r in swept
        if r["params"]["rung"] == "two_step"
    }
    found = []
    for r in swept:
        if r["params"]["rung"] == rung:
            p, rows, values = (r["params"][k] for k in keys)
            at = (r["case"]["n"], p * r["params"].get("y", 1), rows, values)
            found.append(r["times_us"]["median"] / plain[at])
    return found


HOLDS["003/y-blocks"] = lambda: 1 < mean(alike("y_blocks")) <= 1.5
HOLDS["003/shared-x"] = lambda: mean(alike("vector_shared_x")) >= 1 / 1.02
HOLDS["003/table-int8"] = lambda: (
    mean(small("int8 product table", "int8 codes, 128 threads")) <= 1.02
)
HOLDS["003/table-int4"] = lambda: (
    mean(small("int4 product table", "int4 codes, 128 threads")) > 1.02
)
HOLDS["003/int4-16-values"] = lambda: mean(small("int4 codes", "int4 codes, 8 values")) > 1.02
HOLDS["003/printed-bandwidths"] = lambda: (  # the P100's PyTorch at 8192
    abs(202.083 / ((2 * 8192**2 + 4 * 8192) / 618377.7) - 1) <= 0.01
)

# ---- 004


def widths(name: str, kept: str = "warm") -> dict[str, float]:
    return us(find("004", "widths", name, kept=kept))


def ratio(algorithm: str) -> float:
    ours, plain = widths(f"{algorithm} 64"), widths(ALGORITHMS[algorithm])
    return statistics.fmean(plain.values()) / statistics.fmean(ours.values())


def won(algorithm: str, least_bytes: int = 0, *kept: str) -> list[bool]:
    found = []
    for warmth in kept or ("warm",):
        ours, plain = widths(f"{algorithm} 64", warmth), widths(ALGORITHMS[algorithm], warmth)
        for case, time in ours.items():
            sizes = json.loads(case)
            if 4 * sizes["m"] * sizes["n"] > least_bytes:
                found.append(plain[case] > time)
    return found


def best_of(times: dict[int, float]) -> int:
    return min(times, key=lambda key: times[key])


def by_height(algorithm: str) -> dict[int, float]:
    return {
        h: mean(us(find("004", "heights x widths", f"{algorithm} {h} x 64")).values())
        for h in (64, 128, 256, 512, 1024)
    }


def column_gain(name: str) -> float:
    pick = {"kept": "cold", "order": "columns"}
    mine, plain = (us(find("004", "ladder", one, **pick)) for one in (name, "thread_per_row"))
    return mean(plain[case] / mine[case] for case in mine)


HOLDS["004/shared-memory"] = lambda: (
    math.log(column_gain("shared_x")) >= math.log(column_gain("block_multiply")) / 2
)
HOLDS["004/width-64"] = lambda: all(
    best_of({w: statistics.fmean(widths(f"{a} {w}").values()) for w in WIDTHS}) == 64
    for a in ALGORITHMS
)
HOLDS["004/height-1024"] = lambda: all(best_of(by_height(a)) == 1024 for a in ALGORITHMS)
HOLDS["004/own-optimum"] = lambda: all(min(t) == t[3] for t in PRINTED_BEST.values())
HOLDS["004/always-faster"] = lambda: all(won("block_multiply"))
HOLDS["004/above-1-mb"] = lambda: all(won("block_multiply", 1_000_000, "warm", "cold"))
HOLDS["004/transposed-wins"] = lambda: (
    abs(statistics.fmean(won("block_multiply_transposed")) - 160 / 296) <= 0.1
)
for _algorithm, _printed, _name in (
    ("block_multiply", 5.5, "block"),
    ("block_multiply_transposed", 1.2, "transposed"),
    ("transpose_then", 7.3, "then"),
):
    HOLDS[f"004/ratio-{_name}"] = lambda algorithm=_algorithm, printed=_printed: (  # type: ignore[misc]
        0.75 * printed <= ratio(algorithm) <= 1.25 * printed
    )
HOLDS["004/twice-memory"] = lambda: 1.9 < (2 * 4 * 2**28 + 4 * 2**14) / (4 * 2**28) < 2.1
HOLDS["004/case-count"] = lambda: sum(range(7, 15)) in (294, 296)
HOLDS["004/whose-7.3"] = lambda: NAIVE_T / TRANSPOSED > 7
HOLDS["004/eighty-percent"] = lambda: NAIVE_T / TRANSPOSED >= 1.7


@claim("004/coalescing")
def _() -> bool:
    few, many = (
        one["load sectors"] / one["load requests"]
        for name in ("block_multiply", "block_multiply_transposed")
        for one in [counters("004", "counted by the ladder", name, dtype="float16")]
    )
    ours, theirs = widths("block_multiply 64"), widths("block_multiply_transposed 64")
    sizes = {case: json.loads(case) for case in ours}
    square = [c for c, s in sizes.items() if s["m"] == s["n"] and 4 * s["n"] ** 2 > 1_000_000]
    slower = mean(theirs[case] / ours[case] for case in square)
    return many >= 4 * few and slower >= column_gain("shared_x")


@claim("004/any-dimension")
def _() -> bool:
    def columns(width: int) -> int:
        blocks = range(math.ceil(width / 64))
        return sum(width % 64 if 64 * b + 64 <= width else 64 for b in blocks)

    return all(columns(width) == width for width in range(1, 301))


@claim("004/zeroing")
def _() -> bool:
    (zero,) = us(find("004", "fixed cost", "zeroing and storing y", m=128)).values()
    return zero < 0.05 * statistics.median(widths("block_multiply 64").values())


def held() -> dict[str, bool]:
    """Return whether each claim holds by its rule."""
    return {name: holds() for name, holds in HOLDS.items()}


if __name__ == "__main__":
    print("\n".join(f"{name}: {'holds' if one else 'does not'}" for name, one in held().items()))
