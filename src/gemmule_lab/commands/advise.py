"""``gemmule advise``: which weights of a model to quantise on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from gemmule.core.words import Method
from gemmule_lab.commands import _options as options

if TYPE_CHECKING:
    from gemmule_lab.demo.advise import Advice, Cost


@click.command(short_help="Say which weights of a model to quantise on this machine.")
@click.argument("model", type=click.Path(path_type=Path, exists=True))
@click.option("--group-size", type=int, default=64, show_default=True)
@click.option(
    "--method", type=click.Choice(["rtn", "mse", "hqq"]), default="rtn", show_default=True
)
@click.option(
    "--max-error",
    type=options.Number(0, 1),
    default=0.12,
    show_default=True,
    help="Largest relative error of a weight that is quantised.",
)
@options.device()
@options.seconds(0.05, 60, "Time spent on each shape and number of columns.", 1.0)
def advise(
    model: Path, group_size: int, method: Method, max_error: float, device: str, seconds: float
) -> None:
    """Time every weight of MODEL in float16, int8 and int4, and advise.

    MODEL: a .safetensors file, the .safetensors.index.json of several, or the folder of either.
    Weights are multiplied by 1, 4 and 16 float16 columns, here and now, rotating past the cache;
    each is quantised for its own error. The last column says what to take, and why.
    """
    from gemmule_lab.demo import advise as work
    from gemmule_lab.progress import tracked

    settings = work.Settings(group_size, method, max_error, device, seconds)
    costs: dict[tuple[int, int], Cost] = {}
    count = len(work.weights_of(model))
    advices = list(tracked(work.advise(model, settings, costs), count, "measuring"))
    _show(advices, costs)


def _show(advices: list[Advice], costs: dict[tuple[int, int], Cost]) -> None:
    from gemmule_lab.demo import advise as work
    from gemmule_lab.report.tables import byte_text, significant

    heads = [f"us x{columns}" for columns in work.COLUMNS]
    click.echo(f"\n{'shape':>14}  {'format':8}{''.join(f'{head:>10}' for head in heads)}    memory")
    for shape, cost in costs.items():
        for form in work.FORMATS:
            times = (significant(cost.seconds[form, c] * 1e6) for c in work.COLUMNS)
            label = f"{shape[0]} x {shape[1]}" if form == work.FORMATS[0] else ""
            line = f"{label:>14}  {form:8}{''.join(f'{time:>10}' for time in times)}"
            note = "" if cost.cold else "  (stays in the cache)"
            click.echo(f"{line}{byte_text(cost.nbytes[form]):>10}{note}")
    width = max(len(one.name) for one in advices) if advices else 0
    click.echo(f"\n{'weight':{width}}  {'shape':>14}  error int8    int4  take     why")
    for one in advices:
        label = f"{one.shape[0]} x {one.shape[1]}"
        errors = f"{one.errors['int8']:10.4f}  {one.errors['int4']:6.4f}"
        click.echo(f"{one.name:{width}}  {label:>14}  {errors}  {one.take:8} {one.reason}")
    busy = [f"{m} x {n}" for (m, n), cost in costs.items() if cost.disturbed]
    if busy:
        click.echo(f"\nother work took the processor from {', '.join(busy)}: measure again")
    plain, advised = work.total_bytes(advices, costs)
    alone = sum(one.take == "float16" for one in advices)
    click.echo(
        f"\n{len(advices)} weights, {alone} better left alone; {byte_text(plain)} in float16, "
        f"{byte_text(advised)} as advised"
    )


COMMAND = advise
