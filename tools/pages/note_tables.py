"""What the notes on CUDA ladders say of the last run on record, beside what was tried."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from counters import crosscheck
from gemmule.core.problem import Problem
from gemmule.storage import lines
from gemmule_lab.bench import epilogues as bench
from gemmule_lab.records import results
from gemmule_lab.records.rows import Environment, Row
from gemmule_lab.report.tables import TableData, markdown, significant
from pages.markdown import update_markers
from pages.speed_table import NONE_YET

MEMORY_BOUND_BYTES, WORTH_A_LOOK_BYTES = 256e6, 16e6
NEAR, START_US, ALLOWED = 0.97, 2.1, 1.03
PEER = "torch"
DTYPES = {"float16": "halves", "float32": "floats", "float64": "doubles"}
GROUP = 128


def update(root: Path) -> list[Path]:
    """Rewrite the tables of the notes below `root`; return the files that changed."""
    makers: Mapping[str, tuple[str, Callable[[results.Results], str]]] = {
        "cuda_matvec": ("matvec", lambda found: _dense(found, "row")),
        "cuda_vecmat": ("matvec", lambda found: _dense(found, "col")),
        "cuda_quantized": ("quantised", _coded),
    }
    changed = []
    for note, (suite, make) in makers.items():
        page = root / "docs" / "notes" / f"{note}.md"
        files = sorted(root.glob(f"evidence/*/bench/{suite}.jsonl"))
        text = "\n\n".join(make(results.read(path)) for path in files) or NONE_YET
        if page.is_file() and update_markers(page, {"record": text}):
            changed.append(page)
    page = root / "docs" / "notes" / "measuring.md"
    checked = [_crosscheck(path) for path in sorted(root.glob(f"evidence/*/{crosscheck.FILE}"))]
    text = "\n\n".join(checked) or NONE_YET
    if page.is_file() and update_markers(page, {"crosscheck": text}):
        changed.append(page)
    return changed


def epilogues(root: Path) -> str:
    """Return the tables of products with an epilogue."""
    told = []
    for path in sorted(root.glob("evidence/*/epilogues.jsonl")):
        rows = list(lines.read(path, bench.SCHEMA))
        cases = [list(of_case) for _, of_case in itertools.groupby(rows, bench.case_of)]
        told.append(f"On record ({rows[0]['device']}):\n\n{markdown(bench.table('', cases))}")
    return "\n\n".join(told) or NONE_YET


def _crosscheck(path: Path) -> str:
    """Return the table of products by both clocks."""
    rows = list(lines.read(path, crosscheck.SCHEMA))
    header = ("product", "our graphs, us", "NVBench, us", "apart, us")
    cells = []
    for row in rows:
        ours, theirs = (1e6 * float(row[key]) for key in ("ours_s", "nvbench_s"))
        cells.append((str(row["product"]), *map(significant, (ours, theirs, theirs - ours))))
    head = f"On record ({rows[0]['device']}, {rows[0]['date']}, NVBench {rows[0]['nvbench']}):"
    table = markdown(TableData("", header, tuple(cells), (False, True, True, True)))
    return f"{head}\n\n{table}"


def _dense(found: results.Results, layout: str) -> str:
    ours, theirs = (
        [row for row in found.rows if row.problem.layout_a == layout and chosen(row)]
        for chosen in (_is_ours, _is_peer)
    )
    environment = found.environments[ours[0].environment]
    ceiling = environment.ceilings["read"].value
    told = [_head(environment), "", _squares(ours, theirs, ceiling), ""]
    large = [_shares(rows, MEMORY_BOUND_BYTES) for rows in (ours, theirs)]
    if all(large):
        first, second = (f"{min(shares):.2f} to {max(shares):.2f}" for shares in large)
        told.append(
            f"- Of {MEMORY_BOUND_BYTES / 1e6:.0f} MB and more products read at {first} of the "
            f"ceiling, {PEER}'s at {second}."
        )
    told += _near(ours, ceiling)
    slow = sorted(
        (row for row in ours if row.problem.matrix_bytes > WORTH_A_LOOK_BYTES), key=_share
    )[:3]
    if slow:
        least = ", ".join(
            f"{_share(row):.2f} by {row.problem.m} x {row.problem.n} {row.problem.a}"
            for row in slow
        )
        told.append(f"- Least of it above {WORTH_A_LOOK_BYTES / 1e6:.0f} MB: {least}.")
    return "\n".join(told)


def _head(environment: Environment) -> str:
    read = environment.ceilings["read"].value / 1e3
    return (
        f"On record ({environment.device}, {environment.timestamp[:10]}, read ceiling {read:.2f} "
        "TB/s), cold, us:"
    )


def _near(rows: Sequence[Row], ceiling: float) -> list[str]:
    """Yield how many products are near the bytes' time and what a launch takes besides."""
    over = [
        row.times_us.median / (row.problem.matrix_bytes / (NEAR * ceiling) * 1e-3 + START_US)
        for row in rows
    ]
    within = [sum(one <= limit for one in over) for limit in (1.0, ALLOWED)]
    return [
        f"- Of {len(rows)} products {within[0]} take at most what their bytes take at {NEAR} of "
        f"the ceiling and {START_US} us, {within[1]} at most {100 * (ALLOWED - 1):.0f} % more."
    ]


