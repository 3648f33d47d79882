"""Products of tensors met before: what a guard has to tell apart, on tensors of the CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import gemmule as gm  # noqa: E402
import host_tensors  # noqa: E402
from gemmule import lookup  # noqa: E402
from gemmule.arrays.interop import quantized_form  # noqa: E402
from gemmule.backends.cuda.launch import Launcher  # noqa: E402
from gemmule.core.caches import forget_plans  # noqa: E402
from gemmule.core.canonical import DEFAULT, canonical  # noqa: E402
from gemmule.core.operand import Form  # noqa: E402
from gemmule.dispatch import torch_repeats  # noqa: E402  these import torch
from gemmule.dispatch.torch import TensorCall  # noqa: E402
from gemmule.dispatch.torch_repeats import Repeats  # noqa: E402
from gemmule.torch import quantized_linear  # noqa: E402
from host_tensors import Noted, bound, negated  # noqa: E402

OF_3x4 = Form((3, 4), (4, 1), "float32", 16), Form((4,), (1,), "float32", 16)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Noted:
    """What the calls launch, tensors of the host in the place of a device's."""
    noted = Noted()
    host_tensors.install(monkeypatch, noted)
    return noted


@pytest.fixture
def met(run: Noted) -> Repeats:
    """A product of a 3 x 4 float32 matrix by a vector, met without and with an out."""
    memory, call = Repeats(), bound("matvec", *OF_3x4, run)
    for out in (None, torch.empty(3)):
        pair = torch.ones(3, 4), torch.ones(4)
        assert call(*pair, out) is not None
        memory.keep("matvec", (*pair, out), call)
    return memory


def test_operands_like_those_met_are_known(met: Repeats, run: Noted) -> None:
    a, x, y = torch.zeros(3, 4), torch.zeros(4), torch.zeros(3)
    run.launches.clear()
    fresh = met.again("matvec", a, x, None)
    assert (fresh.shape, fresh.dtype) == ((3,), torch.float32)
    assert met.again("matvec", a, x, y) is y
    pointers = a.data_ptr(), x.data_ptr()
    assert run.launches == [(5, *pointers, one.data_ptr(), 0) for one in (fresh, y)]


@pytest.mark.parametrize(
    "change",
    [
        lambda a, x: (a.double(), x.double()),
        lambda a, x: (torch.ones(4, 3).T, x),
        lambda a, x: (a, torch.ones(8)[::2]),
        lambda a, x: (a, torch.ones(5)),
        lambda a, x: (torch.ones(2, 4), x),
        lambda a, x: (a.requires_grad_(), x),
        lambda a, x: (a, negated(x)),
        lambda a, x: (torch.nn.Parameter(a, requires_grad=False), x),
        lambda a, x: (a.numpy(), x),
        lambda a, x: (a.to("meta"), x.to("meta")),
    ],
)
def test_others_are_not(met: Repeats, change: Any) -> None:
    assert met.again("matvec", *change(torch.ones(3, 4), torch.ones(4)), None) is None


def test_another_operation_or_out_is_another_product(met: Repeats) -> None:
    a, x = torch.ones(3, 4), torch.ones(4)
    assert met.again("vecmat", x, a, None) is None
    assert met.again("matvec", a, x, torch.empty(6)[::2]) is None
    assert met.again("matvec", a, x, torch.empty(3, dtype=torch.float64)) is None


def test_what_pytorch_has_to_know_of_is_not(met: Repeats) -> None:
    a, x = torch.ones(3, 4), torch.ones(4)
    with torch.autograd.forward_ad.dual_level():
        assert met.again("matvec", a, x, None) is None
    with torch.autocast("cpu"):
        assert met.again("matvec", a, x, None) is None
    seen = []

    def function(vector: Any) -> Any:
        seen.append(met.again("matvec", a, vector, None))
        return vector

    torch.vmap(function)(torch.ones(2, 4))
    torch.func.grad(lambda vector: function(vector).sum())(x)
    assert seen == [None, None]
    assert met.again("matvec", a, x, None) is not None


def test_a_gradient_asked_for_later_is_not_lost(met: Repeats) -> None:
    a, x = torch.ones(3, 4).requires_grad_(), torch.ones(4)
    with torch.no_grad():
        assert met.again("matvec", a, x, None) is not None
    assert met.again("matvec", a, x, None) is None


# --- a tensor beside a quantised matrix -----------------------------------------------------------


