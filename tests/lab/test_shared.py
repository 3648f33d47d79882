"""What users send of their cards: packed without names, refused if not packed here."""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import socket
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import take_shared
from emulated_driver import emulated
from fake_cublas import installed
from gemmule.backends.cuda.launch import CudaBackend
from gemmule.oracle.problems import make_problem
from gemmule.storage import evidence, first_use, measured
from gemmule_lab import served, sharing
from gemmule_lab.cli import run
from gemmule_lab.records.results import Results
from gemmule_lab.records.rows import Environment
from gemmule_lab.sharing import BENCH, CHECKS, JUDGED, MODEL, Judged, Shared
from gemmule_lab.verify.workers import Tally
from lab_rows import machine, result_row

GPU = "NVIDIA GeForce RTX 4090"
VARIANT = "float32,float32,float32"
PROBLEM = make_problem("matvec", 64, 64, 1, ("float32",) * 3)


def measured_on(device: str = GPU, **changed: Any) -> Results:
    """Return results as a bench has them on a GPU, with all that names the machine."""
    here: Environment = replace(
        machine(device=device),
        backend="cuda",
        cpu="Some CPU",
        gpus=(device,),
        system=f"Linux-6.8.0-{socket.gethostname()}-x86_64",
        commit="0" * 40 + "+",
        clocks={"driver": "CUDA 13.0", "load": "3.10", "governor": "performance"},
    )
    here = replace(here, **changed)
    row = replace(result_row("streamed_rows", 5.0, PROBLEM), environment=here.id)
    return Results({here.id: here}, (row,))


def read(archive: Path) -> Shared:
    return take_shared.read(archive)[0]


def sample(**changed: Any) -> Shared:
    judged = Judged(GPU, "sm_89", "0.5.0", "2026-11-27", 7, 20_000, 0, 0, 12, 0.4)
    place = Path.home() / "lib/gemmule/rungs/a.cu"
    wrong = f"NVRTC could not compile {place} for sm_89: a.cu(3): error"
    checks = (
        first_use.Checked("matvec", "streamed_rows", VARIANT, "c0de", "50", "", "d"),
        first_use.Checked("matmul", "naive", VARIANT, "", "50", wrong, "d"),
    )
    model = {"schema": 1, "device": GPU, "numbers": {"matvec/naive": {"launch_s": 2e-6}}}
    return replace(Shared(judged, checks, measured_on(), model), **changed)


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    sharing.pack(tmp_path / "out.zip", sample())
    return tmp_path / "out.zip"


def test_an_archive_is_read_as_it_was_packed(archive: Path) -> None:
    found, given = read(archive), sample()
    assert (found.judged, found.model) == (given.judged, given.model)
    assert found.checks[0] == given.checks[0]
    assert found.checks[1].wrong == "NVRTC could not compile a.cu for sm_89: a.cu(3): error"
    (row,) = found.bench.rows
    assert row.environment in found.bench.environments
    assert replace(row, environment="") == replace(given.bench.rows[0], environment="")
    assert "20,000 random products, 0 wrong" in sharing.in_words(found)
    assert "2 kernels checked, 1 wrong; 1 rows; with a time model" in sharing.in_words(found)
    with pytest.raises(FileExistsError):
        sharing.pack(archive, sample())


def test_it_names_neither_host_nor_user_nor_folder(archive: Path) -> None:
    with zipfile.ZipFile(archive) as held:
        assert {one.date_time for one in held.infolist()} == {sharing.WRITTEN}
        for name in held.namelist():
            text = held.read(name).decode()
            for secret in (socket.gethostname(), str(Path.home()), "6.8.0", "governor", "0" * 40):
                assert secret not in text, name
            assert len(getpass.getuser()) < 5 or getpass.getuser() not in text, name


Files = dict[str, bytes]


def _files(archive: Path) -> Files:
    with zipfile.ZipFile(archive) as held:
        return {name: held.read(name) for name in held.namelist()}


def _line(content: bytes, **changed: Any) -> bytes:
    return json.dumps({**json.loads(content.splitlines()[0]), **changed}).encode() + b"\n"


