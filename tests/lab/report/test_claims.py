"""What may be said of rows: never of disturbed or single blocks, and only of intervals "surely"."""

from __future__ import annotations

import dataclasses
import os
import random
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from checkout import EVIDENCE
from gemmule.core.problem import Problem
from gemmule_lab import cli
from gemmule_lab.harness import neighbours
from gemmule_lab.records import results
from gemmule_lab.records.results import append
from gemmule_lab.records.rows import Row, Speedup
from gemmule_lab.report import claims
from gemmule_lab.report.against import changes, pull_request, within
from gemmule_lab.report.tables import histogram, summary_table
from lab_rows import QUANT, machine, result_row

TAKEN = ("the CPU was taken away during 1 of 1 blocks",)
BUSY = ("other programs used 62% of the processors",)
HERE = machine()


def up(value: float, half: float = 0.01, confidence: float = 0.95) -> Speedup:
    ends = value * (1 - half), value * (1 + half)
    return Speedup(value, *ends, 9, confidence, "faster" if value > 1 else "slower")


def row(size: int, speedups: Mapping[str, Speedup], us: float = 10.0, **more: object) -> Row:
    made = result_row(
        "threads", us, Problem("matvec", size, size), group=f"{size} x {size}, matvec, float32"
    )
    return dataclasses.replace(made, environment=HERE.id, speedups=dict(speedups), **more)


def words(*rows: Row) -> str:
    return " ".join(claims.takeaway(rows, [HERE]))


def test_single_and_disturbed_blocks_make_no_best_and_no_loss() -> None:
    """A busy machine's summary said "best 62x" and "surely slower on 1" of single blocks."""
    rows = [
        row(64, {"numpy": up(1.5)}),
        row(128, {"numpy": up(1.3)}),
        row(256, {"numpy": up(62.0, 0.0, confidence=0.0)}),  # one block
        row(512, {"numpy": up(60.0)}, flags=TAKEN),
        row(1024, {"numpy": up(0.1)}, flags=BUSY),
    ]
    ((kind, many, mean, least, most, *tally),) = summary_table(rows).rows
    assert (kind, many, mean, least, most) == ("matvec float32", "5", "1.40x", "1.30x", "1.50x")
    assert tally == ["2", "0", "0", "0", "3"], (
        "surely faster, as fast, slower, undecided, not counted"
    )
    told = words(*rows)
    assert "beside numpy gemmule is surely faster on 2 of 2 products." in told
    assert "surely slower on none" in told
    assert "No claim rests on 3 more" in told
    assert not any(figure in told for figure in ("62.", "60.", "0.1"))


def test_a_peer_that_was_disturbed_carries_no_claim() -> None:
    ours = row(64, {"numpy": up(5.0)})
    theirs = dataclasses.replace(ours, name="numpy", kind="peer", speedups={}, flags=TAKEN)
    assert "nothing can be said" in words(ours, theirs)
    assert "surely faster on 1" in words(ours, dataclasses.replace(theirs, flags=()))


def test_surely_is_said_beyond_what_quiet_runs_differ_by() -> None:
    told = words(row(64, {"numpy": up(0.985, 0.004)}), row(128, {"numpy": up(1.03, 0.02)}))
    assert "is as fast on 1, undecided on 1 of 2 products." in told
    assert "surely slower on none" in told
    told = words(row(64, {"numpy": up(0.9)}), row(128, {"numpy": up(1.2)}))
    assert "surely faster on 1, surely slower on 1 of 2 products" in told
    assert "It lost on 1 product: 1 of matvec float32; at worst 0.90x numpy (64 x 64" in told


@pytest.mark.parametrize("seed", range(40))
def test_counts_worst_loss_and_reach_are_those_of_the_rows(seed: int) -> None:
    """Random rows, cold and warm, ours and a peer's, disturbed or flagged, are counted here too."""
    rng, rows, counted, reach = random.Random(seed), list[Row](), list[tuple[float, str]](), [0.0]
    harmless = ("above the read ceiling by 12 %",)
    for size in (64, 128, 256, 512, 1024):
        for temperature in ("cold", "warm")[: rng.randint(1, 2)]:
            value = rng.choice((0.5, 0.8, 0.97, 0.995, 1.0, 1.03, 1.5)) + rng.random() / 50
            one = up(value, rng.choice((0.002, 0.01, 0.05)), rng.choice((0.95, 0.95, 0.0)))
            flags = rng.choice(((), (), harmless, BUSY))
            percent = rng.choice((None, 20.0 + rng.random() * 80))
            ours = row(size, {"numpy": one}, temperature=temperature, flags=flags)
            ours = dataclasses.replace(ours, percent_of_ceiling=percent)
            peer = row(size, {}, temperature=temperature, flags=rng.choice(((), (), (), TAKEN)))
            rows += [ours, dataclasses.replace(peer, name="numpy", kind="peer")]
            reach += [percent] if percent and not flags else []
            if one.confidence and flags != BUSY and not rows[-1].flags:
                counted.append((one.value, verdict(one)))
    rng.shuffle(rows)
    told, names = words(*rows), [name for _, name in counted]
    if not counted:
        assert "nothing can be said" in told
        return
    for name, said in claims.TALLIED.items():
        found = re.search(rf"[ ,]{said} (\d+)", told)
        assert (int(found[1]) if found else 0) == names.count(name)
    assert f" of {len(counted)} product" in told
    lost = min((value for value, name in counted if name == "slower"), default=None)
    worst = "surely slower on none" if lost is None else f"at worst {lost:.2f}x numpy"
    assert worst in told
    best = f"at up to {max(reach):.0f} % of" if max(reach) else "It reads"
    assert (best in told) == bool(max(reach))
    left = len(rows) // 2 - len(counted)
    assert (f"No claim rests on {left} more" in told) == bool(left)


