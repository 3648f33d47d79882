"""Every CPU rung against the oracle: signatures, layouts, edge sizes, and its whole space.

Small integers first (equality), then numbers whose sums round or cancel (the derived bound), then
one NaN or infinity at a time (the IEEE map). Rungs are called through the public functions.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

import gemmule as gm
from gemmule import backends
from gemmule.arrays.interop import unwrap
from gemmule.core.caches import forget_plans
from gemmule.core.canonical import Options, canonical
from gemmule.core.host_rates import HostRates
from gemmule.core.problem import FLOAT4_DTYPE, INTEGERS, Problem, QuantSpec, numpy_dtype
from gemmule.core.registry import all_rungs
from gemmule.core.rung import Rung, Signature, _no_suggestion
from gemmule.oracle.inputs import Inputs, make_inputs
from gemmule.oracle.judge import Verdict, check
from gemmule.oracle.problems import float4_spec, make_problem, nonfinite_cases
from gemmule.rungs.matmul.cpu import _packed_blocks, _packed_operands, _tile, blas_upcast, packed
from gemmule.rungs.matvec.cpu import prefetched_rows
from gemmule.rungs.vecmat.cpu import panel_threads, panels

RUNGS = [
    rung
    for rung in all_rungs("cpu")
    if rung.available() is None and rung.folder != "grouped"  # which takes offsets: test_grouped
]
FUNCTIONS = {"matvec": gm.matvec, "matmul": gm.matmul}

MATVEC_SIZES = [
    (0, 3), (3, 0), (1, 1), (2, 1), (1, 33), (2, 3), (5, 8), (31, 33), (64, 65), (129, 17),
    (17, 129), (3, 1003), (259, 63),
]  # fmt: skip
MATMUL_SIZES = [
    (0, 3, 2), (3, 0, 2), (3, 2, 0), (1, 1, 1), (2, 3, 5), (8, 8, 8), (31, 17, 33), (65, 9, 64),
    (5, 130, 7), (33, 2, 257), (129, 5, 16),
]  # fmt: skip
AWKWARD = {"matvec": (67, 131, 1), "matmul": (37, 19, 67)}
BATCHES = [(2, False, False), (3, True, False), (3, False, True)]


def name_of(rung: Rung) -> str:
    return f"{rung.folder}/{rung.name}"


# Large enough for two threads, whose sums are then added: a few long rows, and long columns.
SHARED = [(3, 12007, 1), (259, 517, 1)]


def sizes(rung: Rung) -> list[tuple[int, int, int]]:
    if rung.op != "matvec":
        return MATMUL_SIZES
    return [*((m, n, 1) for m, n in MATVEC_SIZES), *([] if rung.quantized else SHARED)]


def specs(rung: Rung, signature: Signature) -> list[QuantSpec | None]:
    if not rung.quantized:
        return [None]
    bits = 4 if signature[0] == "uint4" else 8
    kinds = "int8" if "int8" in rung.name else "float"
    if signature[0] == FLOAT4_DTYPE:
        pairs = itertools.product(range(2), (False, True))
        found = [float4_spec(pick, transposed=turned) for pick, turned in pairs]
        return [replace(one, activations=kinds) for one in found]
    groups = [
        (16, True, "float32"),
        (-1, False, "float16"),
        (3, True, "bfloat16"),
        (128, True, "float16"),
        (None, True, "float32"),
        (32, False, "float32"),
    ]
    if rung.op == "matmul":  # a kernel for each number of columns: fewer quantisations
        groups = groups[:2]
    return [
        QuantSpec(bits, group, zeros, "row", scale, turned, activations=kinds)
        for group, zeros, scale in groups
        for turned in (False, True)
    ]


def taken_specs(rung: Rung, signature: Signature, m: int, n: int, k: int) -> list[QuantSpec | None]:
    """Return the quantisations that the rung takes at these sizes."""
    layout = next(one for one in rung.layouts if one != "strided")
    return [
        spec
        for spec in specs(rung, signature)
        if rung.refusal(make_problem(rung.op, m, n, k, signature, layout_a=layout, quant=spec))
        is None
    ]


def problems(rung: Rung, signature: Signature) -> Iterator[Problem]:
    """Yield every layout at every size, and batches at one size."""
    layouts_b = rung.layouts_b if rung.op == "matmul" else ("row",)
    pairs = [(a, b) for a in rung.layouts if a != "strided" for b in layouts_b if b != "strided"]
    for spec in specs(rung, signature):
        for layout_a, layout_b in pairs:
            options: dict[str, Any] = {"layout_a": layout_a, "layout_b": layout_b, "quant": spec}
            for m, n, k in sizes(rung):
                yield make_problem(rung.op, m, n, k, signature, **options)
            for batch, shared_a, shared_b in BATCHES:
                if spec is None or not shared_b:
                    options |= {"batch": batch, "shared_a": shared_a or spec is not None}
                    yield make_problem(rung.op, 5, 33, 9, signature, shared_b=shared_b, **options)


def usual_signature(rung: Rung) -> Signature:
    """Return a signature with float32 beside float32 or codes, else the rung's first."""
    beside = ("float32", "uint4", "uint8")
    found = (s for s in rung.signatures if s[0] in beside and s[1] == "float32")
    return next(found, rung.signatures[0])


