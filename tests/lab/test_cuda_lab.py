"""The lab's GPU half without a GPU: its kernels, its suites, its peers' refusals, its table."""

from __future__ import annotations

import dataclasses
import struct
from typing import Any

import numpy as np
import pytest

from cuemu.build import compile_cu
from cuemu.toolchain import missing_tools
from gemmule.backends.cuda import launch_args, nvrtc
from gemmule.core.problem import Problem, QuantSpec
from gemmule_lab.bench import suites
from gemmule_lab.ceilings import device as device_ceilings
from gemmule_lab.cli import run
from gemmule_lab.kernels.launch import FOLDER
from gemmule_lab.peers.registry import all_peers
from gemmule_lab.records.rows import Row, Speedup, Times
from gemmule_lab.report.tables import SHORT, rows_table
from proofs.proofs import proof_machine

needs_emulator = pytest.mark.skipif(missing_tools() is not None, reason=str(missing_tools()))


@needs_emulator
@pytest.mark.parametrize("order", ["C", "F"])
def test_the_reference_kernels_sum_in_double(order: str) -> None:
    rng = np.random.default_rng(0)
    a = np.asarray(rng.standard_normal((37, 70)), dtype=np.float32, order=order)
    x = rng.standard_normal(70).astype(np.float32)
    sums, sizes = np.full(37, np.nan), np.full(37, np.nan)
    stem, rows, threads = (
        ("reference_rows", 8, 256) if order == "C" else ("reference_columns", 64, 64)
    )
    name = f"{stem}<float, float>"
    packed = launch_args.GEMV.pack(
        a.ctypes.data,
        x.ctypes.data,
        sums.ctypes.data,
        sizes.ctypes.data,
        37,
        70,
        1,
        *(step // 4 for step in a.strides),
        0,
        1,
        0,
        1,
        0,
        1.0,
        0.0,
    )
    module = compile_cu(FOLDER / "operands.cu", names=[name], defines=[])
    module.launch(name, grid=(-(-37 // rows), 1, 1), block=(threads, 1, 1), args=[packed])
    wide = a.astype(np.float64)
    np.testing.assert_allclose(sums, wide @ x, rtol=1e-13, atol=1e-13)
    np.testing.assert_allclose(sizes, np.abs(wide) @ np.abs(x.astype(np.float64)), rtol=1e-13)


@needs_emulator
def test_filled_operands_are_normal_and_differ_with_the_seed() -> None:
    name = "fill_normal<float>"
    module = compile_cu(FOLDER / "operands.cu", names=[name], defines=[])
    found = []
    for seed in (1, 2):
        values = np.zeros(20_000, np.float32)
        packed = device_ceilings.FILL.pack(values.ctypes.data, values.size, seed << 40)
        module.launch(name, grid=(3, 1, 1), block=(256, 1, 1), args=[packed])
        assert abs(values.mean()) < 0.03
        assert abs(values.std() - 1) < 0.03
        assert abs((values**4).mean() - 3) < 0.3
        assert len(np.unique(values)) > 19_900
        assert abs(np.corrcoef(values[1:], values[:-1])[0, 1]) < 0.03
        found.append(values)
    assert abs(np.corrcoef(*found)[0, 1]) < 0.03


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120a"])
def test_the_labs_kernels_compile_without_spills(arch: str) -> None:
    machine = proof_machine(arch)
    types = ("float", "double", "__half", "__nv_bfloat16")
    fills = [f"fill_{kind}<{t}>" for kind in ("normal", "uniform") for t in types]
    for file, names in (
        ("ceilings.cu", tuple(device_ceilings.kernel_names(machine))),
        ("operands.cu", tuple(fills)),
    ):
        _, report = nvrtc.build(FOLDER / file, names, arch)
        found = list(nvrtc.resources(report))
        assert len(found) == len(names)
        assert not [r for r in found if r.spill_bytes]


def test_the_structs_of_the_ceilings_fit_their_kernels() -> None:
    source = (FOLDER / "ceilings.cu").read_text() + (FOLDER / "operands.cu").read_text()
    assert "const void* a;\n  void* b;\n  long long count;" in source
    assert struct.calcsize("<QQq") == device_ceilings.ARGUMENTS.size
    assert "void* data;\n  i64 count;\n  u64 seed;" in source
    assert struct.calcsize("<QqQ") == device_ceilings.FILL.size


def test_the_matvec_suite_has_sixty_matrices_from_both_sides() -> None:
    suite = suites.CUDA_SUITES["matvec"]
    products = suite.products
    assert len({(p.shape, p.format) for p in products}) == 60
    assert len(products) == len(set(products)) == 120
    assert {(4096, 14336), (2112, 7168), (152064, 3584)} <= {p.shape for p in products}
    assert {512, 16384} <= {p.shape[0] for p in products if p.shape[0] == p.shape[1]}
    narrow = suites.narrowed(suite, ("vecmat",), ("float16",), (512,))
    assert [(p.op, p.shape, p.format) for p in narrow.products] == [
        ("vecmat", (512, 512), "float16")
    ]
    with pytest.raises(ValueError, match="no product"):
        suites.narrowed(suite, ("matmul",), (), ())


def test_every_suite_names_peers_that_exist() -> None:
    known = {peer.name for peer in all_peers("cuda")}
    for suite in suites.CUDA_SUITES.values():
        assert set(suite.peers) <= known


def test_peers_say_what_they_do_not_serve() -> None:
    peers = {peer.name: peer for peer in all_peers("cuda")}
    matvec = Problem("matvec", 512, 512)
    matmul = Problem("matmul", 512, 512, 512)
    spec = QuantSpec(4, 128, True, "row", "float32", False)
    int4 = Problem("matvec", 512, 512, a="uint4", b="bfloat16", out="bfloat16", quant=spec)
    assert peers["torch"].refuses(matvec) is None
    assert "mode of float32 matrix" in (peers["torch tf32"].refuses(matvec) or "")
    assert peers["torch tf32"].refuses(matmul) is None
    assert "bfloat16" in (peers["cupy"].refuses(_of(matmul, "bfloat16")) or "")
    assert "rows" in (peers["triton"].refuses(dataclasses.replace(matvec, layout_a="col")) or "")
    assert "unit stride" in (
        peers["torch"].refuses(dataclasses.replace(matvec, layout_a="strided")) or ""
    )
    for name, dtype in (("torch int_mm", "int8"), ("torch scaled_mm", "float8_e4m3fn")):
        given = dataclasses.replace(matmul, a=dtype, b=dtype)
        assert peers[name].refuses(given) is None
        assert "more rows" in (peers[name].refuses(dataclasses.replace(given, m=16)) or "")
        assert dtype in (peers[name].refuses(matmul) or "")
        assert "two plain matrices" in (peers[name].refuses(matvec) or "")
    for name in ("torch", "cupy", "triton", "nvmath"):
        assert "quantised" in (peers[name].refuses(int4) or "")
    assert peers["torch int4pack"].refuses(int4) is None
    assert "fixed table" in (peers["bitsandbytes"].refuses(int4) or "")
    assert "quantised matrices only" in (peers["torch int8pack"].refuses(matvec) or "")


FOUR = QuantSpec(4, 128, True, "row", "float32", False)
EIGHT = QuantSpec(8, -1, False, "row", "float32", False)
# What each peer of codes multiplies, and the single changes that make it what it does not.
SERVED: dict[str, tuple[QuantSpec, str, tuple[tuple[str, Any, str], ...]]] = {
    "torch int4pack": (
        FOUR,
        "bfloat16",
        (
            ("bits", 8, "4 bits"),
            ("group_size", 16, "groups of 32"),
            ("m", 508, "of 8 rows"),
            ("n", 448, "of 128 columns"),
            ("transposed", True, "no transposed"),
        ),
    ),
    "torch int8pack": (
        EIGHT,
        "bfloat16",
        (
            ("bits", 4, "int8"),
            ("has_zeros", True, "symmetric"),
            ("group_size", 128, "per row"),
            ("transposed", True, "no transposed"),
        ),
    ),
    "gemlite": (
        FOUR,
        "float16",
        (
            ("has_zeros", False, "zero points"),
            ("group_size", 48, "groups of 32"),
            ("m", 504, "32 rows"),
            ("n", 504, "columns"),
            ("transposed", True, "no transposed"),
        ),
    ),
}


@pytest.mark.parametrize("name", SERVED)
def test_a_peer_of_codes_refuses_each_change_that_it_does_not_serve(name: str) -> None:
    (peer,) = (one for one in all_peers("cuda") if one.name == name)
    spec, dtype, changes = SERVED[name]
    given = Problem("matvec", 512, 512, a=f"uint{spec.bits}", b=dtype, out=dtype, quant=spec)
    assert peer.refuses(given) is None
    assert "float64" in (peer.refuses(dataclasses.replace(given, b="float64")) or "")
    for field, value, words in changes:
        if field in ("m", "n"):
            other = dataclasses.replace(given, **{field: value})
        else:
            quant = dataclasses.replace(spec, **{field: value})
            other = dataclasses.replace(given, quant=quant, a=f"uint{quant.bits}")
        assert words in (peer.refuses(other) or ""), f"{field}={value}"


def _of(problem: Problem, dtype: str) -> Problem:
    return dataclasses.replace(problem, a=dtype, b=dtype, out=dtype)


PEERS = {"cupy": 2.5, "torch": 1.5, "torch on float32": 1.2}


def row(name: str, kind: str, time_us: float, **options: object) -> Row:
    times = Times(time_us, time_us, time_us, time_us, 7)
    fields = {"gbs": 1.0, "tflops": 1.0, "group": "512 x 512, A x, float16", **options}
    return Row("env", Problem("matvec", 512, 512), name, kind, "cold", times, **fields)  # type: ignore[arg-type]


def test_the_table_has_a_line_for_each_product_with_the_fastest_other_beside_it() -> None:
    up = {n: Speedup(v, v - 0.1, v + 0.1, 8, 0.95, "faster") for n, v in PEERS.items()}
    rows = [
        row("streamed_rows", "rung", 2.0, speedups=up, percent_of_ceiling=50.0),
        row("split_columns", "rung", 5.0, group="third", flags=("above the read ceiling by 9 %",)),
    ]
    data = rows_table("title", rows, SHORT)
    assert [r[:3] for r in data.rows] == [
        ("512 x 512, A x, float16", "streamed_rows", "2"),
        ("third", "split_columns", "5"),
    ]
    first = dict(zip(data.header, data.rows[0], strict=True))
    assert first["times as fast as the fastest other"] == "1.50 (1.40 to 1.60) torch"
    assert first["% of read ceiling"] == "50"
    assert data.rows[1][-1] == "above the read ceiling by 9 %"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--device", "cuda", "--suite", "cpu"], "--suite is 'cpu'; on cuda it must be one of"),
        (["--device", "tpu"], "--device is 'tpu'"),
        (["--device", "cpu", "--suite", "split"], "--suite is 'split'; on cpu"),
    ],
)
def test_suites_belong_to_devices(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["bench", *arguments]) == 2
    assert words in capsys.readouterr().err
