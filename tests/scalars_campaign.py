"""gemv and gemm with every alpha and beta, judged by long sums of Python's own: a campaign by seed.

``python tests/scalars_campaign.py [--cases N] [--seed S] [--device cpu|emulated|cuda] [--jobs J]``
draws shapes (single rows and columns too, which run as matvecs), dtypes, strides, scalars, and NaN
or infinity in places. On a GPU, a real one or an emulated one, operands lie as on the host, in
copies of all the memory that they span, and what lies between C's elements must stay.

Elements are small integers, so that the product has no rounding: what is judged is what is done
with it. Integers must be equal modulo 2^64 (int32: 2^32). Floats must be of the same class (NaN,
either infinity, finite), and finite ones within four roundings of the dtype that is summed in and
one of the result's.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import ctypes
import math
import multiprocessing
import secrets
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

import gemmule as gm
from campaign_record import keep
from gemmule.backends.cuda.device_array import DeviceArray
from gemmule.core.problem import COMPLEX, HALVES, INTEGERS, UNIT_ROUNDOFF, numpy_dtype
from products import ARRANGEMENTS, Array

# Dtypes of A, of x or B, and of the result.
SIGNATURES = (
    ("float64",) * 3, ("float32",) * 3, ("float16",) * 3, ("bfloat16",) * 3,
    ("float16", "float16", "float32"), ("bfloat16", "bfloat16", "float32"),
    ("float16", "float32", "float32"), ("int8", "int8", "int32"), ("uint8", "int8", "int32"),
    ("int8", "int8", "int64"), ("int16", "int16", "int64"), ("int64",) * 3,
    ("int32", "int32", "int64"), ("uint16", "uint16", "uint64"), ("uint64",) * 3,
)  # fmt: skip
ON_HOST = (("complex64",) * 3, ("complex128",) * 3, ("float32", "float32", "float16"))
FLOATS = (0, 1, -1, 2, 0.5, -0.75, 1e-3, 1 / 3, 3e4, 1e-6, 1e30, -1e-30, np.nan, np.inf)
WHOLE = (0, 1, -1, 2, 3, 2**31, -(2**31), 2**53 + 1, 2**62 + 3, 2**63 - 1, -(2**63), 2**64 - 1)
LAID = ("row", "col", "sliced", "step_two", "reversed")


@dataclass(frozen=True)
class Case:
    """One call: operands, the result's old content, both scalars."""

    op: str
    A: Array
    B: Array
    C: Array
    alpha: complex
    beta: complex

    def __str__(self) -> str:
        arrays = ", ".join(f"{a.dtype.name}{a.shape}{a.strides}" for a in (self.A, self.B, self.C))
        return f"{self.op} {arrays} alpha={self.alpha!r} beta={self.beta!r}"


def draw(rng: np.random.Generator, signatures: tuple[Any, ...], laid: tuple[str, ...]) -> Case:
    """Return one case."""
    a, b, out = signatures[rng.integers(len(signatures))]
    op = ("gemv", "gemm")[rng.integers(2)]
    m, n, k = (int(v) for v in rng.integers(0, 18, 3))
    if rng.random() < 0.3:  # one row or one column
        m, n = (1, n) if rng.random() < 0.5 else (m, 1)
    if rng.random() < 0.1:
        k = int(rng.integers(60, 140))
    shapes = ((m, k), (k,), (m,)) if op == "gemv" else ((m, k), (k, n), (m, n))
    low = 0 if a.startswith("uint") or b.startswith("uint") else -3
    A, B, C = (
        ARRANGEMENTS[laid[rng.integers(len(laid))]](
            rng.integers(0 if t.startswith("uint") else low, 4, shape).astype(numpy_dtype(t))
        )
        for t, shape in zip((a, b, out), shapes, strict=True)
    )
    scalars = [_scalar(rng, out) for _ in range(2)]
    if out not in (*INTEGERS, *COMPLEX):
        for array in (A, B, C):
            if array.size and rng.random() < 0.15:
                place = tuple(int(rng.integers(size)) for size in array.shape)
                array[place] = (np.nan, np.inf, -np.inf)[rng.integers(3)]
    return Case(op, A, B, C, scalars[0], scalars[1])


