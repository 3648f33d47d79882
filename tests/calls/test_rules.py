"""Rules that few products would miss if they were gone: each with the case that needs it."""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gemmule as gm
from cuemu.toolchain import missing_tools
from emulated_driver import emulated
from gemmule.arrays import interop
from gemmule.backends.cuda import nvrtc
from gemmule.backends.cuda.device_array import DeviceArray
from gemmule.core.canonical import Options, canonical
from gemmule.core.operand import Form, c_strides
from gemmule.core.problem import Problem
from gemmule.core.registry import cuda_rungs
from gemmule.core.rung import HEADERS_FOLDER, RUNGS_FOLDER
from gemmule.storage import evidence
from gemmule.storage.atomic import small_file

needs_emulator = pytest.mark.skipif(missing_tools() is not None, reason=str(missing_tools()))


@pytest.fixture
def device() -> Iterator[None]:
    """A CUDA device whose kernels are emulated, until the test's arrays are gone."""
    with emulated():
        yield
        gc.collect()


# --- alignment ------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [2048 + 1, 2048 + 2, 2048 + 4])
@pytest.mark.parametrize("which", [0, 1, 2], ids=["A", "B", "out"])
def test_the_steps_of_a_batch_count(which: int, step: int) -> None:
    """Every row of the first entry is aligned to 16 bytes, and none of the second."""
    steps = [2048, 2048, 2048]
    steps[which] = step
    forms = [Form((2, 32, 32), (one, 64, 1), "float32", 16) for one in steps]
    call = canonical("matmul", forms[0], forms[1], forms[2], Options())
    assert call.problem.alignment == 4 * (step & -step)


@pytest.mark.parametrize("wide", [False, True])
def test_a_batch_invariant_call_counts_rows_as_packed(wide: bool) -> None:
    """A vector alone is as aligned as it is in a packed batch, whatever padding it lies in."""
    rows, columns = (100, 64) if wide else (64, 100)
    A, x = (
        Form((rows, columns), (104, 1), "float16", 16),
        Form((3, columns), (104, 1), "float16", 16),
    )
    for vectors in (x, Form((columns,), (1,), "float16", 16)):
        for invariant, alignment in ((False, 16), (True, 8)):
            given = Options(batch_invariant=invariant)
            out = Form(
                (*vectors.shape[:-1], rows), c_strides((*vectors.shape[:-1], 104)), "float16", 16
            )
            assert canonical("matvec", A, vectors, out, given).problem.alignment == alignment


def shifted(array: DeviceArray, nbytes: int) -> DeviceArray:
    """Return a view of the array's first elements that begins some bytes later."""
    shape = (array.shape[0] - 1, *array.shape[1:])
    pointer = array.pointer + nbytes
    return DeviceArray(pointer, shape, array.strides, array.dtype, array.ordinal, array)


@pytest.mark.usefixtures("device")
def test_a_plan_refuses_what_is_less_aligned() -> None:
    A, x = (gm.asarray(np.ones(shape, "f4"), device="cuda") for shape in ((5, 64), (65,)))
    plan = gm.plan("matvec", shifted(A, 0), shifted(x, 0))
    assert plan.problem.alignment == 16
    for operands in ((shifted(A, 4), shifted(x, 0)), (shifted(A, 0), shifted(x, 4))):
        with pytest.raises(ValueError, match=r"at 16-byte alignment; given was .* at 4"):
            plan(*operands)


# --- overlap --------------------------------------------------------------------------------------


def test_an_overlap_too_hard_to_decide_counts_as_one() -> None:
    """Five axes whose steps share no factor: NumPy gives up long before it has an answer."""
    memory, shape = np.zeros(1 << 20, np.int8), (28, 10, 21, 6, 13)
    steps = np.array([20, 5704, 3652, 2184, 5914])
    out, other = (
        np.lib.stride_tricks.as_strided(memory[53 * i :], shape, tuple(steps + i)) for i in (0, 1)
    )
    with pytest.raises(np.exceptions.TooHardError):
        np.shares_memory(out, other, max_work=interop._OVERLAP_WORK)
    assert interop.memory_overlaps(interop.unwrap(out, "out"), interop.unwrap(other, "A"))