def verdict(one: Speedup) -> str:
    """Return what an interval shows beyond 2 percent on either side, as the page promises it."""
    if one.low > 1.02:
        return "faster"
    if one.high < 1 / 1.02:
        return "slower"
    return "same" if one.low >= 1 / 1.02 and one.high <= 1.02 else "undecided"


def test_what_users_get_is_told_apart_from_what_they_ask_for_by_name() -> None:
    """int8 activations round the vector, which nobody gets without asking."""
    spec = dataclasses.replace(QUANT, activations="int8")
    problem = Problem("matvec", 64, 64, a="uint4", b="float32", out="float32", quant=spec)
    rounded = row(
        64, {"numpy on float32": up(9.0)}, problem=problem, group="64 x 64, matvec, int4 x int8"
    )
    plain = dataclasses.replace(
        rounded, problem=dataclasses.replace(problem, quant=QUANT), group="64 x 64, matvec, int4",
        speedups={"numpy on float32": up(2.0)},
    )  # fmt: skip
    named = row(64, {"numpy": up(7.0)}, named=True)
    told = words(plain, rounded, named, row(64, {"numpy": up(1.5)}))
    assert "It gained most in matvec int4: 2.00x numpy on float32" in told
    assert "Asked for (int8 activations, by name) it is surely faster than numpy on float32" in told
    assert "Asked for (a rung by name) it is surely faster than numpy on 1 of 1 product" in told
    kinds = [cells[0] for cells in summary_table([plain, rounded]).rows]
    assert kinds == [
        "matvec int4, over numpy on float32",
        "matvec int4 (int8 activations, by name), over numpy on float32",
    ]


def test_a_slow_library_of_the_same_codes_makes_no_headline() -> None:
    """33 times a library that nobody would use, since NumPy's floats are seven times as quick."""
    problem = Problem("matvec", 64, 64, a="uint4", b="float32", out="float32", quant=QUANT)
    slow = {"torch int4pack": up(33.0), "numpy on float32": up(4.6)}
    both = row(64, slow, problem=problem, group="64 x 64, matvec, int4")
    told = words(both)
    assert "beside numpy on float32 gemmule is surely faster on 1 of 1 product." in told
    assert "It gained most in matvec int4: 4.60x numpy on float32." in told
    assert "33" not in told
    lost = dataclasses.replace(both, speedups={**slow, "numpy on float32": up(0.5)})
    assert "at worst 0.50x numpy on float32" in words(lost)
    unsure = dataclasses.replace(both, speedups={**slow, "numpy on float32": up(4.6, 0.1, 0.5)})
    assert "nothing can be said" in words(unsure), "what came nearest has too few blocks"


def test_others_at_work_are_told(tmp_path: Path) -> None:
    stat = tmp_path / "stat"
    stat.write_text("cpu 100 0 50 800 50 0 0 0 0 0\n")
    own = iter((1.0, 1.0 + 20 / neighbours.TICKS_A_SECOND, 1.0 + 60 / neighbours.TICKS_A_SECOND))
    found = neighbours.Neighbours(stat, lambda: next(own))
    stat.write_text("cpu 160 0 50 840 50 0 0 0 0 0\n")  # 60 ticks in use of 100, 20 of them ours
    share = found.share()
    assert neighbours.flags_beside(share, ()) == ("other programs used 40% of the processors",)
    assert found.share() == 0, "all of them ours"
    assert neighbours.Neighbours(tmp_path / "nowhere").share() is None


def test_only_processors_count_that_may_be_used(tmp_path: Path, fault: Callable[..., Any]) -> None:
    """Two loops on a process's two processors are two of 64 of the machine."""
    fault(os, "sched_getaffinity", lambda sound, pid: {0, 5})
    stat = tmp_path / "stat"
    idle = "".join(f"cpu{n} 0 0 0 100 0 0 0 0 0\n" for n in range(64))
    stat.write_text(f"cpu 0 0 0 6400 0 0 0 0 0\n{idle}")
    found = neighbours.Neighbours(stat, lambda: 0.0)
    busy = idle.replace("cpu5 0 0 0 100", "cpu5 100 0 0 100").replace(
        "cpu0 0 0 0 100", "cpu0 0 0 0 200"
    )
    stat.write_text(f"cpu 100 0 0 6500 0 0 0 0 0\n{busy}")
    assert found.share() == 0.5


