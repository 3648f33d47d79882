"""``gemmule hunt``: look among random products for those that are slow."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gemmule_lab.commands import _options as options
from gemmule_lab.commands.bench import FLOATS, QUANTIZED

if TYPE_CHECKING:
    from gemmule.core.problem import Problem
    from gemmule_lab.harness.bench import Bench
    from gemmule_lab.harness.products import Product
    from gemmule_lab.peers.peer import Peer

VECTORS = ("matvec", "vecmat")
PRODUCT_SECONDS = {"cpu": 0.5, "cuda": 0.2}
OPS = (*VECTORS, "matmul")
CODED = ("int4", "int8")
GROUPED, EPILOGUE = "grouped", "epilogue"  # stand alone
EVERYDAY = ("float32", "float16", "bfloat16", *CODED)
PEERS = {"cpu": "numpy", "cuda": "torch"}
CEILING_SECONDS = {"cpu": 5.0, "cuda": 2.0}


@options.command("measure", "Look among random products for slow ones.")
@options.device()
@options.some(
    "--op",
    "ops",
    "Only this operation; may be repeated. By default matvec and vecmat. grouped, and on a GPU "
    "epilogue, stand alone.",
    (*options.OPS, GROUPED, EPILOGUE),
)
@options.some(
    "--format",
    "formats",
    "Only this number format; may be repeated. By default the four floats.",
    (*FLOATS, *QUANTIZED),
)
@options.seconds(1, 86400, "How long to hunt.", 60.0)
@options.one("--seed", options.Whole(0), None, "Draw the products of this seed again.")
@options.one(
    "--peer",
    str,
    None,
    "Whom to race: numpy by default, on a GPU torch.",
    shell_complete=options.peers,
)
@options.one(
    "--most-bytes",
    options.Whole(1 << 10),
    None,
    "Largest matrix; by default 2 GiB, on a CPU a quarter of the free memory at most.",
)
@options.flag("--hot", "Over one set of operands, which stays in the cache if it fits.")
@options.flag("--ranks", "On a GPU, time the other proved rungs as well.")
@options.flag(
    "--everyday",
    "On a CPU, floats and codes beside float32: A x and x A of 64 to 16384 a side, A B to 2048.",
)
@options.flag("--no-rests", "On a CPU, with no pause when another implementation takes its turn.")
@options.one("--products", options.Whole(1), None, "Stop after so many.")
@options.flag(
    "--fit", "Then measure the worst products all ways, and fit the device's model to them as well."
)
@options.out("Folder of the results.")
def hunt(
    device: str,
    ops: tuple[str, ...],
    formats: tuple[str, ...],
    seconds: float,
    seed: int | None,
    peer: str | None,
    most_bytes: int | None,
    hot: bool,
    ranks: bool,
    everyday: bool,
    no_rests: bool,
    products: int | None,
    fit: bool,
    out: Path,
) -> dict[str, Any]:
    """Race random products against a peer and list the worst, for `gemmule bench` to repeat.

    Shapes are drawn evenly by their logarithms up to 262144 a side, by rows and by columns. Every
    product goes through the public API with its default choice, is judged, and is timed cold in
    turns with the peer. The lists show the slowest against the peer, and against the time that
    reading the bytes takes at the measured ceiling. On a GPU codes, int4 and int8, are multiplied
    by 1 to 4096 columns of bfloat16, 256 to 16384 a side, and the peer multiplies the same weights
    in bfloat16; then pairs are told of which the larger product took less time. There a first look
    is brief, and what it tells against is measured again in the last quarter. With --everyday
    all formats race NumPy's float32. --op grouped draws mixtures of experts, in bfloat16, int4 and
    int8 beside torch._grouped_mm, on a CPU in float32 beside a loop of NumPy's products.
    """
    import itertools
    import secrets

    from gemmule.core.memory import available_bytes
    from gemmule_lab.bench import hunt as work
    from gemmule_lab.bench import session
    from gemmule_lab.bench.suites import Suite
    from gemmule_lab.peers.registry import named

    options.check_device(device)
    backend = device.partition(":")[0]
    seed = secrets.randbelow(2**32) if seed is None else seed
    alone = next((op for op in ops if op in ALONE), None)
    if alone is not None:
        if len(ops) > 1 or formats or peer or most_bytes or hot or ranks or everyday or fit:
            raise ValueError(f"--op {alone} takes --device, --seconds, --seed, --products alone.")
        return ALONE[alone](device, seed, seconds, products, out)
    quarter = available_bytes() // 4 if backend == "cpu" else work.MOST_BYTES
    most_bytes = most_bytes or min(work.MOST_BYTES, quarter)
    peer = peer or PEERS[backend]
    options.check_peers((peer,), backend)
    coded = [name for name in formats if name in CODED]
    if backend == "cpu" and ranks:
        raise ValueError("--ranks is about a GPU.")
    if backend == "cuda" and (everyday or no_rests):
        raise ValueError("--everyday and --no-rests are about a CPU.")
    if backend == "cuda" and coded and (len(coded) < len(formats) or ops):
        raise ValueError("on a GPU --format int4 and int8 take no other format and no --op.")
    if backend == "cuda":
        options.ordinal_of(device)  # that there is no GPU comes before what a peer lacks
    (racer,) = named((peer,), backend)
    absent = racer.absent()
    if absent is not None:
        raise ValueError(f"{peer} cannot be raced here: {absent}.")
    suite = Suite("random products", (), peers=(peer,), name="hunt", warm=hot, every_rung=ranks)
    bench = session.bench_of(suite, device, PRODUCT_SECONDS[backend])
    if backend == "cpu":  # the one that is raced alone
        bench = _beside(racer, rests=not no_rests, warm=hot)
    if backend == "cuda" and coded:
        drawn = _compiled(itertools.islice(work.products_of_codes(coded, seed), products), device)
    else:
        wanted = ops or (OPS if everyday else VECTORS)
        every = formats or (EVERYDAY if everyday else FLOATS)
        taken, left = work.raced(bench, racer, wanted, every)
        _tell_left(peer, left, asked=bool(formats) or not taken)
        draw = work.everyday_products if everyday else work.products
        drawn = itertools.islice(draw(wanted, taken, seed, most_bytes), products)
    click.echo(f"seed {seed}: matrices of 1 KiB to {most_bytes:,} bytes, {seconds:.0f} s")
    path = out / f"{bench.prefix}hunt-{seed}.jsonl"
    found = work.run(
        bench,
        drawn,
        path,
        peer=peer,
        seconds=seconds,
        ceiling_seconds=CEILING_SECONDS[backend],
    )
    model = _fitted(device, found.worst()) if fit else None
    told = {"file": path, "seed": seed, "summary": found.summary(), "products": found.finds}
    return told | ({"model": model} if model else {})


def _compiled(drawn: Iterable[Product], device: str) -> Iterator[Product]:
    """Yield products whose kernels have been compiled by then."""
    from gemmule_lab.harness import ahead

    return ahead.compiled(drawn, device)


def _experts(
    device: str, seed: int, seconds: float, products: int | None, out: Path
) -> dict[str, Any]:
    """Race random mixtures of experts against the grouped products of the device's peer."""
    from gemmule_lab.bench import grouped

    ordinal = None if device == "cpu" else options.ordinal_of(device)
    click.echo(f"seed {seed}: mixtures of experts, {seconds:.0f} s")
    return grouped.hunt(ordinal, out, seed, seconds, products)


