"""Arrays of other libraries on the host: PyTorch, JAX, and bare DLPack objects."""

from __future__ import annotations

import os
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

import gemmule as gm
from children import printed
from gemmule.arrays.interop import check_out, unwrap
from gemmule.backends.cuda import arrays as device_arrays
from gemmule.core.problem import COMPLEX, FLOAT8, FLOATS, INTEGERS, numpy_dtype, result_dtype
from products import ARRANGEMENTS, Array, exact, small


@pytest.fixture(scope="module")
def torch() -> Any:
    return pytest.importorskip("torch")


@pytest.fixture(scope="module")
def jax() -> Any:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    module = pytest.importorskip("jax")
    module.config.update("jax_enable_x64", True)
    return module


def to_torch(torch: Any, a: Array) -> Any:
    """Return a tensor of the values of `a` that owns its memory."""
    name = a.dtype.name
    if name in ("bfloat16", *FLOAT8):
        return torch.tensor(a.astype(np.float32)).to(getattr(torch, name))
    return torch.tensor(a)


def test_a_tensor_spread_over_processes_is_no_operand(
    torch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    spread = pytest.importorskip("torch.distributed.tensor")
    tensor = torch.ones(2, 3)
    assert unwrap(tensor, "A").form.shape == (2, 3)
    monkeypatch.setattr(spread, "DTensor", torch.Tensor)
    with pytest.raises(TypeError, match=r"A is a DTensor.*to_local\(\)"):
        unwrap(tensor, "A")


def values(tensor: Any) -> Array:
    wide = tensor.to(tensor.double().dtype) if tensor.is_floating_point() else tensor
    return wide.detach().numpy()


@pytest.mark.parametrize("dtype", FLOATS + FLOAT8 + INTEGERS + COMPLEX)
def test_torch_dtypes(torch: Any, dtype: str) -> None:
    rng = np.random.default_rng(1)
    A, x, B = small(rng, (7, 19), dtype), small(rng, (19,), dtype), small(rng, (19, 5), dtype)
    tA, tx, tB = (to_torch(torch, a) for a in (A, x, B))
    expected = getattr(torch, result_dtype(dtype, dtype))
    for result, truth in (
        (gm.matvec(tA, tx), exact("matvec", A, x)),
        (gm.vecmat(tx, tB), exact("vecmat", x, B)),
        (gm.matmul(tA, tB), exact("matmul", A, B)),
        (gm.matmul(tx, tx), exact("matmul", x, x)),
        (gm.plan("matvec", tA, tx)(tA, tx), exact("matvec", A, x)),
    ):
        assert isinstance(result, torch.Tensor)
        assert result.dtype is expected
        assert result.device.type == "cpu"
        np.testing.assert_array_equal(values(result), truth)
    out = torch.full((7,), 9).to(expected)
    assert gm.matvec(tA, tx, out=out) is out
    np.testing.assert_array_equal(values(out), exact("matvec", A, x))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_torch_views_are_used_where_they_lie(torch: Any, dtype: str) -> None:
    rng = np.random.default_rng(2)
    base = small(rng, (12, 40), dtype)
    tensor = to_torch(torch, base)
    views = [
        (tensor.T, base.T),
        (tensor[2:9, 3:33], base[2:9, 3:33]),
        (tensor[::2], base[::2]),
        (tensor[:, ::3], base[:, ::3]),
        (tensor[:1].expand(5, 40), np.broadcast_to(base[:1], (5, 40))),
        (tensor.unflatten(1, (4, 10))[:, 1], base.reshape(12, 4, 10)[:, 1]),
    ]
    for view, same in views:
        x = small(rng, (same.shape[1],), dtype)
        result = gm.matvec(view, to_torch(torch, x))
        np.testing.assert_array_equal(values(result), exact("matvec", same, x))
    assert gm.plan("matvec", tensor, tensor[0]).explain().endswith("copies     none")


def test_torch_gradients_are_followed(torch: Any) -> None:
    for A in (torch.eye(3, requires_grad=True), torch.nn.Parameter(torch.eye(3))):
        y = gm.matvec(A, torch.ones(3))
        assert y.requires_grad
        assert y.tolist() == [1, 1, 1]


def test_torch_lazy_views(torch: Any) -> None:
    z = torch.tensor([[1 + 2j, 3 - 1j], [0j, 1j]])
    np.testing.assert_array_equal(gm.matmul(z.conj(), z).numpy(), (z.conj() @ z).numpy())
    np.testing.assert_array_equal(gm.matmul(z.conj().T, z).numpy(), (z.mH @ z).numpy())
    negative = torch.conj(z).imag
    assert negative.is_neg()
    x = torch.tensor([1.0, 10.0])
    np.testing.assert_array_equal(gm.matvec(negative, x).numpy(), (negative @ x).numpy())
    with pytest.raises(ValueError, match="lazily negated or conjugated"):
        gm.matmul(z, z, out=torch.empty_like(z).conj())


def test_a_lazily_negated_tensor_of_a_device_is_read_as_it_counts(torch: Any) -> None:
    """Unwrapping asks a tensor only for its memory, so that one of the host can stand in."""
    from host_tensors import negated

    x = negated(torch.randn(64))
    operand = device_arrays.from_torch(x, "float32")
    assert operand.pointer == operand.array.data_ptr() != x.data_ptr()
    assert not operand.array.is_neg()
    assert torch.equal(operand.array, x)
    plain = device_arrays.from_torch(operand.array, "float32")
    assert plain.array is plain.original
    assert plain.pointer == operand.pointer
    with pytest.raises(ValueError, match="lazily negated"):
        check_out(operand, (64,), "float32", [])


def test_torch_tensors_that_are_refused(torch: Any) -> None:
    x = torch.ones(3)
    with pytest.raises(TypeError, match=r"A is a torch\.sparse_coo tensor.*to_dense"):
        gm.matvec(torch.eye(3).to_sparse(), x)
    with pytest.raises(TypeError, match="on meta; needed is a dense"):
        gm.matvec(torch.eye(3, device="meta"), x)
    with pytest.raises(TypeError, match="A has dtype bool"):
        gm.matvec(torch.eye(3).bool(), x)
    with pytest.raises(ValueError, match="one place"):
        gm.matvec(torch.eye(3), x, out=torch.zeros(1).expand(3))
    with pytest.raises(ValueError, match="overlaps an input"):
        gm.matvec(torch.eye(3), x, out=x)
    with pytest.raises(TypeError, match="out has dtype float64"):
        gm.matvec(torch.eye(3), x, out=torch.zeros(3, dtype=torch.float64))


def test_torch_out_of_any_strides(torch: Any) -> None:
    rng = np.random.default_rng(3)
    A, B = small(rng, (6, 9), "float32"), small(rng, (9, 4), "float32")
    base = torch.full((12, 12), 7.0)
    for out in (base[:6, :4], base.T[:6, :4], base[::2, 1:9:2]):
        assert gm.matmul(to_torch(torch, A), to_torch(torch, B), out=out) is out
        np.testing.assert_array_equal(out.numpy(), exact("matmul", A, B))


def test_libraries_do_not_mix(torch: Any) -> None:
    A, x = np.eye(3), torch.ones(3, dtype=torch.float64)
    with pytest.raises(TypeError, match="A is a numpy array on cpu and x a torch array on cpu"):
        gm.matvec(A, x)
    with pytest.raises(TypeError, match="torch array on cpu and A a numpy array on cpu"):
        gm.vecmat(x, A)
    with pytest.raises(TypeError, match="numpy array on cpu and out a torch array on cpu"):
        gm.matvec(A, np.ones(3), out=x)
    with pytest.raises(TypeError, match="both must come from one"):
        gm.plan("matvec", A, np.ones(3))(A, x)
    with pytest.raises(TypeError, match="both must come from one"):
        gm.plan("matvec", A, np.ones(3))(A, np.ones(3), out=torch.empty(3, dtype=torch.float64))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_a_quantised_matrix_beside_tensors(torch: Any, dtype: str) -> None:
    rng = np.random.default_rng(4)
    Q = gm.quantize(rng.integers(0, 16, (8, 32)).astype("f4"), bits=4, group_size=-1)
    weights = Q.dequantize("float64")
    x = small(rng, (32,), dtype)
    y = gm.matvec(Q, to_torch(torch, x))
    assert isinstance(y, torch.Tensor)
    assert y.dtype is getattr(torch, dtype)
    expected = (weights @ x.astype("f8")).astype(numpy_dtype(dtype)).astype("f8")
    np.testing.assert_allclose(values(y), expected, rtol=2.0**-7 if dtype == "bfloat16" else 1e-5)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16", "int8", "int32"])
def test_jax_arrays(jax: Any, dtype: str) -> None:
    rng = np.random.default_rng(5)
    A, x, B = small(rng, (7, 19), dtype), small(rng, (19,), dtype), small(rng, (19, 5), dtype)
    jA, jx, jB = (jax.numpy.asarray(a) for a in (A, x, B))
    for result, truth in (
        (gm.matvec(jA, jx), exact("matvec", A, x)),
        (gm.vecmat(jx, jB), exact("vecmat", x, B)),
        (gm.matmul(jA, jB), exact("matmul", A, B)),
        (gm.matmul(jA, jA.T), exact("matmul", A, A.T)),
    ):
        assert isinstance(result, jax.Array)
        assert result.dtype.name == result_dtype(dtype, dtype)
        np.testing.assert_array_equal(np.asarray(result).astype(truth.dtype), truth)


def test_jax_immutable_out_and_other_libraries_are_refused(jax: Any) -> None:
    A = jax.numpy.eye(3)
    with pytest.raises(TypeError, match="immutable"):
        gm.matvec(A, jax.numpy.ones(3), out=jax.numpy.zeros(3))
    with pytest.raises(TypeError, match="A is a jax array on cpu and x a numpy array on cpu"):
        gm.matvec(A, np.ones(3))


def test_jax_without_64_bits_refuses_to_round_the_result(jax: Any) -> None:
    jax.config.update("jax_enable_x64", False)
    try:
        A = jax.numpy.ones((3, 3), "int32")
        with pytest.raises(TypeError, match="the result is int64, which JAX holds only with"):
            gm.matmul(A, A)
    finally:
        jax.config.update("jax_enable_x64", True)


class Capsule:
    """An array that speaks nothing but DLPack."""

    def __init__(self, array: Array) -> None:
        self._array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._array.__dlpack_device__()


class Elsewhere(Capsule):
    def __dlpack_device__(self) -> tuple[int, int]:
        return (7, 0)  # Vulkan


class WithNamespace(Capsule):
    def __array_namespace__(self) -> Any:
        return type("Namespace", (), {"from_dlpack": Capsule})


@pytest.mark.parametrize("how", ["row", "col", "step_two", "reversed"])
def test_dlpack_objects(how: str) -> None:
    rng = np.random.default_rng(6)
    A, x = ARRANGEMENTS[how](small(rng, (7, 19))), small(rng, (19,))
    y = gm.matvec(Capsule(A), Capsule(x))
    np.testing.assert_array_equal(y, exact("matvec", A, x))
    y = gm.matvec(WithNamespace(A), WithNamespace(x))
    assert isinstance(y, Capsule)
    np.testing.assert_array_equal(np.from_dlpack(y), exact("matvec", A, x))


@pytest.mark.parametrize("kind", [np.asarray, Capsule])
@pytest.mark.parametrize("how", ARRANGEMENTS)
def test_a_product_lies_in_the_given_result_or_is_refused(how: str, kind: Any) -> None:
    """A result that would have to be copied to be written would be lost with the copy."""
    result = ARRANGEMENTS[how](np.zeros((7, 3)))
    refused = how in ("misaligned", "swapped_bytes", "read_only", "zero_stride")
    with pytest.raises((TypeError, ValueError), match="out is") if refused else nullcontext():
        gm.matmul(kind(np.ones((7, 5))), kind(np.ones((5, 3))), out=kind(result))
    np.testing.assert_array_equal(result, 0 if refused else 5)


def test_dlpack_devices_and_kinds_that_are_refused() -> None:
    with pytest.raises(TypeError, match="DLPack device type 7; supported are 1"):
        gm.matvec(Elsewhere(np.eye(3)), Elsewhere(np.ones(3)))
    with pytest.raises(TypeError, match="A is a numpy array on cpu and x a dlpack array on cpu"):
        gm.matvec(np.eye(3), Capsule(np.ones(3)))


def test_products_of_numpy_arrays_import_no_other_library() -> None:
    code = (
        "import sys, numpy as np, gemmule as gm\n"
        "A = np.ones((2, 3), '>f8')\n"
        "gm.matmul(A, A.T), gm.matvec(A, A[0], rung='blas'), gm.gemm(A, A.T, device='cpu')\n"
        "from gemmule.dispatch.bind import bind\n"
        "assert bind(None, None, None, None, 'cuda:0') is None  # of another library's arrays\n"
        "print({'torch', 'jax', 'cupy', 'scipy'} & {*sys.modules})\n"
    )
    assert printed(code).strip() == "set()"
