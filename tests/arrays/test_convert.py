"""Products on a device whose operands differ in dtype: one of them is converted first."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cuemu.build import compile_cu
from cuemu.toolchain import missing_tools
from gemmule.backends.cuda import convert
from gemmule.core.operand import Form, Operand
from gemmule.core.problem import ITEMSIZE, numpy_dtype, result_dtype

FLOATS = tuple(convert.CTYPE)
WIDER = [(a, b) for a, b in itertools.product(FLOATS, FLOATS) if a != b and result_dtype(a, b) == b]
needs_emulator = pytest.mark.skipif(missing_tools() is not None, reason=str(missing_tools()))


def views(whole: Any) -> Any:
    """Return views of a (6, 4, 10) array that no single stride, or only some axes of one, walk."""
    return [
        whole,
        whole[::2, :, ::-3],
        whole.transpose(2, 0, 1),
        whole[:, :1],
        whole[1:1],
        np.broadcast_to(whole[0, :, :1], (3, 4, 5)),
        whole[2, 3, 4],
    ]


@needs_emulator
@pytest.mark.parametrize(("given", "wanted"), WIDER)
def test_the_kernel_converts_every_value_of_every_view(given: str, wanted: str) -> None:
    kernel = f"convert<{convert.CTYPE[given]}, {convert.CTYPE[wanted]}>"
    module = compile_cu(convert.SOURCE, names=[kernel])
    special = [0.0, -0.0, np.inf, -np.inf, np.nan, 6e-8, 1.5]  # 6e-8: a denormal of float16
    with np.errstate(all="ignore"):
        whole = np.resize(special + list(np.linspace(-9, 9, 233)), (6, 4, 10))
        whole = whole.astype(numpy_dtype(given))
    for view in views(whole):
        out = np.full(view.shape, -77, numpy_dtype(wanted))
        steps = [step // ITEMSIZE[given] for step in view.strides]
        axes = convert.merged_axes(view.shape, tuple(steps))
        if view.size:
            packed = convert.pack(address(view), address(out), view.size, axes)
            module.launch(kernel, grid=(2, 1, 1), block=(256, 1, 1), args=[packed])
        np.testing.assert_array_equal(out, view.astype(out.dtype))
        for part in ("real", "imag"):  # a float's imaginary part is 0
            signs = (np.signbit(getattr(one, part)) for one in (out, view.astype(out.dtype)))
            np.testing.assert_array_equal(*signs)


def address(array: Any) -> int:
    return int(array.__array_interface__["data"][0])


def test_neighbouring_axes_of_one_step_are_one() -> None:
    assert convert.merged_axes((2, 3, 4), (12, 4, 1)) == [(24, 1)]
    assert convert.merged_axes((2, 3, 4), (24, 4, 1)) == [(2, 24), (12, 1)]
    assert convert.merged_axes((2, 1, 4), (4, 99, 1)) == [(8, 1)]
    assert convert.merged_axes((), ()) == []
    assert convert.merged_axes((3, 5), (0, 0)) == [(15, 0)]


def test_what_is_converted_follows_the_stream_of_the_result(
    fault: Callable[..., Any],
) -> None:
    """A matrix of this package's own has no stream; that of what is beside it counts."""
    streams = {"matrix": 0, "result": 7}
    fault(
        convert.device_arrays, "current_stream", lambda sound, one, ordinal: streams[one.original]
    )
    made: list[str] = []
    written: list[int] = []
    form = Form.packed((2, 3), "float32")
    matrix, result = (Operand(None, 64, form, "cuda:0", "gemmule", name) for name in streams)
    fault(
        convert.device_arrays,
        "empty",
        lambda sound, shape, dtype, like: made.append(like.original) or like,
    )
    fault(convert, "write", lambda sound, one, to, dtype, stream: written.append(stream))
    convert.Converting(lambda *_: None, ("float64", "float32"))(matrix, result, result, 1.0, 0.0)
    assert (made, written) == (["result"], [7])