def _epilogues(
    device: str, seed: int, seconds: float, products: int | None, out: Path
) -> dict[str, Any]:
    """Race random products with an epilogue against PyTorch's operations."""
    from gemmule_lab.bench import epilogues

    ordinal = options.ordinal_of(device)
    click.echo(f"seed {seed}: products with epilogues, {seconds:.0f} s")
    return epilogues.hunt(ordinal, out, seed, seconds, products)


ALONE = {GROUPED: _experts, EPILOGUE: _epilogues}


def _beside(racer: Peer, *, rests: bool, warm: bool) -> Bench:
    """Return the bench of a CPU and one peer."""
    from gemmule_lab.harness.host import HostBench

    return HostBench(
        PRODUCT_SECONDS["cpu"], peers=(racer,), beside_float32=True, rests=rests, warm=warm
    )


def _fitted(device: str, worst: Sequence[Problem]) -> dict[str, Any]:
    """Measure these products all ways as well, and fit the device's model anew."""
    from gemmule_lab.tune import device_model

    return device_model.make(device, products=0, beside=worst)


def _tell_left(peer: str, left: Sequence[str], *, asked: bool) -> None:
    """Tell which formats a peer does not take; ValueError where those were asked for."""
    if left and asked:
        raise ValueError(f"{peer} takes no {', '.join(left)}; see --format and --peer.")
    if left:
        click.echo(f"left out, as {peer} takes none: {', '.join(left)}")


COMMAND = hunt
