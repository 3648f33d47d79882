"""``gemmule ladder``: the kernels of an operation, from the simplest to the fastest."""

from __future__ import annotations

from typing import Any

import click

from gemmule_lab.commands import _options as options

OPS = ("matvec", "vecmat", "matmul", "quantized", "grouped")


@options.command("measure", "Show the kernels of an operation, with what each adds.")
@click.argument("op", type=click.Choice(OPS), default="matvec", metavar="[OP]")
@options.one("--backend", ("cpu", "cuda"), "cpu")
@options.one(
    "--size",
    options.Whole(1, 1 << 20),
    4096,
    "Rows and columns of the square problem that workspaces are computed for.",
)
@options.flag("--markdown", "Print a Markdown table.")
def ladder(op: str, backend: str, size: int, markdown: bool) -> Any:
    """Show the ladder of OP: every rung with its technique, its limits and its proof.

    OP is matvec (default), vecmat, matmul, quantized or grouped.
    """
    from gemmule_lab.report import ladder_table

    rows = ladder_table.rows(op, backend, size)
    if not rows:
        click.echo(f"The {op} ladder has no {backend} rungs.")
    elif markdown:
        click.echo(ladder_table.markdown(rows))
    else:
        ladder_table.show(rows, f"{op} on {backend}, {len(rows)} rungs, simplest first")
    return rows


COMMAND = ladder
