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
from gemmule import lookup  # noqa: E402
from gemmule.arrays.interop import quantized_form  # noqa: E402
from gemmule.core.caches import forget_plans  # noqa: E402
from gemmule.core.canonical import DEFAULT  # noqa: E402
from gemmule.core.operand import Form  # noqa: E402
from gemmule.dispatch import torch as torch_calls  # noqa: E402
from gemmule.dispatch import torch_codes, torch_met  # noqa: E402  these import torch
from gemmule.dispatch.torch_met import Met  # noqa: E402


@pytest.fixture
def met() -> Met:
    """A product of a 3 x 4 float32 matrix by a vector, met without and with an out."""
    memory = Met()
    a, x, y = torch.ones(3, 4), torch.ones(4), torch.empty(3)
    memory.keep("matvec", (a, x, None), lambda a, b, out: "fresh")
    memory.keep("matvec", (a, x, y), lambda a, b, out: out)
    return memory


def test_operands_like_those_met_are_known(met: Met) -> None:
    a, x, y = torch.zeros(3, 4), torch.zeros(4), torch.zeros(3)
    assert met.again("matvec", a, x, None) == "fresh"
    assert met.again("matvec", a, x, y) is y


@pytest.mark.parametrize(
    "change",
    [
        lambda a, x: (a.double(), x.double()),
        lambda a, x: (torch.ones(4, 3).T, x),
        lambda a, x: (a, torch.ones(8)[::2]),
        lambda a, x: (a, torch.ones(5)),
        lambda a, x: (torch.ones(2, 4), x),
        lambda a, x: (a.requires_grad_(), x),
        lambda a, x: (a, torch._neg_view(x)),
        lambda a, x: (torch.nn.Parameter(a, requires_grad=False), x),
        lambda a, x: (a.numpy(), x),
        lambda a, x: (a.to("meta"), x.to("meta")),
    ],
)
def test_others_are_not(met: Met, change: Any) -> None:
    assert met.again("matvec", *change(torch.ones(3, 4), torch.ones(4)), None) is None


def test_another_operation_or_out_is_another_product(met: Met) -> None:
    a, x = torch.ones(3, 4), torch.ones(4)
    assert met.again("vecmat", x, a, None) is None
    assert met.again("matvec", a, x, torch.empty(6)[::2]) is None
    assert met.again("matvec", a, x, torch.empty(3, dtype=torch.float64)) is None


def test_what_pytorch_has_to_know_of_is_not(met: Met) -> None:
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
    assert met.again("matvec", a, x, None) == "fresh"


def test_a_gradient_asked_for_later_is_not_lost() -> None:
    memory, a, x = Met(), torch.ones(3, 4).requires_grad_(), torch.ones(4)
    with torch.no_grad():
        memory.keep("matvec", (a, x, None), lambda a, b, out: "fresh")
    assert memory.again("matvec", a, x, None) is None


# --- a tensor beside a quantised matrix -----------------------------------------------------------


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch) -> tuple[Met, Any]:
    """Products of a square matrix on device 0 from both sides, without and with an out."""

    def known(matrix: Any) -> torch_codes.Known:
        kind, device = torch_codes._kind(quantized_form(matrix)), matrix.device
        signature = None if device == "cpu" else (kind, (), (), int(device[5:]))
        return torch_codes.Known(signature, (0, 0, 0, 0))

    monkeypatch.setattr(torch_met, "known", known)
    memory, Q, x, y = Met(), on_device(), torch.ones(4), torch.empty(4)
    memory.keep("matmul", (Q, x, None), lambda a, b, out: "left")
    memory.keep("matmul", (Q, x, y), lambda a, b, out: out)
    memory.keep("matmul", (x, Q, None), lambda a, b, out: "right")
    return memory, Q


def on_device(device: str = "cuda:0", rows: int = 4, **options: Any) -> Any:
    return replace(gm.quantize(torch.ones(rows, 4), **{"bits": 8, **options}), device=device)


def test_a_tensor_beside_a_matrix_like_that_met_is_known(beside: tuple[Met, Any]) -> None:
    memory, Q = beside
    x, y = torch.zeros(4), torch.zeros(4)
    for matrix in (Q, on_device()):
        assert memory.again("matmul", matrix, x, None) == "left"
        assert memory.again("matmul", matrix, x, y) is y
        assert memory.again("matmul", x, matrix, None) == "right"
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
        lambda Q, x: (Q, torch._neg_view(x)),
        lambda Q, x: (Q, torch.nn.Parameter(x, requires_grad=False)),
        lambda Q, x: (Q, x.numpy()),
        lambda Q, x: (Q, x.to("meta")),
        lambda Q, x: (Q, Q),
    ],
)
def test_another_matrix_or_tensor_is_not(beside: tuple[Met, Any], change: Any) -> None:
    memory, Q = beside
    assert memory.again("matmul", *change(Q, torch.ones(4)), None) is None


