"""The emulator catches what a device forbids, and its primitives agree with NumPy."""

from __future__ import annotations

import dataclasses
import re
import struct
from pathlib import Path

import numpy as np
import pytest

from cuemu import asan, device, toolchain
from cuemu.build import RUNGS, EmulationError, Module, Report, compile_cu, device_array, tensor_map
from cuemu.cases import CASES, Case, run_on_emulator
from cuemu.cases import SOURCE as PRIMITIVES
from cuemu.source import rewrite, rewrite_declaration
from cuemu.toolchain import BuildError, missing_tools

_REASON = missing_tools()
needs_compiler = pytest.mark.skipif(_REASON is not None, reason=str(_REASON))
SOURCE = Path(asan.__file__).with_name("planted.cu")

# Kernel, Bug, block, launch options, and the kind of error or "wrong" for a wrong result.
PLANTED: tuple[tuple[str, int, int, dict[str, int], str], ...] = (
    ("missing_barrier", 1, 64, {}, "wrong"),
    ("missing_second_barrier", 1, 64, {}, "wrong"),
    ("divergent_barrier", 1, 64, {}, "divergent_barrier"),
    ("deadlock", 1, 64, {}, "deadlock"),
    ("divergent_warp", 1, 64, {}, "divergent_warp"),
    ("bad_mask", 1, 64, {}, "bad_mask"),
    ("absent_lane", 1, 64, {}, "wrong"),
    ("misaligned", 1, 64, {}, "misaligned"),
    ("misaligned_primitive", 1, 64, {}, "misaligned"),
    ("uninitialised_static", 1, 64, {}, "wrong"),
    ("uninitialised_dynamic", 1, 64, {"smem": 256}, "wrong"),
    ("dynamic_overrun", 1, 64, {"smem": 256}, "shared_overrun"),
    ("static_bounds", 1, 64, {}, "out_of_bounds"),
    ("null_pointer", 1, 64, {}, "fault"),
    ("wild_pointer", 1, 64, {}, "fault"),
    ("division", 1, 64, {}, "fault"),
    ("spin", 1, 64, {}, "timeout"),
    ("missing_copy_wait", 1, 64, {}, "wrong"),
    ("wrong_group_count", 1, 64, {}, "wrong"),
    ("transaction", 1, 64, {}, "mbarrier"),
    ("transaction", 2, 64, {}, "mbarrier"),
    ("transaction", 3, 64, {}, "wrong"),
    ("transaction", 4, 64, {}, "mbarrier"),
    ("transaction", 5, 64, {}, "mbarrier"),
    ("transaction", 6, 64, {}, "wrong"),
    ("uncounted_arrivals", 1, 64, {}, "mbarrier"),
    ("misaligned_bulk", 1, 64, {}, "misaligned"),
    ("missing_store_wait", 1, 64, {}, "wrong"),
    ("missing_wgmma_wait", 1, 128, {}, "wrong"),
    ("two_warpgroups", 1, 256, {"grid": 2, "cluster": 2}, "wgmma"),
    ("two_warpgroups", 2, 256, {"grid": 2, "cluster": 2}, "wrong"),
    ("two_warpgroups", 3, 256, {"grid": 2, "cluster": 2}, "wgmma"),
    ("missing_cluster_barrier", 1, 32, {"grid": 2, "cluster": 2}, "cluster"),
    ("missing_cluster_barrier", 2, 32, {"grid": 2, "cluster": 2}, "address_space"),
    ("exited_block", 1, 32, {"grid": 2, "cluster": 2}, "cluster"),
)
_PLAIN = ("atomics", "block_order", "strided", "strided_wide", "matrix_rows")


def _names() -> list[str]:
    both = {f"{name}<{bug}>" for name, bug, *_ in PLANTED} | {f"{row[0]}<0>" for row in PLANTED}
    others = [f"{name}<{bug}>" for name in ("order_dependence", "stray_read") for bug in (0, 1)]
    others += [f"{name}<{bug}>" for name in ("stage_in_use", "dependent") for bug in (0, 1)]
    others += [f"transaction<{bug}>" for bug in (7, 8, 9, 10)]
    others += [f"unset_register<{bug}>" for bug in (0, 1)]
    others += [f"waited_for<{bug}>" for bug in (1, 2)]
    return [*sorted(both), *others, "dependent<2>", "grid_barrier<0>", *_PLAIN]


@pytest.fixture(scope="module")
def planted() -> Module:
    return compile_cu(SOURCE, _names())


