"""Object code that a wheel brings: found by sources, target and key, and believed only if whole."""

from __future__ import annotations

import base64
import hashlib
import logging
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gemmule as gm
import native_wheel
from checkout import SOURCE
from gemmule.backends.cpu import features, jit, jit_cache, packaged
from gemmule.backends.cpu.jit import kernel, unavailable
from gemmule.core import waiting
from gemmule_lab import warming
from gemmule_lab.cli import run

pytestmark = pytest.mark.skipif(unavailable() is not None, reason="needs llvmlite")
ENTRIES = {hashlib.sha256(bytes([i])).hexdigest()[:32]: bytes(range(i)) for i in range(5)}


def test_what_is_packed_is_unpacked() -> None:
    expected = {bytes.fromhex(key): content for key, content in ENTRIES.items()}
    assert packaged.unpacked(packaged.packed(ENTRIES)) == expected
    assert packaged.unpacked(packaged.packed({})) == {}


def test_a_damaged_file_is_refused() -> None:
    content = packaged.packed(ENTRIES)
    for at in range(len(content)):
        for spoiled in (content[:at], content[:at] + bytes([content[at] ^ 8]) + content[at + 1 :]):
            with pytest.raises(ValueError, match="damaged"):
                packaged.unpacked(spoiled)


@pytest.mark.parametrize("one", packaged.TARGETS, ids=lambda one: one.name)
def test_a_target_fits_what_has_its_features_and_no_others(
    one: packaged.Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fitting(asked: frozenset[str], present: frozenset[str]) -> packaged.Target | None:
        monkeypatch.setattr(features, "target_features", lambda: (asked, None))
        monkeypatch.setattr(features, "host_features", lambda: present)
        return packaged.target.__wrapped__()

    present = one.features | one.needed | {"sse2", "avx512vbmi"}
    assert fitting(present, present) == one
    for word in one.features | one.needed:
        assert fitting(present - {word}, present - {word}) != one
    for word in packaged.ASKED - one.features:
        assert fitting(present | {word}, present | {word}) != one


@pytest.mark.parametrize("one", packaged.TARGETS, ids=lambda one: one.name)
def test_kernels_of_a_target_are_compiled_for_its_features(
    one: packaged.Target, setting: Callable[..., None]
) -> None:
    setting(**one.variables())
    features.target_features.cache_clear()
    try:
        assert features.target_features()[0] & packaged.ASKED == one.features
        assert features.cpu_and_features()[0] == one.cpu
    finally:
        features.target_features.cache_clear()


def test_every_feature_that_is_asked_for_is_known() -> None:
    asked = set()
    for path in jit_cache.source_files():
        if path.name not in ("packaged.py", "features.py"):
            asked |= set(
                re.findall(r'"(avx\w*|amx-\w+|fma\w*|f16c|bmi\d?|sse\S*)"', path.read_text())
            )
    assert asked | {"amx-int8", "amx-bf16"} == packaged.ASKED  # made of a parameter
    assert 'f"amx-{kind}"' in (SOURCE / "gemmule/backends/cpu/amx.py").read_text()


def _product(a: int, b: int) -> int:
    return a * b


@pytest.fixture
def compiled_anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[], bool]:
    """What multiplies by a kernel that only the package may hold, and tells if it was compiled."""

    def run() -> bool:
        made, compiled = [], jit_cache.compiled
        with monkeypatch.context() as patch:
            patch.setattr(packaged, "FOLDER", tmp_path)
            patch.setattr(packaged, "target", lambda: packaged.TARGETS[0])
            patch.setattr(jit, "_LOADED", {})
            patch.setattr(jit_cache, "kernel_folder", lambda: None)
            patch.setattr(
                jit_cache, "compiled", lambda *given: (made.append(1), compiled(*given))[1]
            )
            packaged.built.cache_clear()
            assert kernel(_product)(6, 7) == 42
        packaged.built.cache_clear()
        return bool(made)

    return run


