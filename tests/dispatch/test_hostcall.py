"""The fast paths of NumPy arrays: taken where they are right, left where they do not know."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import gemmule as gm
from children import printed
from gemmule import lookup
from gemmule.arrays.interop import unwrap
from gemmule.core.caches import forget_plans
from gemmule.core.canonical import Options
from gemmule.plan import resolve

DEFAULT = Options()


def eager(op: str, a: Any, b: Any, out: Any = None) -> Any:
    """Return the product by the fast path, None where there is none."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lookup, "product", lambda *_: None)
        return lookup.multiply(op, a, b, out, DEFAULT, None)


def operands(op: str) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    matrix = rng.integers(-3, 4, (5, 7)).astype(np.float32)
    size = {"matvec": 7, "vecmat": 5, "matmul": (7, 3)}[op]
    other = rng.integers(-3, 4, size).astype(np.float32)
    return (other, matrix) if op == "vecmat" else (matrix, other)


@pytest.mark.parametrize("op", ["matvec", "vecmat", "matmul"])
@pytest.mark.parametrize("turn", [np.ascontiguousarray, np.asfortranarray])
def test_plain_arrays_take_the_fast_path(op: str, turn: Callable[..., np.ndarray]) -> None:
    a, b = (turn(v) for v in operands(op))
    np.testing.assert_array_equal(eager(op, a, b), a @ b)
    out = np.full((a @ b).shape, np.nan, np.float32)
    assert eager(op, a, b, out) is out
    np.testing.assert_array_equal(out, a @ b)
    np.testing.assert_array_equal(gm.plan(op, a, b)(a, b), a @ b)


class Subclass(np.ndarray):
    """An array whose kind the result has to keep."""


def unaligned(array: np.ndarray) -> np.ndarray:
    raw = np.zeros(array.nbytes + 1, np.uint8)[1:]
    raw[:] = np.frombuffer(array.tobytes(), np.uint8)
    return raw.view(array.dtype).reshape(array.shape)


@pytest.mark.parametrize(
    "strange",
    [
        lambda v: v.view(Subclass),
        unaligned,
        lambda v: v.astype(">f4"),
        lambda v: v.tolist(),
        lambda v: np.rec.fromarrays([v, v.astype(np.int16)], names="v,w")["v"],  # 6 bytes apart
    ],
)
@pytest.mark.parametrize("which", [0, 1])
def test_what_it_does_not_know_is_left_to_the_general_way(
    strange: Callable[[np.ndarray], Any], which: int
) -> None:
    given: list[Any] = list(operands("matvec"))
    truth = given[0] @ given[1]
    given[which] = strange(given[which])
    if isinstance(given[which], list):
        assert eager("matvec", *given) is None
        with pytest.raises(TypeError, match="needed is a NumPy"):
            gm.matvec(*given)
        return
    assert eager("matvec", *given) is None
    np.testing.assert_array_equal(np.asarray(gm.matvec(*given)), truth)


@pytest.mark.parametrize(
    "out",
    [
        np.empty(6, np.float32),
        np.empty(5, np.float64),
        np.empty((5, 1), np.float32),
        np.empty(10, np.float32)[::2],
    ],
)
def test_a_questionable_out_is_left_to_the_general_way(out: np.ndarray) -> None:
    assert eager("matvec", *operands("matvec"), out) is None


def test_an_out_that_overlaps_is_refused() -> None:
    matrix, _ = operands("matvec")
    square = np.ascontiguousarray(matrix[:, :5])
    with pytest.raises(ValueError, match="overlap"):
        gm.matvec(square, square[0], out=square[1])
    row = square[0]
    for a, x, out in ((square, row.copy(), square[1]), (square.copy(), row, row)):
        with pytest.raises(ValueError, match="overlap"):
            gm.matvec(a, x, out=out)


def test_a_plan_goes_the_fast_path_too() -> None:
    a, x = operands("matvec")
    fast_path = gm.plan("matvec", a, x).fast_path
    assert fast_path is not None
    assert fast_path.call(a, x, None) is not None
    assert fast_path.call(a, x[::-1], None) is None


def read_only(array: np.ndarray) -> np.ndarray:
    array = array.copy()
    array.setflags(write=False)
    return array


def other_strides(array: np.ndarray) -> np.ndarray:
    if array.ndim > 1:
        return np.asfortranarray(array)
    return np.repeat(array, 2)[::2]


