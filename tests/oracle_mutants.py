"""Wrong products, each a mistake that kernels make, for the oracle to find.

Every mutant computes the right product with one thing broken. Run this file to write the kill
table into docs/oracle.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from checkout import ROOT
from gemmule.core.problem import INTEGERS, Problem, QuantSpec
from gemmule.core.rung import Arithmetic
from gemmule.oracle.inputs import Inputs, make_inputs
from gemmule.oracle.judge import Verdict, check
from gemmule.oracle.problems import make_problem
from gemmule.oracle.values import placements
from gemmule.quant.matrix import QuantizedMatrix

SEEDS = 12
DOCUMENT = ROOT / "docs" / "oracle.md"
WIDE = {name: name for name in ("float64", "complex64", "complex128", *INTEGERS)}


def wide(problem: Problem) -> str:
    return WIDE.get(problem.out, "float32")


def arithmetic(problem: Problem) -> Arithmetic:
    """What `correct` does: every sum in the wide dtype, in any order."""
    return Arithmetic(wide(problem), chain=lambda p, params: p.reduction)


def operands(i: Inputs) -> tuple[Any, Any]:
    """Return A ``(..., m, k)`` and B ``(..., k, n)`` in the dtype that sums are kept in."""
    problem = i.case.problem
    a = i.a.dequantize("float32") if isinstance(i.a, QuantizedMatrix) else i.a
    b = i.b[..., None] if problem.op == "matvec" else i.b
    return a.astype(wide(problem)), b.astype(wide(problem))


def store(i: Inputs, product: Any) -> Any:
    product = product[..., 0] if i.case.problem.op == "matvec" else product
    with np.errstate(over="ignore", invalid="ignore"):
        i.out[...] = product.astype(i.out.dtype)
    return i.out


def times(a: Any, b: Any) -> Any:
    with np.errstate(over="ignore", invalid="ignore"):
        return a @ b


def correct(i: Inputs) -> Any:
    return store(i, times(*operands(i)))


F32 = ("float32",) * 3
MV = make_problem("matvec", 37, 65, 1, F32)
MM = make_problem("matmul", 33, 34, 35, F32)
SQUARE = make_problem("matmul", 24, 24, 24, F32)
LONG = make_problem("matvec", 6, 5000, 1, F32)
BATCH = make_problem("matmul", 5, 6, 7, F32, batch=3)
HALF = make_problem("matvec", 17, 700, 1, ("float16",) * 3)
BRAIN = make_problem("matvec", 17, 700, 1, ("bfloat16",) * 3)
BIG_HALF = make_problem("matmul", 9, 10, 64, ("float32", "float32", "float16"))
FP8 = make_problem("matmul", 9, 10, 64, ("float8_e4m3fn", "float8_e4m3fn", "float32"))
DOUBLE = make_problem("matvec", 20, 100, 1, ("float64",) * 3)
COMPLEX = make_problem("matmul", 7, 8, 9, ("complex64",) * 3)
INT8 = make_problem("matmul", 17, 18, 200, ("int8", "int8", "int32"))
UINT8 = make_problem("matvec", 17, 66, 1, ("uint8", "int8", "int32"))
INT64 = make_problem("matvec", 9, 33, 1, ("int64",) * 3)
INT32 = make_problem("matvec", 9, 33, 1, ("int32", "int32", "int64"))
Q4_SPEC = QuantSpec(4, 16, True, "row", "float16", False)
Q4 = make_problem("matvec", 21, 75, 1, ("uint4", "float16", "float16"), quant=Q4_SPEC)
Q8 = make_problem(
    "matvec", 21, 75, 1, ("uint8", "float32", "float32"), quant=replace(Q4_SPEC, bits=8)
)
Q4_PERM = replace(Q4, quant=replace(Q4_SPEC, has_perm=True))


@dataclass(frozen=True)
class Mutant:
    """A broken product, the cases it is tried on, and the check that has to find it."""

    name: str
    run: Callable[[Inputs], Any]
    problems: tuple[Problem, ...]
    kinds: tuple[str, ...]
    found_by: str
    view: str = "contiguous"


MUTANTS: list[Mutant] = []
Run = Callable[[Inputs], Any]


def mutant(
    name: str,
    *problems: Problem,
    kinds: tuple[str, ...] = ("integers",),
    by: str = "equality",
    view: str = "contiguous",
) -> Callable[[Run], Run]:
    def register(run: Run) -> Run:
        MUTANTS.append(Mutant(name, run, problems, kinds, by, view))
        return run

    return register


def spoiled(change: Callable[[Any], None]) -> Run:
    """Return a product whose right result is changed afterwards."""

    def run(i: Inputs) -> Any:
        with np.errstate(all="ignore"):
            change(correct(i))
        return i.out

    return run


def without(part: Any) -> Run:
    """Return a product that leaves part of the sum out."""

    def run(i: Inputs) -> Any:
        a, b = operands(i)
        return store(i, times(np.delete(a, part, axis=-1), np.delete(b, part, axis=-2)))

    return run


def unwritten(part: Any) -> Run:
    """Return a product that leaves part of the output as it was."""

    def run(i: Inputs) -> Any:
        old = i.out[part].copy()
        correct(i)[part] = old
        return i.out

    return run


def rounded(v: Any, dtype: str) -> Any:
    """Round float32 to another dtype and back; tf32 keeps 10 bits behind the point."""
    if dtype != "tf32":
        with np.errstate(over="ignore"):
            return v.astype(dtype).astype(np.float32)
    return ((v.view(np.uint32) + 0x1000) & np.uint32(0xFFFFE000)).view(np.float32)


# Results changed after the fact.


def _scale_one(factor: float) -> Callable[[Any], None]:
    def change(out: Any) -> None:
        place = tuple(s // 2 for s in out.shape)
        out[place] = out[place] * factor

    return change


def _assign(place: Any, value: Any) -> Callable[[Any], None]:
    def change(out: Any) -> None:
        out[place] = value

    return change


def plus_one(out: Any) -> None:
    out[(-1,) * out.ndim] += 1


def _nan_to_zero(out: Any) -> None:
    out[np.isnan(out)] = 0


def _saturate(out: Any) -> None:
    np.clip(out, np.finfo(out.dtype).min, np.finfo(out.dtype).max, out=out)


def swap_rows(out: Any) -> None:
    out[..., [0, 1]] = out[..., [1, 0]]


SOME = (MV, MM, HALF, BRAIN, INT8, Q4, DOUBLE, COMPLEX, FP8)
mutant("last element + 1", *SOME)(spoiled(plus_one))
mutant("last element + 1, random data", MV, DOUBLE, kinds=("normal",), by="bound")(
    spoiled(plus_one)
)
mutant("all zeros", *SOME)(spoiled(_assign(..., 0)))
mutant("output never written", *SOME)(lambda i: i.out)
mutant("last row never written", MM, INT8, BATCH)(unwritten((..., slice(-1, None), slice(None))))
mutant("last column never written", MM, INT8, BATCH)(unwritten((..., slice(-1, None))))
mutant("one element x (1 + 1e-4)", MV, MM, kinds=("normal",), by="bound")(
    spoiled(_scale_one(1 + 1e-4))
)
mutant("one element x (1 + 2e-6)", MV, MM)(spoiled(_scale_one(1 + 2e-6)))
mutant("one element x (1 + 1e-12)", DOUBLE, kinds=("normal",), by="bound")(
    spoiled(_scale_one(1 + 1e-12))
)
mutant("one NaN among right elements", MV, MM, kinds=("normal",), by="nonfinite")(
    spoiled(_scale_one(np.nan))
)
mutant("one sign flipped", MV, INT8, HALF)(spoiled(_scale_one(-1)))
mutant("two rows swapped", MV, HALF, Q4)(spoiled(swap_rows))
mutant("NaN replaced by 0", MV, MM, HALF, kinds=("nonfinite",), by="nonfinite")(
    spoiled(_nan_to_zero)
)
mutant("infinity replaced by the largest number", MV, kinds=("nonfinite",), by="nonfinite")(
    spoiled(_saturate)
)


# Sums that miss or repeat something.
mutant("last term forgotten", *SOME)(without(-1))
mutant("first term forgotten", *SOME, LONG)(without(0))
mutant("one term of 5000 forgotten", LONG)(without(2500))
mutant("terms behind the last multiple of 8 forgotten", MV, HALF, BRAIN, Q4, INT8)(
    lambda i: without(np.arange(i.case.problem.reduction // 8 * 8 - 8, i.case.problem.reduction))(i)
)


@mutant("last split counted twice", MV, MM, LONG, INT8)
def _split_twice(i: Inputs) -> Any:
    a, b = operands(i)
    return store(i, times(a, b) + times(a[..., -8:], b[..., -8:, :]))


@mutant("stale tile: the second tile of A is the first again", MV, MM, HALF, INT8, Q8)
def _stale_tile(i: Inputs) -> Any:
    a, b = operands(i)
    a = a.copy()
    a[..., 16:32] = a[..., :16]
    return store(i, times(a, b))


@mutant("wrong slice of x", MV, HALF, Q8, UINT8)
def _wrong_slice(i: Inputs) -> Any:
    a, b = operands(i)
    return store(i, times(a, np.roll(b, 8, axis=-2)))


# Operands taken for something else.
mutant("B A instead of A B", SQUARE)(lambda i: store(i, times(*operands(i)[::-1])))
mutant("result transposed", SQUARE)(lambda i: store(i, times(*operands(i)).swapaxes(-1, -2)))
mutant("A transposed", SQUARE)(
    lambda i: store(i, times(operands(i)[0].swapaxes(-1, -2), operands(i)[1]))
)


@mutant("every batch entry uses the first A", BATCH)
def _first_batch(i: Inputs) -> Any:
    a, b = operands(i)
    return store(i, times(np.broadcast_to(a[:1], a.shape), b))


@mutant("batch entries in the wrong order", BATCH)
def _batch_order(i: Inputs) -> Any:
    return store(i, times(*operands(i))[::-1])


@mutant("leading stride ignored", MV, HALF, view="padded")
def _packed_rows(i: Inputs) -> Any:
    _, b = operands(i)
    m, n = i.a.shape
    packed = np.lib.stride_tricks.as_strided(i.a, (m, n), (n * i.a.itemsize, i.a.itemsize))
    return store(i, times(packed.astype(np.float32), b))


@mutant("element behind each row read, times 0", MV, kinds=("normal",), by="nonfinite")
def _past_row(i: Inputs) -> Any:
    a, b = operands(i)
    rows, cols = i.a.shape
    buffer = i.frames[2].buffer
    start = i.a.__array_interface__["data"][0] - buffer.__array_interface__["data"][0]
    behind = np.ndarray((rows, 1), np.float32, buffer, start + cols * 4, (i.a.strides[0], 4))
    return store(i, times(a, b) + behind * np.float32(0))


@mutant("pad columns read the next row, times 0", MV, MM, kinds=("nonfinite",), by="nonfinite")
def _pad_times_zero(i: Inputs) -> Any:
    a, b = operands(i)
    with np.errstate(invalid="ignore"):
        spill = a[..., 1:, :1] * np.float32(0)
    product = times(a, b)
    product[..., :-1, :] += spill
    return store(i, product)


@mutant("terms with x = 0 skipped", MV, MM, kinds=("nonfinite",), by="nonfinite")
def _skip_zeros(i: Inputs) -> Any:
    a, b = operands(i)
    with np.errstate(invalid="ignore"):
        terms = a[..., :, :, None] * b[..., None, :, :]
    return store(i, np.where(b[..., None, :, :] == 0, 0, terms).sum(axis=-2))


@mutant("beta = 0 multiplied with what lies in the output", MV, HALF, MM)
def _beta_zero(i: Inputs) -> Any:
    old = i.out.astype(np.float32) * np.float32(0)
    correct(i)
    i.out[...] = i.out + old.astype(i.out.dtype)
    return i.out


# Side effects.
@mutant("write behind the output", *SOME, by="side effect")
def _write_behind(i: Inputs) -> Any:
    out = correct(i)
    frame = i.frames[0]
    start = out.__array_interface__["data"][0] - frame.buffer.__array_interface__["data"][0]
    frame.buffer[start + out.nbytes] = 0
    return out


@mutant("write between a strided output's elements", MV, HALF, by="side effect", view="strided")
def _write_between(i: Inputs) -> Any:
    out = correct(i)
    start = out.__array_interface__["data"][0] - i.frames[0].buffer.__array_interface__["data"][0]
    i.frames[0].buffer[start + out.itemsize] = 0
    return out


@mutant("input modified", MV, MM, INT8, Q4, by="side effect")
def _input_modified(i: Inputs) -> Any:
    out = correct(i)
    i.b.flat[0] = -1 if i.b.flat[0] != -1 else 1
    return out


@mutant("transposed in place, left so", SQUARE, by="side effect")
def _left_transposed(i: Inputs) -> Any:
    out = correct(i)
    i.a[...] = i.a.T.copy()
    return out


@mutant("result of another dtype", MV, by="form")
def _other_dtype(i: Inputs) -> Any:
    return correct(i).astype(np.float64)


@mutant("result of another shape", SQUARE, by="form")
def _other_shape(i: Inputs) -> Any:
    return correct(i)[:-1]


# Arithmetic that is worse than promised.
def _inputs_rounded(dtype: str) -> Run:
    return lambda i: store(i, times(*(rounded(v, dtype) for v in operands(i))))


def accumulated(dtype: str) -> Run:
    def run(i: Inputs) -> Any:
        a, b = (v.astype(dtype) for v in operands(i))
        total = np.zeros(times(*operands(i)).shape, dtype)
        for k in range(a.shape[-1]):
            total = total + a[..., k, None] * b[..., k, None, :]
        return store(i, total)

    return run


mutant("TF32 where float32 was promised", MV, MM, kinds=("normal",), by="bound")(
    _inputs_rounded("tf32")
)
mutant("operands rounded to bfloat16", MV, MM, kinds=("normal",), by="bound")(
    _inputs_rounded("bfloat16")
)
mutant("operands rounded to float16", MV, MM, kinds=("normal", "scaled"), by="bound")(
    _inputs_rounded("float16")
)
mutant("sums in float16", HALF, kinds=("normal",), by="bound")(accumulated("float16"))
mutant("sums in bfloat16", BRAIN, kinds=("normal",), by="bound")(accumulated("bfloat16"))
mutant("float64 computed in float32", DOUBLE, kinds=("normal",), by="bound")(
    lambda i: store(i, times(*(v.astype(np.float32) for v in operands(i))))
)


@mutant("error relative to the row, not to the element", MM, kinds=("scaled",), by="bound")
def _normwise(i: Inputs) -> Any:
    a, b = operands(i)
    unit = np.exp2(np.ceil(np.log2(np.abs(a).max(axis=-1, keepdims=True))) - 24)
    return store(i, times(np.rint(a / unit) * unit, b))


@mutant("result truncated to float16", BIG_HALF, kinds=("normal",), by="bound")
def _truncated(i: Inputs) -> Any:
    total = times(*operands(i))
    near = total.astype(np.float16)
    over = np.abs(near.astype(np.float32)) > np.abs(total)
    near = np.where(over, np.nextafter(near, np.float16(0)), near)
    i.out[...] = near[..., 0] if i.case.problem.op == "matvec" else near
    return i.out


# Integers.
def _through(dtype: str) -> Run:
    return lambda i: store(i, times(*operands(i)).astype(dtype))


@mutant("products wrap in int8", INT8)
def _int8_products(i: Inputs) -> Any:
    return store(i, (i.a[:, :, None] * i.b[None]).sum(axis=1, dtype=np.int32))


@mutant("uint8 read as int8", UINT8)
def _signed_bytes(i: Inputs) -> Any:
    return store(i, times(i.a.view(np.int8).astype(np.int32), operands(i)[1]))


mutant("sums wrap in int16", INT8)(_through("int16"))
mutant("64-bit sums wrap in int32", INT32)(_through("int32"))


@mutant("64-bit integers through float64", INT64)
def _through_float(i: Inputs) -> Any:
    a, b = (v.astype(np.float64) for v in operands(i))
    with np.errstate(invalid="ignore"):
        return store(i, np.fmod(times(a, b), 2.0**63).astype(np.int64))


@mutant("A conjugated", COMPLEX)
def _conjugated(i: Inputs) -> Any:
    a, b = operands(i)
    return store(i, times(a.conj(), b))


# Quantised matrices.
def _requantised(i: Inputs, **parts: Any) -> Any:
    q = replace(i.a, **parts)
    return store(i, times(q.dequantize("float32"), operands(i)[1]))


def _per_column(q: QuantizedMatrix, values: Any) -> Any:
    return np.repeat(values, q.group_size, axis=1)[:, : q.shape[1]].astype(np.float32)


@mutant("code - zero wraps in int8", Q8)
def _zero_wraps(i: Inputs) -> Any:
    q = i.a
    steps = q.codes.view(np.int8) - _per_column(q, q.zeros).astype(np.uint8).view(np.int8)
    return store(i, times(steps.astype(np.float32) * _per_column(q, q.scales), operands(i)[1]))


@mutant("nibbles read as two's complement", Q4)
def _signed_nibbles(i: Inputs) -> Any:
    q = i.a
    codes = np.stack([q.codes & 15, q.codes >> 4], axis=-1).reshape(q.shape[0], -1)
    codes = (codes[:, : q.shape[1]].astype(np.float32) + 8) % 16 - 8
    weights = (codes - _per_column(q, q.zeros)) * _per_column(q, q.scales)
    return store(i, times(weights, operands(i)[1]))


@mutant("nibbles swapped", Q4)
def _swapped_nibbles(i: Inputs) -> Any:
    return _requantised(i, codes=(i.a.codes << 4) | (i.a.codes >> 4))


mutant("scale of the next group", Q4, Q8)(
    lambda i: _requantised(i, scales=np.roll(i.a.scales, -1, axis=1))
)
mutant("zero point of the next group", Q4, Q8)(
    lambda i: _requantised(i, zeros=np.roll(i.a.zeros, -1, axis=1))
)
mutant("zero points forgotten", Q4, Q8)(lambda i: _requantised(i, zeros=np.zeros_like(i.a.zeros)))
mutant("last, shorter group dropped", Q4, Q8)(without(np.arange(64, 75)))
mutant("permutation forgotten", Q4_PERM)(lambda i: _requantised(i, perm=None))
mutant("permutation applied backwards", Q4_PERM)(
    lambda i: _requantised(i, perm=np.argsort(i.a.perm).astype(np.int32))
)


@mutant("odd column of the last byte forgotten", Q4)
def _tail_nibble(i: Inputs) -> Any:
    return without(-1)(i)


@mutant("scales of bfloat16 precision", Q8, kinds=("normal",), by="bound")
def _coarse_scales(i: Inputs) -> Any:
    return _requantised(i, scales=rounded(i.a.scales.astype(np.float32), "bfloat16"))


def seeds(problem: Problem, kind: str) -> range:
    """Return the seeds of a trial; of the single non-finite elements every fifth."""
    return range(0, len(placements(problem)), 5) if kind == "nonfinite" else range(SEEDS)


def trial(m: Mutant, run: Run) -> list[Verdict]:
    """Judge `run` on every case of a mutant."""
    verdicts = []
    for problem in m.problems:
        for kind in m.kinds:
            for seed in seeds(problem, kind):
                inputs = make_inputs(problem, kind, seed, m.view)
                verdicts.append(check(inputs, arithmetic(problem), {}, run(inputs)))
    return verdicts


def kill_table() -> str:
    """Return the kill table in Markdown: mutant, check that found it, cases that did."""
    killed = 0
    lines = ["| mutant | found by | cases that find it |", "|---|---|---|"]
    for m in MUTANTS:
        verdicts = trial(m, m.run)
        kinds = sorted({v.kind for v in verdicts if not v.ok})
        found = sum(not v.ok for v in verdicts)
        lines.append(f"| {m.name} | {', '.join(kinds)} | {found} of {len(verdicts)} |")
        killed += bool(kinds)
    return "\n".join([*lines, "", f"{killed} of {len(MUTANTS)} mutants killed."])


BEGIN, END = "<!-- kill table: begin -->", "<!-- kill table: end -->"


def written_table() -> str:
    text = DOCUMENT.read_text(encoding="utf-8")
    return text.split(BEGIN)[1].split(END)[0].strip()


def main() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    DOCUMENT.write_text(f"{before}{BEGIN}\n{kill_table()}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
