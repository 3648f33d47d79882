"""``gemmule warm``: compile ahead what default choices need, for images and servers."""

from __future__ import annotations

from typing import Any

import click

from gemmule_lab.commands import _options as options

DTYPES = ("float32", "float64", "float16", "bfloat16", "int8")


@options.command("use", "Compile ahead what default choices need.")
@options.some("--dtype", "dtypes", "Of both operands; may be repeated.  [default: all]", DTYPES)
@options.some("--bits", "widths", "Of quantised matrices; repeatable.  [default: all]", ("4", "8"))
@options.device()
def warm(dtypes: tuple[str, ...], widths: tuple[str, ...], device: str) -> dict[str, Any]:
    """Compute one product of each kind, so that what it compiles is in the cache for later ones.

    With --dtype alone no quantised matrices are warmed, with --bits alone nothing but these.
    """
    import time

    from gemmule.settings import cache_folder
    from gemmule_lab import warming
    from gemmule_lab.progress import bar

    options.check_device(device)
    bits = tuple(one for one in warming.BITS if str(one) in widths)
    if not dtypes and not bits:
        dtypes, bits = warming.DTYPES, warming.BITS
    begin, count = time.perf_counter(), 0
    target = None if device == "cpu" else device
    with bar() as shown:
        task = shown.add_task("products", total=None)
        for one in warming.warm(dtypes, bits, target):
            count += 1
            shown.update(task, advance=1, description=one.words)
    seconds = time.perf_counter() - begin
    click.echo(f"{count} kinds of product are warm after {seconds:.0f} s, in {cache_folder()}")
    return {"products": count, "seconds": seconds, "cache": cache_folder()}


COMMAND = warm