@pytest.fixture
def beside(run: Noted) -> tuple[Repeats, Any]:
    """Products of a square matrix on device 0 from both sides, without and with an out."""
    memory, Q, x, y = Repeats(), on_device(), torch.ones(4), torch.empty(4)
    forms = quantized_form(Q), Form((4,), (1,), "float32", 16)
    left, right = bound("matmul", *forms, run), bound("matmul", *forms[::-1], run)
    for operands, call in (((Q, x, None), left), ((Q, x, y), left), ((x, Q, None), right)):
        assert call(*operands) is not None
        memory.keep("matmul", operands, call)
    return memory, Q


def on_device(device: str = "cuda:0", rows: int = 4, **options: Any) -> Any:
    return replace(gm.quantize(torch.ones(rows, 4), **{"bits": 8, **options}), device=device)


def test_a_tensor_beside_a_matrix_like_that_met_is_known(beside: tuple[Repeats, Any]) -> None:
    memory, Q = beside
    x, y = torch.zeros(4), torch.zeros(4)
    for matrix in (Q, on_device()):
        assert memory.again("matmul", matrix, x, None) is not None
        assert memory.again("matmul", matrix, x, y) is y
        assert memory.again("matmul", x, matrix, None) is not None
    assert memory.again("matmul", Q, x, host_tensors.SCALES[:4]) is None  # which it would overwrite
    assert memory.again("matmul", x, Q, y) is None
    assert memory.again("matvec", Q, x, None) is None


@pytest.mark.parametrize(
    "change",
    [
        lambda Q, x: (on_device("cuda:1"), x),
        lambda Q, x: (on_device("cpu"), x),
        lambda Q, x: (on_device(bits=4), x),
        lambda Q, x: (on_device(rows=5), x),
        lambda Q, x: (Q.T, x),
        lambda Q, x: (Q, x.double()),
        lambda Q, x: (Q, torch.ones(8)[::2]),
        lambda Q, x: (Q, torch.ones(4, 1)),
        lambda Q, x: (Q, x.requires_grad_()),
        lambda Q, x: (Q, negated(x)),
        lambda Q, x: (Q, torch.nn.Parameter(x, requires_grad=False)),
        lambda Q, x: (Q, x.numpy()),
        lambda Q, x: (Q, x.to("meta")),
        lambda Q, x: (Q, Q),
    ],
)
def test_another_matrix_or_tensor_is_not(beside: tuple[Repeats, Any], change: Any) -> None:
    memory, Q = beside
    assert memory.again("matmul", *change(Q, torch.ones(4)), None) is None


def test_what_pytorch_has_to_know_of_beside_a_matrix_is_not(beside: tuple[Repeats, Any]) -> None:
    memory, Q = beside
    seen = []

    def function(vector: Any) -> Any:
        seen.append(memory.again("matmul", Q, vector, None))
        return vector

    with torch.autograd.forward_ad.dual_level():
        function(torch.ones(4))
    with torch.autocast("cpu"):
        function(torch.ones(4))
    torch.vmap(function)(torch.ones(2, 4))
    torch.func.grad(lambda vector: function(vector).sum())(torch.ones(4))
    torch.compile(function, backend="eager")(torch.ones(4))
    assert seen == [None] * 5
    assert memory.again("matmul", Q, torch.ones(4), None) is not None


def test_a_gradient_asked_for_later_beside_a_matrix_is_not_lost(
    beside: tuple[Repeats, Any],
) -> None:
    memory, Q = beside
    x = torch.ones(4).requires_grad_()
    with torch.no_grad():
        assert memory.again("matmul", Q, x, None) is not None
    assert memory.again("matmul", Q, x, None) is None


def test_a_matrix_of_the_host_is_not_kept(beside: tuple[Repeats, Any]) -> None:
    memory, Q = beside
    memory.keep("matmul", (on_device("cpu"), torch.ones(4), None), lambda a, b, out: "fresh")
    memory.keep("matmul", (Q, Q, None), lambda a, b, out: "fresh")
    assert memory.again("matmul", on_device("cpu"), torch.ones(4), None) is None
    assert memory.again("matmul", Q, Q, None) is None


# --- layers ---------------------------------------------------------------------------------------


