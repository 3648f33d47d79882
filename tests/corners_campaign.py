"""Corners that random sizes seldom meet, each against NumPy alone: a campaign that is kept as data.

``python tests/corners_campaign.py [--cases N] [--seed S] [--record] [AXIS ...]`` draws products of
four kinds: ``pairs`` (any two dtypes with NaN, infinities and zeros, sums of no, one and two
terms), ``options`` (any two or more of them together, in a function and in a plan), ``sequences``
(one quantised matrix is cut, turned, put in another order, saved, pickled, and multiplied after
each) and ``columns`` (a quantised matrix by 1 to 4096 of them). All numbers are small, so that
results are exact in every order of their sums.
"""

from __future__ import annotations

import argparse
import copy
import pickle
import random
import secrets
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes  # gives NumPy the names of its dtypes  # noqa: F401
import numpy as np

import gemmule as gm
from campaign_record import keep

FLOATS = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
INTEGERS = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
SPECIAL = (np.nan, np.inf, -np.inf, 0.0, -0.0, 0.0, 1.0, -2.0)
MOST_COLUMNS = 4096


def exact(a: Any, b: Any) -> Any:
    """Return ``a @ b`` as doubles, summed by NumPy term by term: no BLAS."""
    with np.errstate(all="ignore"):
        terms = a.astype(float)[..., :, :, None] * b.astype(float)[..., None, :, :]
        return terms.sum(-2)


def same(found: Any, wanted: Any) -> bool:
    """Whether a result holds these numbers, its NaN among them."""
    wide = np.asarray(found).astype(float)
    return wide.shape == wanted.shape and np.array_equal(wide, wanted, equal_nan=True)


def operands(op: str, a: Any, b: Any) -> tuple[Any, Any]:
    """Return the operands of an operation on two matrices: vectors are their first row, column."""
    row, column = (a[..., 0, :] if op == "vecmat" else a), (b[..., 0] if op == "matvec" else b)
    return row, column


def called(op: str, a: Any, b: Any, **options: Any) -> Any:
    """Return the product of two matrices by any operation; see `operands`."""
    return getattr(gm, op)(*operands(op, a, b), **options)


def met(op: str, a: Any, b: Any) -> Iterator[tuple[str, Any]]:
    """Yield the product by the ways that a call takes which was met before, and by a plan."""
    left, right = operands(op, a, b)
    for time in ("second", "third"):
        yield f"{time} call", called(op, a, b)
    plan = gm.plan(op, left, right)
    for time in ("first", "second", "third"):
        yield f"{time} of a plan", plan(left, right)
        out = np.full_like(plan(left, right), 7)
        yield f"{time} of a plan into out", plan(left, right, out=out)


def part(op: str, whole: Any) -> Any:
    """Return what an operation gives of the whole product."""
    return {"matvec": whole[..., 0], "vecmat": whole[..., 0, :], "matmul": whole}[op]


def pairs(choice: random.Random) -> str:
    """Multiply any two dtypes; return what is wrong."""
    kinds = choice.choice([FLOATS[:2], FLOATS, INTEGERS])  # what BLAS has, and all
    first, other = choice.choice(kinds), choice.choice(kinds)
    dtypes = first, choice.choice((first, other))
    op, length = choice.choice(["matvec", "vecmat", "matmul"]), choice.choice((0, 1, 1, 2))
    m, n = choice.choice([1, 2, 3]), choice.choice([1, 2, 3])

    def drawn(shape: tuple[int, ...], dtype: str) -> Any:
        values = SPECIAL if dtype in FLOATS else (0, 1, 2, 3 if dtype[0] == "u" else -1)
        flat = [choice.choice(values) for _ in range(int(np.prod(shape)))]
        with np.errstate(all="ignore"):
            return np.array(flat, float).reshape(shape).astype(dtype)

    a, b = drawn((m, length), dtypes[0]), drawn((length, n), dtypes[1])
    told = f"{op} {dtypes} {a.tolist()} {b.tolist()}"
    try:
        found = called(op, a, b)
    except TypeError as error:
        return "" if "uint64" in dtypes and "no integer dtype" in str(error) else f"{told}: {error}"
    with np.errstate(all="ignore"):
        wanted = part(op, exact(a, b)).astype(found.dtype).astype(float)
    for way, other in (("a call", found), *met(op, a, b)):
        if not same(other, wanted):
            return f"{told} by {way}: {other.tolist()}, not {wanted.tolist()}"
    return ""


