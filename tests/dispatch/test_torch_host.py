"""Products of PyTorch's tensors on the host: as arrays over their memory, and what stays apart."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import gemmule as gm
from gemmule.core.problem import FLOATS
from gemmule.dispatch import torch_host
from planted import planted

DTYPES = [getattr(torch, name) for name in (*FLOATS, "int8", "float8_e4m3fn", "complex64")]


def small(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Return integers whose sums are exact in every dtype."""
    numbers = torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(7))
    return numbers.to(torch.float32).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_do_not_go_the_general_path(dtype: torch.dtype) -> None:
    A, B, x = small(9, 7, dtype=dtype), small(7, 5, dtype=dtype), small(7, dtype=dtype)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    exact = A.to(wide) @ B.to(wide)
    transposed, expanded = B.t().contiguous().t(), x[None].expand(9, 7)
    with planted(torch_host, "tensor", lambda sound, array: sound(array)) as met:
        for b in (B, transposed, B.repeat(2, 2)[:7, :5]):
            C = gm.matmul(A, b)
            assert type(C) is torch.Tensor
            assert torch.equal(C.to(wide), exact)
        assert torch.equal(gm.matvec(A, x).to(wide), A.to(wide) @ x.to(wide))
        assert torch.equal(gm.vecmat(x, B).to(wide), x.to(wide) @ B.to(wide))
        assert torch.equal(gm.matmul(expanded, B).to(wide), expanded.to(wide) @ B.to(wide))
        C += 1  # whose memory is its own
        assert gm.matmul(A, B).ne(C).any()
    assert len(met) == 7


def test_a_quantised_matrix_beside_a_tensor() -> None:
    W = np.random.default_rng(5).standard_normal((40, 64)).astype("f4")
    Q, x = gm.quantize(W, bits=8, group_size=32), torch.ones(64)
    with planted(torch_host, "tensor", lambda sound, array: sound(array)):
        y = gm.matvec(Q, x)
    assert type(y) is torch.Tensor
    assert np.array_equal(y.numpy(), gm.matvec(Q, x.numpy()))


def test_gradients_are_kept() -> None:
    A = small(4, 3, dtype=torch.float32).requires_grad_()
    x = torch.ones(3)
    gm.matvec(A, x).sum().backward()
    assert A.grad is not None
    assert torch.equal(A.grad, torch.ones(4, 3))
    weight = torch.nn.Parameter(torch.ones(4, 3))
    with torch.no_grad():
        y = gm.matvec(weight, x)
    assert not y.requires_grad
    assert torch.equal(y, torch.full((4,), 3.0))


def test_numbers_behind_a_bit_are_read() -> None:
    z = small(3, 3, dtype=torch.float32) + 1j * small(3, 3, dtype=torch.float32).t()
    exact = z.conj().resolve_conj() @ z
    assert torch.equal(gm.matmul(z.conj(), z), exact)
    imaginary = z.conj().imag  # of the negative bit
    assert imaginary.is_neg()
    assert torch.equal(gm.matmul(imaginary, imaginary), imaginary.resolve_neg() @ imaginary)


def test_what_has_no_memory_is_refused_and_numbers_are_numbers() -> None:
    A, x = torch.ones(4, 4), torch.ones(4)
    A.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="resized to 0"):
        gm.matvec(A, x)
    with pytest.raises(TypeError, match="sparse"):
        gm.matvec(torch.eye(4).to_sparse(), x)
    with pytest.raises(ValueError, match="shape"):
        gm.matvec(torch.ones(4, 3), x)
    assert gm.matmul(x, x).shape == ()
    assert gm.matmul(torch.ones(0, 4), torch.ones(4, 2)).shape == (0, 2)
    assert torch.equal(gm.matmul(torch.ones(2, 0), torch.ones(0, 2)), torch.zeros(2, 2))
