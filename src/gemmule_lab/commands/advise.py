"""``gemmule advise``: which weights of a model to quantise on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gemmule.core.words import Method
from gemmule_lab.commands import _options as options

if TYPE_CHECKING:
    from gemmule_lab.demo.advise import Advice, Cost


@options.command("measure", "Say which weights of a model to quantise on this machine.")
@click.argument("model", type=click.Path(path_type=Path, exists=True))
@options.one("--group-size", int, 64)
@options.one("--method", ("rtn", "mse", "hqq"), "rtn")
@options.one(
    "--max-error",
    options.Number(0, 1),
    0.12,
    "Largest relative error of a weight that is quantised.",
)
@options.device()
@options.seconds(0.05, 60, "Time spent on each shape and number of columns.", 1.0)
def advise(
    model: Path, group_size: int, method: Method, max_error: float, device: str, seconds: float
) -> dict[str, Any]:
    """Time every weight of MODEL in float16, int8 and int4, and advise.

    MODEL: a .safetensors file, the .safetensors.index.json of several, or the folder of either.
    Weights are multiplied by 1, 16, 64 and 512 float16 columns, here and now, rotating past the
    cache; each is quantised for its own error. The last column says what to take, by what pays at 1
    and 16 columns, and why. The last sentence says what to expect of the products alone: tokens a
    second in decoding and in prompts, what to leave in floats, and the memory.
    """
    from gemmule_lab.demo import advise as work
    from gemmule_lab.progress import tracked

    options.check_device(device)
    settings = work.Settings(group_size, method, max_error, device, seconds)
    costs: dict[tuple[int, int], Cost] = {}
    count = len(work.weights_of(model))
    advices = list(tracked(work.advise(model, settings, costs), count, "measuring weights"))
    _show(advices, costs)
    return {"shapes": costs, "weights": advices, "sentence": _sentence(advices, costs)}


def _show(advices: list[Advice], costs: dict[tuple[int, int], Cost]) -> None:
    from gemmule_lab.demo import advise as work
    from gemmule_lab.report.render import print_table
    from gemmule_lab.report.tables import Column, TableData, byte_text, significant, table_of

    body = []
    for shape, cost in costs.items():
        for form in work.FORMATS:
            times = (significant(cost.seconds[form, c] * 1e6) for c in work.COLUMNS)
            note = "" if cost.cold else "stays in the cache"
            label = f"{shape[0]} x {shape[1]}" if form == work.FORMATS[0] else ""
            body.append((label, form, *times, byte_text(cost.nbytes[form]), note))
    header = ("shape", "format", *(f"us x{columns}" for columns in work.COLUMNS), "memory", "")
    numeric = (False, False, *[True] * (len(header) - 3), False)
    print_table(TableData("what each shape costs", header, tuple(body), numeric))
    weights: tuple[Column[Advice], ...] = (
        ("weight", lambda one: one.name, False),
        ("shape", lambda one: f"{one.shape[0]} x {one.shape[1]}", False),
        ("error int8", lambda one: f"{one.errors['int8']:.4f}", True),
        ("int4", lambda one: f"{one.errors['int4']:.4f}", True),
        ("take", lambda one: one.take, False),
        ("why", lambda one: one.reason, False),
    )
    print_table(table_of("what to take", advices, weights))
    busy = [f"{m} x {n}" for (m, n), cost in costs.items() if cost.disturbed]
    if busy:
        click.echo(f"\nother work took the processor from {', '.join(busy)}: measure again")
    click.echo(f"\n{_sentence(advices, costs)}")


def _sentence(advices: list[Advice], costs: dict[tuple[int, int], Cost]) -> str:
    """Return what is to be expected: tokens a second, what stays in floats, and the memory."""
    from gemmule_lab.demo import advise as work
    from gemmule_lab.report.tables import byte_text

    plain, advised = work.total_bytes(advices, costs)
    alone = [one.name for one in advices if one.take == "float16"]
    named = f" ({', '.join(alone[:3])}{', ...' if len(alone) > 3 else ''})" if alone else ""
    told = f"Of {len(advices)} weights leave {len(alone)} in floats{named}"
    told += f"; memory goes from {byte_text(plain)} in float16 to {byte_text(advised)}"
    for doing, columns in (("decoding", 1), (f"prompts of {work.PROMPT}", work.PROMPT)):
        found = work.rates(advices, costs, columns)
        if found is not None:
            told += f"; {doing}: at most {found[1]:,.0f} tokens/s, in float16 {found[0]:,.0f}"
    return f"{told}."


COMMAND = advise