DAMAGE: dict[str, tuple[Callable[[Files], Files], str]] = {
    "leads out": (lambda f: {**f, "../../x.jsonl": b""}, "and nothing else"),
    "absolute": (lambda f: {**f, "/tmp/x": b""}, "and nothing else"),
    "lacks one": (lambda f: {n: f[n] for n in f if n != BENCH}, "it must hold"),
    "too large": (lambda f: {**f, CHECKS: b" " * ((1 << 20) + 1)}, "has more than 1,048,576"),
    "other lines": (lambda f: {**f, CHECKS: f[CHECKS] + b"{}\n"}, "1 lines of checks.jsonl"),
    "two judged": (lambda f: {**f, JUDGED: 2 * f[JUDGED]}, "has 2 lines"),
    "wrong type": (lambda f: {**f, JUDGED: _line(f[JUDGED], cases="many")}, "none of ours"),
    "no chip": (lambda f: {**f, JUDGED: _line(f[JUDGED], arch="sm_89; rm")}, "none of ours"),
    "another GPU": (lambda f: {**f, JUDGED: _line(f[JUDGED], device="B300")}, "is of one GPU"),
    "a folder": (lambda f: {**f, CHECKS: _line(f[CHECKS], wrong="/home/me/a.cu")}, "none of ours"),
    "markup": (
        lambda f: {**f, BENCH: f[BENCH].replace(b"streamed_rows", b"<script>")},
        "more than numbers and plain words",
    ),
    "torn": (lambda f: {**f, BENCH: f[BENCH][:-9]}, "no rows, or ends within one"),
    "no JSON": (lambda f: {**f, MODEL: b"{"}, "is no JSON"),
    "code": (lambda f: {**f, MODEL: b'{"device": "`x`"}'}, "more than numbers and short names"),
    "deep": (lambda f: {**f, MODEL: b'{"a":' * 99 + b"1" + b"}" * 99}, "more than numbers"),
    "infinite": (
        lambda f: {**f, MODEL: f[MODEL].replace(b"2e-06", b"Infinity")},
        "more than numbers and short names",
    ),
    "other model": (lambda f: {**f, MODEL: b'{"device": "B300"}'}, "is not of NVIDIA GeForce"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_was_not_packed_here_is_refused(archive: Path, damage: str) -> None:
    change, words = DAMAGE[damage]
    spoiled = archive.with_name("spoiled.zip")
    with zipfile.ZipFile(spoiled, "w") as held:
        for name, content in change(_files(archive)).items():
            held.writestr(name, content)
    with pytest.raises(ValueError, match=words):
        read(spoiled)
    with pytest.raises(ValueError, match=words):
        take_shared.take(spoiled, archive.parent / "evidence")
    assert not (archive.parent / "evidence").exists()


def test_names_of_a_system_are_refused(archive: Path) -> None:
    held = measured_on(commit=None, system="Linux", cpu="me@my-host:~$ `x`")
    sharing.pack(archive.with_name("named.zip"), sample(bench=held))
    with pytest.raises(ValueError, match="holds more than numbers and plain words"):
        read(archive.with_name("named.zip"))


def test_what_is_no_archive_or_unpacks_to_gigabytes_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.zip"
    path.write_bytes(b"PK\x03\x04" + bytes(99))
    with pytest.raises(ValueError, match="is no archive of gemmule verify --share"):
        read(path)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as held:
        for name in (JUDGED, CHECKS, BENCH):
            held.writestr(name, bytes(64 << 20))
    assert path.stat().st_size < take_shared.MOST_ARCHIVE_BYTES
    with pytest.raises(ValueError, match="has more than"):
        read(path)
    path.write_bytes(bytes(take_shared.MOST_ARCHIVE_BYTES + 1))
    with pytest.raises(ValueError, match="has more than 4,194,304 bytes"):
        read(path)
    path.unlink()
    os.mkfifo(path)  # nobody writes to it: who opened it would wait
    with pytest.raises(ValueError, match="is no regular file"):
        read(path)


def test_only_the_ways_of_packing_that_take_little_memory_are_unpacked(archive: Path) -> None:
    for way in (zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA):
        other = archive.with_name("other.zip")
        with zipfile.ZipFile(other, "w", way) as held:
            for name, content in _files(archive).items():
                held.writestr(name, content)
        with pytest.raises(ValueError, match="is packed in another way"):
            read(other)


def test_a_device_may_not_name_a_folder(archive: Path) -> None:
    for name in ("../../../tmp/evil", "..", "/etc"):
        judged = replace(sample().judged, device=name)
        other = archive.with_name("other.zip")
        sharing.pack(other, sample(judged=judged, bench=measured_on(name), model=None))
        with contextlib.suppress(ValueError):  # refused, or it is below the folder given
            place = take_shared.take(other, archive.parent / "evidence")
            assert (archive.parent / "evidence").resolve() in place.resolve().parents
            assert ".." not in place.parts
        other.unlink()


def test_the_tool_says_in_a_line_what_it_did(archive: Path, tmp_path: Path) -> None:
    (tmp_path / "no.zip").write_text("hello")

    def said(*given: str) -> tuple[int, str]:
        command = [sys.executable, take_shared.__file__, *given]
        found = subprocess.run(command, capture_output=True, text=True, check=False)
        return found.returncode, found.stderr

    assert said()[0] == 2  # none was named
    code, words = said(str(tmp_path / "no.zip"))
    assert code == 1
    assert words.startswith("refused: ")
    assert words.count("\n") == 1


def test_the_tool_adds_an_archive_once_and_proves_nothing_by_it(archive: Path) -> None:
    root = archive.parent / "evidence"
    place = take_shared.take(archive, root)
    assert place.parent == root / "nvidia-geforce-rtx-4090" / "shared"
    assert sorted(one.name for one in place.iterdir()) == sorted((BENCH, CHECKS, JUDGED, MODEL))
    again = archive.with_name("again.zip")
    with zipfile.ZipFile(again, "w") as held:
        for one in place.iterdir():
            held.write(one, one.name)
    assert read(again).judged == read(archive).judged
    assert read(again).bench == read(archive).bench
    with pytest.raises(FileExistsError):
        take_shared.take(archive, root)
    assert list(evidence.read(root)) == []


@pytest.fixture
def device(tmp_path: Path, setting: Callable[..., None]) -> Iterator[str]:
    setting(GEMMULE_CACHE=tmp_path / "cache")
    first_use.forget()
    with emulated(), installed(None):
        yield "cuda"
    first_use.forget()


def test_a_device_shares_what_it_has(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On an emulated GPU: its ceilings and times are made up, all else is as on a real one."""
    here = CudaBackend().machine(device)
    path = measured.path_of(sharing.MODELS, here.name, here.arch, here.units)
    measured.save(path, {"device": here.name, "numbers": {}})
    asked: list[str] = []
    monkeypatch.setattr(sharing, "check_kernels", lambda _, device: asked.append(device) or ())
    tally = Tally(done=100, worst_ratio=0.5)
    given: list[str] = []

    def bench(device: str) -> Results:
        given.append(device)
        return measured_on(here.name)

    sharing.share(tmp_path / "mine.zip", device, tally, 3, bench)
    found = read(tmp_path / "mine.zip")
    assert (asked, given) == ([device], [device])
    assert (found.judged.device, found.judged.cases, found.judged.seed) == (here.name, 100, 3)
    assert found.model == {"schema": measured.SCHEMA, "device": here.name, "numbers": {}}
    with pytest.raises(FileExistsError, match="is there already"):
        sharing.share(tmp_path / "mine.zip", device, tally, 3, bench)


def test_usual_kernels_are_checked_where_nothing_proves_them(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gemmule.tuning import first_use as asking

    asked: list[tuple[str, str]] = []
    monkeypatch.setattr(
        asking, "passes", lambda choice, device: asked.append((choice.rung.name, device))
    )
    here = CudaBackend().machine(device)
    assert sharing.check_kernels(here, device) == ()
    assert not asked  # all is proved there
    sharing.check_kernels(replace(here, arch="sm_121a"), device)
    assert len(asked) == len(list(served.products()))


def test_only_a_gpu_is_shared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["verify", "--cases", "1", "--share", str(tmp_path / "x.zip")]) == 2
    assert "with --device cuda" in capsys.readouterr().err
