"""The operators of PyTorch: what they compute, their fakes, gradients, and whole graphs."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest

import gemmule as gm
from checkout import ROOT
from gemmule import general
from products import OURS, THEIRS

torch = pytest.importorskip("torch")

from torch.autograd.gradcheck import GradcheckError  # noqa: E402
from torch.utils._mode_utils import no_dispatch  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from gemmule.dispatch import tracked  # noqa: E402
from gemmule.frameworks import autograd, operators  # noqa: E402
from gemmule.torch import ops as ops  # noqa: E402

OPS: dict[str, Callable[..., Any]] = {
    "matvec": ops.matvec,
    "vecmat": ops.vecmat,
    "matmul": ops.matmul,
}
# Per operator, shapes of both operands: plain, batched on either side, broadcast, 1-D, empty.
SHAPES = {
    "matvec": [
        ((3, 5), (5,)), ((3, 5), (2, 5)), ((3, 5), (2, 3, 5)), ((4, 3, 5), (5,)),
        ((2, 1, 3, 5), (4, 5)), ((2, 3, 5), (2, 5)), ((1, 5), (1, 5)), ((0, 5), (5,)),
        ((3, 0), (0,)), ((3, 5), (0, 5)),
    ],
    "vecmat": [
        ((3,), (3, 5)), ((2, 3), (3, 5)), ((2, 4, 3), (3, 5)), ((3,), (4, 3, 5)),
        ((4, 3), (2, 1, 3, 5)), ((2, 3), (2, 3, 5)), ((1,), (1, 1)), ((3,), (3, 0)),
        ((0,), (0, 5)), ((0, 3), (3, 5)),
    ],
    "matmul": [
        ((3, 4), (4, 5)), ((4,), (4,)), ((4,), (4, 5)), ((3, 4), (4,)), ((2, 3, 4), (4, 5)),
        ((3, 4), (2, 4, 5)), ((4,), (2, 4, 5)), ((2, 3, 4), (4,)), ((2, 1, 3, 4), (6, 4, 5)),
        ((1, 4), (4, 5)), ((3, 4), (4, 1)), ((3, 0), (0, 5)), ((0, 4), (4, 5)), ((3, 4), (2, 4, 0)),
    ],
}  # fmt: skip
SAMPLES = [(op, *shapes) for op, found in SHAPES.items() for shapes in found]
FEW = [(op, *found[i]) for op, found in SHAPES.items() for i in (0, 1, 4, -1)]
DTYPES = ("float64", "float32", "float16", "bfloat16", "int8", "uint8", "int32", "complex128")


def sample(
    shape: tuple[int, ...], dtype: str = "float64", seed: int = 0, grad: bool = False
) -> Any:
    """Return small integers, so that every product is exact, or normal numbers for gradients."""
    generator = torch.Generator().manual_seed(seed)
    if grad:
        return torch.randn(shape, dtype=getattr(torch, dtype), generator=generator).requires_grad_()
    low = 0 if dtype.startswith("u") else -4
    return torch.randint(low, 5, shape, generator=generator).to(getattr(torch, dtype))


def expected(op: str, a: Any, b: Any) -> Any:
    """Return the product by PyTorch's own matmul in float64, or in complex128."""
    wide = torch.complex128 if a.is_complex() else torch.float64
    a, b = a.detach().to(wide), b.detach().to(wide)
    if op == "matvec":
        return (a @ b.unsqueeze(-1)).squeeze(-1)
    if op == "vecmat":
        return (a.unsqueeze(-2) @ b).squeeze(-2)
    return torch.matmul(a, b)


def operator(op: str) -> Any:
    return getattr(torch.ops.gemmule, op).default


