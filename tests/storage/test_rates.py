"""The coefficients of the CPU's cost model: stored once, checked on read, and what follows."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gemmule.backends.cpu import launch as cpu
from gemmule.choose import NOT_WAITING, choose
from gemmule.core.canonical import Options, c_strides, canonical
from gemmule.core.host_rates import DEFAULT_RATES, HostRates
from gemmule.core.operand import Form
from gemmule.core.rung import Machine
from gemmule.rungs.matvec.cpu import blas
from gemmule.storage import rates as store_rates
from gemmule.tuning import rates as tuning_rates
from gemmule.tuning.rates import measure_rates

MINE = ("Some CPU", "x86_64", 4)
RATES = replace(DEFAULT_RATES, read=5e10, measured="2026-11-22")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, setting: Callable[..., None]) -> None:
    setting(GEMMULE_CACHE=tmp_path, GEMMULE_TUNE=None)


def test_what_no_cache_takes_was_not_saved(setting: Callable[..., None], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    setting(GEMMULE_CACHE=tmp_path / "file")
    assert store_rates.save(*MINE, RATES) is None


def test_rates_are_read_as_they_were_stored() -> None:
    assert store_rates.read(*MINE) is None
    assert store_rates.save(*MINE, RATES) is not None
    assert store_rates.read(*MINE) == RATES
    assert store_rates.read("Another CPU", "x86_64", 4) is None
    assert store_rates.read("Some CPU", "x86_64", 2) is None


def test_stored_rates_are_ignored_where_tuning_is_off(setting: Callable[..., None]) -> None:
    store_rates.save(*MINE, RATES)
    setting(GEMMULE_TUNE="0")
    assert store_rates.read(*MINE) is None


@pytest.mark.parametrize(
    "damage", ["cut", "schema", "machine", "units", "word", "huge", "more", "list"]
)
def test_a_damaged_file_is_as_good_as_none(damage: str) -> None:
    path = store_rates.save(*MINE, RATES)
    assert path is not None
    record = json.loads(path.read_text())
    if damage == "schema":
        record["schema"] = 99
    elif damage == "machine":
        record["machine"] = "Another CPU"
    elif damage == "units":  # as a cache that was copied, or renamed, has it
        record["units"] = 8
    elif damage == "word":
        record["rates"]["fma"] = "fast"
    elif damage == "huge":
        record["rates"]["read"] = 1e30
    elif damage == "more":
        record["rates"]["colour"] = 1.0
    elif damage == "list":
        record = [record]
    text = json.dumps(record)
    path.write_text(text[:40] if damage == "cut" else text)
    assert store_rates.read(*MINE) is None


def test_rates_of_no_machine_are_not_stored() -> None:
    with pytest.raises(ValueError, match="read is"):
        store_rates.save(*MINE, replace(RATES, read=1.0))


def test_the_machine_takes_stored_rates() -> None:
    cpu.forget_machine()
    found = cpu.machine()
    assert found.rates == HostRates.default(found.units)
    store_rates.save(found.name, found.arch, found.units, RATES)
    cpu.forget_machine()
    assert cpu.machine().rates == RATES
    assert cpu.machine().read_bytes_per_s == RATES.read


def test_measured_rates_are_those_of_this_process_and_of_later_ones(
    fault: Callable[..., Any],
) -> None:
    cpu.forget_machine()
    found = cpu.machine()
    measured = fault(tuning_rates, "_measured", lambda sound, cache_bytes: RATES)
    assert measure_rates() == RATES
    assert cpu.machine().rates == RATES
    assert measure_rates() == RATES
    assert len(measured) == 1, "what is stored is not measured again"
    assert store_rates.read(found.name, found.arch, found.units) == RATES
    cpu.forget_machine()


def _call(op: str, m: int, n: int, dtype: str) -> object:
    matrix = Form((m, n), c_strides((m, n)), dtype, 8)
    shape = {"matvec": (n,), "vecmat": (m,), "matmul": (n, m)}[op]
    other = Form(shape, c_strides(shape), dtype, 8)
    pair = (other, matrix) if op == "vecmat" else (matrix, other)
    return canonical(op, *pair, None, Options())


@pytest.mark.parametrize("op", ["matvec", "vecmat", "matmul"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("slow", [1e-3, 1.0, 1e3])
def test_blas_is_the_choice_where_it_waits_for_no_other_thread(
    op: str, dtype: str, slow: float, fault: Callable[..., Any]
) -> None:
    """Where OpenBLAS cuts a product among its threads, one of ours is the choice."""
    rates = replace(DEFAULT_RATES, blas=DEFAULT_RATES.blas * slow, read=DEFAULT_RATES.read / slow)
    alone, many = (
        Machine("cpu", "Test", "x86_64", units, rates.read, 1 << 25, rates=rates)
        for units in (1, 16)
    )
    calls = [_call(op, size, size, dtype) for size in (64, 512, 4096)]  # type: ignore[arg-type]
    found = [choose(call, alone) for call in calls]
    assert [one.rung.name for one in found] == ["blas"] * 3
    assert all(one.runner_up for one in found)
    if op == "matmul":
        assert [choose(call, many).rung.name for call in calls] == ["blas"] * 3
        return
    fault(blas, "shares_vectors", lambda sound, m, n: m * n > 64 * 64)
    small, _, large = (choose(call, many) for call in calls)
    assert small.rung.name == "blas"
    # Where memory is a thousand times quicker what shares cost is more than waiting is worth.
    assert (large.reason == NOT_WAITING) == (large.rung.name != "blas")
    assert large.rung.name != "blas" or slow < 1


# An EPYC (Zen 4), two cores, as it measured itself: where NumPy converts quickly its loops over
# integers, one product at a time, must not seem quick.
MEASURED = HostRates(
    read=3.05e10,
    core_read=2.26e10,
    core_cached=6.27e10,
    fma=5.46e10,
    blas=1.85e11,
    convert=1.25e10,
    call=7.4e-7,
    spread=6.9e-7,
    asked=0.8,
    measured="2026-11-23",
)


@pytest.mark.parametrize("op", ["matvec", "vecmat"])
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint32", "int32", "int64"])
@pytest.mark.parametrize("units", [1, 2, 16])
def test_integers_are_multiplied_by_kernels_on_any_machine(op: str, dtype: str, units: int) -> None:
    for rates in (HostRates.default(units), MEASURED):
        machine = Machine("cpu", "Test", "x86_64", units, rates.read, 1 << 25, rates=rates)
        for size in (384, 2048, 4096):
            found = choose(_call(op, size, size, dtype), machine)  # type: ignore[arg-type]
            assert found.rung.name != "upcast_blocks", (size, rates)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_few_columns_of_halves_are_not_widened_as_a_whole(dtype: str) -> None:
    """A BLAS would pad them to its tile, and read again what was widened."""
    for rates in (HostRates.default(2), MEASURED):
        machine = Machine("cpu", "Test", "x86_64", 2, rates.read, 1 << 25, rates=rates)
        for rows, columns in ((384, 4), (1024, 16), (4096, 2)):
            matrix = Form((rows, rows), c_strides((rows, rows)), dtype, 64)
            other = Form((rows, columns), c_strides((rows, columns)), dtype, 64)
            call = canonical("matmul", matrix, other, None, Options())
            assert choose(call, machine).rung.name == "few_columns", (rows, columns, rates)
            few = Form((columns, rows), c_strides((columns, rows)), dtype, 64)
            turned = Form((rows, rows), (1, rows), dtype, 64)
            call = canonical("matmul", few, turned, None, Options())
            assert choose(call, machine).rung.name == "few_columns", (rows, columns, rates)


def test_halves_are_asked_for_ahead_where_this_machine_gains_by_it() -> None:
    def name(m: int, n: int, asked: float) -> str:
        rates = replace(MEASURED, asked=asked)
        machine = Machine("cpu", "Test", "x86_64", 2, rates.read, 1 << 25, rates=rates)
        return choose(_call("vecmat", m, n, "float16"), machine).rung.name  # type: ignore[arg-type]

    assert {name(n, n, asked) for n in (256, 384, 512, 1024) for asked in (0.8, 1.3)} == {
        "prefetched_columns"
    }
    assert name(256, 16384, 1.3) == "prefetched_columns"
    assert name(256, 16384, 0.8) == "panel_threads"
    assert name(2048, 8192, 0.8) == "split_columns"


def test_a_lock_follows_no_link_and_empties_nothing(
    tmp_path: Path, setting: Callable[..., None]
) -> None:
    setting(GEMMULE_CACHE=tmp_path / "cache")
    lock = store_rates.path_of("name", "x86_64", 2).with_suffix(".lock")
    precious = tmp_path / "precious"
    precious.write_text("kept")
    with store_rates.one_at_a_time("name", "x86_64", 2):
        assert lock.is_file()
    lock.write_text("of another kind")
    with store_rates.one_at_a_time("name", "x86_64", 2):
        assert lock.read_text() == "of another kind"
    lock.unlink()
    lock.symlink_to(precious)
    with store_rates.one_at_a_time("name", "x86_64", 2):
        assert precious.read_text() == "kept"
    lock.unlink()
    lock.symlink_to(tmp_path / "absent")
    with store_rates.one_at_a_time("name", "x86_64", 2):
        assert not (tmp_path / "absent").exists()
    lock.unlink()
    lock.parent.chmod(0o777)  # others may put there what they like
    with store_rates.one_at_a_time("name", "x86_64", 2):
        assert not lock.exists()
