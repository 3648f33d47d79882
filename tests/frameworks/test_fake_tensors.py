"""Traced products, of tensors without memory: where each operand lies decides, in every mixture."""

from __future__ import annotations

import itertools

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import gemmule as gm  # noqa: E402
from fake_tensors import FakeTensorMode  # noqa: E402

SHAPES = {
    "matvec": ((6, 8), (8,)),
    "vecmat": ((6,), (6, 8)),
    "matmul": ((6, 8), (8, 5)),
    "grouped_matmul": ((6, 8), (3, 8, 5), (3,)),
}


@pytest.mark.parametrize(
    ("op", "into_out"), [(op, into) for op in SHAPES for into in (False, True)][:-1]
)
def test_operands_of_several_devices_are_refused_and_others_stay_where_they_lie(
    op: str, into_out: bool
) -> None:
    shapes = SHAPES[op]
    result = getattr(gm, op)(*(torch.zeros(s, dtype=kind(s)) for s in shapes)).shape
    with FakeTensorMode():
        for devices in itertools.product(("cpu", "cuda"), repeat=len(shapes) + into_out):
            pairs = zip(shapes, devices, strict=False)
            operands = [torch.empty(s, dtype=kind(s), device=d) for s, d in pairs]
            out = {"out": torch.empty(result, device=devices[-1])} if into_out else {}
            if len(set(devices)) > 1:
                with pytest.raises(TypeError, match=r" lies? on |must lie on one device"):
                    getattr(gm, op)(*operands, **out)
            else:
                found = getattr(gm, op)(*operands, **out)
                assert (found.device.type, found.shape) == (devices[0], result)


def kind(shape: tuple[int, ...]) -> torch.dtype:
    """Return the dtype of an operand: offsets of three experts are integers."""
    return torch.int32 if shape == (3,) else torch.float32