def options(choice: random.Random) -> str:
    """Multiply with several options, by function and by plan; return what is wrong."""
    dtype = choice.choice(["float32", "float16", "bfloat16", "float64", "int8", "int64"])
    wide = {"int8": "int64", "int64": "uint64", "float64": "float32"}.get(dtype, "float64")
    batch = choice.choice([(), (3,), (2, 1), (0,)])
    op = choice.choice(["matvec", "vecmat", "matmul"])
    rng = np.random.default_rng(choice.randrange(2**32))
    a = rng.integers(0, 3, (*batch, choice.choice([1, 5, 40]), 16)).astype(dtype)
    b = rng.integers(0, 3, (*choice.choice([batch, ()]), 16, choice.choice([1, 6, 20]))).astype(
        dtype
    )
    whole = dtype[0] == "i"  # of which precision and sums in halves say nothing
    given: dict[str, Any] = {
        "out_dtype": choice.choice([None, wide, "int32" if whole else "float32"]),
        "precision": choice.choice(["float32"] if whole else ["float32", "ieee", "tf32"]),
        "accumulate": choice.choice([None] if whole else [None, "float16"]),
        "batch_invariant": choice.random() < 0.5,
    }
    wanted = part(op, exact(a, b))
    told = f"{op} {dtype} {a.shape} {b.shape} {given}"
    try:
        found = called(op, a, b, **given)
    except (TypeError, ValueError) as error:
        meant = given["accumulate"] or given["precision"] != "float32"
        return "" if meant else f"{told}: {error}"
    if given["out_dtype"] not in (None, found.dtype.name) or not same(found, wanted):
        return f"{told}: {found.dtype} {found.tolist()}, not {wanted.tolist()}"
    room = np.zeros([2 * size + 1 for size in found.shape], found.dtype)
    gaps = room[tuple(slice(1, None, 2) for _ in found.shape)]
    for out in (np.empty_like(found), np.asfortranarray(np.empty_like(found)), gaps):
        if called(op, a, b, out=out, **given) is not out or not same(out, wanted):
            return f"{told} out {out.strides}: {out.tolist()}, not {wanted.tolist()}"
    return ""


def matrix(choice: random.Random, m: int, n: int) -> tuple[Any, Any]:
    """Return a quantised matrix whose weights doubles hold, and those."""
    rng, bits = np.random.default_rng(choice.randrange(2**32)), choice.choice([4, 8])
    group = choice.choice([None, -1, 4, 7, 16])
    made = gm.quantize(rng.integers(0, 2**bits, (m, n)).astype(np.float32), bits, group)
    scales = rng.choice([0.5, 1.0, 2.0], made.scales.shape).astype(np.float32)
    zeros = rng.integers(0, 2**bits, made.scales.shape).astype(np.float32)
    form: dict[str, Any] = {"shape": (m, n), "bits": bits, "group_size": group}
    if choice.random() < 0.3:
        form["perm"] = rng.permutation(n).astype(np.int32)
    Q = gm.QuantizedMatrix.from_parts(made.codes, scales, zeros, **form)
    raw = made.codes.reshape(m, -1)
    codes = raw if bits == 8 else np.stack([raw & 15, raw >> 4], -1).reshape(m, -1)
    which = np.zeros(n, int) if group in (None, -1) else np.arange(n) // group
    whole = group is None
    each = [part.reshape(1 if whole else m, -1)[:, which] for part in (scales, zeros)]
    weights = np.empty((m, n))
    weights[:, form.get("perm", np.arange(n))] = each[0] * (codes[:, :n].astype(float) - each[1])
    return Q, weights


def _saved(Q: Any, mmap: bool) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "q.safetensors")
        Q.save(path)
        return gm.QuantizedMatrix.load(path, mmap=mmap)