@pytest.fixture(scope="module")
def counted() -> Module:
    return compile_cu(SOURCE, list(_PLAIN), bank_conflicts=True)


def _reverse(
    module: Module, kernel: str, block: int = 64, seed: int = 0, **options: int
) -> tuple[bool, Report]:
    """Launch a reversing kernel; return whether its 64 numbers came out reversed."""
    source, out = device_array(64, np.float32), device_array(68, np.float32)
    source[:] = np.arange(1, 65)
    out[64:] = 0
    args = struct.pack("<QQi4x", source.ctypes.data, out.ctypes.data, 64)
    report = module.launch(
        kernel,
        grid=(options.get("grid", 1),),
        block=(block,),
        cluster=(options.get("cluster", 1),),
        smem=options.get("smem", 0),
        args=[args],
        seed=seed,
        cooperative=bool(options.get("cooperative", 0)),
        eager=bool(options.get("eager", 0)),
        timeout_s=0.4 if kernel.startswith(("spin", "grid")) else 20.0,
    )
    return bool(np.array_equal(out[:64], source[::-1])), report


@needs_compiler
@pytest.mark.parametrize("row", PLANTED, ids=lambda r: f"{r[0]}-{r[1]}")
def test_planted_bug_is_caught_and_the_correct_kernel_passes(
    planted: Module, row: tuple[str, int, int, dict[str, int], str]
) -> None:
    name, bug, block, options, kind = row
    for seed in (0, 1, 2):
        assert _reverse(planted, f"{name}<0>", block, seed, **options)[0]
    if kind == "wrong":
        assert not _reverse(planted, f"{name}<{bug}>", block, **options)[0]
    else:
        with pytest.raises(EmulationError) as caught:
            _reverse(planted, f"{name}<{bug}>", block, **options)
        assert caught.value.kind == kind, caught.value


@needs_compiler
@pytest.mark.skipif(not toolchain.poison(), reason="g++ before version 12 leaves them as they are")
def test_registers_that_nobody_wrote_hold_no_zeros(planted: Module) -> None:
    assert _reverse(planted, "unset_register<0>")[0]
    assert not _reverse(planted, "unset_register<1>")[0]


@needs_compiler
def test_errors_leave_the_module_usable_and_name_the_line(planted: Module) -> None:
    with pytest.raises(EmulationError, match=r"planted\.cu:\d+.*32 threads") as caught:
        _reverse(planted, "divergent_barrier<1>")
    line = int(re.findall(r"planted\.cu:(\d+)", str(caught.value))[0])
    assert "__syncthreads" in SOURCE.read_text().splitlines()[line - 1]
    assert _reverse(planted, "divergent_barrier<0>")[0]


@needs_compiler
@pytest.mark.parametrize("bug", [7, 8, 9])
def test_an_mbarrier_is_refused_where_it_is_initialised(planted: Module, bug: int) -> None:
    with pytest.raises(EmulationError, match=r"mbar_init at planted\.cu:\d+") as caught:
        _reverse(planted, f"transaction<{bug}>")
    assert caught.value.kind == "mbarrier"


@needs_compiler
def test_no_more_bytes_are_announced_than_an_mbarrier_counts(planted: Module) -> None:
    said = r"planted\.cu:\d+: 1048576 bytes announced, at most 2\^20 - 1"
    with pytest.raises(EmulationError, match=said) as caught:
        _reverse(planted, "transaction<10>")
    assert caught.value.kind == "mbarrier"


@needs_compiler
@pytest.mark.parametrize("block", [129, 192])
def test_a_warpgroup_is_whole(planted: Module, block: int) -> None:
    with pytest.raises(EmulationError, match="a warpgroup has 128 threads") as caught:
        _reverse(planted, "two_warpgroups<0>", block, grid=2, cluster=2)
    assert caught.value.kind == "wgmma"


@needs_compiler
@pytest.mark.parametrize(
    ("kernel", "words"),
    [
        ("exited_block<1>", r"planted\.cu:\d+: block 0 of the cluster has exited"),
        ("missing_cluster_barrier<2>", "mapa: block 2 of a cluster of 2"),
    ],
)
def test_a_block_that_is_not_there_is_named(planted: Module, kernel: str, words: str) -> None:
    with pytest.raises(EmulationError, match=words):
        _reverse(planted, kernel, 32, grid=2, cluster=2)


@needs_compiler
def test_deadlock_report_says_who_waits_where(planted: Module) -> None:
    with pytest.raises(EmulationError) as caught:
        _reverse(planted, "deadlock<1>")
    assert "14 at a shuffle" in caught.value.text
    assert "50 at __syncthreads()" in caught.value.text


