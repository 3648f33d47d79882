"""Looking among random products for slow ones: what is drawn, what is kept and shown."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gemmule.core.problem import ITEMSIZE, Problem
from gemmule_lab.bench import grouped, hunt, suites
from gemmule_lab.harness.host import HostBench
from gemmule_lab.harness.operands import host_sets, in_format
from gemmule_lab.harness.products import Product, titled
from gemmule_lab.peers.registry import all_peers
from gemmule_lab.records import results
from gemmule_lab.records.rows import Ceiling, Environment, Row, Speedup, Times

FORMATS = ("float64", "float16", "int4")


def taken(seed: int, count: int = 300) -> list[Product]:
    drawn = hunt.products(("matvec", "vecmat", "matmul"), FORMATS, seed, 1 << 24)
    return list(itertools.islice(drawn, count))


def test_products_follow_the_seed_and_reach_every_corner() -> None:
    found = taken(1)
    assert found == taken(1) != taken(2)
    sizes = [
        p.shape[0] * p.shape[1] * (0.5 if p.format == "int4" else ITEMSIZE[p.format]) for p in found
    ]
    assert min(sizes) >= 1 << 10
    assert max(sizes) <= 1 << 24
    sides = [side for p in found for side in p.shape]
    assert min(sides) <= 3
    assert max(sides) > 1 << 16
    assert {(p.op, p.format) for p in found} == set(
        itertools.product(("matvec", "vecmat", "matmul"), FORMATS)
    )
    assert {p.column_major for p in found} == {True, False}
    assert not any(p.column_major for p in found if p.format == "int4")


def test_products_of_codes_come_in_pairs_that_differ_in_one_size_or_the_bits() -> None:
    found = list(itertools.islice(hunt.products_of_codes(("int4", "int8"), 1), 400))
    assert found == list(itertools.islice(hunt.products_of_codes(("int4", "int8"), 1), 400))
    for first, second in zip(found[::2], found[1::2], strict=True):
        sizes = [(*p.shape, p.width, p.form.bits) for p in (first, second)]
        assert sum(a != b for a, b in zip(*sizes, strict=True)) <= 1
        assert first.form.group_size == second.form.group_size
    assert {p.form.group_size for p in found} == {32, 64, 128}
    assert {p.form.bits for p in found} == {4, 8}
    assert {p.op for p in found} == {"matvec", "matmul"}
    for values, (low, high) in (
        ([p.shape[0] for p in found], hunt.SIDES),
        ([p.shape[1] for p in found], hunt.SIDES),
        ([p.width for p in found], hunt.WIDTHS),
    ):
        assert low <= min(values) < 1.2 * low
        assert 0.8 * high < max(values) <= high


def test_everyday_products_stay_within_their_sides_and_large_slow_ones_are_counted() -> None:
    drawn = hunt.everyday_products(tuple(hunt.EVERYDAY), FORMATS, 1, 1 << 24)
    found = list(itertools.islice(drawn, 300))
    for op, (low, high) in hunt.EVERYDAY.items():
        kept = [p for p in found if p.op == op]
        sides = [side for p in kept for side in (*p.shape, max(p.width, low))]
        assert low <= min(sides)
        assert max(sides) <= high
    assert all(4 * p.shape[0] * p.shape[1] <= 1 << 24 for p in found)
    coded = [p for p in found if p.form.bits is not None]
    assert {(p.op == "matmul", p.by_tokens) for p in coded} == {
        (True, True),
        (True, False),
        (False, False),
    }
    finds = [
        hunt.Find(Product("matvec", "int4", (rows, 600)), "a", 1.0, ratio, None, "a", 1.0)
        for rows, ratio in ((512, 0.89), (511, 0.5), (600, 0.91), (700, 2.0))
    ]
    assert hunt.Hunt("numpy", finds).large() == (
        "1 of 3 products of sides from 512 on (33.3%) below 0.9 of numpy's speed"
    )


def test_more_work_in_less_time_is_told() -> None:
    def find(rows: int, width: int, us: float, ratio: float, group: int = 64) -> hunt.Find:
        form = f"int4 g{group} x bfloat16, scales float16"
        product = Product("matmul", form, (rows, 512), width)
        return hunt.Find(product, "a", us, ratio, None, "b", us / 2)

    found = hunt.Hunt("torch")
    assert found.tails() == []
    found.finds += [
        find(1000, 8, 10.0, 0.9),
        find(1000, 17, 9.0, 1.0),  # more columns, less time
        find(2000, 128, 9.6, 0.7),  # more of everything, and as long within 5 %
        find(500, 9, 99.0, 1.0),  # fewer rows, more columns
        find(4000, 128, 1.0, 1.2, group=128),
    ]
    few, missed, pairs, *told = found.tails()
    assert few == (
        "of 3 by at most 64 columns 33.3% below 0.95; of all 20.0% below 0.8; the least is 0.70"
    )
    assert "2.000 times" in missed
    assert pairs.startswith("3 of 5 pairs")
    assert ["500 x 512" in line for line in told] == [True, True, False]


def test_a_title_names_its_product() -> None:
    every = [
        p
        for suite in (*suites.SUITES.values(), *suites.CUDA_SUITES.values())
        for p in suite.products
    ]
    for product in {*every, *taken(3)}:
        again = titled(product.title)
        assert again.title == product.title
        assert again == (product if product.op == "matmul" else replace(product, columns=64))
    for words in ("4096 x 4096", "4096 x 4096, matvec, float99", "4 x 4, gemv, float32"):
        with pytest.raises(ValueError, match="names no product; needed is rows"):
            titled(words)


def environment() -> Environment:
    read = Ceiling("read", 100.0, "GB/s", "", 1)
    return Environment("d", "cpu", "c", (), "s", "p", {}, None, 1, {}, {"read": read})


def row(product: Product, us: float, ratio: float, temperature: str = "cold") -> Row:
    speedup = Speedup(ratio, ratio, ratio, 9, 0.95, "faster")
    return Row(
        environment().id,
        Problem("matvec", *product.shape),
        "rung",
        "rung",
        temperature,
        Times(us, us, us, us, 9),
        1.0,
        1.0,
        speedups={"numpy": speedup},
        group=product.title,
    )


def test_the_worst_are_shown_and_the_rest_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slow, fast, warm, alone, failing = (
        Product("matvec", "float32", (1000 + i, 1000)) for i in range(5)
    )
    bytes_us = 1000 * 1000 * 4 / 100e3

    def attempt(product: Product, environment: Any) -> Any:
        if product == failing:
            raise MemoryError("no room")
        rows = {
            slow: [row(slow, 3 * bytes_us, 0.5)],
            fast: [row(fast, bytes_us, 2.0)],
            warm: [row(warm, 1.0, 1.0, "warm")],
            alone: [replace(row(alone, 1.0, 1.0), speedups={})],
        }
        return lambda: (rows[product], [])

    bench: Any = SimpleNamespace(
        backend="cpu", brief=None, environment=lambda seconds: environment(), attempt=attempt
    )
    path = tmp_path / "hunt.jsonl"
    given = iter([slow, fast, warm, alone, failing])
    found = hunt.run(bench, given, path, peer="numpy", seconds=60, ceiling_seconds=1)
    assert [find.ratio for find in found.finds] == [0.5, 2.0, 1.0]
    assert found.finds[0].over_floor == pytest.approx(3, rel=0.1)
    assert found.finds[2].floor_us is None
    assert found.summary() == (
        "3 products: 1.00 x numpy in the geometric mean, 1 below 0.95; "
        "50% of 2 cold ones within 1.15 x the floor"
    )
    text = capsys.readouterr().out
    assert text.index(slow.title) < text.index(warm.title) < text.index(fast.title)
    assert f"not measured: {alone.title}: numpy took no part" in text
    assert f"not measured: {failing.title}: no room" in text
    assert [kept.group for kept in results.read(path).rows] == [
        p.title for p in (slow, fast, warm, alone)
    ]


def test_what_a_brief_look_tells_against_is_measured_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Slow ones, but by many columns of codes only very slow ones, and pairs turned round."""
    form = "int4 g64 x bfloat16, scales float16"
    slow, wide, larger, smaller, good = (
        Product("matmul", form, (rows, columns), width)
        for rows, columns, width in (
            (256, 9000, 8),
            (300, 300, 999),
            (4000, 700, 70),
            (2000, 700, 70),
            (9000, 256, 8),
        )
    )
    brief = {slow: (5.0, 0.9), wide: (6.0, 0.81), larger: (7.0, 2.0), smaller: (8.0, 2.0)}
    full = {slow: (4.0, 1.1), larger: (8.2, 1.7)}
    asked: list[tuple[Product, Any]] = []

    def attempt(product: Product, environment: Any) -> Any:
        def measured(budget: Any = None) -> Any:
            asked.append((product, budget))
            if budget is None and product == smaller:
                raise MemoryError("no room")
            us, ratio = (full if budget is None else brief).get(product, (9.0, 1.0))
            return [row(product, us, ratio, "warm")], []

        return measured

    bench: Any = SimpleNamespace(
        backend="cuda", brief="a look", environment=lambda seconds: environment(), attempt=attempt
    )
    given = iter([slow, wide, larger, smaller, good])
    path = tmp_path / "hunt.jsonl"
    found = hunt.run(bench, given, path, peer="numpy", seconds=60, ceiling_seconds=0)
    looks = [slow, wide, larger, smaller, good]
    again = [(slow, None), (larger, None), (smaller, None)]
    assert asked == [*((product, "a look") for product in looks), *again]
    times = {find.product: (find.us, find.ratio) for find in found.finds}
    assert times == brief | full | {good: (9.0, 1.0)}
    text = capsys.readouterr().out
    assert "0 of 1 pairs" in text
    assert f"not measured: {smaller.title}: no room" in text