def takes(rung: Rung, inputs: Inputs) -> bool:
    """Whether the rung takes the problem that the public function will see in these operands."""
    problem = inputs.case.problem
    activations = "float" if problem.quant is None else problem.quant.activations
    options = Options(out_dtype=problem.out, literal=True, activations=activations)
    forms = unwrap(inputs.a, "a").form, unwrap(inputs.b, "b").form
    return rung.refusal(canonical(rung.op, *forms, None, options).problem) is None


def judged(rung: Rung, inputs: Inputs, params: Mapping[str, Any] | None = None) -> Verdict:
    problem = inputs.case.problem
    options: dict[str, Any] = {"rung": rung.name, "params": params, "out_dtype": problem.out}
    if problem.quant is not None:
        options["activations"] = problem.quant.activations
    result = FUNCTIONS[rung.op](inputs.a, inputs.b, out=inputs.out, **options)
    assert result is inputs.out
    used = params if params is not None else rung.check_params(problem, None)
    return check(inputs, rung.arithmetic(problem), used, inputs.out)


def failures(rung: Rung, cases: Iterator[Inputs]) -> tuple[int, list[str]]:
    count, found = 0, []
    for inputs in cases:
        if takes(rung, inputs):
            count += 1
            verdict = judged(rung, inputs)
            if not verdict.ok:
                found.append(f"{inputs.case}: {verdict.kind}: {verdict.text}")
    return count, found


def every_case(rung: Rung, signature: Signature) -> Iterator[Inputs]:
    """Yield integers at every problem; the other kinds and views at some of them."""
    views = ["contiguous", "padded", "sliced"]
    if "row" in rung.layouts:  # other strides are copied to rows
        views += ["strided", "reversed"]
    rounds = signature[2] not in INTEGERS and not signature[2].startswith("complex")
    for seed, problem in enumerate(problems(rung, signature)):
        yield make_inputs(problem, "integers", seed, views[seed % len(views)])
        if rounds:
            kind = ("normal", "cancel", "scaled")[seed % 3]
            if kind == "scaled" and problem.quant is not None:
                kind = "normal"
            yield make_inputs(problem, kind, seed, views[seed % 2])


def marks(rung: Rung, signature: Signature) -> list[pytest.MarkDecorator]:
    """Every signature is a kernel to compile: those that mix dtypes otherwise are for `soak`."""
    a, b, out = signature
    always = a in ("float32", "float16", "bfloat16", "int8", "int64") and a == b
    always = always and out in (a, "int32")
    first = signature == rung.signatures[0]
    common = rung.quantized and b == "float32"
    return [] if always or first or common else [pytest.mark.soak]


SIGNATURES = [
    pytest.param(
        rung, signature, id=f"{name_of(rung)}-{'-'.join(signature)}", marks=marks(rung, signature)
    )
    for rung in RUNGS
    for signature in rung.signatures
]


@pytest.mark.parametrize(("rung", "signature"), SIGNATURES)
def test_every_signature(rung: Rung, signature: Signature) -> None:
    count, found = failures(rung, every_case(rung, signature))
    forget_plans()
    assert count >= 10
    assert not found, "\n".join(found[:10])


MIXED = [rung for rung in RUNGS if ("float16", "float32", "float32") in rung.signatures]