@pytest.mark.parametrize(("share", "kept"), [(0.01, 1), (0.05, 2), (0.2, 3), (None, 2)])
def test_threads_of_one_process_that_take_turns_are_no_disturbance(
    share: float | None, kept: int
) -> None:
    """Not where others were at rest; else, or where nobody knows, it may have been they."""
    noticed = ("the CPU was taken away during 3 of 3 blocks", "above the read ceiling by 12 %")
    flags = neighbours.flags_beside(share, noticed)
    assert len(flags) == kept
    assert noticed[1] in flags
    assert dataclasses.replace(row(64, {}), flags=flags).disturbed is (share != 0.01)


def test_blocks_are_drawn_as_words() -> None:
    assert histogram([3.0]) == ""
    assert histogram([1.0] * 8 + [2.0]) == "█··········▁"


# --- two runs ----------------------------------------------------------------------------------


def run_of(path: Path, *rows: Row, version: str = "2.4") -> Path:
    here = dataclasses.replace(HERE, versions={"numpy": version})
    append(path, [here, *(dataclasses.replace(one, environment=here.id) for one in rows)])
    return path


def test_a_rerun_is_faster_slower_same_or_undecided(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = run_of(tmp_path / "old", *(row(n, {"numpy": up(1.0)}) for n in (1, 2, 3, 4, 5)))
    new = run_of(
        tmp_path / "new",
        row(1, {"numpy": up(1.2)}, us=99.0),  # the machine is slower, ours is not
        row(2, {"numpy": up(0.8)}),
        row(3, {"numpy": up(1.001, 0.001)}),
        row(4, {"numpy": up(1.2, 0.3)}),
        row(5, {"numpy": up(0.5)}, flags=BUSY),
    )
    found = changes(old, new)
    verdicts = [one.verdict for one in found]
    assert verdicts == ["faster", "slower", "same", "undecided", "undecided"]
    told = pull_request(found, old, new).splitlines()
    assert told[0].startswith("**1 slower, 1 faster, 1 same, 2 undecided** of 5 products")
    assert (
        told[4] == "| 2 x 2, matvec, float32, cold | 1.00x numpy | 0.80x numpy | 0.80x | slower |"
    )
    assert len(told) == 6, "what stayed is counted, not listed"
    assert cli.run(["report", str(new), "--against", str(old)]) == 1
    shown = capsys.readouterr()
    assert shown.out.splitlines()[0] == told[0]
    assert shown.err == "gemmule: surely slower than before: 1 of 5.\n"
    assert cli.run(["report", str(old), "--against", str(old)]) == 0


def test_times_decide_where_the_peer_is_another_release(tmp_path: Path) -> None:
    old = run_of(tmp_path / "old", row(1, {"numpy": up(1.0)}, us=10.0), row(2, {}, us=10.0))
    new = run_of(
        tmp_path / "new", row(1, {"numpy": up(0.5)}, us=10.1), row(2, {}, us=11.0), version="2.5"
    )
    found = changes(old, new)
    assert [(one.unit, one.verdict) for one in found] == [("us", "same"), ("us", "slower")]
    assert within(found, 0.03) == 0.5
    other = run_of(tmp_path / "other", row(9, {}))
    with pytest.raises(ValueError, match="share no product"):
        changes(old, other)


def test_two_runs_of_a_study_are_compared_by_their_times() -> None:
    path = EVIDENCE / "nvidia-h200" / "study-003.jsonl"
    found = changes(path, path)
    assert len(found) > 50
    assert within(found, 0.0) == 1.0
    assert {one.unit for one in found} == {"us"}


def test_a_study_s_choice_of_another_rung_is_not_the_same_kernel(tmp_path: Path) -> None:
    path, other = EVIDENCE / "nvidia-h200" / "study-003.jsonl", tmp_path / "study-003.jsonl"
    other.write_text(re.sub(r'"rung":"\w+"', '"rung":"another"', path.read_text()))
    stayed = [one.what for one in changes(path, other)]
    assert stayed
    assert all(": torch, " in what for what in stayed), "what is no rung of ours"
    assert len(stayed) < len(changes(path, path)) / 2


def test_a_busy_run_on_record_claims_nothing_that_the_quiet_one_contradicts() -> None:
    """Two processors of a Xeon, alone and beside two busy loops: 3 times torch's speed, and 76."""
    told: list[dict[tuple[str, str], str]] = []
    most = 0.0
    for name in ("quiet", "busy"):
        rows = results.read(Path(__file__).with_name(f"{name}.jsonl")).rows
        found = claims.comparisons(rows)
        told.append({(one.row.group, one.peer): one.verdict for one in found})
        most = max(one.speedup.value for one in found if one.peer == "torch")
    quiet, busy = told
    assert most > 70, "which no summary tells"
    assert "faster" in quiet.values()
    sure = {key: verdict for key, verdict in busy.items() if verdict in ("faster", "slower")}
    assert all(quiet.get(key) in (None, "undecided", verdict) for key, verdict in sure.items())
    assert not sure, "all of its rows were disturbed"