CHANGED: dict[str, Callable[[np.ndarray], Any]] = {
    "shape": lambda v: np.concatenate([v, v[:1]]),
    "strides": other_strides,
    "dtype": lambda v: v.view(np.int32),
    "bytes": lambda v: v.view(">f4"),
    "type": lambda v: v.view(Subclass),
    "list": lambda v: v.tolist(),
    "alignment": unaligned,
}


@pytest.mark.parametrize("op", ["matvec", "vecmat", "matmul"])
@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("change", [*CHANGED, "read only", "itself", "overlap"])
def test_each_deviation_alone_is_left_to_the_general_way(op: str, which: int, change: str) -> None:
    """Of an operand or the result: what a plan was not made for never reaches its kernel."""
    if (which != 2) and change in ("read only", "itself", "overlap"):
        return
    matrix = np.arange(25, dtype=np.float32).reshape(5, 5)
    vector = np.arange(5, dtype=np.float32)
    a, b = {"matvec": (matrix, vector), "vecmat": (vector, matrix)}.get(op, (matrix, matrix + 1))
    fast_path = gm.plan(op, a, b).fast_path
    assert fast_path is not None
    given: list[Any] = [a.copy(), b.copy(), np.full((a @ b).shape, np.nan, np.float32)]
    np.testing.assert_array_equal(fast_path.call(*given), a @ b)
    alike = given[0] if given[0].shape == given[2].shape else given[1]
    if change == "itself":
        given[2] = alike
    elif change == "overlap":
        given[2] = alike.view()
    else:
        given[which] = ({**CHANGED, "read only": read_only}[change])(given[which])
    before = [np.array(one) for one in given]
    assert fast_path.call(*given) is None
    for one, was in zip(given, before, strict=True):
        np.testing.assert_array_equal(one, was)


@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_quantised_plan_knows_its_own_operands_alone(which: int) -> None:
    rng = np.random.default_rng(6)
    W, x = rng.standard_normal((12, 64)), rng.standard_normal(64, np.float32)
    Q, same = gm.quantize(W, bits=4, group_size=32), gm.quantize(W + 1, bits=4, group_size=32)
    others = (
        [gm.quantize(W, bits=8, group_size=32), gm.quantize(W, bits=4, group_size=16), W],
        [CHANGED[name](x) for name in CHANGED],
        [CHANGED[name](np.zeros(12, np.float32)) for name in CHANGED],
    )
    fast_path = gm.plan("matvec", Q, x).fast_path
    assert fast_path is not None
    for equal in ((Q, x), (same, x.copy())):
        assert fast_path.call(*equal, None) is not None
    for other in others[which]:
        given: list[Any] = [Q, x, None]
        given[which] = other
        assert fast_path.call(*given) is None


def test_new_plans_are_seen_after_the_old_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    a, x = operands("matvec")
    gm.matvec(a, x)
    before = resolve.cache_info().currsize
    forget_plans()
    assert before > 0
    assert resolve.cache_info().currsize == 0
    gm.matvec(a, x)
    assert resolve.cache_info().currsize == 1, "the next call has to plan again"


def test_calls_bound_for_ever_new_shapes_are_forgotten(
    limit: Callable[..., None], fault: Callable[..., Any]
) -> None:
    forget_plans()
    limit(lookup, MOST=3)
    for n in range(1, 5):
        gm.matvec(np.ones((2, n)), np.ones(n))
    seen = fault(lookup.host, "form", lambda sound, operand: sound(operand))
    gm.matvec(np.ones((2, 4)), np.ones(4))
    assert seen == [], "the last one is known"
    gm.matvec(np.ones((2, 1)), np.ones(1))
    assert len(seen) == 2, "the first one is bound anew"


def test_another_default_device_is_heeded(setting: Callable[..., None]) -> None:
    a, x = operands("matvec")
    gm.matvec(a, x)
    setting(GEMMULE_DEVICE="nonsense")
    with pytest.raises(ValueError, match="GEMMULE_DEVICE"):
        gm.matvec(a, x)
    setting(GEMMULE_DEVICE="cpu")
    assert eager("matvec", a, x) is not None
    setting(GEMMULE_DEVICE="cuda:0")
    assert eager("matvec", a, x) is None


