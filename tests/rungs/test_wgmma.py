"""The rungs on wgmma: what the rungs' common tests do not reach, under the emulator."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import gemmule as gm
from cuda_emulation import Emulator, encoded, together
from cuemu.toolchain import missing_tools
from emulated_driver import emulated
from gemmule.backends.cuda import driver, launch_args, starter, tensor_maps
from gemmule.core.packing import TensorMap
from gemmule.core.problem import Problem, numpy_dtype
from gemmule.core.registry import all_rungs, rung_in
from gemmule.core.rung import Rung, Step
from gemmule.oracle.inputs import Inputs, make_inputs
from gemmule.oracle.judge import check
from gemmule.oracle.problems import edge_problems, make_problem
from proofs import proofs

pytestmark = pytest.mark.skipif(missing_tools() is not None, reason=str(missing_tools()))
HALF = ("float16", "float16", "float16")
BYTES = {  # those of 8-bit operands, and two that differ
    "wgmma_int8": ("int8", "uint8", "int32"),
    "wgmma_float8": ("float8_e4m3fn", "float8_e5m2", "float32"),
}
RUNGS = {
    rung.name: rung
    for rung in all_rungs("cuda")
    if rung.op == "matmul"
    and rung.name.startswith("wgmma")
    and (HALF in rung.signatures or rung.name in BYTES)
}
NAMES = sorted(RUNGS)
TYPES = dict.fromkeys(NAMES, HALF) | BYTES


def few_units(units: int) -> Emulator:
    """Return an emulator of a device with so few multiprocessors that blocks take several tiles."""
    emulator = Emulator(seed=3)
    emulator.machine = replace(proofs.proof_machine(), units=units)
    return emulator


def judged(rung: Rung, emulator: Emulator, inputs: Inputs, params: dict[str, Any]) -> None:
    verdict = check(
        inputs, rung.arithmetic(inputs.case.problem), params, emulator.run(rung, inputs, params)
    )
    assert verdict.ok, f"{rung.name} {params}: {verdict.text}"


def cases(rung: Rung) -> Iterator[tuple[Problem, dict[str, Any]]]:
    """Yield products of several tiles a block, by every parameter set, in turning layouts."""
    types = TYPES[rung.name]
    layouts = [(a, b) for a in ("row", "col") for b in ("row", "col")]
    plain = make_problem("matmul", 8, 8, 8, types)
    for i, params in enumerate(rung.space(plain)):
        layout_a, layout_b = layouts[i % 4]
        problem = make_problem(
            "matmul",
            264,
            328,
            136,
            types,
            layout_a=layout_a,
            layout_b=layout_b,
            batch=1 + (i % 2 if rung.batched else 0),
        )
        yield replace(problem, alignment=16), params


@pytest.mark.parametrize("name", NAMES)
def test_blocks_that_take_several_tiles(name: str) -> None:
    rung = RUNGS[name]
    together(rung, cases(rung), few_units(4))
    for problem, params in cases(rung):
        judged(rung, few_units(4), make_inputs(problem, "integers", 11), params)


@pytest.mark.parametrize("name", NAMES)
def test_stages_that_are_filled_again(name: str) -> None:
    """Sums so long that each stage serves more than once, and copies that land at once."""
    rung = RUNGS[name]
    for layout_a, layout_b in (("row", "row"), ("col", "col")):
        problem = make_problem(
            "matmul",
            72,
            136,
            1032,
            TYPES[name],
            layout_a=layout_a,
            layout_b=layout_b,
            layout_out="row",
        )
        for params in ({}, {"cluster": 2}) if "cluster" in rung.params else ({},):
            emulator = few_units(4)
            assert emulator.seed % 2, "copies land at once"
            inputs = make_inputs(problem, "integers", 17)
            judged(rung, emulator, inputs, rung.check_params(problem, params))


@pytest.mark.parametrize("layout_out", ["row", "col"])
def test_tiles_as_narrow_as_the_shorter_side(layout_out: str) -> None:
    """A or B^T is what has few rows; stages serve again, and one part of the sum has none."""
    rung = RUNGS["wgmma_split"]
    problems = [
        make_problem("matmul", m, n, 712, HALF, layout_b="col", layout_out=layout_out)
        for m, n in ((24, 136), (136, 24))
    ]
    narrow = [
        (problem, params)
        for problem in problems
        for params in rung.space(problem)
        if params["tile"] in ("64x16", "64x32")
    ]
    assert len(narrow) == 8
    together(rung, narrow, few_units(4))
    for problem, params in narrow:
        judged(rung, few_units(4), make_inputs(problem, "integers", 7), params)
    short = make_problem("matmul", 24, 136, 64, HALF, layout_b="col", layout_out=layout_out)
    judged(rung, few_units(4), make_inputs(short, "integers", 7), {"tile": "64x64", "parts": 8})


@pytest.mark.parametrize("layout_out", ["row", "col"])
def test_every_part_of_a_sum_is_added(layout_out: str) -> None:
    rung = RUNGS["wgmma_two_step"]
    for parts in (4, 8, 16):
        problem = make_problem("matmul", 40, 72, 64 * parts, HALF, layout_out=layout_out)
        inputs = make_inputs(problem, "integers", parts)
        judged(rung, few_units(4), inputs, {"tile": "128x128", "parts": parts})


def test_the_tile_follows_the_shorter_side() -> None:
    rung, machine = RUNGS["wgmma_split"], proofs.proof_machine()
    for narrow, tile in ((9, "64x16"), (16, "64x16"), (17, "64x32"), (64, "64x64")):
        for m, n in ((narrow, 4096), (4096, narrow)):
            problem = make_problem("matmul", m, n, 4096, HALF, layout_b="col")
            problem = replace(problem, alignment=16)
            suggestion = rung.suggest(problem, machine)
            assert suggestion is not None
            best = min(
                rung.seconds(problem, params, machine)
                for params in rung.space(problem)
                if params["tile"] == tile
            )
            assert best <= 1.05 * suggestion.expected_s, (m, n)


def results(name: str) -> list[tuple[str, str, str]]:
    """Return the types of a rung's operands by a narrow and a wide result."""
    a, b, out = TYPES[name]
    return [(a, b, one) for one in (("int32",) if out == "int32" else ("float16", "float32"))]


