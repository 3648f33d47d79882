"""Products with an epilogue as `gemmule bench` and `gemmule hunt` measure them, on the host."""

from __future__ import annotations

import itertools

import pytest

from gemmule_lab.bench import epilogues
from gemmule_lab.bench.epilogues import Case

torch = pytest.importorskip("torch")
SMALL = (
    Case(24, 40, 64, "float32", "gelu"),
    Case(24, 40, 64, "float32", "gelu_tanh", ("C",)),
    Case(24, 40, 64, "float32", "silu", ("gate",), batch=3),
    Case(40, 24, 64, "float32", "relu", ("bias", "residual"), batch=2),
    Case(40, 24, 64, "float32", None, ("residual",)),
)


@pytest.mark.parametrize("case", SMALL, ids=Case.title)
def test_ways_agree_and_are_timed(case: Case) -> None:
    given = epilogues.Operands(case, None)
    ours, theirs = (given.ways()[name](0) for name in (epilogues.OURS, epilogues.PEER))
    assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-4)
    given.check(ours)
    for name, way in given.ways().items():
        assert torch.equal(way(0), way(len(given.sets))), name
        assert len(given.sets) > 1
        assert not torch.equal(way(0), way(1)), "each call has another set"
    with pytest.raises(ArithmeticError, match="wrong by"):
        given.check(ours + 0.01)
    records = epilogues.measured(case, None)
    assert [one["name"] for one in records] == [epilogues.PLAIN, epilogues.OURS, epilogues.PEER]
    assert {epilogues.case_of(one) for one in records} == {case}
    assert all(one["median"] > 0 and one["by"].startswith("a pass") for one in records)
    (row,) = epilogues.table("", [records]).rows
    assert row[0] == case.title()


def test_random_cases_are_those_of_their_seed() -> None:
    first, again = (list(itertools.islice(epilogues.random_cases(5), 60)) for _ in range(2))
    assert first == again != list(itertools.islice(epilogues.random_cases(6), 60))
    assert {one.dtype for one in first} == {"bfloat16", "float16", "float32", *epilogues.BYTES}
    assert {one.activation for one in first} == {None, "relu", "gelu", "gelu_tanh", "silu"}
    assert any(one.batch > 1 for one in first)