def test_options_and_rungs_tell_calls_of_equal_arrays_apart() -> None:
    a, x = operands("matvec")
    assert gm.matvec(a, x).dtype == np.float32
    assert gm.matvec(a, x, out_dtype="float64").dtype == np.float64
    with pytest.raises(ValueError, match="no cpu rung is called"):
        gm.matvec(a, x, rung="nothing")
    gm.matvec(a, x, rung="scalar_loop")
    with pytest.raises(ValueError, match="equal"):
        gm.matvec(a, x[:-1])


def test_pytorchs_guards_tell_other_tensors_from_those_they_were_made_of() -> None:
    torch = pytest.importorskip("torch")
    from gemmule.dispatch import torch_repeats

    def three() -> list[Any]:
        return [torch.randn(8, 8), torch.randn(8), torch.empty(8)]

    same = torch_repeats.guards(*three())
    assert same(*three())
    others = [
        (0, torch.randn(8, 8).t()),
        (0, torch.randn(8, 9)),
        (1, torch.randn(8).double()),
        (1, torch.randn(16)[::2]),
        (1, torch.randn(8, dtype=torch.complex64).conj().imag),
        (1, np.zeros(8, np.float32)),
        (2, None),
        (2, torch.empty(7)),
        (2, torch.nn.Parameter(torch.empty(8))),
    ]
    for place, other in others:
        changed = three()
        changed[place] = other
        assert not same(*changed), (place, other)


def test_without_pytorchs_guards_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    from gemmule.dispatch import torch_repeats

    monkeypatch.setattr(torch._C._dynamo.guards, "TensorGuards", None)
    x = torch.randn(8)
    assert not torch_repeats.guards(x, x, x)(x, x, x)


