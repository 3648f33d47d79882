"""Proofs fit the code: current keys, what changes a key, what plans need, how records are kept."""

from __future__ import annotations

import gzip
import lzma
import re
import sys
from collections.abc import Callable
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from typing import Any

import pytest

import wheel_evidence
from gemmule.backends.cuda import launch_args, nvrtc
from gemmule.choose import choose
from gemmule.core.canonical import Call, Options, canonical
from gemmule.core.operand import Form
from gemmule.core.problem import QuantSpec
from gemmule.core.registry import cuda_rungs
from gemmule.core.rung import HEADERS_FOLDER
from gemmule.oracle.problems import make_problem
from gemmule.storage import evidence, lines, margins
from gemmule_lab.cli import run
from gemmule_lab.commands.study import DOCUMENTS
from gemmule_lab.records import study as study_store
from gemmule_lab.report import ladder_table
from gemmule_lab.report.tables import significant
from proofs import default_plans, proofs
from proofs import device as verify_device
from proofs import status as proof_status
from proofs.__main__ import COMMAND

pinned = pytest.mark.skipif(
    not proofs.is_pinned(), reason=f"needs NVRTC {evidence.PINNED_NVRTC}, whose cubins are the keys"
)
RECORDS = list(evidence.read())


def test_default_plans_need_no_unproved_rung() -> None:
    proved = {(record.folder, record.rung, record.variant) for record in RECORDS}
    lacking = {name: words for name, words in default_plans.needed().items() if name not in proved}
    assert not lacking


def test_default_plans_cover_what_people_multiply() -> None:
    problems = list(default_plans.problems())
    assert {p.op for p in problems} == {"matvec", "matmul", "grouped"}
    assert {"float16", "bfloat16", "float32", "float64"} <= {p.a for p in problems}
    assert {p.layout_a for p in problems if p.op == "matvec"} == {"row", "col", "strided"}
    assert {p.alignment for p in problems} >= {16, 8, 2}


def test_the_rung_with_the_shortest_time_is_needed() -> None:
    problem = make_problem("matvec", 4096, 4096, 1, ("float16",) * 3)
    rung = default_plans.chosen_rung(problem, proofs.proof_machine())
    assert rung is not None
    assert rung.suggest(problem, proofs.proof_machine()) is not None
    without = [r for r in cuda_rungs() if r is not rung and r.refusal(problem) is None]
    times = [s.expected_s for r in without if (s := r.suggest(problem, proofs.proof_machine()))]
    mine = rung.suggest(problem, proofs.proof_machine())
    assert mine is not None
    assert all(mine.expected_s <= other for other in times)


PACKED = ((8192, 9), (8192, 16), (4096, 24), (5120, 16))


@pytest.mark.parametrize("side", [1024, 2048, 3072, 4096])
def test_sixteen_columns_go_in_one_launch_where_their_blocks_fit_at_a_time(side: int) -> None:
    """More columns or rows would wait for a second wave: packed, or by warpgroups."""
    machine = proofs.proof_machine()

    def chosen(m: int, columns: int, group: int = 128) -> str:
        quant = QuantSpec(4, group, True, "mma16", "float32", False)
        signature = ("uint4", "float16", "float16")
        problem = make_problem("matmul", m, columns, side, signature, layout_b="col", quant=quant)
        rung = default_plans.chosen_rung(problem, machine)
        assert rung is not None
        found = rung.suggest(problem, machine)
        assert found is not None
        (*packs, product) = rung.steps(problem, rung.check_params(problem, found.params), machine)
        if rung.name == "rounded_columns":  # turns x, and may add parts of the sums
            return rung.name
        assert len(packs) == (rung.name in ("fragment_columns", "arranged_columns"))
        if not packs and columns > 8:
            assert product.grid[0] <= machine.units
        return rung.name

    assert {chosen(side, n) for n in (5, 8, 9, 16)} == {"staged_fragments"}
    assert chosen(2 * 4096, 8) == "staged_fragments"
    for m, n in PACKED:  # packed or not, they are expected to be alike
        assert chosen(m, n) in ("warpgroup_columns", "arranged_columns", "rounded_columns")
    assert chosen(side, 16, group=32) == "staged_fragments"


