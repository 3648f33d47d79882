"""``gemmule tune``: measure the configurations of given products and keep the fastest right one."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gemmule_lab.commands import _options as options

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gemmule.core.problem import Problem
    from gemmule.tuning.tuner import Request
    from gemmule_lab.tune.requests import Matrix

WIDTH = 160  # columns where no terminal tells its width
DTYPES = ("float64", "float32", "float16", "bfloat16", "int8")


@click.command(short_help="Find and store the fastest configuration of products.")
@options.ops("Operation; may be repeated.  [default: matvec]")
@click.option(
    "--sizes", multiple=True, help="Rows x columns of A, 4096x4096; for matmul MxKxN. Repeatable."
)
@options.file("--shapes-from", help="Tune every shape of matrix in this .safetensors file.")
@click.option(
    "--columns",
    type=click.IntRange(1, 1 << 20),
    default=16,
    show_default=True,
    help="With --shapes-from and matmul: columns of B.",
)
@click.option(
    "--dtype",
    "dtypes",
    multiple=True,
    type=click.Choice(DTYPES),
    help="Of the operands; may be repeated.  [default: float32]",
)
@click.option("--bits", type=click.Choice(["4", "8"]), help="A quantised matrix of this many bits.")
@click.option(
    "--group-size",
    type=click.IntRange(-1, 1 << 20),
    default=128,
    show_default=True,
    help="Of a quantised matrix; -1 for a row.",
)
@click.option(
    "--layout",
    type=click.Choice(["row", "col"]),
    default="row",
    show_default=True,
    help="How A lies in memory.",
)
@options.device()
@options.seconds(0.1, 3600, "Time for each product.", 30.0)
@click.option(
    "--include-unproved",
    is_flag=True,
    help="Also measure rungs without a proof, in processes of their own; they are never chosen.",
)
@options.folder("--into", help="Store into this folder instead of the cache.")
@click.option(
    "--compare",
    is_flag=True,
    help="Only tell how far the defaults are from what tuning finds: nothing is stored. Without "
    "--sizes, on a list of representative products.",
)
@click.option(
    "--device-model",
    is_flag=True,
    help="Only measure what this machine does in a second, in about two seconds, and store it: "
    "later choices on the CPU are made by it.",
)
def tune(
    ops: tuple[str, ...],
    sizes: tuple[str, ...],
    shapes_from: Path | None,
    columns: int,
    dtypes: tuple[str, ...],
    bits: str | None,
    group_size: int,
    layout: str,
    device: str,
    seconds: float,
    include_unproved: bool,
    into: Path | None,
    compare: bool,
    device_model: bool,
) -> None:
    """Verify every configuration, time them cold and interleaved, and store what beats the default.

    A configuration has to win by 2 % and by more than the noise. Later calls of the same product
    on the same device use it. Ctrl-C keeps what is stored so far.
    """
    from gemmule.settings import tuning_enabled

    options.check_device(device)
    if device_model:
        _measure_device_model(device)
        return
    if compare and not sizes and shapes_from is None:
        from gemmule_lab.tune.compare import representative

        _compare(representative(device), device, seconds)
        return
    if not tuning_enabled() and not compare:
        click.echo("GEMMULE_TUNE is 0: stored results are ignored, so nothing was tuned.")
        return
    from gemmule.quant import checks
    from gemmule_lab.tune.requests import Matrix

    checks.group_size(group_size)
    matrix = Matrix(device, layout, None if bits is None else int(bits), group_size)
    problems = _problems(
        ops or ("matvec",), sizes, shapes_from, columns, dtypes or ("float32",), matrix
    )
    if compare:
        _compare(problems, device, seconds)
    else:
        from gemmule.tuning.tuner import Request

        _run(problems, Request(device, seconds, include_unproved, root=into))


def _measure_device_model(device: str) -> None:
    from dataclasses import asdict

    from gemmule.settings import tuning_enabled
    from gemmule.tuning.rates import measure_rates

    if device != "cpu":
        raise ValueError(f"--device is {device!r}; --device-model measures the CPU alone.")
    for name, value in asdict(measure_rates(fresh=True)).items():
        click.echo(f"{name:12} {value if isinstance(value, str) else format(value, '.3g')}")
    if not tuning_enabled():
        click.echo("GEMMULE_TUNE is 0: what was measured is ignored until it is unset.")


def _compare(problems: list[Problem], device: str, seconds: float) -> None:
    from rich.console import Console

    from gemmule_lab.report.render import terminal_table
    from gemmule_lab.tune import compare as tune_compare

    def told(one: tune_compare.Comparison) -> None:
        click.echo(f"{one.problem.describe()}: {one.off:.3f}, {one.tuned}", err=True)

    found = tune_compare.compare(problems, device, seconds, told)
    console = Console() if Console().is_terminal else Console(width=WIDTH)
    console.print(terminal_table(tune_compare.table(found)))


def _problems(
    ops: Sequence[str],
    sizes: Sequence[str],
    path: Path | None,
    columns: int,
    dtypes: Sequence[str],
    matrix: Matrix,
) -> list[Problem]:
    """Return every product asked for, once."""
    from gemmule_lab.tune import requests

    if not sizes and path is None:
        raise ValueError("there is nothing to tune: give --sizes 4096x4096 or --shapes-from FILE.")
    shapes = [] if path is None else requests.shapes_in(path)
    found: dict[Problem, None] = {}
    for op in ops:
        wanted = [requests.sizes_of(text, op) for text in sizes]
        wanted += [(*shape, columns) if op == "matmul" else shape for shape in shapes]
        for one, dtype in itertools.product(wanted, dtypes):
            found[requests.problem_of(op, one, dtype, matrix)] = None
    return list(found)


def _run(problems: list[Problem], request: Request) -> None:
    from rich.console import Console

    from gemmule.tuning.tuner import TuneReport, tune_problem
    from gemmule_lab.cli import WrongResultError
    from gemmule_lab.progress import bar
    from gemmule_lab.tune import requests

    reports: list[TuneReport] = []
    try:
        with bar() as progress:
            whole = progress.add_task("tune", total=len(problems))
            stage = progress.add_task("")
            for problem in problems:
                report = tune_problem(
                    problem,
                    request,
                    progress=lambda name, done, total: progress.update(
                        stage, description=name, completed=done, total=total
                    ),
                )
                reports.append(report)
                progress.advance(whole)
                if report.stopped:
                    break
    finally:
        if reports:
            requests.show(reports, Console())
            stored = sum(report.path is not None for report in reports)
            click.echo(f"{len(reports)} products tuned, {stored} new choices stored")
    if any(report.winner is None for report in reports):
        raise WrongResultError("a product has no configuration that ran right; see above.")


COMMAND = tune
