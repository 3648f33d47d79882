"""Builds on record: which inputs they stand for, and that nobody trusts them further than that."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

import rebuild
from gemmule.backends.cuda import nvrtc
from gemmule.core.problem import FLOAT4_DTYPE
from gemmule.core.registry import all_rungs
from gemmule.core.rung import CudaRung
from gemmule.storage import built, evidence, lines
from gemmule.storage.atomic import replace_text
from gemmule_lab.cli import run
from proofs import proofs
from proofs import status as proof_status
from proofs.__main__ import COMMAND

pytestmark = pytest.mark.skipif(not proofs.is_pinned(), reason="needs the pinned NVRTC")


# Built in a test, each for 0.2 s and more. Of every rung test_cuda_rungs builds one kernel anew,
# and compares its cubin with the one on record.
MOST_KERNELS = 6
RECORDS = list(evidence.read())
PROVED = {(record.folder, record.rung) for record in RECORDS}
RUNGS = [
    pytest.param(rung, id=f"{rung.folder}-{rung.name}")
    for rung in proofs.kernel_rungs()
    if (rung.folder, rung.name) in PROVED
]


@pytest.fixture(autouse=True)
def _read_anew() -> Iterator[None]:
    built.forget()
    yield
    built.forget()


def rung_named(name: str) -> CudaRung:
    return next(r for r in all_rungs("cuda") if isinstance(r, CudaRung) and r.name == name)


@functools.cache
def smallest(rung: CudaRung) -> proofs.Variant:
    """Return the variant with the fewest kernels, of 8-bit codes where those have no more.

    They unpack in fewer instructions, and so build in half the time. Not one that adds a bias,
    applies an epilogue or reads 4-bit floats: a rung may be chosen before that is proved.
    """
    of_rung = [
        one
        for one in proofs.variants(rung)
        if not (proofs.adds_bias(one) or proofs.scales(one))
        and not one.name.endswith("epilogue")
        and FLOAT4_DTYPE not in one.name
    ]
    return min(of_rung, key=lambda one: (len(one.kernels), one.name.startswith("uint4")))


@pytest.fixture
def copied(tmp_path: Path) -> proofs.Variant:
    """A variant whose sources may be edited."""
    variant = smallest(rung_named("warp_vector"))
    package = variant.rung.path.parents[3]
    shutil.copytree(package / "rungs", tmp_path / "gemmule/rungs")
    path = tmp_path / "gemmule" / variant.rung.path.relative_to(package)
    place = SimpleNamespace(path=path, source_path=path.with_suffix(".cu"))
    return replace(variant, rung=cast("CudaRung", place))


def test_the_inputs_are_all_that_a_cubin_depends_on(
    copied: proofs.Variant, monkeypatch: pytest.MonkeyPatch
) -> None:
    def digest(variant: proofs.Variant) -> str:
        return proofs.inputs_digest(variant)

    variant, rung = copied, copied.rung
    before = digest(variant)
    assert before == digest(smallest(rung_named("warp_vector")))  # wherever the files lie
    found = {before}
    found.add(digest(replace(variant, kernels=(*variant.kernels, "another<1>"))))
    found.add(digest(replace(variant, defines=(*variant.defines, "MORE"))))
    for name, value in (
        ("compiler_version", lambda: "1.2"),
        ("headers_version", lambda: "other 1"),
        ("_OPTIONS", {**nvrtc._OPTIONS, "std": "c++20"}),
    ):
        with monkeypatch.context() as changed:
            changed.setattr(nvrtc, name, value)
            found.add(digest(variant))
    with monkeypatch.context() as changed:
        changed.setattr(proofs, "PROOF_ARCH", "sm_80")
        found.add(digest(variant))
    headers = rung.path.parents[2] / "_cuda"
    for path in (rung.source_path, headers / "ptx.cuh"):  # the second by way of another header
        text = path.read_text()
        path.write_text(text + "\n")
        found.add(digest(variant))
        path.write_text(text)
    assert len(found) == 9
    other = headers / "ptx_wgmma.cuh"
    other.write_text(other.read_text() + "\n")
    assert digest(variant) == before


def test_a_build_on_record_is_not_repeated_and_a_false_one_is_seen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rung = rung_named("p_threads")
    variant = smallest(rung)
    true = proofs.key(variant, anew=True)
    name = (rung.folder, rung.name)
    false = built.Built(variant.name, proofs.inputs_digest(variant), "0" * 64)
    monkeypatch.setattr(evidence, "folder", lambda: tmp_path)
    built.write(built.path_of(name), [false])
    assert proofs.key(variant) != true
    assert proofs.key(variant, anew=True) == true
    proof = evidence.Record(*name, variant.name, "sm_90a", true, "a GPU", "2026-01-01", 1, 0.5)
    path = evidence.proof_file(tmp_path / "a-gpu", name)
    path.parent.mkdir(parents=True)
    fields = {n: getattr(proof, n) for n in proof.__dataclass_fields__}
    replace_text(path, json.dumps({"schema": evidence.SCHEMA, **fields}) + "\n")
    command = ["--stale", "--check", "--rung", rung.name, "--evidence", str(tmp_path)]
    assert run(command, COMMAND) == 1
    assert f"stale: {'/'.join((*name, variant.name))}" in capsys.readouterr().out
    run([*command, "--anew"], COMMAND)
    assert "1 variants proved as they are, 0 stale" in capsys.readouterr().out


@pytest.mark.parametrize("rung", RUNGS)
def test_a_build_on_record_is_what_is_built(rung: CudaRung) -> None:
    """Of each proved rung one variant, built where it has not very many kernels."""
    variant = smallest(rung)
    known = built.cubins(built.path_of((rung.folder, rung.name)))
    assert proofs.inputs_digest(variant) in known, "run python tools/rebuild.py"
    if len(variant.kernels) <= MOST_KERNELS:
        assert proofs.key(variant) == proofs.key(variant, anew=True)


@pytest.mark.parametrize("rung", RUNGS)
def test_a_proved_rung_is_proved_as_it_is(rung: CudaRung) -> None:
    """One variant of each rung; `python -m proofs --check` compares all of them.

    By its build on record, while that is of these inputs; the test above builds it anew.
    """
    variant = smallest(rung)
    name = (rung.folder, rung.name, variant.name)
    found = proof_status.judge({name: proofs.key(variant)}, RECORDS)
    assert found.current == [name], found.lines()


@pytest.mark.parametrize(
    "line", ["", "[]", '{"schema": 1}', '{"schema": 1, "inputs": "%s", "cubin": 7}' % ("a" * 64)]
)
def test_lines_that_are_no_builds_are_passed_over(tmp_path: Path, line: str) -> None:
    good = json.dumps({"schema": 1, "variant": "v", "inputs": "b" * 64, "cubin": "c" * 64})
    path = tmp_path / "x.jsonl"
    path.write_text(f"{line}\n{good}\n")
    assert built.cubins(path) == {"b" * 64: "c" * 64}
    path.write_text(good.replace("b" * 64, "b" * 63))
    built.forget()
    assert built.cubins(path) == {}


def test_the_tool_builds_what_changed_and_drops_what_is_gone(tmp_path: Path) -> None:
    rung = rung_named("p_threads")
    path = built.path_of((rung.folder, rung.name), tmp_path)
    other = path.with_name("matvec.another.jsonl")
    built.write(other, [built.Built("a", "b" * 64, "c" * 64)])
    assert list(rebuild.update([rung.name], tmp_path)) == [path]
    assert list(rebuild.update([rung.name], tmp_path)) == []
    assert other.is_file(), "of which nothing was asked"
    found = list(lines.read(path, built.SCHEMA))
    assert {one["variant"] for one in found} == {one.name for one in proofs.variants(rung)}
    built.write(path, [built.Built(found[0]["variant"], "d" * 64, "e" * 64)])
    assert list(rebuild.update([rung.name], tmp_path)) == [path]
    assert list(lines.read(path, built.SCHEMA)) == found


def test_every_variant_has_its_build_on_record() -> None:
    """Else the check of the evidence builds it, every time and for everybody."""
    recorded = {path.stem for path in (evidence.folder() / built.FOLDER).glob("*.jsonl")}
    kernels = {(rung.folder, rung.name) for rung in proofs.kernel_rungs()}
    proved = {f"{r.folder}.{r.rung}" for r in evidence.read() if (r.folder, r.rung) in kernels}
    assert proved <= recorded, "run python tools/rebuild.py"
    for rung in (rung_named(name) for name in ("warp_per_row", "transpose_then", "naive")):
        known = built.cubins(built.path_of((rung.folder, rung.name)))
        every = list(proofs.variants(rung))
        assert [v.name for v in every] == [",".join(s) for s in proofs.signatures(rung)]
        assert all(v.launches for v in every)
        lacking = [v.name for v in every if proofs.inputs_digest(v) not in known]
        assert not lacking, "run python tools/rebuild.py"
