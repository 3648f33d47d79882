"""``gemmule bench``: products measured beside their peers, against the ceilings of this machine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from gemmule_lab.commands import _options as options

OF_BOTH = ("grouped", "distributed")
SUITES = {
    "cpu": ("quick", "cpu", "everyday", "sizes", "model", "ladder", *OF_BOTH),
    "cuda": (
        "quick",
        "matvec",
        "chained",
        "matmul",
        "bytes",
        "complex",
        "quantised",
        "replaced",
        "epilogues",
        "host",
        "split",
        *OF_BOTH,
    ),
}
FLOATS = ("float64", "float32", "float16", "bfloat16")
QUANTIZED = ("int8", "int4", "int8 x int8", "int4 x int8")
INTEGERS = ("plain int8", "plain int32", "plain int64")
OTHERS = ("float8", "complex64", "complex128")
CEILING_SECONDS = 8.0
SECONDS = {"cpu": 2.0, "cuda": 0.6}


def _suites(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Complete the name of a suite of the device that stands before it."""
    names = SUITES.get(str(ctx.params.get("device") or "cpu").partition(":")[0], ())
    return [name for name in names if name.startswith(incomplete)]


@options.command("measure", "Measure products beside their peers.")
@options.one(
    "--suite",
    str,
    "quick",
    "; ".join(f"on {device}: {', '.join(names)}" for device, names in SUITES.items()),
    shell_complete=_suites,
)
@options.device()
@options.some(
    "--peer",
    "peers",
    "On a GPU: also this peer, or all; may be repeated. torch takes part by itself.",
    shell_complete=options.peers,
)
@options.ops("Only this operation; may be repeated.")
@options.some(
    "--format",
    "formats",
    "Only this number format; may be repeated.",
    (*FLOATS, *QUANTIZED, *INTEGERS, *OTHERS),
)
@options.some(
    "--size",
    "sizes",
    "Rows and columns, instead of the suite's; may be repeated.",
    options.Whole(1, 65536),
)
@options.some(
    "--product",
    "titles",
    "Only this product, as tables name it ('4096 x 4096, matvec, float16'); may be repeated.",
)
@options.seconds(0.05, 600, "Time spent on each product; default 2, on a GPU 0.6.")
@options.one(
    "--patience",
    options.Number(0, 86400),
    0.0,
    "Seconds to spend in all on waiting for idle processors before a product, and on measuring "
    "again what other processes disturbed.",
)
@options.out("Folder of the results.")
@options.file(
    "--resume", help="Go on with this file of an earlier run; what it holds is not measured again."
)
def bench(
    suite: str,
    device: str,
    peers: tuple[str, ...],
    ops: tuple[str, ...],
    formats: tuple[str, ...],
    sizes: tuple[int, ...],
    titles: tuple[str, ...],
    seconds: float | None,
    patience: float,
    out: Path,
    resume: Path | None,
) -> Any:
    """Time products through the public API, all implementations interleaved in one run.

    Every product is judged by the oracle before it is timed, every peer is checked first. Results
    go to a file of JSON lines, product by product, which gemmule report turns into a page. On a GPU
    operands are made there, and calls are timed by replays of captured graphs, cold.
    """
    options.check_device(device)
    backend = device.partition(":")[0]
    if suite not in SUITES[backend]:
        offered = ", ".join(SUITES[backend])
        raise ValueError(f"--suite is {suite!r}; on {backend} it must be one of {offered}.")
    if peers and backend == "cpu":
        raise ValueError("--peer is for a GPU; on a CPU every peer that is there takes part.")
    options.check_peers(tuple(name for name in peers if name != "all"), backend)
    if suite == "distributed":
        from gemmule_lab.distributed import session as distributed

        return distributed.start(device, sizes, out)
    from gemmule_lab.bench import epilogues, grouped, host_to_host, session, suites
    from gemmule_lab.bench.quiet import Patience
    from gemmule_lab.harness.host import HostBench, rates_hint
    from gemmule_lab.harness.neighbours import processors_in_use
    from gemmule_lab.harness.products import titled

    if suite == "grouped":
        return grouped.show(None if backend == "cpu" else options.ordinal_of(device), out)
    if suite == "epilogues":
        return epilogues.show(options.ordinal_of(device), out)
    if suite == "split":
        from gemmule.backends.cuda.arrays import ordinal_named

        return host_to_host.show(ordinal_named(device), sizes or host_to_host.SIDES, out)
    if suite == "everyday":
        from gemmule_lab.bench import everyday

        return {"file": everyday.start(HostBench(), seconds or SECONDS["cpu"], out)}
    all_suites = suites.CUDA_SUITES if backend == "cuda" else suites.SUITES
    chosen = replace(suites.narrowed(all_suites[suite], ops, formats, sizes), name=suite)
    if titles:
        chosen = replace(chosen, products=tuple(titled(title) for title in titles))
    hint = rates_hint() if backend == "cpu" else None
    if hint is not None:
        click.echo(hint, err=True)
    return session.start(
        chosen,
        session.bench_of(chosen, device, seconds or SECONDS[backend], peers),
        out,
        patience=Patience(patience, processors_in_use),
        ceiling_seconds=CEILING_SECONDS,
        resume=resume,
    )


COMMAND = bench