@pytest.mark.parametrize("rung", MIXED, ids=name_of)
def test_halves_beside_float32_in_shares(rung: Rung) -> None:
    signature = ("float16", "float32", "float32")
    layout = next(one for one in rung.layouts if one != "strided")
    shapes = SHARED if rung.op == "matvec" else [(259, 130, 517), (1030, 2, 130)]
    made = [make_problem(rung.op, *size, signature, layout_a=layout) for size in shapes]
    count, found = failures(rung, (make_inputs(one, "integers", 1) for one in made))
    forget_plans()
    assert count > 0
    assert not found, "\n".join(found)


@pytest.mark.parametrize("rung", RUNGS, ids=name_of)
def test_one_nan_or_infinity_at_a_time(rung: Rung) -> None:
    signature = usual_signature(rung)
    if signature[2] in INTEGERS:
        pytest.fail("a rung without a float signature has no place here")
    layout_a = rung.layouts[0]
    count, found = 0, []
    m, n, k = (9, 37, 1) if rung.op == "matvec" else (9, 6, 37)
    for spec in taken_specs(rung, signature, m, n, k)[:2]:
        problem = make_problem(rung.op, m, n, k, signature, layout_a=layout_a, quant=spec)
        cases = (make_inputs(c.problem, c.kind, c.seed, c.view) for c in nonfinite_cases(problem))
        more, wrong = failures(rung, cases)
        count, found = count + more, found + wrong
    forget_plans()
    assert count >= 4
    assert not found, "\n".join(found[:10])


@pytest.mark.parametrize("rung", RUNGS, ids=name_of)
def test_the_whole_declared_space(rung: Rung) -> None:
    signature = usual_signature(rung)
    m, n, k = AWKWARD[rung.op]
    count = 0
    for spec in taken_specs(rung, signature, m, n, k)[:2]:
        for layout in rung.layouts:
            view = "strided" if layout == "strided" else "contiguous"
            laid = "row" if layout == "strided" else layout
            problem = make_problem(rung.op, m, n, k, signature, layout_a=laid, quant=spec)
            for params in rung.space(replace(problem, layout_a=layout)):
                inputs = make_inputs(problem, "normal", count, view)
                if takes(rung, inputs):
                    verdict = judged(rung, inputs, params)
                    assert verdict.ok, f"{params} {layout}: {verdict.text}"
                    count += 1
    forget_plans()
    assert count > 0


def own_constants(rung: Rung) -> list[int]:
    """Return the block sizes of a rung: its parameters' values and its modules' constants."""
    todo = [importlib.import_module(f"gemmule.rungs.{rung.folder}.cpu.{rung.name}")]
    values = [value for choices in rung.params.values() for value in choices]
    for module in todo:
        for name, value in vars(module).items():
            if name.strip("_").isupper():
                values += value if isinstance(value, tuple) else (value,)
            home = value if isinstance(value, ModuleType) else inspect.getmodule(value)
            if home is not None and home not in todo and home.__name__.startswith(LOCAL):
                todo.append(home)
    whole = {v for v in values if isinstance(v, int) and not isinstance(v, bool)}
    return sorted(v for v in whole if 7 < v <= LARGEST)


LARGEST = 8192
LOCAL = ("gemmule.rungs.", "gemmule.backends.cpu.simd", "gemmule.backends.cpu.amx")


@pytest.mark.parametrize("rung", RUNGS, ids=name_of)
def test_sizes_around_its_own_blocks(rung: Rung) -> None:
    """One below, at, and one above every block size, along each axis; the others stay small.

    And blocks of every size several times along two axes at once.
    """
    signature = usual_signature(rung)
    sizes = sorted({c + side for c in own_constants(rung) for side in (-1, 0, 1)})
    large = [size for size in sizes if size < 512][-1:]
    axes = [(0, 3, 1), (5, 0, 1)] if rung.op == "matvec" else [(0, 3, 5), (3, 0, 5), (3, 5, 0)]
    pairs = [(0, 0, 1)] if rung.op == "matvec" else [(0, 3, 0), (3, 0, 0), (0, 0, 5)]
    count, found = 0, []
    for axis in (*axes, *pairs):
        for seed, size in enumerate(sizes if axis in axes else large):
            m, n, k = (size if one == 0 else one for one in axis)
            layout = [one for one in rung.layouts if one != "strided"][seed % 2 :][:1]
            specs = taken_specs(rung, signature, m, n, k)[:1]
            for spec, layout_a in itertools.product(specs, layout or rung.layouts[:1]):
                problem = make_problem(rung.op, m, n, k, signature, layout_a=layout_a, quant=spec)
                more, wrong = failures(rung, iter([make_inputs(problem, "integers", seed)]))
                count, found = count + more, found + wrong
    forget_plans()
    assert count >= len(sizes)
    assert not found, "\n".join(found[:10])