# --- what changes a key ---------------------------------------------------------------------------

SIMPLE = "thread_per_row"


def key_of_edited(folder: Path, old: str, new: str) -> str:
    """Return the cubin digest of a rung whose source was edited."""
    rung = next(r for r in cuda_rungs() if r.name == SIMPLE)
    variant = min(proofs.variants(rung), key=lambda v: len(v.kernels))
    source = rung.source_path.read_text()
    assert old in source
    path = folder / rung.source_path.name
    path.write_text(source.replace(old, new, 1))
    return nvrtc.build(path, variant.kernels[:1], proofs.PROOF_ARCH)[0].digest()


@pinned
def test_comments_and_places_leave_the_key_alone(tmp_path: Path) -> None:
    rung = next(r for r in cuda_rungs() if r.name == SIMPLE)
    variant = min(proofs.variants(rung), key=lambda v: len(v.kernels))
    original = nvrtc.build(rung.source_path, variant.kernels[:1], proofs.PROOF_ARCH)[0].digest()
    assert key_of_edited(tmp_path, "#include", "// A remark.\n\n#include") == original
    assert (
        key_of_edited(tmp_path, "#include", "__device__ int unused_helper();\n#include") == original
    )


@pinned
def test_an_edited_load_changes_the_key(tmp_path: Path) -> None:
    rung = next(r for r in cuda_rungs() if r.name == SIMPLE)
    found = re.search(r"\* p\.a_col", rung.source_path.read_text())
    assert found is not None, "the edit below needs the stride of A in the source"
    original = key_of_edited(tmp_path, "#include", "#include")
    assert key_of_edited(tmp_path, "* p.a_col", "* p.a_col + 1") != original


def test_launch_geometry_is_part_of_the_key() -> None:
    rung = next(r for r in cuda_rungs() if r.name == SIMPLE)
    variant = next(proofs.variants(rung))
    first, *rest = variant.launches
    for change in (
        {"grid": (first.step.grid[0] + 1, 1, 1)},
        {"block": (32, 1, 1)},
        {"smem": 16},
        {"cluster": (2, 1, 1)},
        {"pdl": True},
        {"kernel": "other"},
    ):
        edited = replace(first, step=replace(first.step, **change))
        other = replace(variant, launches=(edited, *rest))
        assert other.geometry_digest() != variant.geometry_digest(), change
    dropped = replace(variant, launches=tuple(rest))
    assert dropped.geometry_digest() != variant.geometry_digest()


@pytest.mark.parametrize(
    ("struct", "fields"),
    [
        ("GemvArgs", launch_args.GEMV_FIELDS),
        ("GemmArgs", launch_args.GEMM_FIELDS),
        ("QuantArgs", launch_args.QUANT_FIELDS),
    ],
)
def test_the_packed_structs_are_those_of_the_header(
    struct: str, fields: tuple[tuple[str, str], ...]
) -> None:
    header = (HEADERS_FOLDER / "args.cuh").read_text()
    assert declared(header, struct) == list(fields)
    assert declared(header.replace("i64 m, n", "i64 n, m"), struct) != list(fields)


def declared(header: str, struct: str) -> list[tuple[str, str]]:
    """Return (name, struct code) of every field of a struct, in order."""
    body = re.search(rf"struct {struct} \{{(.*?)\}};", header, re.S)
    assert body is not None
    found = []
    for line in re.sub(r"//[^\n]*", "", body.group(1)).split(";"):
        words = line.split()
        if words:
            names = line.replace("*", " * ").split(",")
            kind = "Q" if "*" in line else {"i64": "q", "double": "d"}[words[0]]
            found += [(name.split()[-1], kind) for name in names]
    return found