def test_a_layers_product_on_the_host_goes_the_general_path() -> None:
    Q = gm.quantize(np.arange(12.0).reshape(3, 4), bits=8, group_size=4)
    x, bias = torch.arange(4.0), torch.ones(3, requires_grad=True)
    layer = quantized_linear.product_of(Q, x, None)
    assert torch.equal(layer, Q @ x)
    assert torch.equal(quantized_linear.product_of(Q, x, bias), layer + 1)


@pytest.mark.parametrize(
    "change",
    [
        lambda bias: bias,
        lambda bias: torch.nn.Parameter(bias),
        lambda bias: bias.double(),
        lambda bias: torch.ones(6, dtype=torch.float32)[::2],
        lambda bias: negated(bias),
    ],
)
def test_a_bias_that_lies_as_kernels_read_it_is_added_by_them(change: Any, run: Noted) -> None:
    """It stands where an out would; only such tensors are added by the kernel."""
    bias, x = change(torch.ones(3)), torch.ones(4)
    Q = replace(gm.quantize(torch.ones(3, 4), bits=8), device="cuda:0")
    adding = Adding(run)
    forms = quantized_form(Q), Form((4,), (1,), "float32", 16)
    call = bound("matvec", *forms, adding, asks=False)
    good = bias.dtype is torch.float32 and bias.is_contiguous() and not bias.is_neg()
    for _ in range(2):
        run.launches.clear()
        y = call(Q, x, bias)
        assert (y is not None) == good
        if good:
            held = (5, host_tensors.CODES, x.data_ptr(), y.data_ptr(), 0, (bias.data_ptr(),))
            assert run.launches == [held]
    assert call(Q, x, None) is None


def test_where_no_kernel_adds_a_bias_pytorch_does(run: Noted) -> None:
    """Other operands than those planned are left to the general way, as without a bias."""
    call = TensorCall(run, canonical("matvec", *OF_3x4, None, DEFAULT), OF_3x4, host_tensors.HOST)
    adding = call.bound(asks=True, adds=True)
    A, x, bias = torch.ones(3, 4), torch.ones(4), torch.ones(3)
    assert adding(A, x, bias).data_ptr() == run.launches[-1][3]
    assert adding(A, x.double(), bias) is None


class Adding(Launcher):
    """A launcher of kernels that add a bias, which starts what another notes."""

    def __init__(self, run: Noted) -> None:
        self.adds, self.workspace, self.starter = True, 0, run.starter  # type: ignore[method-assign]


