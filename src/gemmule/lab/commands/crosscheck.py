"""``gemmule crosscheck``: our GPU times beside NVBench's."""

from __future__ import annotations

import click


@click.command(short_help="Compare our GPU times with NVBench's.")
@click.option("--device", default="cuda", show_default=True, help="cuda or cuda:<index>.")
def crosscheck(device: str) -> None:
    """Time a few products by our graph replays and by NVBench (package cuda-bench), and print both
    figures and the difference: what NVBench adds is the cost of events around a single launch.
    """
    from rich.console import Console

    from gemmule import backends
    from gemmule.backends.cuda.arrays import ordinal_named
    from gemmule.lab.profile import crosscheck as engine
    from gemmule.lab.report.render import terminal_table
    from gemmule.lab.report.tables import TableData, significant

    backends.get("cuda").machine(device)  # says what is missing before anything starts
    pairs = engine.crosscheck(ordinal=ordinal_named(device))
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


COMMAND = crosscheck