# --- how records are kept -------------------------------------------------------------------------

NAME = ("matvec", "thread_per_row", "float32,float32,float32")


def record(name: tuple[str, str, str] = NAME, key: str = "k") -> evidence.Record:
    return evidence.Record(*name, "sm_90a", key, "NVIDIA X", "2026-11-21", 3, 0.5)


def outcome(name: tuple[str, str, str] = NAME, **options: object) -> verify_device.Outcome:
    return verify_device.Outcome(*name, **{"key": "k", "cases": 3, "device": "NVIDIA X", **options})


def test_standing_tells_current_stale_missing_and_unproved_apart() -> None:
    other = (NAME[0], NAME[1], "float64,float64,float64")
    third = ("matvec", "another", "float32,float32,float32")
    same = proof_status.judge({NAME: "k", other: "k", third: "k"}, [record()])
    assert (same.current, same.missing, same.unproved) == ([NAME], [other], [third])
    assert not same.ok
    changed = proof_status.judge({NAME: "new"}, [record()])
    assert changed.stale == [NAME]
    assert not changed.ok
    assert changed.to_prove() == {NAME[:2]: frozenset({NAME[2]})}
    assert proof_status.judge({NAME: "k", third: "k"}, [record()]).ok
    another_gpu = [record(key="old"), record(key="new")]
    assert proof_status.judge({NAME: "new"}, another_gpu).current == [NAME]


@pinned
def test_failed_variants_lose_their_record_and_others_keep_it(tmp_path: Path) -> None:
    other = (NAME[0], NAME[1], "float64,float64,float64")
    third = ("matvec", "another", "float32,float32,float32")
    path = verify_device.write_evidence(tmp_path, [outcome(), outcome(other), outcome(third)])
    assert path == tmp_path / "nvidia-x" / "verified"
    files = {"matvec.another.jsonl", "matvec.thread_per_row.jsonl"}
    assert {one.name for one in path.iterdir()} == files
    verify_device.write_evidence(tmp_path, [outcome(failures=["wrong"])])
    assert {r.variant for r in evidence.read(tmp_path) if r.rung == NAME[1]} == {other[2]}
    died = outcome((*NAME[:2], verify_device.EVERY), cases=0, failures=["it died"])
    verify_device.write_evidence(tmp_path, [died])
    assert [(r.folder, r.rung, r.variant) for r in evidence.read(tmp_path)] == [third]


def test_nothing_is_written_when_nothing_ran(tmp_path: Path) -> None:
    died = outcome(device="", cases=0, failures=["no device"])
    assert verify_device.write_evidence(tmp_path, [died]) is None
    assert list(tmp_path.iterdir()) == []


@pinned
def test_records_are_frozen() -> None:
    record = next(iter(evidence.read()))
    with pytest.raises(FrozenInstanceError):
        record.cases = 10**9  # type: ignore[misc]


def test_records_of_another_gpu_stay_where_they_are(tmp_path: Path) -> None:
    verify_device.write_evidence(tmp_path, [outcome(device="NVIDIA Y")])
    other = evidence.proof_file(tmp_path / "nvidia-y", NAME[:2])
    before = other.read_bytes()
    assert verify_device.write_evidence(tmp_path, [outcome()]) is not None
    assert len(list(evidence.read_device(tmp_path / "nvidia-x"))) == 1
    assert other.read_bytes() == before


@pinned
def test_records_of_other_rungs_stay_as_they_are(tmp_path: Path) -> None:
    third = ("matvec", "another", "float32,float32,float32")
    verify_device.write_evidence(tmp_path, [outcome(third)])
    other = evidence.proof_file(tmp_path / "nvidia-x", third[:2])
    other.write_text(other.read_text() + "\n")  # a blank line tells a file that was written again
    before = other.read_bytes()
    verify_device.write_evidence(tmp_path, [outcome()])
    assert other.read_bytes() == before
    assert {r.rung for r in evidence.read(tmp_path)} == {NAME[1], third[1]}


