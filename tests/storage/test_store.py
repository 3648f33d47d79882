"""Tuning results on disk: whatever lies there, a lookup is a whole valid entry or a miss."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from gemmule.core.problem import Problem, QuantSpec
from gemmule.core.rung import Constraint, Machine, Rung
from gemmule.storage import sources
from gemmule.storage import tuned as tuned_store
from gemmule.storage.atomic import MAX_BYTES, replace_text, small_file
from made_rungs import made_rung

MACHINE = Machine("cpu", "Test CPU", "x86_64", 2, 1e10, 2**25)
PROBLEM = Problem("matvec", 100, 200)


def _rung(name: str) -> Rung:
    allowed = Constraint("not 4 with b", lambda p, q: (q["block"], q["mode"]) != (4, "b"))
    params = {"block": (1, 2, 4), "mode": ("a", "b")}
    return made_rung(name, expected_s=None, params=params, constraints=(allowed,))


@pytest.fixture
def rungs(
    tmp_path: Path,
    setting: Callable[..., None],
    only_rungs: Callable[..., None],
    limit: Callable[..., None],
) -> tuple[Rung, Rung]:
    """Two rungs whose sources lie in a folder of their own, and an empty cache."""
    both = (_rung("first"), _rung("second"))
    only_rungs(tmp_path / "rungs", *both)
    limit(tuned_store, SHIPPED=tmp_path / "shipped")
    setting(GEMMULE_CACHE=tmp_path / "cache", GEMMULE_TUNE=None)
    return both


def _saved(rung: Rung, **params: Any) -> Path:
    tuned = tuned_store.Tuned(rung, params or {"block": 2, "mode": "a"}, 1e-3, "2026-11-21")
    path = tuned_store.save(MACHINE, PROBLEM, tuned)
    assert path is not None
    return path


def test_round_trip(rungs: tuple[Rung, Rung]) -> None:
    assert tuned_store.lookup(MACHINE, PROBLEM) is None
    path = _saved(rungs[1], block=4, mode="a")
    found = tuned_store.lookup(MACHINE, PROBLEM)
    assert found is not None
    assert found.rung is rungs[1]
    assert (found.params, found.time_s) == ({"block": 4, "mode": "a"}, 1e-3)
    assert found.date == "2026-11-21"
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert [p.name for p in path.parent.iterdir()] == [path.name]  # no temporary is left behind


def test_the_time_of_day_is_cut_off(rungs: tuple[Rung, Rung]) -> None:
    path = _saved(rungs[0])
    record = json.loads(path.read_bytes())
    path.write_text(json.dumps({**record, "date": "2026-11-21T08:15"}))
    found = tuned_store.lookup(MACHINE, PROBLEM)
    assert found is not None
    assert found.date == "2026-11-21"


SPEC = QuantSpec(4, 32, True, "row", "float16", transposed=False)
FIELDS = asdict(Problem("matvec", 3, 4, a="uint4", b="float16", out="float16", quant=SPEC))


@pytest.mark.parametrize(
    "problem",
    [
        PROBLEM,
        Problem("matmul", 2, 3, 5, batch=4, layout_b="col", shared_b=True, precision="ieee"),
        Problem("matvec", 0, 0, a="int8", b="uint8", out="int32", batch=0, alignment=1),
        Problem("matvec", 3, 4, a="float16", b="float16", out="float16", accumulate="float16"),
        Problem("matvec", 3, 4, a="uint4", b="float16", out="float16", quant=SPEC),
    ],
    ids=str,
)
def test_a_problem_is_that_of_its_fields(problem: Problem) -> None:
    assert tuned_store.problem_of(json.loads(json.dumps(asdict(problem)))) == problem


@pytest.mark.parametrize(
    "change",
    [
        *({name: value} for name in ("m", "n", "k", "batch") for value in (-1, 2.0, True, "3")),
        *({name: 1} for name in ("op", "a", "b", "out", "layout_a", "precision", "shared_a")),
        {"op": "vecmat"},
        *({name: "float128"} for name in ("a", "b", "out")),
        {"precision": "half"},
        {"accumulate": "float64"},
        {"quant": {**asdict(SPEC), "more": 1}},
        {"quant": {"bits": 4}},
        {"quant": [4]},
        {"more": 1},
    ],
    ids=repr,
)
def test_fields_of_no_problem_are_refused(change: dict[str, Any]) -> None:
    tuned_store.problem_of(dict(FIELDS))
    with pytest.raises((ValueError, TypeError)):
        tuned_store.problem_of({**FIELDS, **change})


@pytest.mark.parametrize("name", FIELDS)
def test_a_problem_wants_all_its_fields(name: str) -> None:
    with pytest.raises(ValueError, match="a problem has the fields op, m, n"):
        tuned_store.problem_of({key: value for key, value in FIELDS.items() if key != name})


def test_the_key_tells_devices_and_problems_apart(rungs: tuple[Rung, Rung]) -> None:
    _saved(rungs[0])
    others = [
        (replace(MACHINE, name="Other CPU"), PROBLEM),
        (replace(MACHINE, units=3), PROBLEM),
        (replace(MACHINE, backend="cuda"), PROBLEM),
        (MACHINE, replace(PROBLEM, m=101)),
        (MACHINE, replace(PROBLEM, layout_a="col")),
        (MACHINE, replace(PROBLEM, precision="ieee")),
    ]
    assert all(tuned_store.lookup(*other) is None for other in others)
    keys = {tuned_store.key(*other) for other in [*others, (MACHINE, PROBLEM)]}
    assert len(keys) == len(others) + 1


def test_the_user_s_entry_comes_before_the_shipped_one(rungs: tuple[Rung, Rung]) -> None:
    path = _saved(rungs[0])
    tuned_store.SHIPPED.mkdir()
    path.rename(tuned_store.SHIPPED / path.name)
    found = tuned_store.lookup(MACHINE, PROBLEM)
    assert found is not None
    assert found.rung is rungs[0]
    _saved(rungs[1])
    found = tuned_store.lookup(MACHINE, PROBLEM)
    assert found is not None
    assert found.rung is rungs[1]


def test_tuning_can_be_turned_off(rungs: tuple[Rung, Rung], setting: Callable[..., None]) -> None:
    _saved(rungs[0])
    setting(GEMMULE_TUNE="0")
    assert tuned_store.lookup(MACHINE, PROBLEM) is None


def test_an_edited_rung_makes_its_entries_stale(rungs: tuple[Rung, Rung]) -> None:
    _saved(rungs[0])
    rungs[0].path.write_text("# another kernel")
    sources.forget_digests()
    assert tuned_store.lookup(MACHINE, PROBLEM) is None


def test_truncated_at_every_byte_is_a_miss(rungs: tuple[Rung, Rung]) -> None:
    path = _saved(rungs[0])
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        assert tuned_store.lookup(MACHINE, PROBLEM) is None, length
    path.write_bytes(whole)
    assert tuned_store.lookup(MACHINE, PROBLEM) is not None


def test_every_flipped_byte_is_a_miss_or_a_declared_choice(rungs: tuple[Rung, Rung]) -> None:
    path = _saved(rungs[0])
    whole = path.read_bytes()
    for place in range(len(whole)):
        for flip in (0x01, 0x20, 0x80):
            damaged = bytearray(whole)
            damaged[place] ^= flip
            path.write_bytes(damaged)
            found = tuned_store.lookup(MACHINE, PROBLEM)
            if found is not None:
                assert found.rung in rungs
                assert found.params in list(found.rung.space(PROBLEM))
                assert 0 < found.time_s < 3600


GARBAGE = {
    "empty": b"",
    "zeros": b"\0" * 100,
    "list": b"[]",
    "number": b"1",
    "null": b"null",
    "nan": b"NaN",
    "string": b'"schema"',
    "not_utf8": b"\xff\xfe{}",
    "deep_lists": b"[" * 60_000,
    "deep_objects": b'{"a":' * 10_000,
    "huge_integer": b'{"schema": ' + b"9" * 5_000 + b"}",
    "surrogates": b'{"schema": "\\ud800"}',
}


@pytest.mark.parametrize("name", GARBAGE)
def test_garbage_is_a_miss(rungs: tuple[Rung, Rung], name: str) -> None:
    _saved(rungs[0]).write_bytes(GARBAGE[name])
    assert tuned_store.lookup(MACHINE, PROBLEM) is None


@pytest.mark.parametrize(
    "change",
    [
        {"schema": 2},
        {"schema": "1"},
        {"schema": None},
        {"schema": True},
        {"rung": "third"},
        {"rung": 1},
        {"rung": ["first"]},
        {"rung": None},
        {"rung": {}},
        {"folder": "matmul"},
        {"folder": "../matvec"},
        {"folder": []},
        {"digest": "0" * 64},
        {"digest": None},
        {"params": {}},
        {"params": None},
        {"params": []},
        {"params": {"block": 2}},
        {"params": {"block": 2, "mode": "a", "more": 1}},
        {"params": {"block": 3, "mode": "a"}},
        {"params": {"block": 2.0, "mode": "a"}},
        {"params": {"block": "2", "mode": "a"}},
        {"params": {"block": True, "mode": "a"}},
        {"params": {"block": [2], "mode": "a"}},
        {"params": {"block": 2, "mode": None}},
        {"params": {"block": 4, "mode": "b"}},
        {"params": {"block": 10**30, "mode": "a"}},
        {"time_s": 0.0},
        {"time_s": -1.0},
        {"time_s": float("nan")},
        {"time_s": float("inf")},
        {"time_s": 1},
        {"time_s": "1"},
        {"time_s": None},
        {"time_s": 1e9},
        {"time_s": True},
        {"date": None},
        {"date": 20261121},
        {"date": "2026-11-2\x1b"},
    ],
    ids=repr,
)
def test_values_outside_what_is_declared_are_a_miss(
    rungs: tuple[Rung, Rung], change: dict[str, Any]
) -> None:
    path = _saved(rungs[0])
    record = json.loads(path.read_bytes())
    path.write_text(json.dumps(record))
    assert tuned_store.lookup(MACHINE, PROBLEM) is not None
    path.write_text(json.dumps({**record, **change}))
    assert tuned_store.lookup(MACHINE, PROBLEM) is None


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("", {}, ""),
        ("other", {}, "holds the entry of "),
        ("", {"fields": {"op": "matvec"}}, "names no device and problem"),
        ("", {"device": None}, "names no device and problem"),
        (
            "",
            {"device": {"backend": "cpu", "name": "", "arch": "", "units": 1}},
            "holds the entry of",
        ),
        ("", {"digest": "0" * 64}, "is about a rung that changed, or is damaged"),
    ],
)
def test_what_is_wrong_with_a_shipped_entry(
    rungs: tuple[Rung, Rung], name: str, change: dict[str, Any], words: str
) -> None:
    path = _saved(rungs[0])
    record = json.loads(path.read_bytes())
    path = path.with_stem(name or path.stem)
    path.write_text(json.dumps({**record, **change}))
    found = tuned_store.shipped_fault(path)
    assert words in found
    assert bool(words) == bool(found)


@pytest.mark.parametrize("field", ["schema", "folder", "rung", "digest", "params", "time_s"])
def test_a_missing_field_is_a_miss(rungs: tuple[Rung, Rung], field: str) -> None:
    path = _saved(rungs[0])
    record = json.loads(path.read_bytes())
    del record[field]
    path.write_text(json.dumps(record))
    assert tuned_store.lookup(MACHINE, PROBLEM) is None


def test_duplicate_keys_are_a_miss(rungs: tuple[Rung, Rung]) -> None:
    path = _saved(rungs[0])
    text = path.read_text()
    path.write_text(text.replace('"rung": "first"', '"rung": "second", "rung": "first"'))
    assert tuned_store.lookup(MACHINE, PROBLEM) is None


def test_an_oversized_file_is_not_even_parsed(rungs: tuple[Rung, Rung]) -> None:
    path = _saved(rungs[0])
    path.write_bytes(path.read_bytes() + b" " * MAX_BYTES)
    assert tuned_store.lookup(MACHINE, PROBLEM) is None


def test_folders_links_and_pipes_in_the_place_of_an_entry(
    rungs: tuple[Rung, Rung], tmp_path: Path
) -> None:
    path = _saved(rungs[0])
    path.unlink()
    path.mkdir()
    assert tuned_store.lookup(MACHINE, PROBLEM) is None
    path.rmdir()
    path.symlink_to(path)
    assert tuned_store.lookup(MACHINE, PROBLEM) is None
    path.unlink()
    os.mkfifo(path)
    assert tuned_store.lookup(MACHINE, PROBLEM) is None  # and does not wait for a writer


def test_only_small_regular_files_are_read(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for size in (0, 1, MAX_BYTES):
        path.write_bytes(b"x" * size)
        assert small_file(path) == b"x" * size
    path.write_bytes(b"x" * (MAX_BYTES + 1))
    os.mkfifo(tmp_path / "pipe")
    for strange in (path, tmp_path / "pipe", Path("/dev/zero"), Path("/dev/null")):
        with pytest.raises(ValueError, match="no regular file of at most 65,536 bytes"):
            small_file(strange)


@pytest.mark.parametrize("where", ["file", "below_a_file"])
def test_an_unusable_cache_never_raises(
    rungs: tuple[Rung, Rung], where: str, tmp_path: Path, setting: Callable[..., None]
) -> None:
    blocked = tmp_path / "blocked"
    blocked.write_text("a file where a folder should be")
    setting(GEMMULE_CACHE=str(blocked if where == "file" else blocked / "deeper"))
    assert tuned_store.lookup(MACHINE, PROBLEM) is None
    tuned = tuned_store.Tuned(rungs[0], {"block": 1, "mode": "a"}, 1.0, "2026-11-21")
    assert tuned_store.save(MACHINE, PROBLEM, tuned) is None


def test_a_failed_write_leaves_the_old_entry(
    rungs: tuple[Rung, Rung], fault: Callable[..., Any]
) -> None:
    path = _saved(rungs[0])
    before = path.read_bytes()

    def full(sound: Any, path: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    fault(Path, "replace", full)
    tuned = tuned_store.Tuned(rungs[1], {"block": 1, "mode": "a"}, 1.0, "2026-11-21")
    assert tuned_store.save(MACHINE, PROBLEM, tuned) is None
    assert path.read_bytes() == before
    assert [p.name for p in path.parent.iterdir()] == [path.name]


WRITER = """
import sys, time
from pathlib import Path
from gemmule.storage.tuned import write_atomically
path, payload = Path(sys.argv[1]), Path(sys.argv[2]).read_bytes()
print("ready", flush=True)
end = time.monotonic() + 1.5
while time.monotonic() < end:
    assert write_atomically(path, payload)
