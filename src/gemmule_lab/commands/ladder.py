"""``gemmule ladder``: the kernels of an operation, from the simplest to the fastest."""

from __future__ import annotations

import click

OPS = ("matvec", "vecmat", "matmul", "quantized")


@click.command()
@click.argument("op", type=click.Choice(OPS), default="matvec")
@click.option("--backend", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@click.option(
    "--size",
    type=click.IntRange(1, 1 << 20),
    default=4096,
    show_default=True,
    help="Rows and columns of the square problem that workspaces are computed for.",
)
@click.option("--markdown", is_flag=True, help="Print a Markdown table.")
def ladder(op: str, backend: str, size: int, markdown: bool) -> None:
    """Show the ladder of OP: every rung with its technique, its limits and its proof.

    OP is matvec (default), vecmat, matmul or quantized.
    """
    from gemmule_lab.report import ladder_table

    rows = ladder_table.rows(op, backend, size)
    if not rows:
        click.echo(f"The {op} ladder has no {backend} rungs.")
    elif markdown:
        click.echo(ladder_table.markdown(rows))
    else:
        ladder_table.show(rows, f"{op} on {backend}, {len(rows)} rungs, simplest first")


COMMAND = ladder