def test_what_pytorch_has_to_know_of_beside_a_matrix_is_not(beside: tuple[Met, Any]) -> None:
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
    assert memory.again("matmul", Q, torch.ones(4), None) == "left"


def test_a_gradient_asked_for_later_beside_a_matrix_is_not_lost(beside: tuple[Met, Any]) -> None:
    memory, _ = beside
    x, Q = torch.ones(4).requires_grad_(), on_device(bits=4)
    with torch.no_grad():
        memory.keep("matmul", (Q, x, None), lambda a, b, out: "fresh")
        assert memory.again("matmul", Q, x, None) is None
    assert memory.again("matmul", Q, x, None) is None


def test_a_matrix_of_the_host_is_not_kept(beside: tuple[Met, Any]) -> None:
    memory, Q = beside
    before = dict(memory._calls)
    memory.keep("matmul", (on_device("cpu"), torch.ones(4), None), lambda a, b, out: "fresh")
    memory.keep("matmul", (Q, Q, None), lambda a, b, out: "fresh")
    assert memory._calls == before


# --- layers ---------------------------------------------------------------------------------------


def test_a_layers_product_of_tensors_of_the_host_goes_the_general_way() -> None:
    a, x = torch.arange(12.0).reshape(3, 4), torch.arange(4.0)
    assert torch.equal(lookup.below("matvec", a, x, DEFAULT), a @ x)
    bias = torch.ones(3, requires_grad=True)
    assert torch.equal(lookup.below("matvec", a, x, DEFAULT, bias), a @ x + 1)