@pytest.mark.parametrize(("op", "left", "right"), SAMPLES)
def test_products_are_exact(op: str, left: tuple[int, ...], right: tuple[int, ...]) -> None:
    for dtype in DTYPES:
        a, b = sample(left, dtype, 1), sample(right, dtype, 2)
        got = OPS[op](a, b)
        wanted = expected(op, a, b)
        assert got.shape == wanted.shape
        assert torch.equal(got.to(wanted.dtype), wanted)
        own = getattr(gm, op)(a, b)
        assert got.dtype == own.dtype
        out = torch.full_like(got, 7)
        assert OPS[op](a, b, out=out) is out
        assert torch.equal(out, got)


@pytest.mark.parametrize(("op", "left", "right"), FEW)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_operators_are_registered_right(
    op: str, left: tuple[int, ...], right: tuple[int, ...], dtype: str
) -> None:
    floating = dtype == "float32"
    a, b = sample(left, dtype, 1, grad=floating), sample(right, dtype, 2, grad=floating)
    torch.library.opcheck(operator(op), (a, b))
    a, b = a.detach(), b.detach()
    out = torch.empty_like(OPS[op](a, b))
    torch.library.opcheck(operator(f"{op}_out"), (a, b), {"out": out})


def test_views_and_options_are_registered_right() -> None:
    A = sample((5, 6), "float16").mT[:, ::2]
    x = sample((9,), "float16")[::3]
    options = {"out_dtype": torch.float32, "precision": "ieee", "batch_invariant": True}
    torch.library.opcheck(operator("matvec"), (A, x), options)
    assert ops.matvec(A, x, **options).dtype is torch.float32
    torch.library.opcheck(operator("vecmat"), (sample((6,), "float32"), A), {})


@pytest.mark.parametrize(("op", "left", "right"), SAMPLES)
def test_gradients(op: str, left: tuple[int, ...], right: tuple[int, ...]) -> None:
    a, b = sample(left, seed=1, grad=True), sample(right, seed=2, grad=True)
    torch.autograd.gradcheck(OPS[op], (a, b), fast_mode=True)
    if 0 not in (*left, *right):
        torch.autograd.gradgradcheck(OPS[op], (a, b), fast_mode=True)


def test_products_and_their_gradients_are_asked_for_as_the_caller_does(
    fault: Callable[..., Any],
) -> None:
    calls = fault(general, "product", lambda sound, *given: sound(*given))
    A, X = sample((3, 5)), sample((7, 5), grad=True)
    gm.matvec(A, X, batch_invariant=True, precision="ieee").sum().backward()
    options = [(call[0], call[4].batch_invariant, call[4].precision) for call in calls]
    assert options == [("matvec", True, "ieee"), ("vecmat", True, "ieee")]


@pytest.mark.parametrize("op", OPS)
def test_gradients_of_complex_numbers(op: str) -> None:
    left, right = SHAPES[op][0]
    a = sample(left, "complex128", 1, grad=True)
    b = sample(right, "complex128", 2, grad=True)
    assert torch.autograd.gradcheck(OPS[op], (a, b))


@pytest.mark.parametrize("op", OPS)
def test_gradients_have_the_dtype_of_their_operand(op: str) -> None:
    left, right = SHAPES[op][1 if op != "matmul" else 4]
    a = sample(left, "float16", 1).requires_grad_()
    b = sample(right, "float32", 2).requires_grad_()
    got = OPS[op](a, b)
    assert got.dtype is torch.float32
    got.sum().backward()
    assert (a.grad.dtype, b.grad.dtype) == (torch.float16, torch.float32)
    wide = [t.detach().double().requires_grad_() for t in (a, b)]
    OPS[op](*wide).sum().backward()
    assert torch.equal(a.grad.double(), wide[0].grad)
    assert torch.equal(b.grad.double(), wide[1].grad)


def test_only_wanted_gradients_are_computed() -> None:
    A, x = sample((3, 5)), sample((5,)).requires_grad_()
    ops.matvec(A, x).sum().backward()
    assert A.grad is None
    assert torch.equal(x.grad, A.sum(0))


def test_a_wrong_shape_of_the_fake_is_caught(fault: Callable[..., Any]) -> None:
    fault(operators, "_shape", lambda sound, op, a, b: (a[-2] + 1,))
    with pytest.raises(Exception, match=r"(?i)shape|size|fake"):
        torch.library.opcheck(operator("matvec"), (sample((3, 5)), sample((5,))))