def _squares(ours: Sequence[Row], theirs: Sequence[Row], ceiling: float) -> str:
    """Return the table of square matrices: ours, the peer's, and what the bytes need."""
    sides = sorted({row.problem.m for row in ours if row.problem.m == row.problem.n})
    table: list[tuple[str, ...]] = []
    for dtype, words in DTYPES.items():
        for who, rows in (("", ours), (f", {PEER}", theirs)):
            by_side = {row.problem.m: row for row in rows if _square(row.problem, dtype)}
            cells = [_cell(by_side.get(side)) for side in sides]
            if any(cells):
                table.append((words + who, *cells))
        item = {row.problem.m: row.problem for row in ours if _square(row.problem, dtype)}
        needed = [
            significant(item[side].matrix_bytes / ceiling * 1e-3) if side in item else ""
            for side in sides
        ]
        table.append((f"{words}, the matrix at the ceiling", *needed))
    header = ("side", *map(str, sides))
    return markdown(TableData("", header, tuple(table), (False, *[True] * len(sides))))


def _square(problem: Problem, dtype: str) -> bool:
    return problem.a == dtype and problem.m == problem.n


def _coded(found: results.Results) -> str:
    """Return the table of quantised products: by what, in which bits, by side."""
    ours = [row for row in found.rows if _is_ours(row) and _of_group(row.problem)]
    environment = found.environments[ours[0].environment]
    sides = sorted({row.problem.m for row in ours})
    by_kind: dict[str, dict[int, Row]] = {}
    for row in ours:
        kind = row.group.partition(", ")[2]
        by_kind.setdefault(kind, {})[row.problem.m] = row
    cells = []
    for kind, rows in by_kind.items():
        cells.append((kind, *(_cell(rows.get(side)) for side in sides)))
        peers = sorted({name for row in rows.values() for name in row.speedups})
        for peer in peers:
            over = [
                f"{rows[side].speedups[peer].value:.2f}" if side in rows else "" for side in sides
            ]
            cells.append((f"times as fast as {peer}", *over))
    header = ("product", *map(str, sides))
    table = markdown(TableData("", header, tuple(cells), (False, *[True] * len(sides))))
    return f"{_head(environment)}\n\n{table}"


def _of_group(problem: Problem) -> bool:
    return problem.quant is not None and problem.quant.group_size == GROUP


def _cell(row: Row | None) -> str:
    return "" if row is None else significant(row.times_us.median)


def _is_ours(row: Row) -> bool:
    return row.kind == "rung"


def _is_peer(row: Row) -> bool:
    return row.kind == "peer" and row.name == PEER


def _share(row: Row) -> float:
    return (row.percent_of_ceiling or 0.0) / 100


def _shares(rows: Iterable[Row], nbytes: float) -> list[float]:
    return [_share(row) for row in rows if row.problem.matrix_bytes >= nbytes]