def _scalar(rng: np.random.Generator, dtype: str) -> complex:
    if dtype not in INTEGERS:
        value = FLOATS[rng.integers(len(FLOATS))]
        if dtype not in COMPLEX:
            return value
        # Which of NaN and infinity meets which part is NumPy's affair.
        return complex(value if np.isfinite(value) else 2, float(rng.integers(-2, 3)))
    limits = np.iinfo(dtype)
    if rng.random() < 0.3:
        return int(rng.integers(limits.min, limits.max, dtype=dtype, endpoint=True))
    legal = [v for v in WHOLE if limits.min <= v <= limits.max]
    return legal[rng.integers(len(legal))]


def wrong(case: Case, result: Array) -> str:
    """Return what is wrong with a result, or an empty text."""
    if result.dtype != case.C.dtype or result.shape != case.C.shape:
        return f"{result.dtype} {result.shape}"
    if case.C.dtype.name in INTEGERS:
        return _wrong_integers(case, result)
    return _wrong_floats(case, result)


def _wrong_integers(case: Case, result: Array) -> str:
    product = case.A.astype(object) @ case.B.astype(object)
    truth = int(case.alpha.real) * product
    if case.beta:
        truth = truth + int(case.beta.real) * case.C.astype(object)
    modulus = 2 ** (8 * result.dtype.itemsize)
    off = (result.astype(object) - truth) % modulus != 0
    return f"{np.argwhere(off)[0]} of {result.tolist()}" if np.any(off) else ""


def _wrong_floats(case: Case, result: Array) -> str:
    name = result.dtype.name
    summed = "float32" if name in HALVES and case.A.dtype.name != "float64" else name
    wide: Any = np.clongdouble if name in COMPLEX else np.longdouble
    alpha, beta = (wide(numpy_dtype(summed).type(v)) for v in (case.alpha, case.beta))
    with np.errstate(all="ignore"):
        first = np.zeros(result.shape, wide)
        if case.alpha != 0:
            first = alpha * (case.A.astype(wide) @ case.B.astype(wide))
        truth = first
        if case.beta != 0:
            truth = truth + beta * case.C.astype(wide)
        size = np.abs(first) + np.abs(truth - first)
        bound = (16 if name in COMPLEX else 4) * UNIT_ROUNDOFF[summed] * size
        bound += UNIT_ROUNDOFF[name] * np.abs(truth) + _smallest(name) + _smallest(summed)
        got = result.astype(wide)
        share = np.where(np.isfinite(truth), np.abs(truth) / _largest(name), 0)
        right = np.abs(got - truth) <= bound
        right |= np.isnan(got) & np.isnan(truth)
        right |= np.isinf(truth) & (got == truth)
        # Where parts that cancel leave more than the dtype holds uncertain, infinity is right too.
        right |= np.isinf(got) & (truth * np.sign(got) + bound >= _largest(name))
        right |= (share > 0.99) & ((share < 1.01) | (got * np.sign(truth) == np.inf))
    if right.all():
        return ""
    place = tuple(np.argwhere(~right)[0])
    return f"{place}: {result[place]} for {truth[place]}"


def _largest(name: str) -> Any:
    if name in HALVES:
        return np.longdouble(65504 if name == "float16" else 3.3895e38)
    return np.longdouble(np.finfo(name).max)


def _smallest(name: str) -> Any:
    """Return the smallest normal number, below which a rounding is absolute."""
    if name == "bfloat16":
        return np.longdouble(np.finfo(np.float32).tiny)
    return np.longdouble(np.finfo(name).tiny)


def on_host(case: Case) -> Array:
    """Call the public function on the host's arrays."""
    result: Array = getattr(gm, case.op)(
        case.A, case.B, case.C.copy(order="K"), alpha=case.alpha, beta=case.beta
    )
    return result


def on_device(case: Case) -> Array:
    """Call the public function on arrays of the CUDA device, which may be an emulated one."""
    (A, _), (B, _), (C, held) = (_on_device(one) for one in (case.A, case.B, case.C))
    result = getattr(gm, case.op)(A, B, C, alpha=case.alpha, beta=case.beta)
    assert result is C
    after, (before, place) = held.to_host(), _spanned(case.C)
    made, old = (_seen(memory, place, case.C) for memory in (after, before))
    copy = made.copy()
    made[...] = old
    if not np.array_equal(after, before):
        raise AssertionError(f"{case}: memory between the elements of C was written")
    return copy