def test_a_hunt_ends_in_time(tmp_path: Path) -> None:
    bench: Any = SimpleNamespace(
        backend="cpu", brief=None, environment=lambda seconds: environment(), attempt=None
    )
    drawn = hunt.products(("matvec",), ("float32",), 0)
    found = hunt.run(bench, drawn, tmp_path / "x", peer="numpy", seconds=0, ceiling_seconds=1)
    assert found.summary() == "no product was measured"


def test_what_a_peer_does_not_take_is_not_drawn() -> None:
    """NumPy multiplies what has no format of its own in float32; SciPy's BLAS knows no halves."""
    every = ("float32", "float16", "bfloat16", "int4")
    left = {"numpy": [], "scipy.blas": ["float16", "bfloat16", "int4"], "torch": ["int4"]}
    for peer in all_peers("cpu"):
        if peer.name in left and peer.absent() is None:
            bench = HostBench(0.1, peers=(peer,), beside_float32=True)
            taken, others = hunt.raced(bench, peer, ("matvec", "vecmat"), every)
            assert others == left[peer.name]
            assert taken == [name for name in every if name not in others]


def test_halves_are_raced_in_float32() -> None:
    """NumPy's own loops for float16 are no peer, and for bfloat16 it has none."""
    product = Product("matvec", "bfloat16", (300, 200))
    wide = Speedup(0.5, 0.5, 0.5, 9, 0.95, "slower")
    own = replace(wide, value=9.0)
    one = replace(row(product, 10.0, 9.0), speedups={"numpy": own, "numpy on float32": wide})
    found = hunt.Hunt("numpy")
    found.add(product, [one], environment())
    assert [find.ratio for find in found.finds] == [0.5]


