"""Random exact products in a process that is told what befalls it: see `environments_campaign`.

``python tests/environment_products.py SEED COUNT [deleted | full | memory | signals | clock ...]``
prints a digest of each product as one line of JSON.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes  # gives NumPy the names of its dtypes  # noqa: F401
import numpy as np

import gemmule as gm
from gemmule.backends.cpu.threads import thread_count
from gemmule.settings import cache_folder

DTYPES = (
    "float32", "float64", "float16", "bfloat16", "float8_e4m3fn", "int8", "uint8", "int64",
    "complex64",
)  # fmt: skip
MEMORY_BYTES = 1 << 18  # that a product may ask for where memory is short
KINDS = ("matvec", "vecmat", "matmul", "plan", "gemm", "quantised", "saved", "prepared")


def exact(shape: tuple[int, ...], rng: Any, dtype: str) -> Any:
    """Return small integers of a dtype: their sums are exact."""
    return rng.integers(0 if dtype.startswith("u") else -2, 3, shape).astype(dtype)


def codes(m: int, n: int, rng: Any, bits: Any) -> Any:
    """Return a quantised matrix whose scales are powers of two: its products are exact too."""
    made = gm.quantize(rng.integers(0, 2**bits, (m, n)).astype(np.float32), bits, -1)
    scales = np.full_like(made.scales, 0.5)
    form: dict[str, Any] = {"shape": (m, n), "bits": bits, "group_size": -1}
    return gm.QuantizedMatrix.from_parts(made.codes, scales, np.zeros_like(scales), **form)


def product(number: int, seed: int) -> tuple[str, Callable[[], Any]]:
    """Return the name of one random product, and what computes it."""
    choice, rng = random.Random(f"{seed} {number}"), np.random.default_rng([seed, number])
    kind, dtype = KINDS[number % len(KINDS)], choice.choice(DTYPES)
    m, n = choice.choice([1, 7, 64, 300]), choice.choice([1, 5, 96, 260])
    columns = choice.choice([1, 3, 20])
    A, x, z = (exact(shape, rng, dtype) for shape in ((m, n), (n,), (m,)))
    A = choice.choice([A, np.asfortranarray(A), np.tile(A, (2, 1))[::2] if m % 2 else A])
    B = exact((n, columns), rng, dtype)
    Q = codes(m, n, rng, choice.choice([4, 8])) if kind in ("quantised", "saved") else None
    made: dict[str, Callable[[], Any]] = {
        "matvec": lambda: gm.matvec(A, x),
        "vecmat": lambda: gm.vecmat(z, A),
        "matmul": lambda: gm.matmul(A, B),
        "prepared": lambda: gm.matmul(A, gm.prepare(B)),
        "gemm": lambda: gm.gemm(A, B, gm.matmul(A, B), alpha=2, beta=3),
        "plan": lambda: planned(A, x),
        "quantised": lambda: Q @ B.real.astype(np.float32),
        "saved": lambda: saved(Q) @ x.real.astype(np.float32),
    }
    return f"{number} {kind} {dtype} {m} x {n} x {columns}", made[kind]


def planned(A: Any, x: Any) -> Any:
    """Return the third product of a plan, into a result that was there."""
    plan = gm.plan("matvec", A, x)
    out = np.empty_like(plan(A, x))
    plan(A, x, out=out)
    return plan(A, x, out=out)


def saved(matrix: Any) -> Any:
    """Return a matrix that was on disk; where that has no room, nothing is left there."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "q.safetensors")
        try:
            matrix.save(path)
        except OSError:
            assert not list(Path(folder).iterdir())
            return matrix
        return gm.QuantizedMatrix.load(path, mmap=False)


def befall(told: list[str]) -> None:
    """Begin what the process is told to live with."""
    if "full" in told:
        tempfile.gettempdir()  # which is found by writing to it
        # Every write fails as on a disk without room; what is read is there.
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
    if "signals" in told:
        signal.signal(signal.SIGALRM, lambda *_: None)
        signal.setitimer(signal.ITIMER_REAL, 1e-3, 1.7e-3)
    if "clock" in told:
        begun, ticks = time.time(), itertools.count()
        time.time = lambda: begun - next(ticks)
        time.time_ns = lambda: int((begun - next(ticks)) * 1e9)


def digest(make: Callable[[], Any], told: list[str]) -> str:
    """Return the dtype, shape and bits of a product."""
    if "memory" in told:
        make()  # NumPy's BLAS ends a process in which it cannot begin
        taken = 4096 * int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY_BYTES, resource.RLIM_INFINITY))
        try:
            make()
        except MemoryError:
            pass  # said, and no harm done: the same product follows
        finally:
            unlimited = resource.RLIM_INFINITY
            resource.setrlimit(resource.RLIMIT_AS, (unlimited, unlimited))
    if "deleted" in told:
        shutil.rmtree(cache_folder(), ignore_errors=True)
    found = np.ascontiguousarray(make())
    return f"{found.dtype} {found.shape} {hashlib.sha256(found.tobytes()).hexdigest()[:16]}"


def main() -> None:
    """Print what the products gave."""
    seed, count, *told = sys.argv[1:]
    befall(told)
    found = {}
    for number in range(int(count)):
        name, make = product(number, int(seed))
        try:
            found[name] = digest(make, told)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    signal.setitimer(signal.ITIMER_REAL, 0)
    sys.stdout.write(json.dumps(found | {"threads": str(thread_count())}) + "\n")


if __name__ == "__main__":
    main()
