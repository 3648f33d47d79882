"""Rows that studies take over from a device's other records: ``python -m pages.borrowed evidence``.

Counters and times of the ladders, products of codes and of several GPUs were measured once, for
other pages; where a claim of a document needs them they are added to the rows of its study, under
experiments of their own, with the record's own environment. Ceilings stay where they were measured.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from gemmule.core.problem import Problem
from gemmule.storage import lines
from gemmule_lab.records import distributed, results
from gemmule_lab.records import study as store
from gemmule_lab.records.rows import Environment, Times
from gemmule_lab.records.study import Rows, StudyRow

LADDER, COUNTED, CHOSEN = "ladder", "counted by the ladder", "chosen"
SEVERAL, BARRIERS = "several GPUs", "barriers"
CODES = {"uint8": "int8", "uint4": "int4"}
GROUP = 128
Taken = tuple[Environment, StudyRow]


def taken(folder: Path, number: str) -> Iterator[Taken]:
    """Yield what a study takes over of the records in a device's folder."""
    if number == "001":
        yield from _barriers(folder / "study-002.jsonl")
    if number == "003":
        yield from _chosen(folder / "bench")
        return
    yield from _ladder(folder / "ladder.jsonl", number)
    yield from _counters(folder / "counters.jsonl", number)
    if number == "000":
        yield from _several(folder / "distributed.jsonl")


def _row(number: str, experiment: str, environment: Environment, name: str, **rest: Any) -> Taken:
    bare = replace(environment, ceilings={})
    where = (number, experiment, bare.id, bare.device, bare.backend)
    return bare, StudyRow(*where, rest.pop("case"), name, rest.pop("kind", "rung"), **rest)


def _wanted(number: str, problem: Problem) -> dict[str, str | int | float | bool] | None:
    """Return the case under which a study files a product of the ladder, None if it takes none."""
    sizes: dict[str, Any] = {"m": problem.m, "n": problem.n, "dtype": problem.a}
    plain = problem.quant is None and problem.a == problem.b and problem.batch == 1
    if number in ("000", "004") and plain and problem.op == "matvec" and problem.a == "float32":
        order = "columns" if problem.layout_a == "col" else "rows"
        if number == "004" or order == "rows":
            return {**sizes, "order": order}
    if number in ("001", "002") and plain and problem.op == "matmul" and problem.a == "float32":
        return {**sizes, "n": problem.k, "columns": problem.n}
    return None


def _ladder(path: Path, number: str) -> Iterator[Taken]:
    if not path.is_file():
        return
    held = results.read(path)
    for row in held.rows:
        case = _wanted(number, row.problem)
        if case is not None and row.temperature == "cold":
            rate = {"gbs": row.gbs, "gflops": 1e3 * row.tflops}
            given: dict[str, Any] = {"params": row.params, "times_us": row.times_us}
            where = (number, LADDER, held.environments[row.environment], row.name)
            yield _row(*where, case=case, kind=row.kind, temperature="cold", figures=rate, **given)


def _counters(path: Path, number: str) -> Iterator[Taken]:
    ops = ("matmul",) if number in ("001", "002") else ("matvec", "vecmat")
    for one in lines.read(path, 1):
        title = str(one["title"])
        sizes, _, dtype = title.rpartition(", ")
        square = " by " not in sizes and one["op"] in ops and dtype in ("float16", "float32")
        if not square or (number == "000" and one["op"] != "matvec"):
            continue
        n = int(sizes.split()[0])
        case: dict[str, Any] = {"m": n, "n": n, "dtype": dtype}
        case |= {"columns": n} if number in ("001", "002") else {"op": one["op"]}
        figures = {k: float(v) for k, v in one["counters"].items()}
        here = _known_only(str(one["device"]), str(one["date"]))
        yield _row(
            number, COUNTED, here, str(one["rung"]), case=case, temperature="once",
            params=one["params"], figures=figures,
        )  # fmt: skip


def _known_only(device: str, date: str) -> Environment:
    """Return the environment of a record that names its device and its day alone."""
    return Environment(device, "cuda", "", (device,), "", "", {}, None, 0, {}, {}, timestamp=date)


def _several(path: Path) -> Iterator[Taken]:
    if not path.is_file():
        return
    held = distributed.read(path)
    for row in held.rows:
        case: dict[str, Any] = {"n": row.n, "dtype": row.dtype, "gpus": row.world}
        figures = {"over alone": row.over_alone, "bytes sent": float(row.sent_bytes)}
        here = held.environments[row.environment]
        times: Times = row.times_us
        yield _row(
            "000", SEVERAL, here, row.way, case=case, temperature="once", times_us=times,
            figures=figures,
        )  # fmt: skip


def _barriers(path: Path) -> Iterator[Taken]:
    rows = store.read(path, "002")
    for row in rows.where("counters"):
        if row.name != "naive" and row.figures:
            here = rows.environments[row.environment]
            given = {"case": row.case, "temperature": "once", "figures": row.figures}
            yield _row("001", BARRIERS, here, row.name, **given)


def _chosen(folder: Path) -> Iterator[Taken]:
    """Yield square matvecs by plans' choices, in halves and in codes in groups, and torch's."""
    for path in sorted(folder.glob("*.jsonl")):
        if path.stem not in ("matvec", "quantised"):
            continue
        held = results.read(path)
        fastest: dict[tuple[int, str], Any] = {}
        for row in held.rows:
            name = _form(row.problem, row.name, row.kind)
            key = (row.problem.m, name)
            if name and row.temperature == "cold" and _square(row.problem):
                best = fastest.get(key)
                if best is None or row.times_us.median < best.times_us.median:
                    fastest[key] = row
        for (n, name), row in fastest.items():
            here = held.environments[row.environment]
            yield _row(
                "003", CHOSEN, here, name, case={"n": n}, kind=row.kind, temperature="cold",
                params={**row.params, "rung": row.name}, times_us=row.times_us,
                figures={"gbs": row.gbs, "gflops": 1e3 * row.tflops},
            )  # fmt: skip


def _square(problem: Problem) -> bool:
    whole = problem.m == problem.n and problem.alignment == 16
    return whole and problem.layout_a == "row" and problem.batch == 1


def _form(problem: Problem, name: str, kind: str) -> str:
    if problem.op != "matvec" or problem.b != "float16":
        return ""
    if problem.quant is None and problem.a == "float16":
        return "fp16, chosen" if kind == "rung" else name if name == "torch" else ""
    if problem.quant is None:
        return ""
    grouped = problem.quant.group_size == GROUP and not problem.quant.transposed
    form = CODES.get(problem.a, "")
    return f"{form}, chosen" if form and grouped and kind == "rung" else ""


@click.command()
@click.argument("evidence", type=click.Path(path_type=Path, file_okay=False, exists=True))
def borrow(evidence: Path) -> None:
    """Add to the studies below EVIDENCE what they take over of the records beside them."""
    for folder in sorted(path for path in evidence.iterdir() if path.is_dir()):
        for number in ("000", "001", "002", "003", "004"):
            found = list(taken(folder, number)) if (folder / "bench").is_dir() else []
            if found:
                rows = Rows((row for _, row in found), {e.id: e for e, _ in found})
                path = folder / f"study-{number}.jsonl"
                click.echo(f"{path}: {store.add(path, rows, number)} rows of other records")


if __name__ == "__main__":
    borrow()