def _on_device(array: Array) -> tuple[DeviceArray, DeviceArray]:
    """Return an array of the device that lies as the given one does, and all of its memory."""
    memory, place = _spanned(array)
    held = gm.asarray(memory, device="cuda")
    steps = tuple(step // array.itemsize for step in array.strides)
    where = held.pointer + place
    return DeviceArray(where, array.shape, steps, array.dtype.name, 0, held), held


def _spanned(array: Array) -> tuple[Array, int]:
    """Return the bytes that an array spans, as far behind a multiple of 16, and where it begins."""
    low, high = np.lib.array_utils.byte_bounds(array) if array.size else (0, 1)
    data = b"\0" * (low % 16) + (ctypes.string_at(low, high - low) if array.size else b"\0")
    begin = int(array.__array_interface__["data"][0]) - low + low % 16 if array.size else 0
    return np.frombuffer(bytearray(data), np.uint8), begin


def _seen(memory: Array, place: int, like: Array) -> Array:
    """Return the array that lies in `memory` as `like` does in its own."""
    seen: Array = np.ndarray(like.shape, like.dtype, memory, place, like.strides)
    return seen


def judged(
    cases: int | range,
    seed: int,
    multiply: Callable[[Case], Array],
    signatures: tuple[Any, ...],
    laid: Any,
    seconds: float = math.inf,
) -> collections.Counter[str]:
    """Return how many cases were right and wrong; print the wrong ones. None begins later."""
    counts: collections.Counter[str] = collections.Counter()
    begun = time.monotonic()
    for index in range(cases) if isinstance(cases, int) else cases:
        if time.monotonic() - begun > seconds:
            break
        case = draw(np.random.default_rng([seed, index]), signatures, laid)
        try:
            with np.errstate(all="ignore"):
                fault = wrong(case, multiply(case))
        except Exception as error:  # every case is legal
            fault = repr(error)
        counts["wrong" if fault else "right"] += 1
        if fault:
            print(f"case {index} of seed {seed}: {case}: {fault}", flush=True)
    return counts


def run(device: str, cases: range, seed: int, seconds: float) -> collections.Counter[str]:
    """Judge some cases of a seed, all in this process."""
    with contextlib.ExitStack() as undo:
        if device == "emulated":
            from emulated_driver import emulated

            undo.enter_context(emulated())
        if device == "cpu":
            return judged(cases, seed, on_host, SIGNATURES + ON_HOST, LAID, seconds)
        return judged(cases, seed, on_device, SIGNATURES, LAID, seconds)


def main() -> int:
    """Run the campaign; 1 where a result was wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=100_000)
    parser.add_argument("--device", choices=("cpu", "emulated", "cuda"), default="cpu")
    parser.add_argument("--jobs", type=int, default=1, help="processes that share the cases")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no case later")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(10**6))
    parser.add_argument("--record", action="store_true", help="keep the outcome in the evidence")
    parser.add_argument("--add", action="store_true", help="--record, with the runs kept so far")
    given = parser.parse_args()
    print(f"seed {given.seed}", flush=True)
    shares = [range(job, given.cases, given.jobs) for job in range(given.jobs)]
    apart = multiprocessing.get_context("spawn")  # CUDA and threads survive no fork
    counts: collections.Counter[str] = collections.Counter()
    with ProcessPoolExecutor(given.jobs, mp_context=apart) as pool:
        tasks = [
            pool.submit(run, given.device, share, given.seed, given.seconds) for share in shares
        ]
        for task in tasks:
            counts += task.result()
    if given.record or given.add:
        keep(
            f"gemv and gemm with scalars: {given.device}",
            sum(counts.values()),
            counts["wrong"],
            f"python tests/scalars_campaign.py --cases {given.cases} --seed {given.seed} "
            f"--device {given.device}",
            "random shapes, single rows and columns, dtypes, strides, alpha and beta, NaN and Inf",
            device=given.device == "cuda",
            add=given.add,
        )
    print(f"{given.device}: {sum(counts.values())} calls, {counts['wrong']} wrong", flush=True)
    return 1 if counts["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