@pinned
def test_the_single_file_of_all_rungs_is_read_and_taken_apart(tmp_path: Path) -> None:
    third = ("matvec", "another", "float32,float32,float32")
    verify_device.write_evidence(tmp_path, [outcome(), outcome(third)])
    gpu = tmp_path / "nvidia-x"
    files = sorted((gpu / evidence.FOLDER).iterdir())
    (gpu / evidence.SINGLE_FILE).write_text("".join(path.read_text() for path in files))
    files[1].unlink()
    files[0].write_text(files[0].read_text().replace('"k"', '"older"'))
    assert {(r.folder, r.rung, r.variant) for r in evidence.read(tmp_path)} == {NAME, third}
    verify_device.write_evidence(tmp_path, [outcome(key="newer")])
    assert not (gpu / evidence.SINGLE_FILE).exists()
    assert sorted((gpu / evidence.FOLDER).iterdir()) == files
    assert {r.rung: r.key for r in evidence.read(tmp_path)} == {NAME[1]: "newer", third[1]: "k"}


def test_records_in_the_package_come_before_those_of_the_source_tree(tmp_path: Path) -> None:
    inside = "src/gemmule/evidence"  # where a wheel has them
    assert evidence.folder(tmp_path / "src/gemmule") == tmp_path / "evidence"
    (tmp_path / inside).mkdir(parents=True)
    assert evidence.folder(tmp_path / "src/gemmule") == tmp_path / inside


ARCHIVES: dict[str, Callable[[bytes], bytes]] = {"gz": gzip.compress, "xz": lzma.compress}


def test_what_a_wheel_carries_is_read_as_the_tree_is(
    tmp_path: Path, fault: Callable[..., Any]
) -> None:
    def contents() -> tuple[list[Any], dict[str, list[Any]], dict[str, list[Any]]]:
        measured = {
            gpu.name: list(margins.read_file(gpu / margins.FILE))
            for gpu in sorted(evidence.folder().iterdir())
        }
        studies = {
            f"{seed} {path.parent.name}": [*study_store.read(path, seed)]
            for seed in DOCUMENTS
            for path in study_store.on_record(seed)[:1]  # the one that is shown
        }
        records = sorted(evidence.read(), key=lambda r: (r.device, r.folder, r.rung, r.variant))
        return records, {name: found for name, found in measured.items() if found}, studies

    def said(row: study_store.StudyRow) -> list[str]:
        numbers = [*row.figures.values()]
        if row.times_us is not None:
            numbers += [row.times_us.q1, row.times_us.median, row.times_us.q3]
        return [significant(one) for one in numbers]

    of_tree = contents()
    assert all(of_tree)
    assert len({name.split()[0] for name in of_tree[2]}) == len(DOCUMENTS)
    size = 0
    carried = dict(wheel_evidence.packed(evidence.folder()))
    assert sum("study-" in name for name in carried) == len(DOCUMENTS)
    for name, content in carried.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
        size += len(content)
    assert size < 1 << 20
    fault(evidence, "folder", lambda sound: tmp_path)
    *plans, studies = contents()
    assert plans == [*of_tree[:2]]
    assert studies.keys() == of_tree[2].keys()
    for name, rows in studies.items():
        for found, recorded in zip(rows, of_tree[2][name], strict=True):
            assert said(found) == said(recorded), name
            if recorded.times_us is not None:
                assert found.us == pytest.approx(recorded.us, rel=1e-5)
            assert found == replace(recorded, times_us=found.times_us, figures=found.figures), name