STEPS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "turned": (lambda Q: Q.T, lambda W: W.T),
    "saved": (lambda Q: _saved(Q, mmap=False), lambda W: W),
    "mapped": (lambda Q: _saved(Q, mmap=True), lambda W: W),
    "pickled": (lambda Q: pickle.loads(pickle.dumps(Q)), lambda W: W),
    "copied": (copy.deepcopy, lambda W: W),
    "mma16": (lambda Q: Q.to(layout="mma16"), lambda W: W),
    "row": (lambda Q: Q.to(layout="row"), lambda W: W),
    "cut": (lambda Q: Q[1:], lambda W: W[1:]),
    "cut across": (lambda Q: Q.T[:-1].T, lambda W: W[:, :-1]),
}


def sequences(choice: random.Random) -> str:
    """Change one quantised matrix step by step; return after which a product is wrong."""
    Q, W = matrix(choice, choice.randrange(3, 40), choice.randrange(3, 70))
    done: list[str] = []
    for _ in range(choice.randrange(1, 6)):
        name = choice.choice(list(STEPS))
        if (Q.T if name == "cut across" else Q).transposed and name.startswith("cut"):
            continue
        if min(W.shape) < 2:
            break
        done.append(name)
        Q, W = STEPS[name][0](Q), STEPS[name][1](W)
        wrong = _multiplied(Q, W, choice, choice.choice([1, 3, 18]))
        if wrong:
            return f"{done} {wrong}"
    return ""


def columns(choice: random.Random) -> str:
    """Multiply a quantised matrix by some columns of up to 4096; return what is wrong."""
    Q, W = matrix(choice, choice.randrange(1, 40), choice.randrange(1, 70))
    count = round(MOST_COLUMNS ** choice.random())
    return _multiplied(*choice.choice([(Q, W), (Q.T, W.T)]), choice, count)


def _multiplied(Q: Any, W: Any, choice: random.Random, count: int) -> str:
    if Q.layout != "row":  # that of a GPU's kernels, which no product on the host reads
        Q = Q.to(layout="row")
    rng, dtype = np.random.default_rng(choice.randrange(2**32)), choice.choice(FLOATS[:2])
    B = rng.integers(-2, 3, (W.shape[1], count)).astype(dtype)
    C = rng.integers(-2, 3, (count, W.shape[0])).astype(dtype)
    for name, found, wanted in (
        ("Q @ B", Q @ B, exact(W, B)),
        ("C @ Q", C @ Q, exact(C, W)),
        ("Q @ x", Q @ B[:, 0], exact(W, B[:, :1])[:, 0]),
        ("z @ Q", C[0] @ Q, exact(C[:1], W)[0]),
    ):
        if not same(found, wanted):
            worst = np.abs(np.asarray(found, float) - wanted).max()
            return f"{name} {Q!r} {dtype} by {count}: off by {worst}"
    return ""


AXES = {one.__name__: one for one in (pairs, options, sequences, columns)}


def found_wrong(axis: str, cases: int, seed: int) -> list[str]:
    """Return what is wrong among so many cases of an axis."""
    told = []
    for number in range(cases):
        try:
            wrong = AXES[axis](random.Random(f"{seed} {axis} {number}"))
        except Exception as error:  # of a call that is legal
            wrong = f"{type(error).__name__}: {error}"
        if wrong:
            told.append(f"{axis} {number} of seed {seed}: {wrong}")
    return told


def main() -> int:
    """Run the campaign and print a line for each axis; 1 where something was wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("axes", nargs="*", metavar="AXIS", help=", ".join(AXES))
    parser.add_argument("--cases", type=int, default=10_000, help="of each axis")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(10**6))
    parser.add_argument("--record", action="store_true", help="keep the outcome in the evidence")
    given = parser.parse_args()
    bad = 0
    for axis in given.axes or AXES:
        wrong = found_wrong(axis, given.cases, given.seed)
        bad += len(wrong)
        sys.stdout.write("".join(f"{line[:600]}\n" for line in wrong[:10]))
        sys.stdout.write(f"{axis}: {given.cases:,} cases, {len(wrong)} wrong\n")
        if given.record:
            command = (
                f"python tests/{Path(__file__).name} --cases {given.cases} --seed {given.seed}"
            )
            detail = (AXES[axis].__doc__ or "").partition(";")[0].lower()
            keep(f"corners: {axis}", given.cases, len(wrong), f"{command} {axis}", detail)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