@pytest.mark.parametrize(
    "fault", [None, "gone", "damaged", "other sources", "other key", "no object"]
)
def test_a_kernel_of_the_package_is_not_compiled(
    fault: str | None,
    compiled_anew: Callable[[], bool],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wanted: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(packaged, "object_code", lambda digest, key: wanted.append(key))
        assert compiled_anew()
    (key,) = wanted
    code = jit_cache.compiled(kernel(_product), (int, int), True)
    key = key[::-1] if fault == "other key" else key
    content = packaged.packed({key: b"no object" if fault == "no object" else code})
    content = content[:-1] if fault == "damaged" else content
    digest = "0" * 32 if fault == "other sources" else jit_cache.source_digest()
    if fault != "gone":
        (tmp_path / f"{packaged.TARGETS[0].name}-{digest}").write_bytes(content)
    assert compiled_anew() is (fault is not None)


def test_a_long_wait_is_told_once(
    caplog: pytest.LogCaptureFixture, fault: Callable[..., Any]
) -> None:
    now = iter([0.0, 0.9, 5.0, 5.2, 9.0, 19.0])
    fault(waiting.time, "perf_counter", lambda sound: next(now))
    wait, seen = waiting.Wait("kernels", "gemmule warm"), []
    with caplog.at_level(logging.WARNING, "gemmule"):
        for _ in range(3):
            with wait.measured():
                pass
            seen.append(caplog.text.count("compiling kernels took 1.1 s so far"))
    assert seen == [0, 1, 1]
    assert len(caplog.records) == 1


def test_who_compiles_ahead_is_not_told_to(
    caplog: pytest.LogCaptureFixture, fault: Callable[..., Any]
) -> None:
    now = iter([0.0, 20.0, 20.9, 21.0])
    fault(waiting.time, "perf_counter", lambda sound: next(now))
    wait = waiting.Wait("kernels", "gemmule warm")
    with caplog.at_level(logging.WARNING, "gemmule"):
        with waiting.ahead(), wait.measured():
            pass
        with wait.measured():
            pass
    assert not caplog.records, "what was compiled ahead is no wait, nor part of one"


def test_warming_computes_each_kind_of_product(
    monkeypatch: pytest.MonkeyPatch, limit: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    computed: list[str] = []

    def counted(name: str) -> Callable[..., object]:
        function = getattr(gm, name)

        def compute(*operands: object, **options: str) -> object:
            result = function(*operands, **options)
            computed.append(f"{name} {result.dtype} {options.get('activations')}")
            assert np.isfinite(result.astype(np.float32)).all()
            return result

        return compute

    for name in ("matvec", "vecmat", "matmul"):
        monkeypatch.setattr(warming, name, counted(name))
    sizes = {"_MATRICES": ((8, 8),), "_PRODUCTS": ((8, 8, 8),), "_COLUMNS": (2,)}
    limit(warming, **sizes, _GROUPS=(32,), _SIDE=64)
    assert run(["warm", "--dtype", "int8", "--bits", "4"]) == 0
    assert f"{len(computed)} kinds of product" in capsys.readouterr().out
    halves = [f"{op} {dtype} {made}" for op in ("matvec", "matmul") for made in (None, "int8")
              for dtype in ("float32", "float16", "bfloat16")]  # fmt: skip
    assert {*halves, "matvec int32 None", "vecmat int32 None", "matmul int32 None"} <= {*computed}
    assert run(["warm", "--device", "gpu"]) == 2
    with pytest.raises(ValueError, match="int9 cannot be warmed"):
        next(warming.warm(("int9",)))


def test_the_tool_replaces_only_what_is_there() -> None:
    """In a wheel whose names have moved it would build for the machine at hand, and say nothing."""
    with pytest.raises(SystemExit, match="jit_cache has no nothing"):
        native_wheel.put(jit_cache, "nothing", None)


def test_the_wheel_of_a_platform_is_the_other_with_tags_and_a_record_of_its_own(
    tmp_path: Path,
) -> None:
    files = {"gemmule/a.py": b"1\n", "gemmule/backends/cpu/objects/x": b"\0\1"}
    about = "gemmule-1.dist-info"
    told = b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    for name, content in {**files, f"{about}/WHEEL": told, f"{about}/RECORD": b"old"}.items():
        path = tmp_path / "package" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    made = [
        native_wheel.zipped(tmp_path / "package", tmp_path / f"{turn}.whl").read_bytes()
        for turn in "ab"
    ]
    assert made[0] == made[1]
    with zipfile.ZipFile(tmp_path / "a.whl") as wheel:
        assert {name: wheel.read(name) for name in files} == files
        words = wheel.read(f"{about}/WHEEL").decode().splitlines()
        rows = [line.split(",") for line in wheel.read(f"{about}/RECORD").decode().splitlines()]
        assert {name for name, *_ in rows} == set(wheel.namelist())
        for name, digest, size in rows:
            content = wheel.read(name)
            wanted = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
            own = name == f"{about}/RECORD"
            assert (digest, size) == (("", "") if own else (f"sha256={wanted}", str(len(content))))
    assert "Root-Is-Purelib: false" in words
    platforms = native_wheel.TAG.removeprefix("py3-none-").split(".")
    assert [word for word in words if word.startswith("Tag")] == [
        f"Tag: py3-none-{one}" for one in platforms
    ]