OF_RESULTS = [(name, types) for name in NAMES for types in results(name)]


@pytest.mark.parametrize(("name", "types"), OF_RESULTS)
def test_alpha_and_beta(name: str, types: tuple[str, str, str]) -> None:
    rung = RUNGS[name]
    problem = replace(make_problem("matmul", 150, 136, 72, types), alignment=16)
    for beta in (0.0, 3.0 if types[2] == "int32" else 0.5):
        inputs = make_inputs(problem, "integers", 5)
        old = np.arange(problem.outputs).reshape(problem.m, problem.n) % 16
        inputs.out[...] = old if beta else 7 if types[2] == "int32" else np.nan
        params = rung.check_params(problem, None)
        got = few_units(2).run(rung, inputs, params, alpha=-2.0, beta=beta)
        exact = -2.0 * (inputs.a.astype(float) @ inputs.b.astype(float)) + beta * old
        assert np.array_equal(got.astype(float), exact.astype(got.dtype).astype(float)), beta


@pytest.mark.parametrize("name", NAMES)
def test_a_column_major_result(name: str) -> None:
    """C is computed as the transpose of B^T A^T, or stored where it lies."""
    rung = RUNGS[name]
    for layout_a, layout_b in (("row", "row"), ("col", "row"), ("row", "col")):
        problem = make_problem(
            "matmul",
            200,
            72,
            136,
            TYPES[name],
            layout_a=layout_a,
            layout_b=layout_b,
            layout_out="col",
        )
        shared = replace(problem, batch=2, shared_a=layout_b == "col", shared_b=layout_a == "col")
        for which in (problem, shared)[: 1 + rung.batched]:
            inputs = make_inputs(which, "integers", 3)
            judged(rung, few_units(4), inputs, rung.check_params(which, None))


