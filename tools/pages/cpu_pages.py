"""The pages of the CPU ladders: what was measured of each rung, and what its hot loop is made of.

The tables of a page come from two files in one CPU's folder of the evidence: the rows of a run of
``gemmule bench --suite ladder``, which `keep` puts there, and instruction mixes, which `record`
makes anew.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gemmule.core.registry import OPS, Ladder, ladder
from gemmule.core.rung import Rung
from gemmule.storage.atomic import replace_text
from gemmule.storage.evidence import slug
from gemmule_lab.records import results
from gemmule_lab.records.environment import cpu_name
from gemmule_lab.records.rows import Environment, Row
from gemmule_lab.report.ladder_gains import FILES, before, ladder_of, newest
from gemmule_lab.report.tables import (
    SHORT,
    Column,
    TableData,
    label,
    markdown,
    rows_table,
    significant,
    without_empty_columns,
)
from pages.cpu_code import shown
from pages.cuda_pages import draw, of_rungs
from pages.instructions import KINDS
from pages.ladder_tables import bars

FOLDER, EVIDENCE = Path("docs") / "ladder", "evidence"
MEASURED = FILES["cpu"]
MIXES = "instructions.json"
FORMATS = ("float32", "float16", "plain int8", "int8", "int4")
MAX_BYTES = 1 << 20
NOT_YET = "Not measured yet (`gemmule bench --suite ladder`):"


def page(op: str) -> Path:
    """Return where the page of a CPU ladder lies in a source tree."""
    return FOLDER / f"cpu_{op}.md"


def tables(root: Path) -> dict[Path, dict[str, str]]:
    """Return the tables of every page that exists below `root`, from its evidence."""
    run = newest("cpu", root / EVIDENCE)
    mixes = sorted((root / EVIDENCE).glob(f"*/{MIXES}"))
    if run is not None:  # before those of other processors
        mixes.sort(key=lambda path: path.parent.name != slug(_cpu(run)))
    held = read_mixes(mixes[0]) if mixes else {}
    found = {}
    for op in OPS:
        if (root / page(op)).is_file():
            texts = [] if run is None else [*map(conditions, run.environments.values())]
            rows = () if run is None else run.rows
            texts.append(measured(op, rows))
            times = functools.partial(_times, op, rows)
            found[page(op)] = {
                "rungs": of_rungs(op, "cpu", rows, shown, times),
                "measured": "\n\n".join(texts),
                "instructions": instructions(op, held),
            }
    return found


def _cpu(run: results.Results) -> str:
    return next(iter(run.environments.values())).cpu


def keep(root: Path, file: Path) -> Path:
    """Make a run of ``gemmule bench --suite ladder`` what the pages show; return where it lies.

    ValueError where the file holds no such run.
    """
    run = results.read(file)
    if not all(any(ladder_of(row) == op for row in run.rows) for op in OPS):
        raise ValueError(f"{file} has no rows of some ladder; give one of a whole ladder suite.")
    path = root / EVIDENCE / slug(_cpu(run)) / MEASURED
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, file.read_text("utf-8"))
    return path


def pictures(root: Path) -> list[Path]:
    """Draw the figures of every page anew; return those that changed."""
    run, changed = newest("cpu", root / EVIDENCE), []
    for op in OPS:
        if (root / page(op)).is_file():
            ladder_rows = [row for row in (run.rows if run else ()) if ladder_of(row) == op]
            first = ladder_rows[0].group if ladder_rows else "not measured"
            times = bars(first, ladder(op, "cpu").numbers, ladder_rows, "")
            changed += draw(root, f"cpu_{op}", {"times": times})
    return changed


def _times(op: str, rows: Sequence[Row], rung: Rung, rungs: Ladder) -> list[str]:
    """Return one rung's times on every product of its ladder; nothing where it was not measured."""
    body = []
    for row in rows:
        if row.kind == "rung" and row.name == rung.name and ladder_of(row) == op:
            share = row.percent_of_ceiling
            cells = (significant(row.gbs), significant(1000 * row.tflops))
            told = "" if share is None or row.problem.op == "matmul" else f"{share:.0f}"
            times = {one.name: one.times_us.median for one in rows if one.group == row.group}
            earlier = before(rung, rungs, times)
            gain = "" if earlier is None else f"{times[earlier] / times[rung.name]:.2f} {earlier}"
            body.append((row.group, significant(row.times_us.median), *cells, told, gain))
    header = ("product", "us", "GB/s", "GFLOP/s", "% of read ceiling", "times as fast as")
    table = TableData("", header, tuple(body), (False, True, True, True, True, False))
    return [markdown(without_empty_columns(table))] if body else []