@needs_compiler
@pytest.mark.parametrize(
    ("bug", "what", "call"),
    [(1, "the cluster barrier", "cluster_sync"), (2, "wgmma_wait", "wgmma_wait")],
)
def test_deadlock_report_names_what_is_waited_for(
    planted: Module, bug: int, what: str, call: str
) -> None:
    with pytest.raises(EmulationError, match="no thread can go on") as caught:
        _reverse(planted, f"waited_for<{bug}>", 128)
    found = re.findall(r" (\d+) at ([^(]+) \(planted\.cu:(\d+)\)", caught.value.text)
    source = SOURCE.read_text().splitlines()
    assert {(int(n), name) for n, name, _ in found} == {(1, "an mbarrier"), (127, what)}
    for _, name, line in found:
        assert (call if name == what else "mbar_wait") in source[int(line) - 1]


@needs_compiler
def test_order_dependence_shows_under_a_shuffled_order_only(planted: Module) -> None:
    assert _reverse(planted, "order_dependence<1>", seed=0)[0]
    assert not all(_reverse(planted, "order_dependence<1>", seed=s)[0] for s in (1, 2, 3))
    assert all(_reverse(planted, "order_dependence<0>", seed=s)[0] for s in (0, 1, 2, 3))


@needs_compiler
def test_a_copy_into_what_is_read_shows_where_copies_land_at_once(planted: Module) -> None:
    for eager in (0, 1):
        for seed in (0, 1, 2):
            assert _reverse(planted, "stage_in_use<0>", seed=seed, eager=eager)[0]
    assert _reverse(planted, "stage_in_use<1>")[0]
    assert not _reverse(planted, "stage_in_use<1>", eager=1)[0]


@needs_compiler
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_dependent_launch_sees_what_it_waited_for_only(planted: Module, seed: int) -> None:
    """What the grid before writes is poison until a thread waits, and others have run on."""
    for bug in (0, 1, 2):
        source, out = device_array(64, np.float32), device_array(64, np.float32)
        made = np.arange(1, 65, dtype=np.float32)
        args = struct.pack("<QQi4x", source.ctypes.data, out.ctypes.data, 64)
        old = np.zeros(64, np.float32)  # of `out` too: it comes once, and not over what was written
        late = [
            (to.ctypes.data, by.ctypes.data, by.nbytes) for to, by in ((out, old), (source, made))
        ]
        kernel = f"dependent<{bug}>"
        planted.launch(kernel, grid=(1,), block=(64,), args=[args], seed=seed, late=late)
        assert np.array_equal(out, made[::-1]) == (bug == 0)


@needs_compiler
def test_blocks_run_in_an_order_of_the_seed(planted: Module) -> None:
    orders = []
    for seed in (0, 1, 1, 2):
        out = device_array(64, np.float32)
        out[63:] = 0
        args = struct.pack("<QQi4x", 0, out.ctypes.data, 64)
        planted.launch("block_order", grid=(4, 4), block=(1,), args=[args], seed=seed)
        orders.append(out[:16].astype(int).tolist())
    in_order = [i % 4 for i in range(16)]
    assert orders[0] == in_order
    assert orders[1] == orders[2] != in_order
    assert orders[3] not in (in_order, orders[1])
    assert sorted(orders[1]) == sorted(in_order)


@needs_compiler
def test_grid_barrier_needs_all_blocks_resident(planted: Module) -> None:
    assert _reverse(planted, "grid_barrier<0>", 32, grid=2, cooperative=1)[0]
    with pytest.raises(EmulationError, match="timeout"):
        _reverse(planted, "grid_barrier<0>", 32, grid=2)


@needs_compiler
def test_barriers_are_counted(planted: Module) -> None:
    assert _reverse(planted, "missing_second_barrier<0>")[1].barriers == 4
    assert _reverse(planted, "missing_second_barrier<1>")[1].barriers == 2


@needs_compiler
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_atomics_of_every_type(planted: Module, seed: int) -> None:
    out = device_array(8, np.float32)
    out[:] = 0
    args = struct.pack("<QQi4x", out.ctypes.data, out.ctypes.data, 64)
    planted.launch("atomics", grid=(1,), block=(64,), args=[args], seed=seed)
    assert out[0] == 64
    assert out[1:2].view(np.float16).tolist() == [64, 128]
    assert out[2:4].view(np.float64)[0] == 32
    assert out[4:6].view(np.int32).tolist() == [63, 0]
    assert out[6] == 64