@pytest.mark.parametrize(("name", "types"), OF_RESULTS)
def test_a_result_whose_rows_are_longer_than_it_is_wide(
    name: str, types: tuple[str, str, str]
) -> None:
    """13 columns of a C whose rows begin at multiples of 16 bytes, and nothing written beside."""
    rung = RUNGS[name]
    problem = make_problem("matmul", 40, 13, 208, types, layout_b="col")
    problem = replace(problem, alignment=16)
    for params in list(rung.space(problem))[::4]:
        inputs = make_inputs(problem, "integers", 19)
        whole = np.full((40, 24), 7, inputs.out.dtype)
        judged(rung, few_units(2), replace(inputs, out=whole[:, :13]), params)
        assert (whole[:, 13:] == 7).all(), params


@pytest.mark.parametrize("name", sorted({*NAMES} - {"wgmma_repacked", *BYTES}))
def test_what_tma_cannot_read_is_refused(name: str) -> None:
    rung = RUNGS[name]
    assert "16 bytes" in str(rung.refusal(make_problem("matmul", 64, 64, 63, HALF)))
    assert "16 bytes" in str(rung.refusal(make_problem("matmul", 64, 61, 64, HALF)))
    assert rung.refusal(make_problem("matmul", 64, 64, 0, HALF)) is not None
    assert rung.refusal(make_problem("matmul", 64, 64, 64, HALF)) is None


def test_public_calls_reach_them() -> None:
    rng = np.random.default_rng(3)
    given = rng.integers(-4, 5, (72, 136)), rng.integers(-4, 5, (136, 64))
    with emulated():
        for name in NAMES:
            left, right = (
                one.astype(numpy_dtype(dtype).type if "uint" not in dtype else np.int8)
                for one, dtype in zip(given, TYPES[name], strict=False)
            )
            a, b = gm.asarray(left, device="cuda"), gm.asarray(right, device="cuda")
            for _ in range(2):  # the second call finds its maps encoded
                got = gm.matmul(a, b, rung=name).to_host()
                assert np.array_equal(got.astype(float), left.astype(float) @ right.astype(float))
            del a, b


@pytest.mark.parametrize("name", NAMES)
def test_a_fresh_result_whose_rows_end_anywhere(name: str) -> None:
    """TMA takes both operands, but could not store a C of 61 columns."""
    rng = np.random.default_rng(9)
    dtypes = [numpy_dtype(one) for one in TYPES[name][:2]]
    left = rng.integers(0, 5, (40, 128)).astype(dtypes[0])
    right = np.asfortranarray(rng.integers(0, 5, (128, 61)).astype(dtypes[1]))
    with emulated():
        a, b = gm.asarray(left, device="cuda"), gm.asarray(right, device="cuda")
        got = gm.matmul(a, b, rung=name).to_host()
        del a, b
    assert np.array_equal(got.astype(float), left.astype(float) @ right.astype(float))


def test_sums_of_float8_that_are_not_float32s(only_proved: Callable[..., None]) -> None:
    """They are the choice, explain() tells of them, and precision="ieee" forbids them."""
    rng = np.random.default_rng(5)
    dtype = numpy_dtype("float8_e4m3fn")
    with emulated():
        a, b = (
            gm.asarray(rng.standard_normal((64, 64)).astype(dtype), device="cuda") for _ in "ab"
        )
        only_proved("cuda", {"wgmma_float8", "register_tile"})
        plan = gm.plan("matmul", a, b)
        assert plan.rung.name == "wgmma_float8"
        assert "tensor cores keep 14 bits of" in plan.explain()
        exact = gm.plan("matmul", a, b, precision="ieee")
        assert exact.rung.name == "register_tile"
        assert "14 bits" not in exact.explain()
        del a, b


@pytest.mark.parametrize("name", BYTES)
def test_bytes_that_tma_cannot_read_are_copied(name: str) -> None:
    """Each operand alone, both, and none; what is copied begins at multiples of 256 bytes."""
    rung, machine = RUNGS[name], proofs.proof_machine()
    layouts = {("row", "col"): 0, ("col", "col"): 272 * 512, ("row", "row"): 144 * 512}
    for (layout_a, layout_b), copied in layouts.items():
        problem = make_problem(
            "matmul", 272, 144, 512, TYPES[name], layout_a=layout_a, layout_b=layout_b
        )
        params = rung.check_params(problem, {"tile": "128x64"})
        assert rung.workspace(problem, params, machine) == copied
        assert len(rung.steps(problem, params, machine)) == 1 + bool(copied)
        judged(rung, few_units(4), make_inputs(problem, "integers", 23), params)
    for layout_a, layout_b in (("row", "col"), ("col", "row")):
        problem = make_problem(
            "matmul", 131, 67, 333, TYPES[name], layout_a=layout_a, layout_b=layout_b, batch=2
        )
        for shared in (problem, replace(problem, shared_a=True), replace(problem, shared_b=True)):
            inputs = make_inputs(shared, "integers", 29, "sliced")
            judged(rung, few_units(4), inputs, rung.check_params(problem, None))


