"""``gemmule crosscheck``: our GPU times beside NVBench's."""

from __future__ import annotations

from pathlib import Path

import click

from gemmule_lab.commands import _options as options


@click.command(short_help="Compare our GPU times with NVBench's.")
@options.device("cuda")
@options.folder("--evidence", help="Write both figures to <evidence>/<device>/nvbench.jsonl, too.")
def crosscheck(device: str, evidence: Path | None) -> None:
    """Time a few products by our graph replays and by NVBench (package cuda-bench), and print both
    figures and the difference: what NVBench adds is the cost of events around a single launch.
    """
    from rich.console import Console

    from gemmule_lab.profile import crosscheck as engine
    from gemmule_lab.report.render import terminal_table
    from gemmule_lab.report.tables import TableData, significant

    pairs = engine.crosscheck(ordinal=options.ordinal_of(device))
    rows = tuple(
        (
            pair.product.title,
            significant(pair.ours_s * 1e6),
            significant(pair.theirs_s * 1e6),
            f"{pair.difference_s * 1e6:+.2f}",
            f"{100 * pair.difference_s / pair.ours_s:+.1f}",
        )
        for pair in pairs
    )
    header = ("product", "ours, us", "NVBench, us", "difference, us", "%")
    Console().print(terminal_table(TableData("two clocks", header, rows, (False, *[True] * 4))))
    if evidence is not None:
        click.echo(f"wrote {engine.write(evidence, pairs, options.ordinal_of(device))}")


COMMAND = crosscheck