@pytest.mark.parametrize("way", ["scaled", "transposed"])
def test_a_wrong_gradient_is_caught(fault: Callable[..., Any], way: str) -> None:
    if way == "scaled":
        fault(autograd, "_like", lambda sound, grad, tensor: sound(grad, tensor) * 1.01)
    else:

        def untransposed(sound: Any, op: str, a: Any, b: Any, **options: Any) -> Any:
            return sound("matvec", b, a) if op == "vecmat" else sound(op, a, b, **options)

        fault(autograd, "product", untransposed)
    a, b = sample((4, 4), seed=1, grad=True), sample((4,), seed=2, grad=True)
    with pytest.raises(GradcheckError):
        torch.autograd.gradcheck(operator("matvec"), (a, b))


# ---- graphs -------------------------------------------------------------------------------------
def layer(A: Any, x: Any, B: Any) -> Any:
    hidden = torch.tanh(ops.matvec(A, x))
    return ops.matmul(hidden, B) + ops.vecmat(hidden, B)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_compiled_graph_is_whole_and_differentiable(dynamic: bool) -> None:
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for rows, batch in ((6, 2), (7, 3)):
        inputs = [
            sample((rows, 5), "float32", 1, grad=True),
            sample((batch, 5), "float32", 2, grad=True),
            sample((rows, 4), "float32", 3, grad=True),
        ]
        eager = [t.detach().clone().requires_grad_() for t in inputs]
        got, wanted = compiled(*inputs), layer(*eager)
        torch.testing.assert_close(got, wanted)
        got.square().sum().backward()
        wanted.square().sum().backward()
        for one, other in zip(inputs, eager, strict=True):
            torch.testing.assert_close(one.grad, other.grad)


def test_a_compiled_graph_writes_into_out() -> None:

    def step(A: Any, x: Any, out: Any) -> Any:
        ops.matvec(A, x, out=out)
        return out + 1

    A, x, out = sample((3, 5)), sample((5,)), torch.zeros(3, dtype=torch.float64)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    got = compiled(A, x, out)
    assert torch.equal(out, expected("matvec", A, x))
    assert torch.equal(got, out + 1)


def test_an_exported_program_holds_the_operators() -> None:
    class Layer(torch.nn.Module):
        def forward(self, A: Any, x: Any) -> Any:
            return ops.matvec(A, x)

    batch = torch.export.Dim("batch", min=2, max=64)
    program = torch.export.export(
        Layer(), (sample((3, 5)), sample((4, 5))), dynamic_shapes=({}, {0: batch})
    )
    assert "gemmule.matvec" in program.graph_module.code
    A, X = sample((3, 5), seed=3), sample((9, 5), seed=4)
    assert torch.equal(program.module()(A, X), expected("matvec", A, X))


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_eager_products_do_not_pass_through_the_operators() -> None:
    A, x = sample((3, 5)), sample((5,))
    with Seen() as seen:
        gm.matvec(A, x)
        gm.vecmat(sample((3,)), A)
        gm.matmul(A, A.mT)
    assert not [name for name in seen.names if "gemmule" in name]
    with Seen() as seen:
        ops.matvec(A, x)
    assert seen.names[0] == "gemmule.matvec.default"  # the mode does see what there is to see


class Handling(torch.Tensor):
    """A tensor that handles operators, by their names, and functions in the usual way."""

    names: ClassVar[list[str]] = []

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.names.append(str(func))
        with no_dispatch():
            plain = [one.as_subclass(torch.Tensor) if isinstance(one, cls) else one for one in args]
        return func(*plain, **(kwargs or {}))