# (m, n, threads) -> rows and columns of a block, for tiles of 12 x 32 and at most 1024 columns.
PACKED_BLOCKS = [
    ((0, 0, 1), (12, 32)),
    ((480, 1024, 1), (480, 1024)),
    ((2048, 2048, 1), (1032, 1024)),  # one thread packs B for more rows
    ((480, 1024, 8), (480, 128)),  # the columns are cut for eight threads
    ((480, 64, 8), (60, 64)),  # two tiles of columns: the rows are cut instead
    ((3, 40, 4), (12, 64)),  # one tile of rows
    ((481, 1024, 2), (252, 1024)),
    ((13, 5000, 3), (24, 864)),
    ((5000, 5000, 2), (456, 1024)),  # blocks enough for two threads
    ((1440, 3072, 2), (480, 1024)),  # three by three, and that is enough
]


@pytest.mark.parametrize(("given", "block"), PACKED_BLOCKS)
def test_packed_rungs_own_blocks_are_shared_evenly(
    given: tuple[int, int, int], block: tuple[int, int], fault: Callable[..., Any]
) -> None:
    m, n, threads = given
    fault(packed, "register_tile", lambda sound, *_: SimpleNamespace(rows=12, columns=32))
    assert packed.block_size(m, n, "float32", 1024, threads) == block


