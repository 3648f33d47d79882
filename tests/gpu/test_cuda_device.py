"""The CUDA back end on a real device: other libraries' arrays, streams, graphs, threads, sizes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import gemmule as gm
from gemmule.arrays import interop, transfer
from gemmule.backends.cuda import driver
from gemmule.backends.cuda.device_array import DeviceArray
from gemmule.core.registry import device_rungs
from gemmule.core.rung import CudaRung, DeviceRung, Rung
from gemmule.errors import DeviceError
from gemmule.oracle.problems import make_problem
from gemmule.storage.evidence import proved_variants

RNG = np.random.default_rng(0)
M, N = 130, 257


def whole(*shape: int, dtype: str = "float32") -> Any:
    """Return small integers, whose products are exact in every dtype."""
    return RNG.integers(-3, 4, shape).astype(dtype)


A, X, LEFT, B = whole(M, N), whole(N), whole(M), whole(N, 33)
OPS = {"matvec": (A, X), "vecmat": (LEFT, A), "matmul": (A, B)}


def torch_cuda() -> Any:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this PyTorch is built without CUDA")
    return torch


def cupy_library() -> Any:
    return pytest.importorskip("cupy")


# --- arrays of other libraries, in and out without copies -----------------------------------------


@pytest.mark.parametrize("op", OPS)
def test_torch_in_and_out(op: str) -> None:
    torch = torch_cuda()
    left, right = (torch.from_numpy(v).cuda() for v in OPS[op])
    result = getattr(gm, op)(left, right)
    assert isinstance(result, torch.Tensor)
    assert result.device == left.device
    np.testing.assert_array_equal(result.cpu().numpy(), OPS[op][0] @ OPS[op][1])
    out = torch.full_like(result, float("nan"))
    assert getattr(gm, op)(left, right, out=out) is out
    assert torch.equal(out, result)


@pytest.mark.parametrize("op", OPS)
def test_cupy_in_and_out(op: str) -> None:
    cupy = cupy_library()
    left, right = (cupy.asarray(v) for v in OPS[op])
    result = getattr(gm, op)(left, right)
    assert isinstance(result, cupy.ndarray)
    np.testing.assert_array_equal(cupy.asnumpy(result), OPS[op][0] @ OPS[op][1])
    out = cupy.full_like(result, np.nan)
    assert getattr(gm, op)(left, right, out=out) is out
    assert bool((out == result).all())


@pytest.mark.parametrize("op", OPS)
def test_jax_in_and_out(op: str) -> None:
    jax = pytest.importorskip("jax")
    if jax.default_backend() != "gpu":
        pytest.skip("this JAX sees no GPU")
    left, right = (jax.numpy.asarray(v) for v in OPS[op])
    result = getattr(gm, op)(left, right)
    assert isinstance(result, jax.Array)
    np.testing.assert_array_equal(np.asarray(result), OPS[op][0] @ OPS[op][1])


@pytest.mark.parametrize("view", ["contiguous", "transposed", "sliced", "stepped", "negative"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "int8"])
def test_views_of_tensors_are_used_where_they_lie(view: str, dtype: str) -> None:
    torch = torch_cuda()
    wide = torch.from_numpy(whole(2 * M, 2 * N)).to(getattr(torch, dtype)).cuda()
    matrix = {
        "contiguous": lambda: wide[:M, :N].contiguous(),
        "transposed": lambda: wide[:N, :M].T,
        "sliced": lambda: wide[1 : M + 1, 3 : N + 3],
        "stepped": lambda: wide[::2, ::2],
        "negative": lambda: wide.flip(0)[:M, :N],
    }[view]()
    x = torch.from_numpy(X).to(matrix.dtype).cuda()
    truth = matrix.double().cpu().numpy() @ X.astype(np.float64)
    result = gm.matvec(matrix, x)
    found = result.double().cpu().numpy()
    expected = torch.from_numpy(truth).to(result.dtype).double().numpy()
    np.testing.assert_array_equal(found, expected)


def test_dlpack_and_interface_share_memory() -> None:
    there = gm.asarray(A, device="cuda")
    assert isinstance(there, DeviceArray)
    torch = torch_cuda()
    for tensor in (torch.from_dlpack(there), torch.as_tensor(there, device="cuda")):
        assert tensor.data_ptr() == there.pointer
    tensor = torch.from_dlpack(there)
    del there
    np.testing.assert_array_equal(tensor.cpu().numpy(), A)  # the memory lives as long as the view


def test_arrays_with_the_interface_alone_come_in() -> None:
    matrix, vector = gm.asarray(A, device="cuda"), gm.asarray(X, device="cuda")

    class Foreign:
        def __init__(self, array: DeviceArray) -> None:
            self.array = array
            self.__cuda_array_interface__ = array.__cuda_array_interface__

    result = gm.matvec(Foreign(matrix), Foreign(vector))
    np.testing.assert_array_equal(transfer.to_host(interop.unwrap(result, "y")), A @ X)


@pytest.mark.parametrize("op", OPS)
def test_host_arrays_go_there_and_come_back(op: str) -> None:
    left, right = OPS[op]
    result = getattr(gm, op)(left, right, device="cuda")
    assert isinstance(result, np.ndarray)
    np.testing.assert_array_equal(result, left @ right)


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int8"])
def test_device_arrays_make_the_round_trip(order: str, dtype: str) -> None:
    host = np.asarray(whole(37, 19, dtype=dtype), order=order)
    there = gm.asarray(host, device="cuda")
    np.testing.assert_array_equal(there.to_host(), host)
    np.testing.assert_array_equal(there.T.to_host(), host.T)


# --- streams, graphs, threads ---------------------------------------------------------------------


def test_a_captured_graph_repeats_the_product_on_new_data() -> None:
    torch = torch_cuda()
    a, x = torch.from_numpy(A).cuda(), torch.from_numpy(X).cuda()
    out = torch.empty(M, device="cuda")
    gm.matvec(a, x, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gm.matvec(a, x, out=out)
    other = whole(N)
    x.copy_(torch.from_numpy(other))
    out.fill_(float("nan"))
    graph.replay()
    np.testing.assert_array_equal(out.cpu().numpy(), A @ other)


def test_work_waits_for_its_own_stream_only() -> None:
    """The operand is written late on a side stream; a launch elsewhere would read the old one."""
    torch = torch_cuda()
    a = torch.from_numpy(A).cuda()
    stream = torch.cuda.Stream()
    for _ in range(5):
        x = torch.zeros(N, device="cuda")
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)
            x.copy_(torch.from_numpy(X).pin_memory(), non_blocking=True)
            y = gm.matvec(a, x)
        stream.synchronize()
        np.testing.assert_array_equal(y.cpu().numpy(), A @ X)


def test_two_streams_do_not_disturb_each_other() -> None:
    torch = torch_cuda()
    big = torch.from_numpy(whole(1000, 999)).cuda()
    inputs = [torch.from_numpy(whole(999)).cuda() for _ in range(2)]
    truths = [big.double() @ x.double() for x in inputs]
    streams = [torch.cuda.Stream() for _ in inputs]
    torch.cuda.synchronize()
    results: list[list[Any]] = [[], []]
    for _ in range(50):
        for which, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                results[which].append(gm.matvec(big, inputs[which]))
    torch.cuda.synchronize()
    for found, truth in zip(results, truths, strict=True):
        assert all(torch.equal(one.double(), truth) for one in found)


def test_four_threads_compute_at_once() -> None:
    torch = torch_cuda()
    a = torch.from_numpy(A).cuda()
    wrong: list[str] = []

    def work(seed: int) -> None:
        try:
            rng = np.random.default_rng(seed)
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(100):
                    x = rng.integers(-3, 4, N).astype(np.float32)
                    found = gm.matvec(a, torch.from_numpy(x).cuda()).cpu().numpy()
                    if not np.array_equal(found, A @ x):
                        wrong.append(f"thread {seed}")
        except Exception as error:
            wrong.append(repr(error))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# --- the BLAS forms -------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [1.0, -2.0])
@pytest.mark.parametrize("beta", [0.0, 1.0, 3.0])
def test_beta_zero_never_reads_y(alpha: float, beta: float) -> None:
    torch = torch_cuda()
    a, x = torch.from_numpy(A).cuda(), torch.from_numpy(X).cuda()
    start = np.full(M, np.nan, np.float32) if beta == 0 else whole(M)
    y = torch.from_numpy(start).cuda()
    assert gm.gemv(a, x, y, alpha=alpha, beta=beta) is y
    truth = alpha * (A @ X) + (0 if beta == 0 else beta * start)
    np.testing.assert_array_equal(y.cpu().numpy(), truth)
    c = torch.full((M, 33), float("nan"), device="cuda")
    gm.gemm(a, torch.from_numpy(B).cuda(), c, alpha=alpha, beta=0.0)
    np.testing.assert_array_equal(c.cpu().numpy(), alpha * (A @ B))


# --- sizes ----------------------------------------------------------------------------------------


def proved() -> list[DeviceRung]:
    on_file = {name[:2] for name in proved_variants()}
    return [r for r in device_rungs() if (r.folder, r.name) in on_file]


def by_name(choose: Callable[[Rung], bool]) -> list[Any]:
    return [pytest.param(r, id=f"{r.folder}-{r.name}") for r in proved() if choose(r)]


@pytest.mark.whole_gpu
@pytest.mark.parametrize("rung", by_name(lambda r: r.op == "matmul" and not r.quantized))
def test_products_beyond_2_to_the_31_results(rung: Rung) -> None:
    """C has more than 2^31 elements, and its last one depends on the last of A and of B."""
    torch = torch_cuda()
    dtype = rung.signatures[0][0]
    signature = next(
        (s for s in rung.signatures if s[0] in ("int8", "float16")), rung.signatures[0]
    )
    dtype = signature[0]
    rows, columns, inner = 46_400, 46_500, 16
    a = torch.zeros((rows, inner), dtype=getattr(torch, dtype), device="cuda")
    b = torch.zeros((inner, columns), dtype=getattr(torch, dtype), device="cuda")
    if "row" not in rung.layouts_b:
        b = torch.zeros((columns, inner), dtype=b.dtype, device="cuda").T
    a[-1, -1], b[-1, -1], a[0, 0], b[0, 0] = 2, 3, 1, 1
    try:
        c = gm.matmul(a, b, rung=rung.name)
    except ValueError as error:
        pytest.skip(str(error))
    assert int((c != 0).sum()) == 2
    assert (int(c[-1, -1]), int(c[0, 0])) == (6, 1)


def test_shared_memory_beyond_48_kib() -> None:
    """Some rung asks for more dynamic shared memory than a kernel gets unasked, and is right."""
    torch = torch_cuda()
    machine = gm.plan(
        "matvec", *(torch.ones(s, device="cuda") for s in ((2, 2), (2,)))
    ).choice.machine
    large = []
    for rung in (rung for rung in proved() if isinstance(rung, CudaRung)):  # a library has no steps
        for problem in [] if rung.by_blocks else candidates(rung):  # whose scales are not drawn
            if rung.refusal(problem) is not None:
                continue
            for params in rung.space(problem):
                if any(s.smem > 48 * 1024 for s in rung.steps(problem, params, machine)):
                    large.append((rung, problem, params))
                    break
    if not large:
        pytest.skip("no proved rung asks for more than 48 KiB of dynamic shared memory")
    for rung, problem, params in large:
        operands = tensors(torch, problem)
        options = {"out_dtype": problem.out, "params": params}
        found = getattr(gm, problem.op)(*operands, rung=rung.name, **options)
        truth = operands[0].double() @ operands[1].double()
        assert torch.equal(found.double(), truth.to(found.dtype).double()), (rung.name, params)


def candidates(rung: Rung) -> list[Any]:
    if rung.quantized or rung.op == "grouped":
        return []
    m, n, k = (512, 16384, 1) if rung.op == "matvec" else (256, 256, 512)
    return [
        make_problem(rung.op, m, n, k, signature, layout_a=layout)
        for signature in rung.signatures
        for layout in rung.layouts
        if layout in ("row", "col")
    ]


def tensors(torch: Any, problem: Any) -> tuple[Any, Any]:
    """Return operands of a problem: mostly zeros, so that sums stay exact in halves."""

    def make(shape: tuple[int, ...], dtype: str, layout: str) -> Any:
        values = RNG.integers(-1, 2, shape) * (RNG.random(shape) < 0.02)
        tensor = torch.from_numpy(values.astype(np.float32)).to(getattr(torch, dtype)).cuda()
        return tensor.T.contiguous().T if layout == "col" else tensor

    inner = problem.reduction
    width = () if problem.op == "matvec" else (problem.n,)
    return (
        make((problem.m, inner), problem.a, problem.layout_a),
        make((inner, *width), problem.b, problem.layout_b),
    )


@pytest.mark.whole_gpu
def test_what_does_not_fit_is_refused_and_nothing_is_lost() -> None:
    free_bytes, total = driver.memory_bytes(0)
    with pytest.raises(DeviceError, match=f"{2 * total:,} bytes"):
        DeviceArray.empty((2 * total,), "uint8")
    np.testing.assert_array_equal(gm.matvec(A, X, device="cuda"), A @ X)
    assert driver.memory_bytes(0)[0] > free_bytes - (64 << 20)
