"""``gemmule bench --suite grouped``: products of mixtures of experts beside what PyTorch has.

Each case is experts, tokens and how these choose; draws follow each other in one captured graph, so
that no call finds the experts of the one before in the caches. Everybody's result is compared with
the right one, within the bound of our rung, before anything is timed.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
import numpy as np

import gemmule as gm
from gemmule.oracle.judge import tolerance
from gemmule.oracle.problems import make_problem
from gemmule.oracle.truth import grouped_reference
from gemmule.storage import lines
from gemmule_lab.harness.bench import in_turns
from gemmule_lab.records import log
from gemmule_lab.records.results import geomean
from gemmule_lab.records.rows import times_of_us
from gemmule_lab.report.render import print_table
from gemmule_lab.report.tables import Column, TableData, significant, table_of

DRAWS, ROUNDS, COLUMNS, SEED = 6, 9, 8, 0
WORST = 10  # cases of a hunt that are shown
PEERS = {"cpu": "loop of NumPy", "cuda": "torch._grouped_mm"}
Call = Callable[[int], Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """One case. Matrices of `experts` x (n, k), as torch.nn.Linear keeps them.

    how: ``uniform`` (each token's expert drawn by itself), ``zipf``, or ``distinct``: eight
    different experts for every eight tokens in turn.
    """

    experts: int
    tokens: int
    n: int
    k: int
    how: str = "uniform"

    def title(self) -> str:
        """Return a line for people."""
        size = f"{self.experts} experts of {self.n} x {self.k}"
        return f"{self.tokens} tokens, {size}, {self.how}"

    def ends(self, rng: np.random.Generator) -> np.ndarray[Any, Any]:
        """Draw where each expert's rows end."""
        experts = self.experts
        if self.how == "distinct":
            counts = np.zeros(experts, np.int64)
            for _ in range(self.tokens // 8):
                counts[rng.choice(experts, 8, replace=False)] += 1
        else:
            share = 1.0 / np.arange(1, experts + 1) if self.how == "zipf" else np.ones(experts)
            counts = rng.multinomial(self.tokens, rng.permutation(share) / share.sum())
        return np.asarray(np.cumsum(counts), np.int32)


DECODE = (
    Shape(128, 256, 1536, 2048),
    Shape(256, 128, 2048, 7168),
    Shape(128, 256, 1536, 2048, "zipf"),
    Shape(128, 8, 1536, 2048, "distinct"),
    Shape(128, 128, 1536, 2048, "distinct"),
)
PREFILL = (
    Shape(8, 4096, 14336, 4096),
    Shape(64, 4096, 2048, 2048),
    Shape(128, 8192, 1536, 2048),
    Shape(256, 8192, 2048, 7168),
)
# Of what a hunt draws: bytes of the matrices in halves, multiplications and additions.
MOST = {"cpu": (1 << 24, 1 << 28), "cuda": (1 << 30, 1 << 40)}
ON_HOST = (
    Shape(16, 8, 768, 1024, "distinct"),
    Shape(16, 128, 768, 1024),
    Shape(16, 2048, 768, 1024),
)


@dataclasses.dataclass(frozen=True, slots=True)
class Operands:
    """What a case multiplies: the matrices (experts, k, n), and draws of tokens and offsets."""

    shape: Shape
    weights: Any
    tokens: list[Any]
    ends: list[Any]
    host_ends: list[np.ndarray[Any, Any]]

    @property
    def touched(self) -> float:
        """Experts with tokens, in the mean."""
        return float(np.mean([np.count_nonzero(np.diff(e, prepend=0)) for e in self.host_ends]))


def made(shape: Shape, ordinal: int | None) -> Operands:
    """Return random operands: bfloat16 tensors on a GPU, float32 arrays on the host."""
    rng = np.random.default_rng(SEED)
    drawn = [shape.ends(rng) for _ in range(DRAWS)]
    size = (shape.experts, shape.n, shape.k)
    if ordinal is None:
        weights = rng.standard_normal(size, np.float32)
        tokens = [rng.standard_normal((shape.tokens, shape.k), np.float32) for _ in drawn]
        return Operands(shape, weights.swapaxes(1, 2), tokens, drawn, drawn)
    import torch

    place, half = torch.device("cuda", ordinal), torch.bfloat16
    weights = torch.empty(size, dtype=half, device=place).normal_()
    tokens = [torch.empty(shape.tokens, shape.k, dtype=half, device=place).normal_() for _ in drawn]
    ends = [torch.from_numpy(one).to(place) for one in drawn]
    return Operands(shape, weights.transpose(1, 2), tokens, ends, drawn)


def ways(
    given: Operands, ordinal: int | None, *, triton: bool = True
) -> Iterator[tuple[str, Any, Call]]:
    """Yield who multiplies: a name, the matrices it reads, and its call of a draw."""

    def ours(weights: Any) -> Call:
        return lambda i: gm.grouped_matmul(given.tokens[i], weights, given.ends[i])

    yield "gemmule", given.weights, ours(given.weights)
    if ordinal is None:
        yield "loop of NumPy", given.weights, lambda i: _loop(given, i)
    else:
        import torch

        product = torch._grouped_mm
        yield (
            "torch._grouped_mm",
            given.weights,
            lambda i: product(given.tokens[i], given.weights, offs=given.ends[i]),
        )
        if triton and find_spec("triton") is not None:
            from gemmule_lab.peers.triton_kernels import grouped

            yield (
                "triton",
                given.weights,
                lambda i: grouped(given.tokens[i], given.weights, given.ends[i]),
            )
    if given.shape.k % 128 == 0:
        for bits in (8, 4):
            stack = gm.quantize_experts(
                given.weights, bits=bits, symmetric=True, scale_dtype="float16"
            )
            yield f"gemmule int{bits} g128", stack, ours(stack)


def _loop(given: Operands, i: int) -> Any:
    starts = [0, *given.host_ends[i][:-1]]
    pairs = zip(starts, given.host_ends[i], strict=True)
    parts = [given.tokens[i][s:e] @ given.weights[x] for x, (s, e) in enumerate(pairs) if e > s]
    return np.concatenate(parts) if parts else np.empty((0, given.shape.n), np.float32)


def check(given: Operands, name: str, weights: Any, call: Call) -> None:
    """Raise ValueError where the first columns of the first draw are beyond the rung's bound.

    Codes are judged as what they stand for, in the tokens' dtype.
    """
    ends, result = given.host_ends[0], call(0)
    plan = gm.plan("grouped_matmul", given.tokens[0], weights, given.ends[0])
    a = _host(given.tokens[0])
    w = _columns(weights, given.shape)
    problem = make_problem("grouped", len(a), w.shape[2], a.shape[1], (a.dtype.name,) * 3)
    truth = grouped_reference(problem, a, w, ends)
    bound = tolerance(problem, plan.rung.arithmetic(plan.problem), plan.params, truth)
    if isinstance(weights, gm.QuantizedStack):  # its own roundings, and those of these weights
        bound = 4.0 * bound
    found = _host(result[: int(ends[-1]), : w.shape[2]]).astype(np.float64)
    if not np.all(np.abs(found - truth.values) <= bound):
        raise ValueError(f"{name} is wrong: {given.shape.title()}")


def _columns(weights: Any, shape: Shape) -> np.ndarray[Any, Any]:
    """Return the first columns of every expert's matrix on the host, codes as floats."""
    count = min(COLUMNS, shape.n)
    if not isinstance(weights, gm.QuantizedStack):
        return _host(weights[:, :, :count])
    held = weights.matrix
    parts = [held.codes, held.scales, held.zeros]
    cut = [None if part is None else _first(part, shape, count) for part in parts]
    sample = gm.QuantizedMatrix.from_parts(
        *cut,  # type: ignore[arg-type]
        shape=(shape.experts * count, shape.k),
        bits=held.bits,
        group_size=held.group_size,
    )
    stack = gm.QuantizedStack.from_matrix(sample, shape.experts)
    floats: np.ndarray[Any, Any] = stack.dequantize("float64")
    return floats


def _first(part: Any, shape: Shape, count: int) -> np.ndarray[Any, Any]:
    whole = part
    if not isinstance(part, np.ndarray):
        import torch

        whole = torch.from_dlpack(part)
    rows = whole.reshape(shape.experts, shape.n, -1)[:, :count]
    return np.ascontiguousarray(_host(rows)).reshape(shape.experts * count, -1)


def _host(array: Any) -> np.ndarray[Any, Any]:
    if isinstance(array, np.ndarray):
        return array
    found: np.ndarray[Any, Any] = gm.asarray(array.contiguous().cpu())
    return found


def clock(
    call: Call, ordinal: int | None, draws: int = DRAWS, before: Callable[[], Any] | None = None
) -> Callable[[], float]:
    """Return what times all draws once, in microseconds a call.

    before: is called first, on a GPU.
    """
    if ordinal is None:

        def on_host() -> float:
            begin = time.perf_counter()
            for i in range(draws):
                call(i)
            return (time.perf_counter() - begin) * 1e6 / draws

        return on_host
    import torch

    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(draws):
            call(i)
    replayed = graph, call  # who holds the memory that the graph reads
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def sample() -> float:
        if before is not None:
            before()
        begin.record()
        replayed[0].replay()
        end.record()
        torch.cuda.synchronize()
        return float(begin.elapsed_time(end)) * 1e3 / draws

    return sample


def measured(shape: Shape, ordinal: int | None, *, triton: bool = True) -> list[dict[str, Any]]:
    """Return a record for each way of one case, all timed by turns."""
    given, clocks, moved = made(shape, ordinal), {}, {}
    for name, weights, call in ways(given, ordinal, triton=triton):
        check(given, name, weights, call)
        clocks[name] = clock(call, ordinal)
        moved[name] = given.touched * _expert_bytes(weights, shape)
    samples = in_turns(clocks, ROUNDS, seed=SEED)
    item = 4 if ordinal is None else 2
    beside = shape.tokens * (shape.k + shape.n) * item
    about = {"schema": 1, **dataclasses.asdict(shape), "touched": given.touched, "seed": SEED}
    return [
        # of `times`, n counts samples: here it is the matrices' own
        {**dataclasses.asdict(times_of_us(times)), "samples": len(times)}
        | {**about, "name": name, "bytes": moved[name] + beside}
        for name, times in samples.items()
    ]


def _expert_bytes(weights: Any, shape: Shape) -> float:
    return float(weights.nbytes) / shape.experts


def show(ordinal: int | None, out: Path) -> dict[str, Any]:
    """Measure, print, write and return every case; DeviceError or ImportError for what is missing.

    ordinal: of the GPU, None on the host.
    """
    records = []
    for shape in ON_HOST if ordinal is None else DECODE + PREFILL:
        found = measured(shape, ordinal)
        print_table(_table(shape, found))
        records += found
    return written(records, ordinal, out, "grouped")


def written(
    records: list[dict[str, Any]], ordinal: int | None, out: Path, name: str
) -> dict[str, Any]:
    """Write records, each with its device; return the file and what it holds."""
    device = "cpu"
    if ordinal is not None:
        from gemmule.backends.cuda import driver

        device = driver.device_info(ordinal).name
    records = [{"device": device, **one} for one in records]
    path = log.fresh(out, f"{'cpu' if ordinal is None else 'cuda'}-{name}")
    lines.write(path, records)
    click.echo(f"wrote {path}")
    return {"file": path, "products": records}


def random_shapes(seed: int, most_bytes: int, most_flops: int) -> Iterator[Shape]:
    """Yield cases whose sizes are drawn evenly by their logarithms."""
    draw = random.Random(seed)  # noqa: S311  no secret
    while True:
        experts, tokens = (int(2 ** draw.uniform(*ends)) for ends in ((1.0, 8.2), (0.0, 13.0)))
        n, k = (64 * round(2 ** draw.uniform(2.0, 8.0)) for _ in range(2))
        shape = Shape(experts, tokens, n, k, draw.choice(("uniform", "uniform", "zipf")))
        if 2 * experts * n * k <= most_bytes and 2 * tokens * n * k <= most_flops:
            yield shape


def hunt(
    ordinal: int | None, out: Path, seed: int, seconds: float, products: int | None = None
) -> dict[str, Any]:
    """Measure random cases for so long, print the worst of each way beside the peer, write all.

    ValueError where a result is beyond its rung's bound.
    """
    end = time.monotonic() + seconds
    found: list[list[dict[str, Any]]] = []
    shapes = random_shapes(seed, *MOST["cpu" if ordinal is None else "cuda"])
    for shape in itertools.islice(shapes, products):
        if found and time.monotonic() >= end:
            break
        found.append(measured(shape, ordinal, triton=False))
    peer = PEERS["cpu" if ordinal is None else "cuda"]
    for name in dict.fromkeys(str(one["name"]) for case in found for one in case):
        if name != peer:
            print_table(worst_of(name, peer, found))
    return written(list(itertools.chain(*found)), ordinal, out, f"grouped-hunt-{seed}")


def worst_of(name: str, peer: str, found: list[list[dict[str, Any]]]) -> TableData:
    """Return the cases of a hunt in which `name` is slowest beside the peer, and the mean of all.

    found: the records of each case.
    """
    of_case = [{str(one["name"]): one for one in case} for case in found]
    beside = [(by[peer]["median"] / by[name]["median"], by[name]) for by in of_case if name in by]
    columns: tuple[Column[tuple[float, dict[str, Any]]], ...] = (
        ("case", lambda one: _shape_of(one[1]).title(), False),
        ("us", lambda one: significant(one[1]["median"]), True),
        ("GB/s", lambda one: significant(one[1]["bytes"] / one[1]["median"] * 1e-3), True),
        (f"speed of {peer}", lambda one: f"{one[0]:.2f}", True),
    )
    mean = geomean(ratio for ratio, _ in beside)
    title = f"{name}: {len(beside)} products, {mean:.2f} x the speed of {peer} in the mean"
    return table_of(title, sorted(beside, key=lambda one: one[0])[:WORST], columns)


def _shape_of(record: dict[str, Any]) -> Shape:
    return Shape(**{field.name: record[field.name] for field in dataclasses.fields(Shape)})


def _table(shape: Shape, found: list[dict[str, Any]]) -> TableData:
    rows = sorted(found, key=lambda one: float(one["median"]))
    flops = 2.0 * shape.tokens * shape.n * shape.k
    columns: tuple[Column[dict[str, Any]], ...] = (
        ("who", lambda one: str(one["name"]), False),
        ("us", lambda one: significant(one["median"]), True),
        ("GB/s", lambda one: significant(one["bytes"] / one["median"] * 1e-3), True),
        ("TFLOP/s", lambda one: significant(flops / one["median"] * 1e-6), True),
    )
    title = f"{shape.title()}; {rows[0]['touched']:.0f} experts touched"
    return table_of(title, rows, columns)
