"""``gemmule multiply``: matrices in files, and the product in a file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from gemmule_lab.commands import _options as options

if TYPE_CHECKING:
    from gemmule_lab.files.multiply import Job

DTYPES = (
    "float64", "float32", "float16", "bfloat16", "int8", "uint8", "int32", "int64", "complex64",
    "complex128",
)  # fmt: skip
SHOWN_ELEMENTS, SHOWN_AS_JSON = 8, 10_000


@options.command("use", "Multiply matrices in files.")
@click.argument("first", shell_complete=options.matrix_files)
@click.argument("second", shell_complete=options.matrix_files)
@options.path(
    "-o",
    "--output",
    words="Result: .npy, .safetensors, .mat, .csv. Without it a summary is printed.",
)
@options.one("--op", options.OPS, None, "Default: by the dimensions of the operands.")
@options.one("--dtype", DTYPES, None, "Convert both operands first.")
@options.one("--out-dtype", DTYPES, None, "Dtype of the result.")
@options.one("--bits", ("4", "8"), None, "Quantise the matrix first.")
@options.one("--group-size", int, 128, "Columns that share a scale; -1: a row.")
@options.flag("--symmetric", "Quantise without zero points.")
@options.one(
    "--rung",
    str,
    None,
    "Compute with this rung (see gemmule ladder).",
    shell_complete=options.rung_names,
)
@options.one("--device", ("cpu", "cuda"), None, "Where to compute.")
@options.flag(
    "--check",
    "Check every element against float64; exit code 1 where one is wrong. With --bits: the "
    "quantised matrix's product, and how far that is off the file's own.",
)
@options.flag("--force", "Replace an existing result.")
def multiply(first: str, second: str, output: Path | None, bits: str | None, **given: Any) -> Any:
    """Multiply the matrix in the file FIRST with the vector or matrix in SECOND.

    Files: .npy, .safetensors, .npz, .mtx and, with the extra io, .mat; one matrix of several as
    FILE:NAME. Files larger than memory are multiplied in blocks (.npy and .safetensors); what is
    larger than a GPU's memory goes there in panels, at most GEMMULE_DEVICE_BUDGET bytes at a time.

    \b
    gemmule multiply A.npy x.npy -o y.npy
    gemmule multiply model.safetensors:fc.weight x.npy -o y.npy --bits 4 --check
    """
    from gemmule_lab.files import matrices
    from gemmule_lab.files.multiply import Job, order
    from gemmule_lab.files.output import check_target
    from gemmule_lab.files.sources import parse_source

    source = click.get_current_context().get_parameter_source("group_size")
    if bits is None and (given["symmetric"] or source is ParameterSource.COMMANDLINE):
        raise ValueError("--group-size and --symmetric say how to quantise; pass --bits with them.")
    if output is not None:
        inputs = [parse_source(name).path for name in (first, second)]
        check_target(output, force=given["force"], inputs=inputs)
    op, left, right = order(given["op"], matrices.read_matrix(first), matrices.read_matrix(second))
    names = ("dtype", "out_dtype", "group_size", "symmetric", "device", "rung")
    wanted = {name: given[name] for name in names}
    job = Job(op, left, right, bits=None if bits is None else 4 if bits == "4" else 8, **wanted)
    return _run(job, output, check=given["check"], force=given["force"])


def _run(job: Job, output: Path | None, *, check: bool, force: bool) -> dict[str, Any]:
    """Compute into the output file, or into memory without one, then say what was done."""
    import numpy as np

    from gemmule.core.problem import numpy_dtype
    from gemmule_lab.files.output import new_matrix

    shape, dtype = job.shape, job.result
    if output is None:
        result = np.empty(shape, numpy_dtype(dtype))
        told = _compute(job, result, check)
        with np.printoptions(threshold=SHOWN_ELEMENTS, edgeitems=3, precision=6):
            click.echo(result)
        return {**told, "result": result.tolist() if result.size <= SHOWN_AS_JSON else None}
    with new_matrix(output, shape, dtype, force=force) as result:
        told = _compute(job, result, check)
    click.echo(f"wrote {output}: {dtype} {' x '.join(map(str, shape)) or 'scalar'}")
    return {**told, "file": output}


def _compute(job: Job, result: Any, check: bool) -> dict[str, Any]:
    """Fill the result, say how long that took, less a check; WrongResultError where it fails."""
    import time

    from gemmule.outofcore.engine import watched
    from gemmule_lab.cli import WrongResultError
    from gemmule_lab.files.multiply import blocks, flops, multiply
    from gemmule_lab.progress import bar

    checker = None
    if check:
        from gemmule_lab.verify.check import BlockCheck

        checker = BlockCheck(job)
    start = time.perf_counter()
    parts = blocks(job, whole=checker is None)
    with bar() as progress:
        task = progress.add_task(job.op, total=len(parts))

        def panels(done: int, steps: int) -> None:
            if len(parts) == 1:
                progress.update(task, completed=done, total=steps)

        with watched(panels):
            for _ in multiply(job, result, parts, watch=checker):
                progress.advance(task)
    elapsed = time.perf_counter() - start - (checker.seconds if checker else 0.0)
    click.echo(f"{job.op}: {flops(job) / 1e9:.3g} GFLOP in {elapsed:.3g} s, reading included")
    told = {"op": job.op, "shape": job.shape, "dtype": job.result, "seconds": elapsed}
    if checker is not None:
        click.echo(checker.summary())
        told |= {"right": checker.ok, "check": checker.summary()}
        if not checker.ok:
            raise WrongResultError(f"the result is wrong: {checker.worst}.", told)
    return told


COMMAND = multiply