class Calling(torch.Tensor):
    """A tensor that sees functions of PyTorch, and no operators."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize("side", [0, 1])
def test_tensors_that_handle_operators_see_products_and_others_do_not(side: int) -> None:
    A, x = sample((3, 5)), sample((5,), seed=1)
    for kind, passes in ((Handling, True), (Calling, False), (torch.nn.Parameter, False)):
        assert tracked.dispatches(kind) == passes
        given: list[Any] = [A, x]
        with torch.no_grad():
            given[side] = given[side].as_subclass(kind)
            Handling.names.clear()
            found = gm.matvec(*given)
        assert ("gemmule.matvec.default" in Handling.names) == passes
        with no_dispatch():
            assert torch.equal(found.as_subclass(torch.Tensor), expected("matvec", A, x))


# ---- mistakes -----------------------------------------------------------------------------------
MISTAKES = [
    ("matvec", (3, 5), (4,), "float32", "float32", ValueError, "5 elements along the summed axis"),
    ("matvec", (5,), (5,), "float32", "float32", ValueError, "two or more dimensions"),
    ("matvec", (2, 3, 5), (4, 5), "float32", "float32", ValueError, "do not broadcast"),
    ("vecmat", (4,), (3, 5), "float32", "float32", ValueError, "3 elements along the summed axis"),
    ("matmul", (3, 4), (5, 3), "float32", "float32", ValueError, "4 columns"),
    ("matmul", (), (3,), "float32", "float32", ValueError, "0-D"),
    ("matvec", (3, 5), (5,), "int8", "float32", TypeError, "integers and floats do not mix"),
    ("matmul", (3, 5), (5, 2), "bool", "bool", TypeError, "bool"),
]


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(("op", "left", "right", "a", "b", "error", "message"), MISTAKES)
def test_mistakes_are_the_same_for_tensors_and_for_fakes(
    op: str,
    left: Any,
    right: Any,
    a: str,
    b: str,
    error: type[Exception],
    message: str,
    device: str,
) -> None:
    first = torch.zeros(left, dtype=getattr(torch, a), device=device)
    second = torch.zeros(right, dtype=getattr(torch, b), device=device)
    with pytest.raises(error, match=re.escape(message)):
        OPS[op](first, second)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_out_is_checked(device: str) -> None:
    A, x = torch.zeros(3, 5, device=device), torch.zeros(5, device=device)
    with pytest.raises(ValueError, match="out has shape"):
        ops.matvec(A, x, out=torch.zeros(4, device=device))
    with pytest.raises(TypeError, match="out has dtype"):
        ops.matvec(A, x, out=torch.zeros(3, device=device, dtype=torch.float64))


def test_out_does_not_lose_a_gradient_silently() -> None:
    A, x = sample((3, 5), grad=True), sample((5,))
    out = torch.zeros(3, dtype=torch.float64)
    with pytest.raises(ValueError, match="Leave out= away"):
        ops.matvec(A, x, out=out)
    with torch.no_grad():
        assert torch.equal(ops.matvec(A, x, out=out), ops.matvec(A, x))


def test_operands_on_two_devices_are_named() -> None:
    with pytest.raises(TypeError, match="A lies on cpu and x on meta"):
        ops.matvec(torch.zeros(3, 5), torch.zeros(5, device="meta"))


# ---- the plain functions come here by themselves ------------------------------------------------
@pytest.mark.parametrize(("op", "left", "right"), FEW)
def test_plain_functions_are_differentiable(op: str, left: Any, right: Any) -> None:
    a, b = sample(left, seed=1, grad=True), sample(right, seed=2, grad=True)
    assert torch.autograd.gradcheck(OURS[op], (a, b))
    with torch.no_grad():
        assert not OURS[op](a, b).requires_grad


@pytest.mark.parametrize("op", OPS)
def test_plain_functions_stay_in_a_compiled_graph(op: str) -> None:
    left, right = SHAPES[op][0]
    a, b = sample(left, "float32", 1, grad=True), sample(right, "float32", 2)
    compiled = torch.compile(
        lambda a, b: torch.tanh(OURS[op](a, b)), fullgraph=True, backend="aot_eager"
    )
    torch.testing.assert_close(compiled(a, b), torch.tanh(THEIRS[op](a, b)))
    torch.testing.assert_close(compiled(a.detach(), b), torch.tanh(THEIRS[op](a, b)).detach())


VMAPS = [
    *[("matvec", *s) for s in (((3, 5), (5,)), ((2, 3, 5), (5,)), ((3, 5), (2, 5)))],
    *[("vecmat", *s) for s in (((3,), (3, 5)), ((4, 3), (3, 5)), ((3,), (2, 3, 5)))],
    *[("matmul", *s) for s in SHAPES["matmul"][:7]],
]


@pytest.mark.parametrize(("op", "left", "right"), VMAPS)
def test_vmap_and_its_gradients(op: str, left: Any, right: Any) -> None:
    called, theirs = getattr(torch.ops.gemmule, op), THEIRS[op]
    for places in ((None, 0), (0, None), (0, 0), (-1, 0), (1, -1)):
        given = []
        for seed, (shape, place) in enumerate(zip((left, right), places, strict=True)):
            whole = shape if place is None else (6, *shape)
            tensor = sample(whole, seed=seed, grad=True).detach()
            given.append(tensor if place is None else tensor.movedim(0, place))
        wanted = torch.vmap(theirs, places)(*given)
        slope = torch.vmap(torch.func.grad(lambda a, b: theirs(a, b).sin().sum(), (0, 1)), places)
        # Called by name it is the same below: once is enough.
        for function in (OURS[op], called) if places == (1, -1) else (OURS[op],):
            found = torch.vmap(function, places)(*given)
            torch.testing.assert_close(found, wanted)
            mine = torch.func.grad(lambda a, b, f=function: f(a, b).sin().sum(), (0, 1))
            torch.testing.assert_close(torch.vmap(mine, places)(*given), slope(*given))
        along = tuple(torch.randn_like(tensor) for tensor in given)
        forward, direction = (
            torch.func.jvp(torch.vmap(f, places), tuple(given), along) for f in (theirs, called)
        )
        torch.testing.assert_close(direction, forward)


def test_vmap_of_an_operator_gives_the_batch() -> None:
    A, X = sample((3, 5)), sample((4, 5))
    got = torch.vmap(lambda x: ops.matvec(A, x))(X)
    assert torch.equal(got, ops.matvec(A, X))


def test_derivatives_forwards_and_of_second_order() -> None:
    A, x = sample((3, 5), seed=1, grad=True).detach(), sample((5,), seed=2, grad=True).detach()
    torch.testing.assert_close(torch.func.jacfwd(lambda x: gm.matvec(A, x))(x), A)
    mine, theirs = (
        torch.func.hessian(lambda x, f=f: f["matvec"](A, x).sin().sum())(x) for f in (OURS, THEIRS)
    )
    torch.testing.assert_close(mine, theirs)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        slope = torch.autograd.forward_ad.unpack_dual(gm.matvec(A, dual)).tangent
    torch.testing.assert_close(slope, A.sum(1))


@pytest.mark.parametrize("functions", [OURS, OPS])
@pytest.mark.parametrize("op", OPS)
def test_autocast_is_that_of_pytorchs_matmul(op: str, functions: Any) -> None:
    left, right = SHAPES[op][0]
    a, b = sample(left, "float32"), sample(right, "float32")
    with torch.autocast("cpu"):
        assert (
            functions[op](a, b).dtype
            is torch.matmul(a, b.unsqueeze(-1)[..., :1] if op == "matvec" else b).dtype
        )
        assert functions[op](a.double(), b.double()).dtype is torch.float64
        assert functions[op](a.int(), b.int()).dtype is torch.int64
    assert functions[op](a, b).dtype is torch.float32


@pytest.mark.parametrize(
    ("op", "shape"),
    [("matvec", (8,)), ("matvec", (3, 8)), ("vecmat", (5,)), ("matmul", (8, 2)), ("matmul", (8,))],
)
def test_a_quantised_matrix_gives_its_tensor_a_gradient(op: str, shape: Any) -> None:
    Q = gm.quantize(np.random.default_rng(3).standard_normal((5, 8)), bits=8, group_size=4)
    dense = torch.from_numpy(Q.dequantize()).double()
    x = sample(shape, seed=4, grad=True)
    order = (lambda m, x: (x, m)) if op == "vecmat" else (lambda m, x: (m, x))
    found, wanted = OURS[op](*order(Q, x)), THEIRS[op](*order(dense, x))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    assert torch.autograd.gradcheck(lambda x: OURS[op](*order(Q, x)), (x,), atol=1e-4, rtol=1e-3)
    if op == "matmul" and len(shape) == 2:
        assert torch.autograd.gradcheck(lambda x: gm.matmul(x, Q), (x.mT[:, :5],), atol=1e-4)


def test_what_the_operators_cannot_do_is_said() -> None:
    A, x = sample((3, 5), grad=True), sample((5,))
    with pytest.raises(ValueError, match=r"given rung='blas' with tensors that require"):
        gm.matvec(A, x, rung="blas")
    with pytest.raises(ValueError, match=r"given out= and a tensor that requires"):
        gm.matvec(A, x, out=torch.empty(3, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"given out= and a tensor that requires"):
        gm.matvec(gm.quantize(np.eye(5)), x.requires_grad_(), out=torch.empty(5).double())
    with pytest.raises(ValueError, match=r"device='cpu' with tensors that require a gradient"):
        gm.matvec(A, x, device="cpu")
    plan = gm.plan("matvec", A, x)
    with pytest.raises(ValueError, match="a plan computes without PyTorch's knowledge"):
        plan(A, x)
    with torch.no_grad():
        assert torch.equal(plan(A, x), gm.matvec(A, x))


def test_the_page_runs() -> None:
    page = (ROOT / "docs" / "pytorch.md").read_text("utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, re.S)
    assert blocks
    names: dict[str, Any] = {}
    for number, block in enumerate(blocks):
        exec(compile(block, f"pytorch.md block {number}", "exec"), names)


# ---- on a GPU -----------------------------------------------------------------------------------
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("op", OPS)
def test_operators_on_a_gpu(op: str) -> None:
    left, right = SHAPES[op][1]
    a, b = (sample(s, "float32", i, grad=True).cuda().detach() for i, s in enumerate((left, right)))
    a, b = a.requires_grad_(), b.requires_grad_()
    torch.library.opcheck(operator(op), (a, b))
    compiled = torch.compile(OPS[op], fullgraph=True)
    got = compiled(a, b)
    assert np.allclose(got.detach().cpu().numpy(), expected(op, a, b).cpu().numpy(), atol=1e-4)
    got.sum().backward()
    assert (a.grad.is_cuda, b.grad.is_cuda) == (True, True)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("into_out", [False, True])
def test_every_option_reaches_the_product(
    monkeypatch: pytest.MonkeyPatch, op: str, into_out: bool
) -> None:
    """One by one and together, by the function, the operator and a traced graph."""
    seen: list[Any] = []
    product = operators.general.product

    def noted(*given: Any) -> Any:
        seen.append(given[-1])
        return product(*given)

    monkeypatch.setattr(operators.general, "product", noted)
    a, b = (sample(shape, "float32") for shape in SHAPES[op][0])
    given = [
        {"out_dtype": torch.float64},
        {"precision": "tf32"},
        {"precision": "ieee"},
        {"batch_invariant": True},
        {"out_dtype": torch.float64, "precision": "tf32", "batch_invariant": True},
    ]
    for options in given:
        wanted = operators.as_options(options)
        assert wanted != operators.as_options({})
        dtype = options.get("out_dtype", torch.float32)
        out = {"out": torch.empty(OPS[op](a, b).shape, dtype=dtype)} if into_out else {}
        call = functools.partial(OPS[op], **options, **out)
        for one in (call, torch.compile(call, backend="eager")):
            seen.clear()
            result = one(a, b)
            assert (result.dtype, seen) == (dtype, [wanted])