@pytest.mark.usefixtures("device")
def test_an_overlap_on_a_device_is_found() -> None:
    A = gm.asarray(np.ones((8, 8), "f4"), device="cuda")
    x = gm.asarray(np.ones(8, "f4"), device="cuda")
    last = DeviceArray(A.pointer + 7 * 32, (8,), (1,), "float32", 0, A._owner)
    for out in (x, last):
        with pytest.raises(ValueError, match="out overlaps an input"):
            gm.matvec(A, x, out=out)
    Q = gm.quantize(np.ones((8, 8), "f4"), bits=8, group_size=4).to("cuda")
    for part in (Q.codes, Q.scales, Q.zeros):
        with pytest.raises(ValueError, match="out overlaps an input"):
            gm.matvec(Q, x, out=DeviceArray(part.pointer + 32, (8,), (1,), "float32", 0, part))


@needs_emulator
@pytest.mark.usefixtures("device")
def test_neighbours_on_a_device_do_not_overlap() -> None:
    held = gm.asarray(np.ones((9, 8), "f4"), device="cuda")
    A = DeviceArray(held.pointer, (8, 8), (8, 1), "float32", 0, held)
    behind = DeviceArray(held.pointer + 256, (8,), (1,), "float32", 0, held)
    x = gm.asarray(np.ones(8, "f4"), device="cuda")
    gm.matvec(A, x, out=behind)
    assert held.to_host()[8].tolist() == [8.0] * 8


# --- proofs and compiled kernels ------------------------------------------------------------------


def test_a_proof_is_for_the_architectures_that_its_rung_declares() -> None:
    proved = evidence.proved_variants()
    narrow = [r for r in cuda_rungs() if "sm_80" not in r.archs]
    assert narrow
    for rung in narrow:
        a, b, out = rung.signatures[0]
        if (rung.folder, rung.name) not in {one[:2] for one in proved}:
            continue  # shown as unproved, and never chosen
        assert (rung.folder, rung.name, f"{a},{b},{out}") in proved, rung.name
        problem = Problem(rung.op, 64, 64, 64 if rung.op == "matmul" else 1, a=a, b=b, out=out)
        assert evidence.is_proved(rung, problem, "sm_90a")
        assert not evidence.is_proved(rung, problem, "sm_80")


def test_what_kernels_include_lies_where_the_cache_looks() -> None:
    package = RUNGS_FOLDER.parent
    sources = [*package.rglob("*.cu"), *package.rglob("*.cuh")]
    assert len(sources) > 40
    known = {header.name for header in HEADERS_FOLDER.glob("*.cuh")}
    for source in sources:
        named = set(re.findall(r'#include "(.*?)"', source.read_text()))
        assert named - {"ptx_twins.h"} <= known, source  # the emulator's own, behind a macro


def test_no_pipe_is_read_as_a_small_file(tmp_path: Path) -> None:
    """Whoever may write to it would decide how long a reader waits, and what it gets."""
    pipe, plain = tmp_path / "pipe", tmp_path / "plain"
    os.mkfifo(pipe)
    held = os.open(pipe, os.O_RDWR)
    os.write(held, b"{}")
    with pytest.raises(ValueError, match="no regular file"):
        small_file(pipe)
    os.close(held)
    plain.write_bytes(b"{}")
    assert small_file(plain) == b"{}"


def test_every_source_and_option_is_in_the_key_of_a_kernel(
    fault: Callable[..., Any], limit: Callable[..., None], tmp_path: Path
) -> None:
    """Also a header that the source does not name itself: another may."""
    limit(nvrtc, HEADERS_FOLDER=tmp_path)
    source = tmp_path / "kernel.cu"
    source.write_text("__global__ void f() {}")
    headers = [tmp_path / name for name in ("one.cuh", "two.cuh")]

    def key(*given: Any) -> str:
        nvrtc.headers_digest.cache_clear()
        return nvrtc.cubin_key(source, *(given or (("f",), "sm_80", ())))

    seen = [
        key(),
        key(("g",), "sm_80", ()),
        key(("f",), "sm_90a", ()),
        key(("f",), "sm_80", ("X",)),
    ]
    for texts in (("a", ""), ("ab", ""), ("a", "b"), ("", "ab"), ("b", "a")):
        for header, text in zip(headers, texts, strict=True):
            header.write_text(text)
        seen.append(key())
    source.write_text("__global__ void f() {;}")
    seen.append(key())
    fault(nvrtc, "compiler_version", lambda sound: "0.0.0")
    seen.append(key())
    nvrtc.headers_digest.cache_clear()
    assert len(set(seen)) == len(seen)