"""


def test_four_writers_never_tear_an_entry(rungs: tuple[Rung, Rung], tmp_path: Path) -> None:
    writers = []
    for i in range(4):
        tuned = tuned_store.Tuned(
            rungs[i % 2], {"block": (1, 2, 4, 1)[i], "mode": "a"}, 1.0, "2026-11-21" * 500
        )
        path = tuned_store.save(MACHINE, PROBLEM, tuned)
        assert path is not None
        payload = tmp_path / f"payload{i}"
        payload.write_bytes(path.read_bytes())
        command = [sys.executable, "-c", WRITER, str(path), str(payload)]
        writers.append(subprocess.Popen(command, stdout=subprocess.PIPE))
    for writer in writers:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"ready\n"
    reads = torn = 0
    while any(writer.poll() is None for writer in writers):
        torn += tuned_store.lookup(MACHINE, PROBLEM) is None
        reads += 1
    for writer in writers:
        writer.communicate()
        assert writer.returncode == 0
    assert reads > 50
    assert torn == 0


def _mutated(rng: random.Random, whole: bytes) -> bytes:
    """Damage an entry as disks, editors and bad luck do: bytes, spans, or values of the JSON."""
    data = bytearray(whole)
    for _ in range(rng.randint(1, 4)):
        place, span = rng.randrange(len(data) + 1), rng.randint(1, 12)
        what = rng.randrange(5)
        if what == 0 and place < len(data):
            data[place] = rng.randrange(256)
        elif what == 1:
            del data[place : place + span]
        elif what == 2:
            data[place:place] = rng.randbytes(span)
        elif what == 3:
            source = rng.randrange(len(data) + 1)
            data[place:place] = data[source : source + span]
        else:
            record = json.loads(whole)
            value = rng.choice(
                [None, True, -1, 2**70, 1.5, float("nan"), "", "first", [], {}, [[]]]
            )
            record[rng.choice(list(record))] = value
            if rng.random() < 0.5:
                record["params"] = {"block": value, "mode": rng.choice(["a", "b", value])}
            data = bytearray(json.dumps(record).encode())
    return bytes(data)


def _survives_mutations(rung: Rung, count: int) -> int:
    """Look a damaged entry up `count` times; return how often it was still believed."""
    path, rng, believed = _saved(rung), random.Random(11), 0
    whole = path.read_bytes()
    for _ in range(count):
        path.write_bytes(_mutated(rng, whole))
        found = tuned_store.lookup(MACHINE, PROBLEM)
        if found is not None:
            believed += 1
            assert any(dict(found.params) == declared for declared in found.rung.space(PROBLEM))
            assert 0 < found.time_s < 3600
            assert found.date.isprintable()
    return believed


def test_damaged_entries_are_misses_or_declared_choices(rungs: tuple[Rung, Rung]) -> None:
    believed = _survives_mutations(rungs[0], 4000)
    assert 0 < believed < 2000  # some damage hits what nobody reads, most does not


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_million_damaged_entries(rungs: tuple[Rung, Rung]) -> None:
    _survives_mutations(rungs[0], 1_000_000)


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o666])
def test_text_that_is_replaced_keeps_its_permissions(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "page.html"
    replace_text(path, "new")
    assert path.stat().st_mode & 0o777 == 0o644
    path.chmod(mode)
    replace_text(path, "newer")
    assert (path.read_text(), path.stat().st_mode & 0o777) == ("newer", mode)