def conditions(environment: Environment) -> str:
    """Return where and when rows were measured."""
    read = environment.ceilings.get("read")
    ceiling = "" if read is None else f", read ceiling {significant(read.value)} GB/s"
    day = environment.timestamp[:10]
    return f"{environment.cpu}, {environment.threads} threads, {day}{ceiling}."


def measured(op: str, rows: Sequence[Row]) -> str:
    """Return one table per product of the ladder: its rungs in order, then the peers."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        if ladder_of(row) == op:
            groups.setdefault(row.group, []).append(row)
    order = {rung.name: place for place, rung in enumerate(ladder(op, "cpu"))}
    parts = []
    for title, group in groups.items():
        ours = [row for row in group if row.kind == "rung"]
        ours.sort(key=lambda row: order.get(row.name, len(order)))
        peers = sorted((r for r in group if r.kind == "peer"), key=lambda r: r.times_us.median)
        parts.append(f"**{title}**\n\n{markdown(_measured_table(op, [*ours, *peers]))}")
    known = {row.name for row in rows if ladder_of(row) == op}
    missing = [rung.name for rung in ladder(op, "cpu") if rung.name not in known]
    if missing:
        parts.append(f"{NOT_YET} {', '.join(missing)}.")
    return "\n\n".join(parts)


def _measured_table(op: str, rows: Sequence[Row]) -> TableData:
    times = {row.name: row.times_us.median for row in rows if row.kind == "rung"}
    rungs = ladder(op, "cpu")
    earlier = {rung.name: times.get(before(rung, rungs, times) or "") for rung in rungs}

    def gain(row: Row) -> str:
        slower = earlier.get(row.name) if row.kind == "rung" else None
        return "" if slower is None else f"{slower / row.times_us.median:.2f}"

    by_name = {name: (name, cell, right) for name, cell, right in SHORT}
    columns: tuple[Column[Row], ...] = (
        ("rung", label, False),
        *(by_name[name] for name in ("us", "GB/s", "% of read ceiling")),
        ("GFLOP/s", lambda row: significant(1000 * row.tflops), True),
        ("x over the rung before it", gain, True),
        by_name["error / bound"],
        ("remarks", lambda row: "; ".join(row.flags), False),
    )
    return rows_table(op, rows, columns)


def instructions(op: str, mixes: Mapping[str, Any]) -> str:
    """Return the table of the hot loops of a ladder's rungs."""
    kept = [kind for kind in KINDS if kind != "scalar"]
    header = ("rung", "format", "bytes a vector", *kept, "from memory", "scalar", "per product")
    body = []
    for rung in ladder(op, "cpu"):
        for name in FORMATS:
            mix = mixes.get(op, {}).get(rung.name, {}).get(name)
            if mix is not None:
                body.append(_mix_cells(rung.name, name, mix, kept))
    numeric = (False, False, *[True] * (len(header) - 2))
    return markdown(without_empty_columns(TableData("", header, tuple(body), numeric)))


def _mix_cells(
    rung: str, name: str, mix: Mapping[str, Any], kept: Sequence[str]
) -> tuple[str, ...]:
    counts = mix["counts"]
    products = counts.get("multiply-add", 0) + counts.get("dot product", 0)
    share = f"{sum(counts.values()) / products:.1f}" if products else ""
    cells = [str(counts[kind]) if kind in counts else "" for kind in (*kept,)]
    scalar = str(counts.get("scalar", ""))
    return (rung, name, str(mix["width"]), *cells, str(mix["folded"] or ""), scalar, share)


