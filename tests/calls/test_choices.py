"""Which rung and parameters plans take for dense products, held where an H200 measured them.

The figures behind each are in ``docs/notes``: a model that is refitted must not lose them, which is
to say that it expects no other to be quicker by more than it is mostly off.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gemmule.choose import eligible, known_best
from gemmule.core.canonical import Options, canonical
from gemmule.core.choice import Choice
from gemmule.core.operand import Form
from gemmule.core.problem import ITEMSIZE, Problem, QuantSpec
from gemmule.core.registry import all_rungs, rung_in
from gemmule.core.words import Bits
from gemmule.oracle.problems import make_problem
from proofs import proofs

H200 = replace(proofs.proof_machine(), units=132, read_bytes_per_s=4.5e12)


def product(rows: int, columns: int, dtype: str, *, across: bool = False) -> Problem:
    """Return A x of a packed row-major matrix, or the product across its rows."""
    alignment = 16
    while columns * ITEMSIZE[dtype] % alignment:
        alignment //= 2
    m, n = (columns, rows) if across else (rows, columns)
    layout = "col" if across else "row"
    return Problem(
        "matvec", m, n, a=dtype, b=dtype, out=dtype, layout_a=layout, alignment=alignment
    )


def chosen(problem: Problem) -> tuple[str, dict[str, Any]]:
    """Return the least expected suggestion: what a plan takes where all rungs are proved."""
    found = []
    for rung in all_rungs("cuda"):
        if rung.refusal(problem) is None and eligible(rung, problem):
            made = rung.suggest(problem, H200)
            if made is not None:
                params = dict(rung.check_params(problem, made.params))
                found.append((made.expected_s, rung.name, params))
    _, name, params = min(found, key=lambda one: one[0])
    return name, params


NEAR = 1.15


def behind(problem: Problem, rung: str, params: dict[str, Any]) -> float:
    """Return how much longer than the choice a rung with some parameters is expected to take."""
    folder = "matvec" if problem.layout_a == "row" else "vecmat"
    measured = rung_in(folder, "cuda", rung)
    assert measured.seconds is not None
    space = (p for p in measured.space(problem) if params.items() <= p.items())
    mine = min(measured.seconds(problem, one, H200) for one in space)
    name, taken = chosen(problem)
    best = rung_in(folder, "cuda", name)
    assert best.seconds is not None
    return mine / best.seconds(problem, taken, H200)


@pytest.mark.parametrize(
    ("rows", "columns", "dtype", "rung", "params"),
    [
        # A large block for each of few rows; small ones where large ones begin a second wave.
        (6, 1478, "float64", "streamed_rows", {"lanes": 256, "unroll": 4}),
        (54, 991, "float64", "streamed_rows", {"lanes": 256, "unroll": 2}),
        (677, 233160, "float64", "streamed_rows", {"lanes": 128, "unroll": 4}),
        (498, 72744, "float64", "streamed_rows", {"lanes": 256, "unroll": 4}),
        (890, 23745, "float16", "streamed_rows", {"lanes": 128, "unroll": 2}),
        # A wave of small blocks and a few: equal shares instead.
        (1280, 9705, "float64", "even_rows", {}),
        (1200, 45235, "float32", "even_rows", {}),
        # Lanes without work in a turn.
        (256783, 72, "float64", "streamed_rows", {"lanes": 8}),
        (5800, 1104, "float16", "streamed_rows", {"lanes": 32, "unroll": 2}),
        (38391, 575, "bfloat16", "streamed_rows", {"rows": 4}),
        (42215, 349, "float16", "streamed_rows", {"rows": 2}),
        # A thread a row of a few bytes, a block's shared memory for longer ones.
        (58846, 9, "float32", "thread_per_row", {}),
        (218999, 2, "float32", "staged_rows", {}),
        (21793, 19, "float64", "staged_rows", {}),
        (3858, 10, "float16", "streamed_rows", {"lanes": 32}),
    ],
)
def test_rungs_for_rows(
    rows: int, columns: int, dtype: str, rung: str, params: dict[str, Any]
) -> None:
    assert behind(product(rows, columns, dtype), rung, params) <= NEAR


@pytest.mark.parametrize(
    ("rows", "columns", "dtype", "rung", "params"),
    [
        # Narrow strips, one launch, instead of a few wide ones.
        (254, 10649, "float16", "block_columns", {"lanes": 8}),
        (471, 14551, "float16", "block_columns", {"lanes": 8}),
        # Sums of a few columns by lanes, not by 32 sums a thread.
        (8615, 17, "bfloat16", "split_columns", {"lanes": 8}),
        (1306, 45, "bfloat16", "split_columns", {"splits": 16}),
        # Two rows a thread by half as many blocks.
        (235536, 2, "float16", "staged_columns", {"rows": 2, "splits": 512}),
        # Unaligned doubles: two launches read faster.
        (594, 10271, "float64", "split_columns", {"lanes": 32}),
    ],
)
def test_rungs_for_columns(
    rows: int, columns: int, dtype: str, rung: str, params: dict[str, Any]
) -> None:
    assert behind(product(rows, columns, dtype, across=True), rung, params) <= NEAR


@pytest.mark.parametrize("rows", [4111, 8027, 17390])
def test_no_block_has_less_than_half_a_turn(rows: int) -> None:
    """A strip of few columns is split among no more blocks than have rows for their threads."""
    name, taken = chosen(product(rows, 20, "float32", across=True))
    assert name == "split_columns"
    assert 2 * rows >= taken["splits"] * 256 // taken["lanes"] * taken["unroll"]


@pytest.mark.parametrize(
    ("bits", "group", "n", "rung"),
    [
        (8, None, 4096, "int8_codes"),
        (4, None, 4096, "int4_codes"),
        (4, 128, 4096, "int4_codes"),
        (8, 48, 4096, "any_codes"),  # pieces of 16 codes would lie across groups
        (8, None, 4097, "any_codes"),  # rows that begin anywhere
    ],
)
def test_codes_that_lie_as_rows_have_a_fast_rung(
    bits: Bits, group: int | None, n: int, rung: str
) -> None:
    """As document 003 stores them: code by code they take four times as long as halves."""
    spec = QuantSpec(bits, group, True, "row", "float32", False)
    types = (f"uint{bits}", "float16", "float16")
    assert chosen(make_problem("matvec", 4096, n, 1, types, quant=spec))[0] == rung


def test_codes_of_experts_become_halves_for_many_tokens_of_each_only() -> None:
    rung = rung_in("grouped", "cuda", "wgmma_codes")
    spec = QuantSpec(4, 64, False, "row", "float16", False)
    about: dict[str, Any] = {"a": "bfloat16", "b": "uint4", "out": "float32", "quant": spec}
    about["batch"] = 8
    assert eligible(rung, Problem("grouped", 8 * 17, 512, 512, **about))
    assert not eligible(rung, Problem("grouped", 8 * 16, 512, 512, **about))
    about["quant"] = replace(spec, exact=True)
    assert not eligible(rung, Problem("grouped", 8 * 17, 512, 512, **about))


@pytest.mark.parametrize(
    ("library_us", "rounded_us", "exact_us", "taken"),
    [
        (9.0, 11.0, 40.0, "rounded_columns"),  # expected quicker, but not by far
        (9.0, 14.0, 40.0, "dequantise_library"),
        (9.0, 13.0, 13.5, "fragment_columns"),  # rounds no weight, and is near what was left
        (9.0, 9.0, 9.2, "fragment_columns"),
        (300.0, 310.0, 900.0, "dequantise_library"),  # of long products its time is known
    ],
)
def test_short_products_are_dequantised_only_where_that_is_quicker_by_far(
    library_us: float, rounded_us: float, exact_us: float, taken: str
) -> None:
    spec = QuantSpec(4, 64, True, "mma16", "float16", False)
    forms = Form((920, 802), (0, 0), "uint4", 16, spec), Form((802, 300), (1, 802), "bfloat16", 4)
    call = canonical("matmul", *forms, None, Options())
    times = {
        "dequantise_library": library_us,
        "rounded_columns": rounded_us,
        "fragment_columns": exact_us,
    }
    ranked = [
        Choice(call, call.problem, rung_in("quantized", "cuda", name), {}, H200, "", us * 1e-6)
        for name, us in times.items()
    ]
    ranked.sort(key=lambda one: one.expected_s or 0.0)
    assert known_best(ranked, H200).rung.name == taken