def _conflicts(module: Module, kernel: str, n: int) -> Report:
    out = device_array(32, np.float32)
    args = struct.pack("<QQi4x", out.ctypes.data, out.ctypes.data, n)
    return module.launch(kernel, grid=(1,), block=(32,), args=[args])


@needs_compiler
@pytest.mark.parametrize("stride", [0, 1, 2, 3, 4, 8, 16, 32, 33])
def test_bank_conflicts_of_a_stride(counted: Module, stride: int) -> None:
    ways = 1 if stride == 0 else int(np.gcd(stride, 32))
    assert _conflicts(counted, "strided", stride).bank_conflicts == ways - 1


@needs_compiler
def test_bank_conflicts_of_wide_loads_and_ldmatrix(counted: Module) -> None:
    # Eight lanes of 16 bytes are one pass; at stride 2 they meet in half of the banks.
    for stride, passes in ((1, 4), (2, 8), (8, 32), (9, 4)):
        report = _conflicts(counted, "strided_wide", stride)
        assert (report.shared_ideal, report.shared_wavefronts) == (4, passes)
    assert _conflicts(counted, "matrix_rows", 0).bank_conflicts == 4 * 7
    assert _conflicts(counted, "matrix_rows", 1).bank_conflicts == 0


# ---- AddressSanitizer ----------------------------------------------------------------------------
def reverse_under_asan(kernel: str) -> bool:
    """Run in the child: exact-size arrays, so that an element past the end is a poisoned byte."""
    names = [f"{k}<{b}>" for k in ("stray_read", "dynamic_overrun") for b in (0, 1)]
    module = compile_cu(SOURCE, names, asan=True)
    return _reverse(module, kernel, smem=256)[0]


@needs_compiler
@pytest.mark.parametrize("kernel", ["stray_read", "dynamic_overrun"])
def test_asan_sees_the_first_byte_out_of_bounds(kernel: str) -> None:
    assert asan.run("test_cuemu:reverse_under_asan", f"{kernel}<0>") is True
    with pytest.raises(EmulationError, match="AddressSanitizer") as caught:
        asan.run("test_cuemu:reverse_under_asan", f"{kernel}<1>")
    assert caught.value.kind == "asan"
    assert "planted.cu" in caught.value.text


# ---- primitives ----------------------------------------------------------------------------------
@needs_compiler
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_primitive_equals_numpy(case: Case) -> None:
    for seed in (0, 7):
        for out, expected in zip(run_on_emulator(case, seed), case.expected, strict=True):
            assert out.tobytes() == expected.tobytes()


# What an H200 answers with an illegal instruction. Column 50 of bfloat16 is byte 100.
@needs_compiler
@pytest.mark.parametrize(
    ("n", "said"),
    [
        ((1024, 50, 9), "byte 100 of the contiguous dimension"),
        ((1024, -1, 0), "byte -2 of the contiguous dimension"),
    ],
)
def test_coordinates_off_the_grid_of_a_tensor_copy_are_caught(
    n: tuple[int, ...], said: str
) -> None:
    case = next(c for c in CASES if c.name.startswith("tensor_2d_none"))
    with pytest.raises(EmulationError, match=said):
        run_on_emulator(dataclasses.replace(case, n=n))


@needs_compiler
@pytest.mark.parametrize("at", [(-8, 0), (0, -1)])
def test_stores_before_the_start_of_a_tensor_are_caught(
    tmp_path: Path, at: tuple[int, int]
) -> None:
    text = PRIMITIVES.read_text("utf-8")
    planted = re.sub(r"max\((p\.n\[\d\]), 0\)", r"\1", text)
    assert planted != text
    source = tmp_path / "primitives.cu"
    source.write_text(planted, "utf-8")
    case = next(c for c in CASES if c.name.startswith("tensor_2d_none"))
    with pytest.raises(EmulationError, match="only loads take negative coordinates"):
        run_on_emulator(dataclasses.replace(case, n=(1024, *at)), source=source)


HEADERS = ("ptx.cuh", "ptx_f64.cuh", "ptx_float8.cuh", "ptx_peers.cuh", "ptx_wgmma.cuh")