@pytest.mark.parametrize("suffix", ARCHIVES)
@pytest.mark.parametrize("damage", [lambda packed: packed[:-9], lambda packed: b"no archive"])
def test_a_damaged_archive_holds_nothing(
    tmp_path: Path, damage: Callable[[bytes], bytes], suffix: str
) -> None:
    path = tmp_path / "gpu" / evidence.SINGLE_FILE
    path.parent.mkdir()
    packed = path.with_name(f"{path.name}.{suffix}")
    packed.write_bytes(ARCHIVES[suffix](f"{GOOD}\n".encode()))
    assert [r.rung for r in evidence.read(tmp_path)] == ["r"]
    packed.write_bytes(damage(packed.read_bytes()))
    assert list(evidence.read(tmp_path)) == []
    path.write_text(GOOD.replace('"r"', '"s"') + "\n")  # the plain file counts where it is
    assert [r.rung for r in evidence.read(tmp_path)] == ["s"]


@pytest.mark.parametrize("suffix", ARCHIVES)
def test_an_archive_that_swells_is_not_unpacked(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / "a.jsonl"
    path.with_name(f"a.jsonl.{suffix}").write_bytes(ARCHIVES[suffix](bytes(1 << 24)))
    with pytest.raises(ValueError, match="more than 1,000,000 bytes"):
        lines.read_bytes(path, 10**6)


def test_every_record_lies_in_its_rungs_file() -> None:
    found = 0
    for gpu in evidence.folder().glob("*"):
        for path in (gpu / evidence.FOLDER).glob("*.jsonl"):
            names = {(r.folder, r.rung) for r in evidence.read_file(path)}
            assert [evidence.proof_file(gpu, name) for name in names] == [path]
            found += 1
    assert found


GOOD = (
    '{"schema": 1, "folder": "matvec", "rung": "r", "variant": "v", "arch": "sm_90a", '
    '"key": "k", "device": "d", "date": "2026-11-21", "cases": 1, "worst_ratio": 0.5}'
)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "no json",
        "[]",
        "{}",
        '{"schema": 2}',
        "[" * 100_000,
        '{"schema": 1, "folder": "matvec", "rung": "r"}',
        "x" * (lines.MAX_LINE_BYTES + 1),
        GOOD.replace('"schema": 1', '"schema": 2').replace('"r"', '"s"'),
        GOOD.replace('"schema": 1', '"schema": true').replace('"r"', '"s"'),
        GOOD.replace('"cases": 1', '"cases": -1'),
        GOOD.replace('"cases": 1', '"cases": true'),
        GOOD.replace('"cases": 1', '"cases": "1"'),
        GOOD.replace('"cases": 1', '"cases": 0'),
        GOOD.replace('"cases": 1', f'"cases": {2**63}'),
        GOOD.replace('"k"', '""'),
        GOOD.replace('"k"', '"\\u0007"'),
        GOOD.replace('"k"', f'"{"k" * (evidence.MAX_TEXT + 1)}"'),
        GOOD.replace("0.5", "NaN"),
        GOOD.replace("0.5", "1.5"),
        GOOD.replace("0.5", "-0.5"),
        GOOD.replace('"matvec"', '["matvec"]'),
        GOOD.replace('"rung": "r"', '"rung": "r", "rung": "s"'),
    ],
)
def test_lines_that_are_no_records_are_passed_over(tmp_path: Path, line: str) -> None:
    folder = tmp_path / "gpu"
    folder.mkdir()
    (folder / "verified.jsonl").write_text(f"{line}\n{GOOD}\n")
    assert [r.rung for r in evidence.read(tmp_path)] == ["r"]


@pytest.mark.parametrize("ratio", ["0", "1", "1.0"])
def test_a_result_at_its_very_bound_is_right_in_lines_that_say_so(
    tmp_path: Path, ratio: str
) -> None:
    folder = tmp_path / "gpu"
    folder.mkdir()
    (folder / "verified.jsonl").write_text(f"{GOOD.replace('0.5', ratio)}\n")
    assert [r.worst_ratio for r in evidence.read(tmp_path)] == [float(ratio)]


