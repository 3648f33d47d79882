"""Which weights of a model to quantise, by what they cost and gain on this machine, now.

Each distinct shape is timed cold in float16, int8 and int4, all in one interleaved run for each
number of columns; every weight is quantised for its own error. A weight is left alone where no
format is surely faster, where its error is too large, or where it is looked up and not multiplied.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import gemmule as gm
from gemmule import backends
from gemmule.backends.cuda.arrays import ordinal_named
from gemmule.core.problem import FLOATS
from gemmule.core.words import Bits, Method
from gemmule.quant.files import model_files
from gemmule.timing.sampler import Budget, Ratio, ratio, sample
from gemmule_lab.files.matrices import list_matrices, read_matrix
from gemmule_lab.files.sources import Source
from gemmule_lab.harness.bench import Bench
from gemmule_lab.harness.device import DeviceBench
from gemmule_lab.harness.host import HostBench, sets_needed
from gemmule_lab.harness.operands import OperandSet, Sets
from gemmule_lab.records.rows import disturbed

FORMATS = ("float16", "int8", "int4")
BITS: dict[str, Bits] = {"int8": 8, "int4": 4}
COLUMNS = (1, 16, 64, 512)
DECODE = (1, 16)  # tokens of one and of several sequences: what is decided by
PROMPT = COLUMNS[-1]
LEAST_GAIN = 1.1  # an advantage below is not worth another number format
LOOKED_UP = ("embed", "wte", "wpe")  # in the name: rows of a table
# The last parts of the names that tools give to codes, or to the scales beside them.
QUANTISED = frozenset(("codes", "qweight", "W_q", "weight_packed", "weight_scale"))
_NOT_MULTIPLIED = "looked up by row, not multiplied"
COLD_FACTOR = 4  # times the cache of a GPU have to pass before a matrix is read again


@dataclass(frozen=True, slots=True)
class Settings:
    """How weights are quantised, and what is demanded of them."""

    group_size: int = 64
    method: Method = "rtn"
    max_error: float = 0.12
    device: str = "cpu"
    seconds: float = 1.0


@dataclass(frozen=True, slots=True)
class Cost:
    """What one shape costs: median seconds by (format, columns), and float16's time over it.

    `disturbed`: most blocks of a measurement lost the processor to other work.
    """

    shape: tuple[int, int]
    seconds: Mapping[tuple[str, int], float]
    gains: Mapping[tuple[str, int], Ratio]
    nbytes: Mapping[str, int]
    cold: bool
    disturbed: bool = False

    def refusal(self, name: str) -> str | None:
        """Return why a format does not pay in decoding, or None where it does."""
        gains = {columns: self.gains[name, columns] for columns in DECODE}
        slower = [columns for columns, gain in gains.items() if gain.high < 1]
        if slower:
            plural = "s" if slower != [1] else ""
            return f"{name} is slower at {', '.join(map(str, slower))} column{plural}"
        if all(gain.low < LEAST_GAIN for gain in gains.values()):
            return f"{name} is not surely {LEAST_GAIN} times as fast"
        return None


@dataclass(frozen=True, slots=True)
class Advice:
    """One weight: its errors by format, the format to take (``float16``: leave it), and why."""

    name: str
    shape: tuple[int, int]
    errors: Mapping[str, float]
    take: str
    reason: str


def weights_of(path: Path) -> dict[str, tuple[Path, tuple[int, int]]]:
    """Return file and shape of a model's 2-D tensors; ValueError where there is none.

    path: a safetensors file, the index of several, or the folder of either.
    """
    where = model_files(path)
    files = dict.fromkeys(where.values()) if isinstance(where, dict) else {where: None}
    found = {
        name: (file, (shape[0], shape[1]))
        for file in files
        for name, shape in list_matrices(file).items()
        if len(shape) == 2 and 0 not in shape
    }
    ends = {name.rpartition(".")[2]: name for name in found}
    if codes := sorted(ends.keys() & QUANTISED):
        raise ValueError(
            f"{path} is quantised already: {ends[codes[0]]} belongs to a matrix of codes. Give the "
            "floats that it was made of."
        )
    if not found:
        raise ValueError(f"{path} holds no 2-D weight; give a model's .safetensors file.")
    return found


def read_weight(path: Path, name: str) -> np.ndarray[Any, Any] | None:
    """Return one weight, or None for integers (positions, masks), which are no weights."""
    matrix = read_matrix(Source(path, name))
    return matrix if matrix.dtype.name in FLOATS else None


def cost_of(weight: np.ndarray[Any, Any], settings: Settings, bench: Bench) -> Cost:
    """Time one weight's shape in every format and number of columns; all results are judged first.

    ArithmeticError for a wrong result.
    """
    made = {name: in_format(weight, name, settings) for name in FORMATS}
    seconds, gains, cold, hit = {}, {}, True, False
    for columns in COLUMNS:
        sets = {name: _sets(matrix, columns, settings.device) for name, matrix in made.items()}
        entries = [bench.ours(one, name=name) for name, one in sets.items()]
        samples = sample(entries, bench.clock, Budget(max_seconds=settings.seconds))
        cold = cold and all(one.cold for one in sets.values())
        hit = hit or any(disturbed(one) for one in samples.values())
        for name in FORMATS:
            seconds[name, columns] = samples[name].median
            gains[name, columns] = ratio(samples["float16"], samples[name])
    nbytes = {name: matrix.nbytes for name, matrix in made.items()}
    return Cost((weight.shape[0], weight.shape[1]), seconds, gains, nbytes, cold, hit)


def in_format(weight: np.ndarray[Any, Any], name: str, settings: Settings) -> Any:
    """Return a weight in one of FORMATS, on the host."""
    if name not in BITS:
        return np.ascontiguousarray(weight, np.float16)
    return gm.quantize(
        weight, BITS[name], settings.group_size, scale_dtype="float16", method=settings.method
    )


def _sets(matrix: Any, columns: int, device: str) -> Sets:
    """Return copies of a weight and of float16 columns, as many as rotate past the cache."""
    shape = (matrix.shape[1],) if columns == 1 else (matrix.shape[1], columns)
    other = np.random.default_rng(columns).standard_normal(shape).astype(np.float16)
    parts = (matrix, other, np.empty(matrix.shape[:1] + shape[1:], np.float16))
    turn = sets_needed(matrix.nbytes + other.nbytes, _cold_bytes(device))
    items = [OperandSet(*(placed(part, device) for part in parts)) for _ in range(turn.sets)]
    return Sets("matvec" if columns == 1 else "matmul", items, turn.cold)


def placed(array: Any, device: str) -> Any:
    """Return a copy of a host array or quantised matrix at an address of its own."""
    return deepcopy(array) if device == "cpu" else gm.asarray(array, device=device)


def _cold_bytes(device: str) -> int | None:
    if device == "cpu":
        return None
    return COLD_FACTOR * backends.get("cuda").machine(device).cache_bytes


def bench_of(device: str) -> Bench:
    """Return what judges and times products on a device."""
    return HostBench() if device == "cpu" else DeviceBench(ordinal_named(device))


def advise(path: Path, settings: Settings, costs: dict[tuple[int, int], Cost]) -> Iterator[Advice]:
    """Yield advice on each float weight of a file, timing each shape when it is first met.

    costs: filled on the way, by shape.
    """
    bench = bench_of(settings.device)
    for name, (file, shape) in weights_of(path).items():
        weight = read_weight(file, name)
        if weight is None:
            continue
        errors = {}
        try:
            for form in BITS:
                error = in_format(weight, form, settings).error
                errors[form] = float("nan") if error is None else error
        except ValueError as fault:  # not finite, or too large for the format's scales
            yield Advice(name, shape, dict.fromkeys(BITS, float("nan")), "float16", str(fault))
            continue
        if shape not in costs:
            costs[shape] = cost_of(weight, settings, bench)
        take, reason = decide(name, errors, costs[shape], settings.max_error)
        yield Advice(name, shape, errors, take, reason)


def decide(name: str, errors: Mapping[str, float], cost: Cost, max_error: float) -> tuple[str, str]:
    """Return the format to take and why: the smallest that pays and whose error is small enough."""
    if any(word in name.lower() for word in LOOKED_UP):
        return "float16", _NOT_MULTIPLIED
    reasons: list[str] = []
    for form in sorted(BITS, key=BITS.__getitem__):
        reason = cost.refusal(form)
        if reason is None and not errors[form] <= max_error:
            reason = f"{form} has error {errors[form]:.3f}, above {max_error:g}"
        if reason is None:
            gain = max(cost.gains[form, columns].value for columns in DECODE)
            return form, "; ".join([f"up to {gain:.2f}x", *reasons])
        reasons.append(reason)
    return "float16", "; ".join(reasons)


def total_bytes(
    advices: Sequence[Advice], costs: Mapping[tuple[int, int], Cost]
) -> tuple[int, int]:
    """Return the bytes of all weights in float16, and as advised."""
    plain = {one.name: 2 * one.shape[0] * one.shape[1] for one in advices}
    alone = sum(plain[one.name] for one in advices if one.take == "float16")
    made = sum(costs[one.shape].nbytes[one.take] for one in advices if one.take != "float16")
    return sum(plain.values()), alone + made


def rates(
    advices: Sequence[Advice], costs: Mapping[tuple[int, int], Cost], columns: int
) -> tuple[float, float] | None:
    """Return tokens a second in float16 and as advised, if products were all; None for no product.

    columns: tokens at once.
    """
    multiplied = [one for one in advices if one.reason != _NOT_MULTIPLIED and one.shape in costs]
    if not multiplied:
        return None
    times = [costs[one.shape].seconds for one in multiplied]
    plain = sum(seconds["float16", columns] for seconds in times)
    taken = zip(multiplied, times, strict=True)
    advised = sum(seconds[one.take, columns] for one, seconds in taken)
    return columns / plain, columns / advised