def test_mixtures_follow_the_seed_and_stay_within_their_limits() -> None:
    def drawn(seed: int) -> list[grouped.Shape]:
        return list(itertools.islice(grouped.random_shapes(seed, 1 << 28, 1 << 36), 200))

    found = drawn(1)
    assert found == drawn(1) != drawn(2)
    assert max(2 * s.experts * s.n * s.k for s in found) <= 1 << 28
    assert max(2 * s.tokens * s.n * s.k for s in found) <= 1 << 36
    assert min(s.experts for s in found) <= 3
    assert max(s.experts for s in found) > 128
    assert {s.how for s in found} == {"uniform", "zipf"}


def test_the_worst_mixtures_are_those_farthest_behind_the_peer() -> None:
    def case(tokens: int, ours: float, theirs: float) -> list[dict[str, Any]]:
        about = {"experts": 2, "tokens": tokens, "n": 64, "k": 128, "how": "uniform", "bytes": 1e3}
        return [{**about, "name": n, "median": us} for n, us in (("a", ours), ("peer", theirs))]

    cases = [case(i + 1, 10.0, 10.0 * (i + 1)) for i in range(20)]
    table = grouped.worst_of("a", "peer", cases[::-1])
    assert len(table.rows) == grouped.WORST
    assert table.rows[0][0] == "1 tokens, 2 experts of 64 x 128, uniform"
    assert [row[-1] for row in table.rows[:3]] == ["1.00", "2.00", "3.00"]
    assert "20 products" in table.title


def test_a_hunt_among_mixtures_records_their_sizes(tmp_path: Path) -> None:
    grouped.hunt(None, tmp_path, 3, 0.0)
    (path,) = tmp_path.glob("cpu-grouped-hunt-3*.jsonl")
    (shape,) = itertools.islice(grouped.random_shapes(3, *grouped.MOST["cpu"]), 1)
    first = json.loads(path.read_text().splitlines()[0])
    assert (first["n"], first["k"], first["samples"]) == (shape.n, shape.k, grouped.ROUNDS)


def test_codes_meet_rows_of_activations_where_they_lie_by_columns() -> None:
    for by_columns in (False, True):
        product = Product("matmul", "int8", (5, 128), 7, by_columns)
        matrix, x = in_format(np.ones((5, 128)), "int8"), np.ones((128, 7))
        (one,) = host_sets(product, [matrix], [x], cold=False).items
        assert one.b.flags.f_contiguous == one.out.flags.f_contiguous == by_columns
        assert product.order == "C"
    assert Product("matmul", "float16", (5, 128), 7, True).order == "F"