@pinned
def test_the_check_fails_where_a_proof_is_out_of_date(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rung = next(r for r in cuda_rungs() if r.name == "p_threads")
    command = ["--stale", "--check", "--rung", rung.name, "--evidence", str(tmp_path)]
    assert run(command, COMMAND) == 0
    assert "unproved, never chosen automatically: matvec/p_threads" in capsys.readouterr().out
    keys = proofs.keys((rung,))
    verify_device.write_evidence(tmp_path, [outcome(name, key=key) for name, key in keys.items()])
    assert run(command, COMMAND) == 0
    assert f"{len(keys)} variants proved as they are" in capsys.readouterr().out
    (first, *_) = keys
    verify_device.write_evidence(tmp_path, [outcome(first, key="another")])
    assert run(command, COMMAND) == 1
    assert f"stale: {'/'.join(first)} changed since its proof" in capsys.readouterr().out


# --- what plans may choose ------------------------------------------------------------------------

HALF = ("float16",) * 3
NEW = ("float16", "bfloat16", "float32")


def half_call(signature: tuple[str, str, str]) -> Call:
    """Return a matvec of halves with the dtypes put in the place of its own."""
    forms = Form((4096, 4096), (4096, 1), "float16", 16), Form((4096,), (1,), "float16", 16)
    call = canonical("matvec", *forms, None, Options())
    a, b, out = signature
    return replace(call, problem=replace(call.problem, a=a, b=b, out=out))


def test_a_dtype_added_to_a_proved_rung_is_unproved(
    only_proved: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rung's other dtypes are chosen as before, the new one only where nobody asks."""
    machine = proofs.proof_machine()
    usual = choose(half_call(HALF), machine).rung
    wider = replace(usual, signatures=(*usual.signatures, NEW))
    planted = tuple(wider if rung is usual else rung for rung in cuda_rungs())
    for name in ("all_rungs", "rungs_for"):
        monkeypatch.setattr(sys.modules["gemmule.choose"], name, lambda *of, **which: planted)
    call = half_call(NEW)
    assert wider.refusal(call.problem) is None
    assert wider.suggest(call.problem, machine) is not None
    assert choose(half_call(HALF), machine).rung is wider
    with pytest.raises(TypeError, match="no proved cuda rung"):
        choose(call, machine)
    assert choose(call, machine, wider.name).rung is wider  # by name it may run
    only_proved("cuda", {wider.name})
    assert choose(call, machine).rung is wider


def test_a_variant_without_its_record_makes_room_for_the_next_rung(
    fault: Callable[..., Any],
) -> None:
    machine = proofs.proof_machine()
    usual = choose(half_call(HALF), machine).rung
    lost = (usual.folder, usual.name, evidence.variant_named(HALF))
    kept = evidence.proved_variants() - {lost}
    assert len(kept) == len(evidence.proved_variants()) - 1
    fault(evidence, "proved_variants", lambda sound: kept)
    other = choose(half_call(HALF), machine).rung
    assert other is not usual
    assert choose(half_call(("bfloat16",) * 3), machine).rung is usual
    status = {row.rung: row.proof for row in ladder_table.rows("matvec", "cuda", 4096, machine)}
    count = len(usual.signatures)
    assert status[usual.name] == f"proved for {count - 1} of {count} mixes of dtypes"
    assert status[other.name] == "proved"


def test_what_cannot_be_written_is_said(tmp_path: Path) -> None:
    """Every record of lines raises where its folder cannot be one, and leaves what is there."""
    (tmp_path / "file").write_text("kept", "utf-8")
    for place in (tmp_path / "file" / "rows.jsonl", tmp_path):  # below a file; a folder itself
        with pytest.raises(OSError):
            lines.write(place, [{"schema": 1}])
        with pytest.raises(OSError):
            lines.write_records(place, 1, [])
    assert [one.name for one in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text("utf-8") == "kept"
