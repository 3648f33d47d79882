"""What ``gemmule tune`` is asked to tune, as problems, and what came of it, as a table."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from gemmule.core.canonical import Options, canonical
from gemmule.core.operand import Form, c_strides
from gemmule.core.problem import ITEMSIZE, Problem, QuantSpec
from gemmule.tuning.outcomes import Failure, Skipped, TuneReport
from gemmule.tuning.tuner import MOST_DISTURBED
from gemmule_lab.files.matrices import list_matrices
from gemmule_lab.report.render import print_table
from gemmule_lab.report.tables import TableData

LARGEST = 1 << 31
SHOWN_FAILURES = 8
WORTH_TELLING = 0.1  # share of disturbed blocks
Sizes = tuple[int, ...]


def sizes_of(text: str, op: str) -> Sizes:
    """Return the sizes in ``4096x4096`` (rows x columns of A), for matmul ``m x k x n``.

    >>> sizes_of("512x1024", "matvec"), sizes_of("64x32x16", "matmul")
    ((512, 1024), (64, 32, 16))
    """
    count = 3 if op == "matmul" else 2
    form = "MxKxN, as in 1024x4096x1024" if op == "matmul" else "MxN, as in 4096x4096"
    if (
        not re.fullmatch(r"[1-9][0-9]{0,9}(x[1-9][0-9]{0,9})*", text)
        or text.count("x") != count - 1
    ):
        raise ValueError(f"sizes are {text!r}; {op} takes {form}.")
    found = tuple(int(part) for part in text.split("x"))
    if max(found) > LARGEST:
        raise ValueError(f"sizes are {text}; each may be at most {LARGEST:,}.")
    return found


def shapes_in(path: Path) -> list[tuple[int, int]]:
    """Return the distinct shapes of the matrices of a ``.safetensors`` file, the commonest first.

    ValueError where it holds no matrix.
    """
    shapes = Counter(
        (shape[0], shape[1])
        for shape in list_matrices(path).values()
        if len(shape) == 2 and 0 not in shape
    )
    if not shapes:
        raise ValueError(f"{path} holds no matrix of two dimensions: there is nothing to tune.")
    return [shape for shape, _ in shapes.most_common()]


@dataclass(frozen=True, slots=True)
class Matrix:
    """How the matrix of a product lies (``row`` or ``col``), on which device, in how many bits."""

    device: str = "cpu"
    layout: str = "row"
    bits: int | None = None
    group_size: int = 128


def problem_of(op: str, sizes: Sizes, dtype: str, matrix: Matrix = Matrix()) -> Problem:
    """Return the problem that the public function meets on packed operands of these sizes.

    dtype: of all operands, or, with bits, of what the quantised matrix is multiplied with.
    TypeError, ValueError as the public functions raise.

    >>> problem_of("vecmat", (3, 5), "float32").describe()
    'matvec A 5 x 3 col, float32 x float32 -> float32'
    """
    rows, columns = sizes[:2]
    bits, device = matrix.bits, matrix.device
    if bits is None:
        strides = c_strides((rows, columns)) if matrix.layout == "row" else (1, rows)
        first = _form((rows, columns), strides, dtype, device)
    else:
        spec = QuantSpec(bits, matrix.group_size, True, "row", "float32", False)
        first = Form((rows, columns), (0, 0), f"uint{bits}", 16, spec)
    other = {"matvec": (columns,), "vecmat": (rows,), "matmul": (columns, sizes[-1])}[op]
    second = _form(other, c_strides(other), dtype, device)
    pair = (second, first) if op == "vecmat" else (first, second)
    return canonical(op, *pair, None, Options()).problem


def _form(shape: Sizes, strides: Sizes, dtype: str, device: str) -> Form:
    """Return the form of a packed array as `gemmule.arrays.interop` would find it on the device."""
    if device == "cpu":
        return Form(shape, strides, dtype, min(ITEMSIZE[dtype], 16))
    from gemmule.backends.cuda.arrays import form_of

    return form_of(0, shape, strides, dtype)


def problems(
    ops: Sequence[str],
    sizes: Sequence[str],
    shapes: Sequence[tuple[int, int]],
    columns: int,
    dtypes: Sequence[str],
    matrix: Matrix,
) -> list[Problem]:
    """Return every product asked for, once: of sizes in words, and of the shapes of a file."""
    if not sizes and not shapes:
        raise ValueError("there is nothing to tune: give --sizes 4096x4096 or --shapes-from FILE.")
    found: dict[Problem, None] = {}
    for op in ops:
        wanted = [sizes_of(text, op) for text in sizes]
        wanted += [(*shape, columns) if op == "matmul" else shape for shape in shapes]
        for one, dtype in itertools.product(wanted, dtypes):
            found[problem_of(op, one, dtype, matrix)] = None
    return list(found)


def plainly(report: TuneReport) -> dict[str, Any]:
    """Return what a report says of its product, for JSON."""
    winner = report.winner
    return {
        "product": report.problem.describe(),
        "default": report.default.name,
        "winner": None if winner is None else winner.name,
        "gain": report.gain,
        "seconds": report.winner_s,
        "file": report.path,
        "stopped": report.stopped,
    }


def show(reports: Sequence[TuneReport]) -> None:
    """Print a table of the reports and, below it, why configurations failed."""
    header = ("product and configurations", "gain", "tried", "failed")
    title = f"tuned on {reports[0].machine.name}"
    body = tuple(tuple(row(report)) for report in reports)
    print_table(TableData(title, header, body, (False, True, True, True)))
    for report in reports:
        for line in remarks(report):
            click.echo(line)


def row(report: TuneReport) -> list[str]:
    """Return one report's cells: the gain is the last duel's, with its 95 % interval."""
    gain = "no challenger"
    if report.gain is not None:
        share = report.gain
        gain = f"{share.value:.3f}x\n{share.low:.3f} to {share.high:.3f}"
    winner = "none ran right" if report.winner is None else "the default"
    if report.winner is not None and report.changed:
        winner = report.winner.name
    lines = [
        report.problem.describe(),
        f" default {report.default.name}{_us(report.default_s)}",
        f" winner  {winner}{_us(report.winner_s) if report.changed else ''}",
    ]
    tried = sum(not isinstance(outcome, Skipped) for outcome in report.outcomes)
    return ["\n".join(lines), gain, str(tried + 1), failures_in_words(report.failures)]


def _us(seconds: float | None) -> str:
    return "" if seconds is None else f": {seconds * 1e6:,.1f} us"


def failures_in_words(failures: Iterable[Failure]) -> str:
    """Return how many failed in which way, one line each; ``0`` for none."""
    kinds = Counter(type(one).__name__ for one in failures)
    return "\n".join(f"{count} {kind}" for kind, count in kinds.most_common()) or "0"


def remarks(report: TuneReport) -> list[str]:
    """Return what the table has no room for: failures, what was not tried, a busy machine."""
    lines = [
        f"{type(one).__name__} {one.candidate.name}: {one.text}"
        for one in report.failures[:SHOWN_FAILURES]
    ]
    if len(report.failures) > SHOWN_FAILURES:
        lines.append(f"and {len(report.failures) - SHOWN_FAILURES} more that failed")
    late = sum(isinstance(o, Skipped) and "no time" in o.text for o in report.outcomes)
    if late:
        lines.append(f"{late} configurations were not tried for want of time; give more --seconds")
    if report.stopped:
        lines.append(f"stopped early: {report.stopped}")
    if WORTH_TELLING < report.disturbed <= MOST_DISTURBED:  # above, the tuner itself has warned
        lines.append(
            f"other programs took a processor away in {report.disturbed:.0%} of the blocks"
        )
    if not report.cold:
        lines.append("the operands did not all fall out of the caches between calls")
    if report.fastest_unproved is not None:
        one = report.fastest_unproved
        lines.append(
            f"unproved, so not chosen: {one.candidate.name}, {one.seconds * 1e6:,.1f} us, "
            f"{one.ratio.value:.3f} of the default's time"
        )
    return [f"{report.problem.describe()}: {line}" for line in lines]