@pytest.mark.parametrize("unknown", ["", "a", "b"])
def test_operands_of_a_device_are_told_apart_where_all_are_known(
    unknown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def seen(operand: Any) -> str | None:
        return None if operand.name == unknown else operand.name

    known = SimpleNamespace(seen=seen, wanted=lambda *_: False)
    monkeypatch.setattr(lookup, "_torch_calls", lambda: known)
    a, b = (SimpleNamespace(name=name, is_cuda=True) for name in ("a", "b"))
    assert lookup.signatures_of(a, b) == (None if unknown else ("a", "b"))
    known.wanted = lambda *_: True
    assert lookup.signatures_of(a, b) is None
    known.wanted = lambda *_: False
    for other in (SimpleNamespace(name="b", is_cuda=False), SimpleNamespace(name="b")):
        assert lookup.signatures_of(a, other) is None


@pytest.mark.parametrize(
    ("names", "ordinal", "way", "found"),
    [("ab", 1, "short", True), ("ab", 1, None, False), ("ab", 2, "short", False)],
)
def test_a_bound_call_is_for_one_device(
    names: str, ordinal: int, way: Any, found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def resolved(*asked: Any) -> Any:
        assert asked == ("matvec", "a", "b", None, "cuda:1", DEFAULT)
        fast_path = None if way is None else SimpleNamespace(call=way)
        return SimpleNamespace(fast_path=fast_path)

    known = SimpleNamespace(form=lambda seen: seen[0])
    monkeypatch.setattr(lookup, "_torch_calls", lambda: known)
    monkeypatch.setattr(lookup, "resolve", resolved)
    signatures = (names[0], (), (), 1), (names[1], (), (), ordinal)
    call = lookup.bound_product.__wrapped__("matvec", *signatures, DEFAULT)
    assert call == (way if found else None)


def test_memory_is_bounded(limit: Callable[..., None]) -> None:
    limit(torch_repeats, MOST=3)
    memory = Repeats()
    for rows in range(1, 6):
        pair = torch.ones(rows, 4), torch.ones(4)
        memory.keep("matvec", (*pair, None), lambda a, b, out: a.shape[0])
    found = [memory.again("matvec", torch.ones(m, 4), torch.ones(4), None) for m in range(1, 6)]
    assert found == [None, None, None, 4, 5]


def test_guards_are_made_for_a_few_kinds_of_flags_alone(
    run: Noted, limit: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(torch_repeats, MOST_GUARDS=2)
    made = []

    def guards(*tensors: Any) -> Any:
        made.append(tensors)
        return lambda *others: False

    monkeypatch.setattr(torch_repeats, "guards", guards)
    call = bound("matvec", *OF_3x4, run)
    for _ in range(5):
        assert call(torch.ones(3, 4), torch.ones(4), None) is not None
    assert len(made) == 2


def test_forgotten_plans_are_not_met_again(met: Repeats) -> None:
    """Else a product goes on by the rung that was chosen before tuning."""
    forget_plans()
    assert met.again("matvec", torch.ones(3, 4), torch.ones(4), None) is None


# --- planned products, whose guards are made by the first call -----------------------------------

Checked = Callable[[Any, Any, Any], Any]


@pytest.fixture(params=["dense", "coded"])
def planned(request: pytest.FixtureRequest, run: Noted) -> tuple[Checked, Any]:
    """Return a planned product of a matrix by a vector, and the matrix."""
    if request.param == "dense":
        return bound("matvec", *OF_3x4, run), torch.ones(3, 4)
    Q = replace(gm.quantize(torch.ones(3, 4), bits=8), device="cuda:0")
    return bound("matvec", quantized_form(Q), OF_3x4[1], run), Q


def test_a_planned_product_loses_no_gradient_after_no_grad(planned: tuple[Checked, Any]) -> None:
    checked, A = planned
    x = torch.ones(4).requires_grad_()
    with torch.no_grad():
        assert checked(A, x, None) is not None
        assert checked(A, x, torch.empty(3)) is not None
    assert checked(A, x, None) is None
    assert checked(A, x, torch.empty(3)) is None
    assert checked(A, torch.ones(4), None) is not None


def test_a_planned_product_sees_forward_differentiation(planned: tuple[Checked, Any]) -> None:
    checked, A = planned
    x, y = torch.ones(4), torch.empty(3)
    for _ in range(2):
        assert checked(A, x, None) is not None
        assert checked(A, x, y) is y
    with torch.autograd.forward_ad.dual_level():
        assert checked(A, x, None) is None
        assert checked(A, x, y) is None
    with torch.autocast("cpu"):
        assert checked(A, x, None) is None
    assert checked(A, x, None) is not None


def test_a_workspace_lives_until_the_launches_are_given(run: Noted) -> None:
    """Else another thread could be given the memory in between."""
    run.workspace = 640
    call = bound("matvec", *OF_3x4, run)
    a, x = torch.ones(3, 4), torch.ones(4)
    for _ in range(2):
        assert call(a, x, None) is not None
        assert not run.held
    assert run.alive == [True, True]
    assert all(launch[4] for launch in run.launches)


class _Array:
    """An array of another library on a GPU: CuPy's, or this package's own."""

    shape, dtype, is_cuda = (3,), "float32", True


@pytest.mark.parametrize(
    "out",
    [_Array(), np.empty(3, np.float32), torch.empty(3).requires_grad_()],
    ids=["other", "numpy", "grad"],
)
def test_a_planned_product_leaves_other_outs_to_the_general_way(
    planned: tuple[Checked, Any], out: Any
) -> None:
    checked, A = planned
    assert checked(A, torch.ones(4), out) is None
    assert checked(A, torch.ones(4), torch.empty(3)) is not None
    assert checked(A, torch.ones(4), out) is None


def test_guards_of_several_circumstances_are_kept(
    run: Noted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of tensors within torch.inference_mode and outside, in turns."""
    compared, seen = [], torch_repeats.seen
    monkeypatch.setattr(torch_repeats, "seen", lambda one: compared.append(one) or seen(one))
    call = bound("matvec", *OF_3x4, run)
    a, x, y = torch.ones(3, 4), torch.ones(4), torch.empty(3)
    for turn in range(4):
        if turn == 1:
            compared.clear()
        for inside in (False, True):
            with torch.inference_mode(inside):
                assert call(a, x, None) is not None
                assert call(a, x, y) is y
    assert not compared
