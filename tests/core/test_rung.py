"""The rung, its search space, and the ladder read from the directory."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from types import SimpleNamespace

import pytest

from children import printed
from gemmule.core import registry
from gemmule.core import rung as rung_module
from gemmule.core.caches import forget_plans, remembered
from gemmule.core.choice import duration
from gemmule.core.problem import DTYPES, FLOAT4_DTYPE, Problem, QuantSpec, result_dtype
from gemmule.core.registry import LADDERS, all_rungs, ladder
from gemmule.core.rung import (
    BACKENDS,
    Arithmetic,
    Constraint,
    CpuRung,
    CudaRung,
    LibraryRung,
    Rung,
    floats,
    integers,
    same,
)

PROBLEM = Problem("matvec", 10, 20)


def make(name: str = "r", after: str | None = None, **changes: object) -> Rung:
    values = {
        "params": {"p": (8, 4, 2), "q": (1, 2)},
        "constraints": (Constraint("p * q is at most 8", lambda pr, v: v["p"] * v["q"] <= 8),),
        "signatures": same("float32"),
        "op": "matvec",
        **changes,
    }
    return CpuRung(
        title="t",
        idea="i",
        source="s",
        after=after,
        name=name,
        folder="matvec",
        bind=lambda problem, params: lambda A, x, y: None,
        arithmetic=lambda p: Arithmetic("float32", lambda q, r: q.reduction),
        **values,
    )


def test_the_space_is_what_the_constraints_leave() -> None:
    space = list(make().space(PROBLEM))
    assert space == [
        {"p": 8, "q": 1},
        {"p": 4, "q": 1},
        {"p": 4, "q": 2},
        {"p": 2, "q": 1},
        {"p": 2, "q": 2},
    ]


def test_defaults_come_first_and_missing_values_are_filled() -> None:
    rung = make()
    assert rung.check_params(PROBLEM, None) == {"p": 8, "q": 1}
    assert rung.check_params(PROBLEM, {"p": 2}) == {"p": 2, "q": 1}
    assert rung.check_params(PROBLEM, {"q": 2}) == {"p": 4, "q": 2}  # 8 * 2 breaks the constraint


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"r": 1}, r"no parameter 'r'; it has: p, q"),
        ({"p": 3}, r"p=3 is outside its declared values \(8, 4, 2\)"),
        ({"p": "8"}, r"p='8' is outside"),
        ({"p": 8, "q": 2}, r"p \* q is at most 8"),
    ],
)
def test_wrong_parameters(params: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make().check_params(PROBLEM, params)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"op": "matmul", "k": 3}, "computes matvec, not matmul"),
        ({"a": "float64"}, "does not take dtypes float64 x float32 -> float32"),
        ({"layout_a": "col"}, "reads A as row, not col"),
    ],
)
def test_refusals(change: dict[str, object], words: str) -> None:
    assert make().refusal(PROBLEM) is None
    refusal = make().refusal(dataclasses.replace(PROBLEM, **change))
    assert refusal is not None
    assert words in refusal


def test_refusal_of_layout_b_quantisation_space_and_machine() -> None:
    product = Problem("matmul", 3, 4, k=5, layout_b="col")
    assert "reads B as row" in str(make(op="matmul", layouts_b=("row",)).refusal(product))
    assert "needs a quantised" in str(make(quantized=True).refusal(PROBLEM))
    never = (Constraint("never", lambda p, q: False),)
    assert "no parameters fit: never" in str(make(constraints=never).refusal(PROBLEM))
    assert make(available=lambda: "no such unit").refusal(PROBLEM) == "no such unit"


def test_a_rung_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        make().title = "other"  # type: ignore[misc]


@pytest.mark.parametrize("signatures", [floats(*DTYPES[:4]), integers(), same("complex64")])
def test_signature_helpers_agree_with_the_dtype_rules(signatures: tuple[tuple[str, ...]]) -> None:
    for a, b, out in signatures:
        assert result_dtype(a, b, out) == out
    assert len(set(signatures)) == len(signatures)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("op", LADDERS)
def test_a_ladder_is_shown_in_columns(op: str, backend: str) -> None:
    rungs, begins = ladder(op, backend), set[tuple[int, int]]()
    for rung, line in zip(rungs, repr(rungs).splitlines(), strict=True):
        assert line.split()[:2] == [rungs.numbers[rung.name], rung.name]
        assert line.endswith(f"  {rung.idea}")
        begins.add((line.index(f" {rung.name} ") + 1, len(line) - len(rung.idea)))
    widest = max(map(len, rungs.numbers.values())), max(map(len, rungs.numbers))
    assert begins == {(widest[0] + 2, sum(widest) + 4)}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("op", LADDERS)
def test_every_ladder_holds_what_the_directory_holds(op: str, backend: str) -> None:
    rungs = ladder(op, backend)
    assert rungs
    names = [(r.folder, r.name) for r in rungs]
    assert len(set(names)) == len(names)
    for rung in rungs:
        assert rung.path.is_file()
        assert rung.source_path.is_file()
        assert rung.backend == backend
        assert rung.title
        assert rung.idea
        assert rung.source
        assert rung.after is None or rung.after in [r.name for r in rungs[: rungs.index(rung)]]
    files = {
        (path.parent.parent.name, path.stem)
        for path in rung_module.RUNGS_FOLDER.glob(f"*/{backend}/*.py")
        if not path.stem.startswith("_")
    }
    assert {(r.folder, r.name) for r in all_rungs(backend)} == files


@pytest.mark.parametrize("backend", BACKENDS)
def test_declared_spaces_are_sound(backend: str) -> None:
    for rung in all_rungs(backend):
        for name, values in rung.params.items():
            assert values, f"{rung.folder}/{rung.name}: {name} has no values"
            assert len(set(values)) == len(values), f"{rung.folder}/{rung.name}: {name} repeats"
            assert all(type(value) in (int, str, bool) for value in values)
        for preset in getattr(rung, "presets", {}).values():
            assert set(preset) <= set(rung.params)
            assert all(value in rung.params[name] for name, value in preset.items())
        for a, b, out in rung.signatures:
            assert out in DTYPES
            codes, plain = (b, a) if rung.folder == "grouped" else (a, b)
            assert plain in DTYPES
            assert codes in DTYPES or (rung.quantized and codes in ("uint4", "uint8", FLOAT4_DTYPE))
        assert type(rung) in {"cpu": (CpuRung,), "cuda": (CudaRung, LibraryRung)}[backend]


def test_a_rung_in_the_folder_of_the_other_back_end_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = SimpleNamespace(__name__="gemmule.rungs.matvec.cuda.r", RUNG=make())
    monkeypatch.setattr(registry.importlib, "import_module", lambda name: module)
    with pytest.raises(TypeError, match=r"cuda\.r holds a CpuRung; its folder is cuda"):
        registry.rung_in.__wrapped__("matvec", "cuda", "r")


def test_ladder_refuses_unknown_names() -> None:
    with pytest.raises(ValueError, match="op is 'gemm'; it must be one of matvec"):
        ladder("gemm")
    with pytest.raises(ValueError, match="backend is 'tpu'; it must be one of cpu, cuda"):
        ladder("matvec", "tpu")


def test_loading_the_ladders_compiles_and_imports_nothing_heavy() -> None:
    code = (
        "import sys, gemmule\n"
        "for op in ('matvec', 'vecmat', 'matmul', 'quantized', 'grouped'):\n"
        "    gemmule.ladder(op, 'cpu'), gemmule.ladder(op, 'cuda')\n"
        "heavy = {'numba', 'torch', 'cuda', 'jax', 'scipy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    printed(code)


@pytest.mark.parametrize(("bits", "dtype"), [(4, "float16"), (4, "bfloat16"), (8, "bfloat16")])
def test_experts_that_stay_exact_are_rounded_by_no_rung(bits: int, dtype: str) -> None:
    """Also by none that a caller names: plans ask the arithmetic, a name only what a rung takes."""
    spec = QuantSpec(bits, 64, False, "row", "float16", False)
    sizes = {"m": 96, "n": 128, "k": 256, "batch": 2, "alignment": 16}
    dtypes = {"a": dtype, "b": f"uint{bits}", "out": dtype}
    problem = Problem("grouped", **sizes, **dtypes, quant=spec)  # type: ignore[arg-type]
    exact = replace(problem, quant=replace(spec, exact=True))
    taken = [one for one in all_rungs("cuda", ("grouped",)) if one.mismatch(problem) is None]
    rounding = [one for one in taken if one.arithmetic(problem).inputs == dtype]
    assert rounding
    assert {one for one in taken if one.mismatch(exact) is None} == {*taken} - {*rounding}


def test_a_time_has_the_unit_in_which_it_is_rounded() -> None:
    seconds = 1e-7, 9.9994e-4, 9.9996e-4, 0.99994, 0.99996
    assert [*map(duration, seconds)] == ["0.1 us", "999.9 us", "1.0 ms", "999.9 ms", "1.0 s"]


def test_what_is_remembered_is_bounded_as_asked_for() -> None:
    square = remembered(3)(lambda number: number**2)
    assert [square(i) for i in range(5)] == [0, 1, 4, 9, 16]
    assert square.cache_info()[2:] == (3, 3)
    forget_plans()
    assert square.cache_info().currsize == 0