def forget_tiles() -> None:
    """Forget what was made for the register tiles known so far."""
    forget_plans()
    for module in (_tile, packed, _packed_blocks, _packed_operands):
        for made in vars(module).values():
            if hasattr(made, "cache_clear"):
                made.cache_clear()


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_packed_tiles_for_registers_of_another_width(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (rung,) = (one for one in RUNGS if one.name == "packed")
    other = {32: 64, 64: 32}[_tile.vector_bytes()]  # the compiler makes two of one, or leaves half
    with monkeypatch.context() as patch:
        patch.setattr(_tile, "vector_bytes", lambda: other)
        forget_tiles()
        assert _tile.register_tile("float32", narrow=False).lanes == other // 4
        for n, (layout_a, layout_b) in itertools.product((5, 75), (("row", "col"), ("col", "row"))):
            problem = make_problem(
                "matmul", 53, n, 300, (dtype,) * 3, layout_a=layout_a, layout_b=layout_b
            )
            verdict = judged(rung, make_inputs(problem, "integers", n, "padded"))
            assert verdict.ok, verdict.text
    forget_tiles()


@pytest.mark.parametrize("ready", [False, True])
@pytest.mark.parametrize("dtypes", [("float16",) * 2, ("bfloat16",) * 2, ("bfloat16", "float32")])
def test_prefetched_rows_own_ways_to_meet_x(dtypes: tuple[str, str], ready: bool) -> None:
    if prefetched_rows.RUNG.available() is not None:
        pytest.skip("no registers of 16 lanes")
    rng = np.random.default_rng(8)
    for m, n in [(9, 64), (70, 333), (5, 31), (4, 4097)]:
        A = rng.integers(-3, 4, (m, n)).astype(numpy_dtype(dtypes[0]))
        x = rng.integers(-3, 4, n).astype(numpy_dtype(dtypes[1]))
        plan = gm.plan("matvec", A, x, rung="prefetched_rows", params={"ready": ready})
        exact = A.astype(np.float64) @ x.astype(np.float64)
        for _ in range(3):
            assert np.array_equal(plan(A, x), exact.astype(numpy_dtype(plan.problem.out)))


def test_panels_own_blocks_are_whole_cache_lines() -> None:
    widths = [*panels.WIDTHS, *panel_threads.RUNG.params["width"]]
    assert len(set(panels.WIDTHS)) == len(panels.WIDTHS)
    assert all(512 <= width <= 4096 and width % 64 == 0 for width in widths)


@pytest.mark.parametrize("k", [1, 7, 8, 9, 16, 17])
def test_blas_upcast_own_blocks_of_integers_are_all_summed(
    k: int, limit: Callable[..., None]
) -> None:
    limit(blas_upcast, EXACT_DEPTH=8)
    rng = np.random.default_rng(k)
    A, B = (rng.integers(-9, 9, shape).astype(np.int16) for shape in ((3, k), (k, 5)))
    C = np.zeros((3, 5), np.int64)
    problem = make_problem("matmul", 3, 5, k, ("int16", "int16", "int64"))
    blas_upcast.bind(problem, {"block": 2})(A, B, C)
    np.testing.assert_array_equal(C, A.astype(np.int64) @ B)


@pytest.mark.parametrize("rung", RUNGS, ids=name_of)
def test_expected_times_grow_with_the_problem(rung: Rung) -> None:
    """Where a rung proposes itself, which may be for some sizes or layouts only."""
    rates = HostRates.default(2)
    machine = replace(backends.get("cpu").machine("cpu"), units=2, rates=rates)
    signature = usual_signature(rung)
    families = [[(n, n, n) for n in (96, 480, 2400)], [(2, n, n) for n in (80_000, 800_000)]]
    families.append([(n, 2, n) for n in (96, 480, 2400)])
    found = 0
    for layout, batch, family in itertools.product(rung.layouts, (1, 3), families):
        expected = [0.0]
        for size in family:
            spec = next(iter(taken_specs(rung, signature, *size)), None)
            options = {"layout_a": layout, "quant": spec, "batch": batch, "shared_a": bool(spec)}
            problem = make_problem(rung.op, *size, signature, **options)
            made = None if rung.refusal(problem) else rung.suggest(problem, machine)
            if made is not None:
                rung.check_params(problem, made.params)
                expected.append(made.expected_s)
        assert all(less < more for less, more in itertools.pairwise(expected)), expected
        found += len(expected) - 1
    assert found or rung.suggest is _no_suggestion


@pytest.mark.parametrize("rung", [panels.RUNG, packed.RUNG], ids=["panels", "packed"])
def test_expected_times_of_one_core(rung: Rung) -> None:
    """No core besides makes it faster, and no core computes faster than its FMAs."""
    rates = HostRates.default(1)
    cores = replace(backends.get("cpu").machine("cpu"), units=1, rates=rates)
    more = replace(cores, units=8, read_bytes_per_s=8 * cores.read_bytes_per_s)
    for n in (256, 1024, 6000):
        problem = make_problem(rung.op, n, n, n, ("float32",) * 3, layout_a=rung.layouts[0])
        made = [rung.suggest(problem, machine) for machine in (cores, more)]
        assert made[0] == made[1]
        assert made[0] is not None
        products = problem.m * problem.n * (problem.k if rung.op == "matmul" else 1)
        assert made[0].expected_s >= products / (16 * rates.fma)
        if rung.op == "matmul":
            assert made[0].expected_s >= products / rates.fma


def test_expected_times_of_panels_count_the_columns_of_each() -> None:
    machine = backends.get("cpu").machine("cpu")
    few, many = (
        panels.columns_s(
            make_problem("matvec", blocks * panels.WIDTHS[0], 9, 1, ("float32",) * 3), machine
        )
        for blocks in (1, 8)
    )
    assert many == 8 * few > 0


def test_the_judge_sees_a_rung_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """One element of the last row off, at one size only, must fail the same loop."""
    rung = next(r for r in RUNGS if r.name == "scalar_loop")
    bind = rung.bind
    assert bind is not None

    def wrong(problem: Problem, params: Mapping[str, Any]) -> Any:
        core = bind(problem, params)

        def run(A: Any, x: Any, y: np.ndarray[Any, Any]) -> None:
            core(A, x, y)
            if y.shape == (31,):
                y[-1] += 1

        return run

    forget_plans()
    module = importlib.import_module("gemmule.choose")
    for name in ("all_rungs", "rungs_for"):
        monkeypatch.setattr(module, name, lambda *of, **which: (replace(rung, bind=wrong),))
    _, found = failures(rung, every_case(rung, ("float32", "float32", "float32")))
    forget_plans()
    assert len(found) == 2 * len(set(rung.layouts) - {"strided"})  # integers and one other kind
    assert all("m=31" in text for text in found)