@pytest.mark.parametrize("private", [True, False])
def test_results_are_made_as_compiled_models_make_them(
    private: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the private function of the PyTorch that is installed, here its twin for the host."""
    torch = pytest.importorskip("torch")
    from gemmule.dispatch import torch as torch_calls
    from host_tensors import put_library

    made: list[Any] = []
    twin = torch._C._dynamo.guards._empty_strided_cpu

    def quick(*given: Any) -> Any:
        made.append(twin(*given))
        return made[-1]

    library = SimpleNamespace(
        Size=torch.Size,
        device=lambda *given: torch.device("cpu"),
        empty=torch.empty,
        _C=SimpleNamespace(_dynamo=SimpleNamespace(guards=SimpleNamespace())),
    )
    if private:
        library._C._dynamo.guards._empty_strided_cuda = quick
    put_library(monkeypatch, library)
    for shape in ((3, 4), torch.Size([7]), (0, 3)):
        fresh = torch_calls.maker(shape, torch.float16, 0)
        made.clear()
        result = fresh()
        assert tuple(result.shape) == tuple(shape)
        assert result.dtype is torch.float16
        assert result.is_contiguous()
        assert bool(made) == private, "a slower way was taken silently"


def test_a_warm_product_is_few_functions_deep() -> None:
    """Each costs a tenth of a microsecond; NumPy's own and builtin ones are not counted."""
    a, x = operands("matvec")
    plan, own = gm.plan("matvec", a, x), str(Path(gm.__file__).parent)

    def depth_of(product: Callable[[], Any]) -> tuple[int, int]:
        depth = count = deepest = 0

        def note(frame: Any, event: str, argument: Any) -> None:
            nonlocal depth, count, deepest
            if frame.f_code.co_filename.startswith(own):
                depth += {"call": 1, "return": -1}.get(event, 0)
                count += event == "call"
                deepest = max(deepest, depth)

        for _ in range(3):
            product()
        sys.setprofile(note)
        try:
            product()
        finally:
            sys.setprofile(None)
        return count, deepest

    for product, most, deep in ((lambda: gm.matvec(a, x), 6, 4), (lambda: plan(a, x), 3, 3)):
        count, deepest = depth_of(product)
        assert count <= most
        assert deepest <= deep


def test_the_first_product_loads_the_rungs_of_its_operation_alone() -> None:
    code = """
import sys, numpy as np, gemmule as gm
gm.matvec(np.ones((9, 9), np.float32), np.ones(9, np.float32))
names = {name.split(".")[2] for name in sys.modules if name.startswith("gemmule.rungs.")}
print(*sorted(name for name in names if not name.startswith("_")))
assert "gemmule.backends.cpu.amx" not in sys.modules
"""
    assert printed(code).split() == ["matvec", "vecmat"]


def test_products_of_prepared_matrices_take_the_fast_path() -> None:
    a, b = operands("matmul")
    left, right = gm.prepare(a, side="left"), gm.prepare(b)
    for first, second in ((left, b), (a, right), (left, right)):
        np.testing.assert_array_equal(eager("matmul", first, second), a @ b)
        out = np.empty((5, 3), np.float32)
        assert eager("matmul", first, second, out) is out
        np.testing.assert_array_equal(out, a @ b)
    plan = gm.plan("matmul", left, right)
    np.testing.assert_array_equal(plan(left, right), a @ b)
    for first, second in ((gm.prepare(a[:4], side="left"), right), (left, gm.prepare(b[:, :2]))):
        with pytest.raises(ValueError, match="plan"):
            plan(first, second)


def test_quantised_products_take_the_fast_path() -> None:
    rng = np.random.default_rng(5)
    Q = gm.quantize(rng.standard_normal((12, 64)), bits=4, group_size=32)
    x, z = rng.standard_normal(64, np.float32), rng.standard_normal(12, np.float32)
    B = rng.standard_normal((64, 3), np.float32)
    for op, a, b in (("matvec", Q, x), ("vecmat", z, Q), ("matmul", Q, B), ("matvec", Q.T, z)):
        found = eager(op, a, b)
        assert found is not None
        expected = gm.plan(op, a, b).execute(unwrap(a, "a"), unwrap(b, "b"), None)
        np.testing.assert_array_equal(found, expected)
        out = np.empty_like(found)
        assert eager(op, a, b, out) is out
        np.testing.assert_array_equal(out, expected)
        np.testing.assert_array_equal(gm.plan(op, a, b)(a, b), expected)
    with pytest.raises(ValueError, match="summed axis"):
        eager("matvec", Q, z)
    read_only = np.zeros(12, np.float32)
    read_only.setflags(write=False)
    assert eager("matvec", Q, x, read_only) is None


def parted(rows: int, columns: int) -> tuple[gm.QuantizedMatrix, list[np.ndarray]]:
    """Return a matrix of one group a row, and the arrays that it was made of and holds."""
    codes = np.arange(rows * columns, dtype=np.uint8).reshape(rows, columns)
    parts = [codes, np.ones((rows, 1), np.float32), np.zeros((rows, 1), np.float32)]
    shape = (rows, columns)
    return gm.QuantizedMatrix.from_parts(*parts, shape=shape, bits=8, group_size=-1), parts


@pytest.mark.parametrize("op", ["matvec", "vecmat", "matmul", "columns"])
def test_an_out_in_the_parts_of_a_quantised_matrix_is_refused(op: str) -> None:
    """A view of a part, and where the shapes allow it a part itself: by every way to a product."""
    held, parts = parted(8, 12)
    Q, name = held.T if op == "vecmat" else held, "matmul" if op == "columns" else op
    x = np.ones({"matmul": (12, 1), "columns": (12, 3)}.get(op, (12,)), np.float32)
    pair = (x, Q) if op == "vecmat" else (Q, x)
    plan, function = gm.plan(name, *pair), getattr(gm, name)  # type: ignore[call-overload]
    expected, before = function(*pair), [part.copy() for part in parts]
    places = [parts[0].reshape(-1).view(np.float32)[: expected.size].reshape(expected.shape)]
    if op != "columns":
        places += [part.reshape(expected.shape) for part in parts[1:]]
        places += parts[1:] if expected.shape == (8, 1) else []
    for _ in range(3):  # the first call, and those after it
        for out in places:
            for product in (function, plan):
                with pytest.raises(ValueError, match="out overlaps an input"):
                    product(*pair, out=out)
        for out in (np.full_like(expected, np.nan), np.empty((2, *expected.shape), "f4")[1]):
            for product in (function, plan):
                assert np.array_equal(product(*pair, out=out), expected)
    assert all(np.array_equal(*both) for both in zip(parts, before, strict=True))


def test_an_out_of_another_library_in_a_quantised_matrix_is_refused() -> None:
    torch = pytest.importorskip("torch")
    Q, parts = parted(8, 12)
    with pytest.raises(ValueError, match="out overlaps an input"):
        gm.matvec(Q, torch.ones(12), out=torch.from_numpy(parts[1])[:, 0])
