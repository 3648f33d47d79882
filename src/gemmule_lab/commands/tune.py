"""``gemmule tune``: measure the configurations of given products and keep the fastest right one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gemmule_lab.commands import _options as options

if TYPE_CHECKING:
    from gemmule.core.problem import Problem
    from gemmule.tuning.tuner import Request

DTYPES = ("float64", "float32", "float16", "bfloat16", "int8")


@options.command("maintain", "Find and store the fastest configuration of products.")
@options.ops("Operation; may be repeated.  [default: matvec]")
@options.some("--sizes", "sizes", "Rows x columns of A, 4096x4096; for matmul MxKxN. Repeatable.")
@options.file("--shapes-from", help="Tune every shape of matrix in this .safetensors file.")
@options.one(
    "--columns", options.Whole(1, 1 << 20), 16, "With --shapes-from and matmul: columns of B."
)
@options.some("--dtype", "dtypes", "Of the operands; may be repeated.  [default: float32]", DTYPES)
@options.one("--bits", ("4", "8"), None, "A quantised matrix of this many bits.")
@options.one(
    "--group-size", options.Whole(-1, 1 << 20), 128, "Of a quantised matrix; -1 for a row."
)
@options.one("--layout", ("row", "col"), "row", "How A lies in memory.")
@options.device()
@options.seconds(0.1, 3600, "Time for each product.", 30.0)
@options.flag(
    "--include-unproved",
    "Also measure rungs without a proof, in processes of their own; they are never chosen.",
)
@options.folder("--into", help="Store into this folder instead of the cache.")
@options.flag(
    "--compare",
    "Only tell how far the defaults are from what tuning finds: nothing is stored. Without "
    "--sizes, on a list of representative products.",
)
@options.flag(
    "--device-model",
    "Only measure how long random products take here, fit the rungs' estimates to it, and store "
    "that: later choices on this device are made by it. What was measured before is kept.",
)
@options.one("--products", options.Whole(0), None, "With --device-model: products of the sample.")
@options.one("--seed", options.Whole(0), 0, "With --device-model: draw the products of this seed.")
@options.one("--rung", str, None, "With --device-model: only this rung, after its kernel changed.")
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
    products: int | None,
    seed: int,
    rung: str | None,
) -> Any:
    """Verify every configuration, time them cold and interleaved, and store what beats the default.

    A configuration has to win by 2 % and by more than the noise. Later calls of the same product
    on the same device use it. Ctrl-C keeps what is stored so far.
    """
    from gemmule.settings import tuning_enabled

    options.check_device(device)
    of_model = {"--products": products, "--rung": rung, "--seed": seed or None}
    of_products = {"--op": ops, "--sizes": sizes, "--shapes-from": shapes_from, "--dtype": dtypes}
    given = [name for name, one in (of_products if device_model else of_model).items() if one]
    if given:
        words = "are of products that are named, without" if device_model else "go with"
        raise ValueError(f"{', '.join(given)} {words} --device-model.")
    if device_model:
        from gemmule_lab.tune import device_model as making

        return making.make(device, seed=seed, products=products, only=rung)
    if not tuning_enabled() and not compare:
        click.echo("GEMMULE_TUNE is 0: stored results are ignored, so nothing was tuned.")
        return []
    from gemmule.quant import checks
    from gemmule.tuning.tuner import Request
    from gemmule_lab.tune import compare as comparing
    from gemmule_lab.tune import requests

    checks.group_size(group_size)
    matrix = requests.Matrix(device, layout, None if bits is None else int(bits), group_size)
    if compare and not sizes and shapes_from is None:
        problems = comparing.representative(device)
    else:
        ops, dtypes = ops or ("matvec",), dtypes or ("float32",)
        shapes = [] if shapes_from is None else requests.shapes_in(shapes_from)
        problems = requests.problems(ops, sizes, shapes, columns, dtypes, matrix)
    if compare:
        return comparing.show(problems, device, seconds)
    return _run(problems, Request(device, seconds, include_unproved, root=into))


def _run(problems: list[Problem], request: Request) -> list[dict[str, Any]]:
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
            requests.show(reports)
            stored = sum(report.path is not None for report in reports)
            click.echo(f"{len(reports)} products tuned, {stored} new choices stored")
    told = [requests.plainly(report) for report in reports]
    if any(report.winner is None for report in reports):
        message = "a product has no configuration that ran right; see above."
        raise WrongResultError(message, told)
    return told


COMMAND = tune