@pytest.fixture
def encodings(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Maps encoded without a driver: the addresses, one after the other."""
    found: list[int] = []

    def encode(address: int, shape: tensor_maps.Shape) -> bytes:
        found.append(address)
        return encoded(address, shape)

    monkeypatch.setattr(tensor_maps, "encode", encode)
    return found


@pytest.fixture
def launch_by(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """What makes a function the driver's that launches."""
    return lambda launch: monkeypatch.setattr(starter, "launch_function", lambda: launch)


def test_maps_are_kept_by_address(encodings: list[int]) -> None:
    made = encodings
    maps = tensor_maps.Maps((shape_of("a"), shape_of("b")))
    first = maps.of((64, 128, 0, 0))
    assert maps.of((64, 128, 256, 0)) == first
    assert made == [64, 128]
    assert maps.of((64, 64, 0, 0))[1] != first[1]
    assert made == [64, 128, 64]
    for address in range(16, 16 * (tensor_maps.MOST_KEPT + 2), 16):
        maps.of((address, 128, 0, 0))
    assert len(maps.kept[0]) <= tensor_maps.MOST_KEPT


def shape_of(operand: str, **changes: int) -> tensor_maps.Shape:
    problem = make_problem("matmul", 24, 40, 56, HALF, layout_b="col")
    fields = dict.fromkeys((name for name, _ in launch_args.GEMM_FIELDS), 0)
    fields |= {"m": 24, "n": 40, "k": 56, "batch": 1, "a_row": 56, "b_col": 56, "c_row": 40}
    packed = launch_args.GEMM.pack(*(fields | changes).values())
    step = Step("kernel", (1, 1, 1), (1, 1, 1), maps=(TensorMap(operand, (64, 8)),))
    (shape,) = tensor_maps.declared((step,), problem, packed)
    return shape


def test_a_map_says_how_an_operand_lies() -> None:
    assert shape_of("a") == (0, 2, (56, 24, 1), (112, 112), (64, 8, 1), 0)
    assert shape_of("b") == (1, 2, (56, 40, 1), (112, 112), (64, 8, 1), 0)
    assert shape_of("c", c_row=48) == (2, 2, (40, 24, 1), (96, 96), (64, 8, 1), 0)
    assert shape_of("a", batch=3, a_batch=2048) == (0, 2, (56, 24, 3), (112, 4096), (64, 8, 1), 0)
    assert shape_of("a", batch=3).sizes == (56, 24, 1), "a shared operand has one plane"
    assert shape_of("a", m=1, a_row=3).strides == (112, 112)  # that of a single row may be anything


def test_steps_declare_one_list_of_maps() -> None:
    problem = make_problem("matmul", 8, 8, 8, HALF)
    one, two = (
        Step("kernel", (1, 1, 1), (1, 1, 1), maps=(TensorMap("a", (64, rows)),)) for rows in (8, 16)
    )
    with pytest.raises(ValueError, match="one list for all"):
        tensor_maps.declared((one, two), problem, bytes(launch_args.GEMM.size))


def test_the_driver_is_given_what_a_map_says(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def encoder(target: int, *rest: Any) -> int:
        seen.append([list(r) if isinstance(r, ctypes.Array) else r for r in rest])
        ctypes.memset(target, 7, tensor_maps.MAP_BYTES)
        return 0

    monkeypatch.setattr(tensor_maps, "_encoder", lambda: encoder)
    assert tensor_maps.encode(4096, shape_of("a")) == b"\7" * 128
    assert seen == [[1, 3, 4096, [56, 24, 1], [112, 112], [64, 8, 1], [1, 1, 1], 0, 3, 3, 0]]
    with emulated():
        monkeypatch.setattr(tensor_maps, "_encoder", lambda: lambda *given: 1)
        monkeypatch.setattr(driver, "bindings", lambda: _Codes)
        with pytest.raises(gm.DeviceError, match="encoding a tensor map"):
            ENCODE(4096, shape_of("a"))


@pytest.mark.parametrize("cluster", [(1, 1, 1), (2, 1, 1)])
def test_a_start_shows_the_maps(
    cluster: tuple[int, int, int], encodings: list[int], launch_by: Callable[..., None]
) -> None:
    """What the driver is given: config, attribute, struct and the maps of these addresses."""
    seen: list[tuple[Any, ...]] = []

    def launch(config: int, function: int, params: int, extra: None) -> int:
        numbers = struct.unpack("<7I4xQQI4x", ctypes.string_at(config, 56))
        attribute = struct.unpack("<I4x3I", ctypes.string_at(numbers[8], 20)) if numbers[9] else ()
        pointers = struct.unpack("<3Q", ctypes.string_at(params, 24))
        fields = struct.unpack("<3Q", ctypes.string_at(pointers[0], 24))
        maps = [ctypes.string_at(at, 128) for at in pointers[1:]]
        seen.append((function, numbers[:8], attribute, fields, maps))
        return 0

    launch_by(launch)
    shapes = (shape_of("a"), shape_of("b"))
    step = Step("kernel", (4, 1, 1), (384, 1, 1), 1000, cluster=cluster)
    template, maps = bytes(launch_args.GEMM.size), tensor_maps.Maps(shapes)
    start = starter.starter(starter.Kernels((step,), (77,), template, maps), "4Q")
    for left in (1024, 4096, 1024):
        start(5, left, 2048, 3072, 0)
        config = (4, 1, 1, 384, 1, 1, 1000, 5)
        shown = [encoded(left, shapes[0]), encoded(2048, shapes[1])]
        attribute = () if cluster == (1, 1, 1) else (4, 2, 1, 1)
        assert seen.pop() == (77, config, attribute, (left, 2048, 3072), shown)
    assert encodings == [1024, 2048, 4096], "each map is encoded once"


@pytest.mark.parametrize("work", [0, 64000])
@pytest.mark.parametrize("mapped", [False, True])
def test_a_start_of_several_kernels(
    mapped: bool,
    work: int,
    encodings: list[int],
    launch_by: Callable[..., None],
    fault: Callable[..., Any],
) -> None:
    """Each kernel has its own config and attribute; struct, maps and workspace serve all."""
    seen: list[tuple[Any, ...]] = []
    shapes = (shape_of("a"), shape_of("b")) if mapped else ()
    template = bytes(range(150))

    def launch(config: int, function: int, params: int, extra: None) -> int:
        numbers = struct.unpack("<7I4xQQI4x", ctypes.string_at(config, 56))
        attribute = tuple(
            struct.unpack("<I4x3I", ctypes.string_at(numbers[8] + 72 * i, 20))
            for i in range(numbers[9])
        )
        pointers = struct.unpack(
            f"<{1 + len(shapes)}Q", ctypes.string_at(params, 8 + 8 * len(shapes))
        )
        given = ctypes.string_at(pointers[0], 150)
        maps = [ctypes.string_at(at, 128) for at in pointers[1:]]
        assert all(at % 64 == 0 for at in pointers[1:])
        seen.append((function, numbers[:8], attribute, given, maps))
        return 7 if function == 9 else 0

    launch_by(launch)
    steps = (
        Step("first", (4, 1, 1), (384, 1, 1), 1000, cluster=(2, 1, 1)),
        Step("second", (5, 6, 7), (32, 1, 1), cluster=(1, 2, 1), pdl=True),
        Step("last", (1, 1, 1), (64, 2, 1), 8, pdl=True),
    )
    maps = tensor_maps.Maps(shapes) if mapped else None
    kernels = starter.Kernels(steps, (3, 5, 8), template, maps)
    start = starter.starter(kernels, "4Q", "2d")
    for stream, at, scalars in ((5, work, ()), (5, work // 2, (2.0, 3.0)), (6, work, (1.0, 0.0))):
        start(stream, 1024, 2048, 3072, at, scalars)
        if scalars:
            template = template[:-16] + struct.pack("<2d", *scalars)
        given = struct.pack("<4Q", 1024, 2048, 3072, at) + template[32:]
        shown = [encoded(at, shape) for at, shape in zip((1024, 2048), shapes, strict=False)]
        assert seen == [
            (3, (4, 1, 1, 384, 1, 1, 1000, stream), ((4, 2, 1, 1),), given, shown),
            (5, (5, 6, 7, 32, 1, 1, 0, stream), ((4, 1, 2, 1), (6, 1, 0, 0)), given, shown),
            (8, (1, 1, 1, 64, 2, 1, 8, stream), ((6, 1, 0, 0),), given, shown),
        ]
        seen.clear()
    fault(starter, "failed", lambda sound, code, step: OSError(code, step.kernel))
    refused = starter.Kernels(steps, (3, 9, 8), template, maps)
    with pytest.raises(OSError, match="second"):
        starter.starter(refused, "4Q")(6, 1024, 2048, 3072, 0)
    assert [one[0] for one in seen] == [3, 9], "nothing is launched after a kernel that was refused"


def test_attributes_and_configs_lie_as_the_driver_has_them(launch_by: Callable[..., None]) -> None:
    from cuda.bindings import driver as api

    launch_by(print)

    step = Step("kernel", (4, 5, 6), (32, 2, 1), 1000, cluster=(2, 4, 8), pdl=True)
    cluster, early = api.CUlaunchAttribute(), api.CUlaunchAttribute()
    cluster.id = api.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    dimension = cluster.value.clusterDim
    dimension.x, dimension.y, dimension.z = step.cluster
    early.id = api.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    early.value.programmaticStreamSerializationAllowed = 1
    config = api.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = step.grid
    config.blockDimX, config.blockDimY, config.blockDimZ = step.block
    config.sharedMemBytes, config.hStream = step.smem, api.CUstream(5)
    config.numAttrs = 2
    memory = starter.Arguments(starter.Kernels((step,), (1,), b""))
    memory.turn(5)
    packed = ctypes.string_at(memory.call.args[0], 56)
    seen = struct.unpack("<7I4xQQI4x", packed)
    driver_s = struct.unpack("<7I4xQQI4x", ctypes.string_at(config.getPtr(), 56))
    assert (*seen[:8], seen[9]) == (*driver_s[:8], driver_s[9])
    for i, one in enumerate((cluster, early)):
        assert ctypes.string_at(seen[8] + 72 * i, 72) == ctypes.string_at(one.getPtr(), 72)


class _Codes:
    """A driver that names its codes."""

    @staticmethod
    def CUresult(code: int) -> Any:
        return type("Code", (int,), {"name": "CUDA_ERROR_INVALID_VALUE"})(code)


ENCODE = tensor_maps.encode


LAUNCH_S = 1e-6  # less than a launch takes on any device


@pytest.mark.parametrize("name", ["wgmma_repacked", "wgmma_int8", "wgmma_float8"])
def test_copies_before_a_product_are_a_launch_that_is_expected(name: str) -> None:
    """Else small products would go to kernels that copy first."""
    rung, machine, met = RUNGS[name], proofs.proof_machine(), 0
    plain = rung_in(rung.op, "cuda", "wgmma_specialized") if name == "wgmma_repacked" else rung
    for problem in edge_problems(rung.op, rung.signatures[0], rung.layouts):
        if rung.refusal(problem) is not None or 0 in (problem.m, problem.k, problem.n):
            continue
        copied = rung.suggest(problem, machine)
        if copied is None or len(rung.steps(problem, copied.params, machine)) == 1:
            continue
        if problem.k > 1024:  # stages of long sums, fitted for each rung, weigh more than a launch
            continue
        m, n, k = (-(-size // 64) * 64 for size in (problem.m, problem.n, problem.k))
        whole = replace(problem, m=m, n=n, k=k, layout_a="row", layout_b="col", alignment=16)
        as_it_lies = plain.suggest(whole, machine)
        assert as_it_lies is not None
        assert len(plain.steps(whole, as_it_lies.params, machine)) == 1
        assert copied.expected_s - as_it_lies.expected_s > LAUNCH_S, problem
        met += 1
    assert met