def test_every_primitive_of_the_header_has_a_case() -> None:
    headers = "".join((RUNGS / name).read_text() for name in HEADERS)
    pattern = r"^(?:template <[^>]*>\n)?(?:PTX_FN|__device__ __forceinline__) [\w ]+? (\w+)\("
    names = set(re.findall(pattern, headers, re.MULTILINE)) - {"operator"}
    names |= set(re.findall(r"^PTX_(?:LOAD|MMA)\((\w+)", headers, re.MULTILINE))
    assert {"cp_async", "mma_f16", "ld_nc", "wgmma_bf16", "mbar_wait", "tma_store_2d"} <= names
    kernels = SOURCE.with_name("primitives.cu").read_text() + SOURCE.read_text()

    def used(name: str) -> bool:  # by a kernel, or by another primitive beside its definition
        word = re.compile(rf"\b{name}\b")
        return bool(word.search(kernels)) or len(word.findall(headers)) > 1

    assert [n for n in sorted(names) if not used(n)] == []


@pytest.mark.parametrize("level", [80, 86, 89, 90, 100, 120])
def test_primitives_compile_for_every_architecture(level: int) -> None:
    pytest.importorskip("cuda.core", reason="cuda-core is not installed")
    cubin, symbols = device.compile_cases(level)
    assert cubin[:4] == b"\x7fELF"
    wanted = {c.kernel for c in CASES if device.supported(c, level)}
    assert set(symbols) == wanted
    assert any(k.startswith("warpgroup") for k in wanted) == (level == 90)


# ---- source rewriting and arguments --------------------------------------------------------------
def test_shared_declarations_are_rewritten_line_by_line() -> None:
    text = (
        "// __shared__ int no;\n__shared__ alignas(16) Vec<float, 4> a[N][N +\n 1], b;\n"
        "extern __shared__ __align__(sizeof(T)) T d[];\nint x;\n"
    )
    out = rewrite(text)
    assert out.count("\n") == text.count("\n")
    assert "typedef Vec<float, 4> cuemu_type_a[N][N + 1];" in out
    assert "cuemu_type_b& b" in out
    assert "size_t(16)" in out
    assert "T* d = reinterpret_cast<T*>" in out
    assert out.splitlines()[4] == "int x;"
    with pytest.raises(ValueError, match="cannot read"):
        rewrite_declaration("__shared__ ")


@needs_compiler
def test_wrong_arguments_are_refused(planted: Module) -> None:
    with pytest.raises(ValueError, match=r"\[24\] bytes"):
        planted.launch("atomics", grid=(1,), block=(1,), args=[b"1234"])
    with pytest.raises(ValueError, match="was not compiled"):
        planted.launch("nothing", grid=(1,), block=(1,), args=[])
    good = [bytes(24)]
    for bad in ({"block": (1025,)}, {"block": (0,)}, {"smem": 1 << 20}, {"cluster": (2,)}):
        options = {"grid": (1,), "block": (1,), "args": good} | bad
        with pytest.raises(EmulationError, match="launch"):
            planted.launch("atomics", **options)


@needs_compiler
def test_compile_errors_carry_the_line(tmp_path: Path) -> None:
    source = tmp_path / "broken.cu"
    source.write_text("\n\n__global__ void k(int n) { undeclared(n); }\n")
    with pytest.raises(BuildError, match=r"broken\.cu:3.*undeclared"):
        compile_cu(source, ["k"])


@needs_compiler
def test_shared_memory_in_a_header_is_rewritten_too(tmp_path: Path) -> None:
    (tmp_path / "part.cuh").write_text(
        "__device__ inline float* mine() { __shared__ float s[4]; return s; }\n"
    )
    source = tmp_path / "outer.cu"
    source.write_text(
        '#include "part.cuh"\nstruct P { float* out; };\n'
        "__global__ void k(P p) {\n if (threadIdx.x == 0) mine()[1] = 3 + blockIdx.x;\n"
        " __syncthreads();\n p.out[blockIdx.x * 2 + threadIdx.x] = mine()[1]; }\n"
    )
    out = device_array(4, np.float32)
    module = compile_cu(source, ["k"])
    module.launch("k", grid=(2,), block=(2,), args=[struct.pack("<Q", out.ctypes.data)])
    assert out.tolist() == [3, 3, 4, 4]


@pytest.mark.parametrize(
    ("shape", "box", "swizzle"),
    [
        ((8, 60), (8, 8), "none"),
        ((8, 64), (8, 128), "128B"),
        ((8, 64), (8, 4), "none"),
        ((64,), (8,), "none"),
    ],
)
def test_tensor_map_refuses_what_the_driver_refuses(
    shape: tuple[int, ...], box: tuple[int, ...], swizzle: str
) -> None:
    with pytest.raises(ValueError, match="required"):
        tensor_map(device_array(shape, np.float16), box, swizzle)
