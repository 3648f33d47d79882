"""The bench loses nothing when it is ended, and never takes more memory than it may."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gemmule as gm
from gemmule.backends.cpu.target import vector_bytes
from gemmule.timing.clock import Entry, Timing
from gemmule.timing.machine import Rotation
from gemmule.timing.sampler import Budget, sample
from gemmule_lab.bench import session
from gemmule_lab.ceilings import host as of_host
from gemmule_lab.ceilings.cold import COLD_FROM, SAFETY, plateau_from, rotating_bytes
from gemmule_lab.cli import run
from gemmule_lab.harness import host as host_bench
from gemmule_lab.harness.bench import Measurement
from gemmule_lab.harness.host import BYTES_TO_PREPARE, PEERS_SHARE, HostBench, sets_needed
from gemmule_lab.harness.operands import OperandSet, Sets, drawn
from gemmule_lab.harness.products import Product
from gemmule_lab.peers.peer import Peer, Prepared
from gemmule_lab.records import results
from gemmule_lab.records.rows import Ceiling
from gemmule_lab.verify import check
from planted import planted

pytestmark = pytest.mark.usefixtures("quick_bench")
MIB = 1 << 20
ARGUMENTS = [
    "bench",
    "--suite",
    "quick",
    "--size",
    "40",
    "--format",
    "float32",
    "--seconds",
    "0.05",
]


@pytest.mark.parametrize("ending", [KeyboardInterrupt, MemoryError])
def test_a_bench_that_is_ended_keeps_its_rows_and_goes_on(
    ending: type[BaseException], capsys: pytest.CaptureFixture[str]
) -> None:
    held: list[int] = []

    def ends_in_the_third(sound: Any, bench: HostBench, one: Measurement, environment: Any) -> Any:
        held.append(sum(1 for path in Path("results").iterdir() for _ in results.read(path).rows))
        if len(held) == 3:
            raise ending
        return sound(bench, one, environment)

    with planted(HostBench, "measure", ends_in_the_third), pytest.raises(ending):
        session.start(
            _suite(),
            session.bench_of(_suite(), "cpu", 0.05),
            Path("results"),
            patience=_no_patience(),
            ceiling_seconds=0.1,
            resume=None,
        )
    (path,) = Path("results").iterdir()
    kept = results.read(path).rows
    groups = list(dict.fromkeys(row.group for row in kept))
    assert held[0] == 0 < held[1] < held[2] == len(kept), "each product was on disk before the next"
    assert [group.split(", ")[1] for group in groups] == ["matvec", "vecmat"]
    assert groups[1] in capsys.readouterr().out, "what was measured is shown all the same"

    assert run([*ARGUMENTS, "--resume", str(path)]) == 0
    captured = capsys.readouterr()
    assert "[1/1]" in captured.err
    assert "matmul" in captured.err
    rows = results.read(path).rows
    assert rows[: len(kept)] == kept
    assert groups[0] in captured.out


def _suite() -> Any:
    from gemmule_lab.bench.suites import SUITES, narrowed

    return narrowed(SUITES["quick"], [], ["float32"], [40])


def _no_patience() -> Any:
    from gemmule_lab.bench.quiet import Patience

    return Patience(0.0, lambda: None)


def test_ceilings_measured_anew_rewrite_the_file_in_one_step(
    limit: Callable[..., None], fault: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    low = {"read": Ceiling("read", 1e-9, "GB/s", "made", 1)}
    high = {"read": Ceiling("read", 1e9, "GB/s", "made", 1)}
    limit(host_bench, MOST_SETS=1 << 16)
    fault(host_bench, "last_level_cache_bytes", lambda sound: 4096)
    fault(host_bench, "measure_ceilings", lambda sound, **o: high if "seed" in o else low)
    assert run([*ARGUMENTS, "--op", "matvec"]) == 0
    (path,) = Path("results").iterdir()
    found = results.read(path)
    (environment,) = found.environments.values()
    assert environment.ceilings["read"].value == 1e9
    assert {row.environment for row in found.rows} == {environment.id}
    assert not any("above" in flag for row in found.rows for flag in row.flags)


def test_the_memory_bounds_our_sets_and_the_row_is_called_warm(
    limit: Callable[..., None], fault: Callable[..., Any]
) -> None:
    limit(host_bench, MOST_SETS=1024)
    product = Product("matvec", "float32", (256, 256))
    size = 256 * 256 * 4
    assert len(HostBench(cold_bytes=10 * size).sets(product).items) == 11
    fault(host_bench, "available_bytes", lambda sound: int(4 * size / 0.25))
    one = HostBench(cold_bytes=10 * size).sets(product)
    assert len(one.items) == 4
    assert one.temperature == "warm"
    assert sets_needed(size, 10 * size, 0) == Rotation(1, size, cold=False)


def test_the_memory_bounds_what_peers_pack(
    limit: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    called: set[int] = set()

    def copies(problem: Any, a: Any, b: Any) -> Any:
        made.append("converted")

        def one() -> Prepared:
            made.append("set")
            number = len(made)
            return Prepared(lambda: called.add(number), lambda: a @ b)

        return one

    peer = Peer(
        "packs",
        "cpu",
        lambda: None,
        lambda p: None,
        lambda p, a, b: copies(p, a, b)(),
        lambda: "",
        copies=copies,
        own_bytes=lambda problem: MIB,
    )
    a, x = np.ones((8, 8), np.float32), np.ones(8, np.float32)
    sets = Sets("matvec", [OperandSet(a, x, a @ x)])
    limit(host_bench, MOST_SETS=1024)

    def entry(available: int) -> Entry:
        monkeypatch.setattr(host_bench, "available_bytes", lambda: available)
        made.clear(), called.clear()
        (found,), _ = HostBench(cold_bytes=10 * MIB).theirs(sets, [peer])
        return found

    assert entry(1 << 40).about.temperature == "cold"
    assert made == ["converted", "set", "converted", *["set"] * 11], "one conversion, then copies"
    assert called == {2, *range(4, 15)}, "none that is timed is the first with its copy"
    few = entry(int(BYTES_TO_PREPARE * 4 * MIB / PEERS_SHARE))
    assert (few.sets, few.about.temperature) == (4, "warm")


def test_a_peer_that_is_wrong_on_the_operands_to_be_timed_is_not_timed() -> None:
    a, x = np.ones((300, 8), np.float32), np.ones(8, np.float32)

    def prepare(problem: Any, left: Any, right: Any) -> Prepared:
        wrong = left @ right * (0.5 if len(left) == len(a) else 1)
        return Prepared(lambda: None, lambda: wrong)

    peer = Peer("large ones only", "cpu", lambda: None, lambda p: None, prepare, lambda: "")
    found, absent = HostBench().theirs(Sets("matvec", [OperandSet(a, x, a @ x)]), [peer])
    assert not found
    assert "not A B" in absent[0].reason


def test_matrices_are_made_once_for_products_that_share_them() -> None:
    bench = HostBench(cold_bytes=1)
    first = bench.prepared(Product("matvec", "int4", (8, 256)))
    second = bench.prepared(Product("vecmat", "int4", (8, 256)))
    third = bench.prepared(Product("vecmat", "int8", (8, 256)))
    assert first.sets.items[0].a is second.sets.items[0].a
    plain = [one.plain.items[0].a for one in (first, second, third) if one.plain is not None]
    assert plain[0] is plain[1] is plain[2]
    assert third.sets.items[0].a.bits == 8


def test_rows_of_a_large_matrix_differ() -> None:
    found = drawn((64, 1 << 18), np.random.default_rng(0))
    assert found.dtype == np.float32
    assert len({row[:64].tobytes() for row in found}) == 64
    assert abs(float(found.std()) - 1) < 0.01


def test_the_cache_that_counts_is_where_the_rate_stops_falling() -> None:
    rates = {1: 30.0, 2: 30.0, 4: 20.0, 8: 17.3, 16: 17.0, 32: 17.1}
    assert plateau_from(rates) == 8
    assert plateau_from({**rates, 16: 25.0}) == 32, "what is odd makes it larger, never smaller"
    ceilings = {COLD_FROM: Ceiling(COLD_FROM, 256.0, "MiB", "", 1)}
    assert rotating_bytes(ceilings) == SAFETY * 256 * MIB
    assert rotating_bytes({}) is None


def test_contestants_with_other_sets_have_a_sequence_of_their_own() -> None:
    seen: dict[str, list[int]] = {"a": [], "b": [], "c": []}

    class Clock:
        name, overhead_s, time_s = "made up", 1e-9, 0.0

        def now(self) -> float:
            self.time_s += 1e-3
            return self.time_s

        def prepare(self, entry: Entry) -> Any:
            def block(first: int, calls: int) -> Timing:
                seen[entry.name] += [(first + i) % entry.sets for i in range(calls)]
                return Timing(0.01 * calls, calls)

            return block

    entries = [
        Entry("a", lambda i: None, 5),
        Entry("b", lambda i: None, 5),
        Entry("c", lambda i: None, 3),
    ]
    sample(entries, Clock(), Budget(min_blocks=12, max_blocks=12, max_seconds=1e6))
    steps = np.diff(seen["c"]) % 3
    assert (steps == 1).all(), "nobody else reads its sets, so none may be left out"


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group_size", [32, -1, None])
@pytest.mark.parametrize("op", ["matvec", "vecmat"])
def test_a_quantised_matrix_is_judged_piece_by_piece(
    bits: int, group_size: int | None, op: str, limit: Callable[..., None]
) -> None:
    rng = np.random.default_rng(0)
    Q = gm.quantize(rng.standard_normal((70, 200), np.float32), bits, group_size)
    x = rng.standard_normal(200 if op == "matvec" else 70).astype(np.float32)
    operands = (Q, x) if op == "matvec" else (x, Q)
    whole = host_bench.judged(op, *operands)
    limit(check, SCRATCH_BYTES=24 * 200 * 9)
    assert host_bench.judged(op, *operands) == whole
    out = getattr(gm, op)(*operands)
    out[-1] += 1
    plan = gm.plan(op, *operands)
    verdict = check.judge(op, *operands, out, check.Rounding.of(plan))
    assert not verdict.ok
    assert verdict.worst_index == (len(out) - 1,)


def test_ceilings_of_a_cpu_are_those_of_arrays_beyond_its_cache(
    fault: Callable[..., None], limit: Callable[..., None]
) -> None:
    limit(of_host, FMA_STEPS=1 << 12)
    fault(of_host, "last_level_cache_bytes", lambda sound: MIB)
    found = of_host.measure_ceilings(max_seconds=0.02, threads=2)
    assert found[COLD_FROM].value == 4
    for name in ("read", "copy", "fma float32", "fma float64"):
        assert found[name].value == max(found[name].tried.values()) > 0
        assert {way[-9:] for way in found[name].tried} == {" 1 thread", "2 threads"}
    assert len(found["read"].tried) == 2 * len({8, vector_bytes()}) * 4