def read_mixes(path: Path) -> dict[str, Any]:
    """Return recorded mixes: ladder -> rung -> format -> mix; ValueError for anything else."""
    if path.stat().st_size > MAX_BYTES:
        raise ValueError(f"{path} has more than {MAX_BYTES:,} bytes; record it anew.")
    data = json.loads(path.read_text("utf-8"))
    try:
        for rungs in data.values():
            for formats in rungs.values():
                for mix in formats.values():
                    counts = mix["counts"]
                    known = set(counts) <= set(KINDS) and set(mix) == {"counts", "width", "folded"}
                    if not known or not all(type(c) is int for c in counts.values()):
                        raise ValueError(f"{path} holds {mix}, which is no instruction mix.")
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{path} holds no instruction mixes: {error!r}.") from error
    return dict(data)


# One process for each product: only kernels that it compiles itself show their assembly.
_SCRIPT = """
import dataclasses, json, sys
import gemmule as gm
from gemmule.core.rung import RUNGS_FOLDER, Rung
from pages.instructions import mix_of_run
from pages.cpu_pages import operands_of
op, rung, name = sys.argv[1:]
function, operands, options = operands_of(op, rung, name)
mix = mix_of_run(lambda: getattr(gm, function)(*operands, rung=rung, **options))
print("null" if mix is None else json.dumps(dataclasses.asdict(mix)))
"""


def operands_of(op: str, rung: str, name: str) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    """Return function, small operands and options that a rung of a ladder takes in a format.

    ValueError when it takes none.
    """
    import numpy as np

    import gemmule as gm
    from gemmule.core.problem import numpy_dtype

    rng = np.random.default_rng(0)
    options: dict[str, Any] = {"activations": "int8"} if "int8" in rung else {}
    matrix: Any = rng.standard_normal((64, 512), np.float32)
    if name in ("int8", "int4"):
        matrix = gm.quantize(matrix, bits=4 if name == "int4" else 8, group_size=128)
        ways: tuple[str, ...] = ("matvec", "vecmat", "matmul")
    else:
        matrix = (3 * matrix).astype(numpy_dtype(name.removeprefix("plain ")))
        ways = (op,)
    for function in ways:
        width = 16 if op == "quantized" else 64
        size = {"matvec": (512,), "vecmat": (64,), "matmul": (512, width)}[function]
        other = rng.standard_normal(size, np.float32)
        if name not in ("int8", "int4"):
            other = (3 * other).astype(matrix.dtype)
        operands = (other, matrix) if function == "vecmat" else (matrix, other)
        try:
            plan = gm.plan(function, *operands, rung=rung, **options)
        except ValueError:
            continue
        if not plan.choice.copies:  # of operands that are converted first, the loop says nothing
            return function, operands, options
    raise ValueError(f"rung {rung} takes no {name} operands.")


def record(root: Path) -> Path:
    """Compile every rung anew, record the mixes of its hot loops, and return the file."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for op in OPS:
        formats = FORMATS[3:] if op == "quantized" else FORMATS[: 3 if op == "matmul" else 2]
        for rung in ladder(op, "cpu"):
            for name in formats:
                mix = _compiled_mix(op, rung.name, name)
                if mix is not None:
                    found.setdefault(op, {}).setdefault(rung.name, {})[name] = mix
    path = root / EVIDENCE / slug(cpu_name()) / MIXES
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, json.dumps(found, indent=1) + "\n")
    return path


def _compiled_mix(op: str, rung: str, name: str) -> Any:
    """Return a rung's mix as JSON gives it; None where it takes no such operands."""
    try:
        operands_of(op, rung, name)
    except ValueError:
        return None
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"GEMMULE_CACHE": folder, "GEMMULE_DEVICE": "cpu"}
        run = [sys.executable, "-c", _SCRIPT, op, rung, name]
        done = subprocess.run(run, env=environment, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)