BIAS = {"is_contiguous": lambda: True, "is_neg": lambda: False, "dtype": "half"}


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"dtype": "float"},
        {"get_device": lambda: 2},
        {"is_contiguous": lambda: False},
        {"is_neg": lambda: True},
    ],
)
def test_a_bias_that_lies_as_kernels_read_it_is_added_by_them(
    change: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    where = {"get_device": lambda: 1}
    x = SimpleNamespace(is_cuda=True, dtype="half", **where)
    bias = SimpleNamespace(**{**BIAS, **where, **change}, detach=lambda: "apart")
    known = SimpleNamespace(seen=lambda operand: ("form", (), (), 1))
    monkeypatch.setattr(lookup, "_torch_calls", lambda: known)
    monkeypatch.setattr(lookup, "_bound_with_bias", lambda *_: lambda *given: given)
    plain = SimpleNamespace(add_=lambda given: given)
    monkeypatch.setattr(lookup, "_bound", lambda *_: lambda a, b, out: plain)
    way = ("Q", x, bias) if not change else "apart"
    assert lookup.below("matvec", "Q", x, DEFAULT, bias) == way
    assert lookup.below("vecmat", "Q", x, DEFAULT, bias) == "apart"


@pytest.mark.parametrize("seen", [(None, None), (None, 2), (1, None), (1, 2)])
def test_a_layer_goes_the_short_way_where_both_operands_are_known(
    seen: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    known = SimpleNamespace(seen=dict(zip("ab", seen, strict=True)).get)
    monkeypatch.setattr(lookup, "_torch_calls", lambda: known)
    monkeypatch.setattr(lookup, "_bound", lambda *_: lambda a, b, out: "short")
    monkeypatch.setattr(lookup, "product", lambda *_: "general")
    way = "general" if None in seen else "short"
    assert lookup.below("matvec", "a", "b", DEFAULT) == way


@pytest.mark.parametrize("unknown", ["", "a", "b", "out"])
def test_operands_of_a_device_are_told_apart_where_all_are_known(
    unknown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def seen(operand: Any) -> str | None:
        return None if operand.name == unknown else operand.name

    known = SimpleNamespace(seen=seen, wanted=lambda *_: False)
    monkeypatch.setattr(lookup, "_torch_calls", lambda: known)
    a, b, out = (
        SimpleNamespace(name=name, is_cuda=True, requires_grad=False) for name in ("a", "b", "out")
    )
    whole, fresh = lookup._signatures(a, b, out), lookup._signatures(a, b, None)
    assert whole == (None if unknown else ("a", "b", "out"))
    assert fresh == (None if unknown in ("a", "b") else ("a", "b", None))
    known.wanted = lambda *_: True
    assert lookup._signatures(a, b, out) is None
    known.wanted = lambda *_: False
    for other in (SimpleNamespace(name="b", is_cuda=False), SimpleNamespace(name="b")):
        assert lookup._signatures(a, other, out) is None


@pytest.mark.parametrize(
    ("names", "ordinal", "seen_out", "way", "bound"),
    [
        ("ab", 1, None, "short", True),
        ("ab", 1, "out", "short", True),
        ("ab", 1, "other", "short", False),
        ("ab", 1, None, None, False),
        ("ab", 2, None, "short", False),
        ("?b", 1, None, "short", False),
        ("a?", 1, None, "short", False),
    ],
)
def test_a_bound_call_is_for_one_device_and_its_own_out(
    names: str, ordinal: int, seen_out: Any, way: Any, bound: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def resolved(*asked: Any) -> Any:
        assert asked == ("matvec", "a", "b", None, "cuda:1", DEFAULT)
        short_way = None if way is None else SimpleNamespace(trusted=way, out_seen="out")
        return SimpleNamespace(short_way=short_way)

    known = SimpleNamespace(form=lambda seen: None if seen[0] == "?" else seen[0])
    monkeypatch.setattr(lookup, "_torch_calls", lambda: known)
    monkeypatch.setattr(lookup, "resolve", resolved)
    signatures = (names[0], (), (), 1), (names[1], (), (), ordinal)
    found = lookup._bound.__wrapped__("matvec", *signatures, seen_out, DEFAULT)
    assert found == (way if bound else None)


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_met, "MOST", 3)
    memory = Met()
    for rows in range(1, 6):
        memory.keep("matvec", (torch.ones(rows, 4), torch.ones(4), None), lambda a, b, out: "last")
    assert len(memory._calls) == 2
    assert memory.again("matvec", torch.ones(5, 4), torch.ones(4), None) == "last"


def test_forgotten_plans_are_not_met_again(met: Met) -> None:
    """Else a product goes on by the rung that was chosen before tuning."""
    forget_plans()
    assert met.again("matvec", torch.ones(3, 4), torch.ones(4), None) is None


# --- planned products, whose guards are made by the first call -----------------------------------

Checked = Callable[[Any, Any, Any], Any]
HOST = -1  # what a tensor of the CPU says its device is


def trusted(a: Any, b: Any, out: Any) -> str:
    return "multiplied"


def dense() -> tuple[Checked, Any]:
    """Return a planned product of a tensor by a vector, and the tensor."""
    forms = Form((3, 4), (4, 1), "float32", 16), Form((4,), (1,), "float32", 16)
    out_seen = (torch.float32, torch.Size([3]), (1,), HOST)
    return torch_calls._checked(trusted, out_seen, *forms), torch.ones(3, 4)


def coded(monkeypatch: pytest.MonkeyPatch) -> tuple[Checked, Any]:
    """Return a planned product of a quantised matrix by a vector, and the matrix."""
    Q = gm.quantize(torch.ones(3, 4), bits=8)
    signature = (torch_codes._kind(quantized_form(Q)), (), (), HOST)
    seen = torch_codes.Known(signature, (0, 0, 0, 0))
    monkeypatch.setattr(torch_codes, "known", lambda matrix: seen)
    forms = quantized_form(Q), Form((4,), (1,), "float32", 16)
    out_seen = (torch.float32, torch.Size([3]), (1,), HOST)
    return torch_codes.checked_pair(trusted, out_seen, forms, True), Q


@pytest.fixture(params=["dense", "coded"])
def planned(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[Checked, Any]:
    return dense() if request.param == "dense" else coded(monkeypatch)


def test_a_planned_product_loses_no_gradient_after_no_grad(planned: tuple[Checked, Any]) -> None:
    checked, A = planned
    x = torch.ones(4).requires_grad_()
    with torch.no_grad():
        assert checked(A, x, None) == "multiplied"
        assert checked(A, x, torch.empty(3)) == "multiplied"
    assert checked(A, x, None) is None
    assert checked(A, x, torch.empty(3)) is None
    assert checked(A, torch.ones(4), None) == "multiplied"


def test_a_planned_product_sees_forward_differentiation(planned: tuple[Checked, Any]) -> None:
    checked, A = planned
    x, y = torch.ones(4), torch.empty(3)
    assert checked(A, x, None) == checked(A, x, None) == "multiplied"
    assert checked(A, x, y) == checked(A, x, y) == "multiplied"
    with torch.autograd.forward_ad.dual_level():
        assert checked(A, x, None) is None
        assert checked(A, x, y) is None
    with torch.autocast("cpu"):
        assert checked(A, x, None) is None
    assert checked(A, x, None) == "multiplied"


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
    assert checked(A, torch.ones(4), torch.empty(3)) == "multiplied"
    assert checked(A, torch.ones(4), out) is None
