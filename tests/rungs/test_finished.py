"""Products with an epilogue: by a pass on the host and on a device, and by the kernels."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import gemmule as gm
from cuda_emulation import Emulator
from cuemu.toolchain import missing_tools
from emulated_driver import emulated
from fake_cublas import FakeCublas, installed
from gemmule.backends.cuda.device_array import DeviceArray
from gemmule.core.epilogue import ACTIVATIONS
from gemmule.core.problem import FLOATS, numpy_dtype
from gemmule.core.registry import cuda_rungs
from gemmule.core.rung import CudaRung
from gemmule.oracle import finished
from gemmule.oracle.inputs import Inputs, make_inputs
from gemmule.oracle.problems import make_problem
from proofs import device as verify_device
from proofs import proofs

FINISHING = [rung for rung in cuda_rungs() if rung.finished]
HOWS = (None, *ACTIVATIONS)
SIZES = (1, 2, 3, 7, 8, 16, 31, 33, 64, 70)
needs_emulator = pytest.mark.skipif(missing_tools() is not None, reason=str(missing_tools()))


def test_these_rungs_finish() -> None:
    floats = {"wgmma_specialized", "wgmma_repacked", "wgmma_3xfp16"}
    assert {rung.name for rung in FINISHING if not rung.scaled} == floats
    scaled = {"wgmma_int8", "wgmma_float8", "wgmma_split_bytes"}
    assert {rung.name for rung in FINISHING if rung.scaled} == scaled


VARIANTS = [(rung, one) for rung in FINISHING for one in proofs.variants(rung)]
VARIANTS = [(rung, one) for rung, one in VARIANTS if proofs.activations(one)]


@needs_emulator
@pytest.mark.parametrize(
    ("rung", "variant"), VARIANTS[::3], ids=lambda one: getattr(one, "name", None)
)
def test_kernels_finish(rung: CudaRung, variant: Any) -> None:
    trials = verify_device.trials_of(rung, variant, few=True)
    hows, emulator = proofs.activations(variant), Emulator()
    given = list(finished.some(rung, trials))
    assert len(given) > 3
    for emulator.seed, trial in enumerate(given):
        verdict = finished.judge_trial(rung, trial, emulator.run, hows)
        assert verdict.ok, f"{trial}: {verdict.text}"


def drawn(number: int, *, batched: bool = True) -> tuple[Inputs, finished.Around]:
    """Return a random product with a random epilogue."""
    rng = np.random.default_rng(number)
    m, n, k = (int(one) for one in rng.choice(SIZES, 3))
    dtype = FLOATS[rng.integers(len(FLOATS))]
    batch = 3 if batched and rng.random() < 0.25 else 1
    layouts = {name: ("row", "col")[rng.integers(2)] for name in ("layout_a", "layout_b")}
    problem = make_problem("matmul", m, n, k, (dtype,) * 3, batch=batch, **layouts)  # type: ignore[arg-type]
    problem = replace(problem, layout_out=("row", "col")[rng.integers(2)])
    kind, view = ("integers", "normal")[rng.integers(2)], ("contiguous", "strided")[number % 5 == 0]
    return make_inputs(problem, kind, number, view), finished.around(problem, HOWS, number, kind)


def epilogue_of(around: finished.Around, place: Any = lambda one: one) -> gm.Epilogue:
    """Return the epilogue that the user writes, its operands where `place` puts them."""
    scalars = {"alpha": around.alpha, "beta": around.beta}
    operands = {name: place(one) for name, one in around.operands.items()}
    return gm.Epilogue(**scalars, **operands, activation=around.activation)


def judged(inputs: Inputs, around: finished.Around, out: Any, rung: Any = None) -> Any:
    """Judge a result by the arithmetic of the rung that summed."""
    problem = inputs.case.problem
    wide = "float32" if problem.out in ("float16", "bfloat16") else problem.out
    plan = rung or gm.plan("matmul", inputs.a, inputs.b, out_dtype=wide)
    arithmetic = plan.rung.arithmetic(plan.problem)
    chain = problem.k + 70
    return finished.judge_finished(
        replace(arithmetic, chain=lambda problem, params: chain), {}, inputs, around, out
    )


@pytest.mark.parametrize("number", range(120))
def test_on_the_host(number: int) -> None:
    inputs, around = drawn(number)
    with_out = number % 2 == 0
    result = gm.matmul(
        inputs.a,
        inputs.b,
        epilogue=epilogue_of(around),
        **({"out": inputs.out} if with_out else {}),
    )
    assert (result is inputs.out) == with_out
    verdict = judged(inputs, around, result)
    assert verdict.ok, f"{inputs.case} {around}: {verdict.text}"


@needs_emulator
@pytest.mark.parametrize("some", range(4))
def test_on_a_device(some: int) -> None:
    """By whatever proved kernel and pass a plan takes; every operand a device's array."""
    with emulated(seed=some):
        for number in range(1000 + some, 1060 + some, 4):
            inputs, around = drawn(number)
            a, b = (
                gm.asarray(np.ascontiguousarray(one), device="cuda:1")
                for one in (inputs.a, inputs.b)
            )
            epilogue = epilogue_of(around, lambda one: gm.asarray(one, device="cuda:1"))
            plan = gm.plan("matmul", a, b, epilogue=epilogue)
            result = plan(a, b).to_host()
            assert plan.explain().splitlines()[-1].startswith("epilogue   ")
            inputs.out[...] = result
            verdict = judged(inputs, around, inputs.out, plan)
            assert verdict.ok, f"{inputs.case} {around}: {verdict.text}"
            del a, b, epilogue, plan, result


@needs_emulator
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("rung", [rung.name for rung in FINISHING if not rung.scaled])
@pytest.mark.parametrize(("lead", "shared"), [((), False), ((3,), False), ((2, 2), True)])
def test_by_a_named_kernel_on_a_device(lead: Any, shared: bool, rung: str, how: str | None) -> None:
    """Alone, in a batch, and in one that shares B, whose rows are those of one product."""
    rng = np.random.default_rng(3)
    dtype = "float32" if rung == "wgmma_3xfp16" else "bfloat16"
    half, u = numpy_dtype(dtype), 2.0**-20 if dtype == "float32" else 2.0**-8
    a, b, c, gate, bias = (
        rng.standard_normal((*front, *shape)).astype(half)
        for front, shape in (
            (lead, (40, 64)),
            (() if shared else lead, (64, 72)),
            (lead, (40, 72)),
            (lead, (40, 72)),
            ((), (72,) if shared else (40, 1)),
        )
    )
    with emulated():
        there = [gm.asarray(one, device="cuda:0") for one in (a, b, c, gate, bias)]
        epilogue = gm.Epilogue(
            alpha=0.5, C=there[2], beta=2, bias=there[4], activation=how, gate=there[3]
        )
        plan = gm.plan("matmul", *there[:2], epilogue=epilogue, rung=rung)
        assert plan.explain().endswith("by the kernel that multiplies")
        got = plan(*there[:2]).to_host()
        del there, epilogue, plan
    whole = [one.astype(np.float64) for one in (a, b, c, gate, bias)]
    values = 0.5 * (whole[0] @ whole[1]) + 2 * whole[2] + whole[4]
    if how is not None:
        values = PLAIN[how](values)
    values *= whole[3]
    assert (abs(got.astype(np.float64) - values) <= u * abs(values) + 2.0**-15).all()


@needs_emulator
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("how", [None, "relu", "gelu_tanh"])
def test_by_a_library_on_a_device(how: str | None, turned: bool) -> None:
    """What it is told of, by `fake_cublas`; where C or a bias has gaps it is given no epilogue."""
    rng = np.random.default_rng(4)
    a, b = (rng.standard_normal(shape).astype(np.float16) for shape in ((24, 40), (40, 32)))
    c, bias = (
        rng.standard_normal((24, 32)).astype(np.float16),
        rng.standard_normal(32).astype(np.float16),
    )
    library, order = FakeCublas(workspace=64), "F" if turned else "C"
    per_row = rng.standard_normal((24, 1)).astype(np.float16)
    whole = [one.astype(np.float64) for one in (a, b, c, bias, per_row)]
    with emulated(), installed(library):
        there = [gm.asarray(one, device="cuda:0") for one in (a, b)]
        for name, own in {"bias": per_row if turned else bias, "both": bias, "C": None}.items():
            for old in (np.array(c, order=order), np.repeat(c, 2, axis=1)[:, ::2]):
                given = {} if own is None else {"bias": gm.asarray(own, device="cuda:0")}
                values = whole[0] @ whole[1] + (0 if own is None else own.astype(np.float64))
                if name != "bias":
                    wide = gm.asarray(np.ascontiguousarray(old), device="cuda:0")
                    given["C"] = wide if order == "C" else gm.asarray(old, device="cuda:0")
                    given["beta"], values = -0.5, values - 0.5 * whole[2]
                values = values if how is None else PLAIN[how](values)
                epilogue = gm.Epilogue(activation=how, **given)
                out = gm.asarray(np.zeros_like(c, order=order), device="cuda:0")
                gm.matmul(*there, epilogue=epilogue, rung="cublas", out=out)
                got = out.to_host().astype(np.float64)
                assert (abs(got - values) <= 2.0**-10 * abs(values) + 1e-6).all(), name
                del epilogue, given, out
        del there, wide
    assert not library.faults
    told = {one.epilogue for one in library.products}
    assert {None: 1, "relu": 2, "gelu_tanh": 32}[how] in told or how is None
    assert any(number & 4 for number in told)


@needs_emulator
def test_a_batch_by_a_library_on_a_device() -> None:
    """C may lie farther apart than the result; what has two steps a batch is left to a pass."""
    rng = np.random.default_rng(5)
    library, half = FakeCublas(), np.float16
    shapes = ((2, 3, 24, 40), (2, 3, 40, 32), (14, 24, 32), (32,))
    a, b, c, bias = (rng.standard_normal(shape).astype(half) for shape in shapes)
    product = a.astype(np.float64) @ b.astype(np.float64) + bias.astype(np.float64)
    size = 24 * 32
    with emulated(), installed(library):
        there = [gm.asarray(one, device="cuda:0") for one in (a, b, bias, c)]
        for steps, told in (
            ((3, 1), 6),
            ((6, 2), 6),
            ((7, 2), 1),
        ):  # products of c from one to next
            strides = (steps[0] * size, steps[1] * size, 32, 1)
            old = DeviceArray(there[3].pointer, product.shape, strides, "float16", 0, there[3])
            epilogue = gm.Epilogue(C=old, beta=2, bias=there[2], activation="relu")
            got = gm.matmul(*there[:2], epilogue=epilogue, rung="cublas").to_host()
            which = np.add.outer(np.arange(2) * steps[0], np.arange(3) * steps[1])
            values = np.maximum(product + 2 * c[which].astype(np.float64), 0)
            assert (abs(got - values) <= 2.0**-9 * abs(values) + 1e-6).all()
            assert library.products.pop().epilogue == told
            del old, epilogue
        del there
    assert not library.faults


@needs_emulator
def test_batches_along_axes_that_are_no_single_one() -> None:
    """C lies with its two batch axes swapped, so that neither step is a multiple of the other."""
    rng = np.random.default_rng(6)
    shapes = (2, 3, 5, 9), (2, 3, 9, 4), (3, 2, 5, 4)
    a, b, c = (rng.integers(-3, 4, shape).astype(np.float32) for shape in shapes)
    with emulated():
        put = [gm.asarray(one, device="cuda:0") for one in (a, b, c)]
        swapped = DeviceArray(put[2].pointer, (2, 3, 5, 4), (20, 40, 4, 1), "float32", 0, put[2])
        epilogue = gm.Epilogue(C=swapped, beta=2, activation="relu")
        found = gm.matmul(*put[:2], epilogue=epilogue).to_host()
        del put, swapped, epilogue
    assert np.array_equal(found, np.maximum(a @ b + 2 * c.swapaxes(0, 1), 0))


erf = np.vectorize(__import__("math").erf)
PLAIN = {
    "relu": lambda v: np.maximum(v, 0),
    "gelu": lambda v: v * (1 + erf(v / 2**0.5)) / 2,
    "gelu_tanh": lambda v: v * (1 + np.tanh((2 / np.pi) ** 0.5 * (v + 0.044715 * v**3))) / 2,
    "silu": lambda v: v / (1 + np.exp(-v)),
}


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("how", ACTIVATIONS)
def test_activations_are_those_of_their_names(how: str, dtype: str) -> None:
    v = np.linspace(-30, 30, 901)[:, None].astype(numpy_dtype(dtype))
    got = gm.matmul(v, np.ones((1, 2), v.dtype), epilogue=gm.Epilogue(activation=how))
    wide = v.astype(np.float64)
    u = {"float64": 2.0**-50, "float32": 2.0**-21, "float16": 2.0**-10, "bfloat16": 2.0**-7}[dtype]
    assert (abs(got.astype(np.float64) - PLAIN[how](wide)) <= u * abs(wide)).all()


def test_what_is_not_finite_spreads() -> None:
    v = np.array([[np.nan], [np.inf], [-np.inf]])
    for how, of_minus in ((None, -np.inf), ("relu", 0.0), ("gelu", 0.0)):
        got = gm.matmul(v, np.ones((1, 2)), epilogue=gm.Epilogue(activation=how))[:, 0]
        assert np.isnan(got[0])
        assert got[1] == np.inf
        assert got[2] == of_minus
    poison = np.full((3, 2), np.nan)
    got = gm.matmul(np.ones((3, 1)), np.ones((1, 2)), epilogue=gm.Epilogue(C=poison, beta=0))
    assert (got == 1).all()


FAULTS: dict[str, Any] = {
    "right": lambda p, o, f: (
        f(p * o["alpha"] + o["beta"] * o["C"] + o["bias"]) * o["gate"] + o["residual"]
    ),
    "no alpha": lambda p, o, f: f(p + o["beta"] * o["C"] + o["bias"]) * o["gate"] + o["residual"],
    "no beta": lambda p, o, f: f(p * o["alpha"] + o["C"] + o["bias"]) * o["gate"] + o["residual"],
    "bias of the next": lambda p, o, f: (
        f(p * o["alpha"] + o["beta"] * o["C"] + np.roll(o["bias"], 1)) * o["gate"] + o["residual"]
    ),
    "residual within": lambda p, o, f: (
        f(p * o["alpha"] + o["beta"] * o["C"] + o["bias"] + o["residual"]) * o["gate"]
    ),
    "gate within": lambda p, o, f: (
        f((p * o["alpha"] + o["beta"] * o["C"] + o["bias"]) * o["gate"]) + o["residual"]
    ),
    "rounded before": lambda p, o, f: (
        f(
            (p * o["alpha"] + o["beta"] * o["C"] + o["bias"])
            .astype(numpy_dtype("bfloat16"))
            .astype(np.float64)
        )
        * o["gate"]
        + o["residual"]
    ),
    "of another form": lambda p, o, f: (
        OTHER(p * o["alpha"] + o["beta"] * o["C"] + o["bias"]) * o["gate"] + o["residual"]
    ),
}
OTHER = PLAIN["gelu_tanh"]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_what_is_finished_otherwise_is_seen(fault: str, dtype: str) -> None:
    """Some drawn epilogue with all operands; the oracle judges what a fault makes of it."""
    problem = make_problem("matmul", 40, 33, 20, (dtype,) * 3)
    for seed in itertools.count():
        around = finished.around(problem, ("gelu",), seed, "normal")
        if len(around.operands) == 4 and (around.alpha, around.beta) != (1.0, 1.0):
            break
    inputs = make_inputs(problem, "normal", 1)
    named = {name: one.astype(np.float64) for name, one in around.operands.items()}
    named |= {"alpha": around.alpha, "beta": around.beta}
    product = inputs.a.astype(np.float64) @ inputs.b.astype(np.float64)
    inputs.out[...] = FAULTS[fault](product, named, PLAIN["gelu"])
    verdict = judged(inputs, around, inputs.out)
    assert verdict.ok == (fault == "right"), verdict.text


SQUARE = np.ones((3, 3), np.float32)


@pytest.mark.parametrize(
    ("epilogue", "error", "words"),
    [
        ({"bias": np.ones(4, np.float32)}, ValueError, r"bias has shape \(4,\).*3 columns"),
        ({"bias": np.ones(3)}, TypeError, "bias has dtype float64, and the result is float32"),
        ({"C": np.ones((3, 1), np.float32)}, ValueError, r"C has shape \(3, 1\)"),
        ({"gate": np.ones((1, 3, 3), np.float32)}, ValueError, "gate has shape"),
        ({"residual": [1.0]}, TypeError, "residual is a list"),
        ({"alpha": "2"}, TypeError, "alpha is '2'; it must be a real number"),
        ({"alpha": 10**400}, ValueError, "alpha is beyond the largest double"),
        ({"alpha": 1j}, TypeError, "alpha is 1j"),
    ],
)
def test_what_does_not_fit_is_refused(epilogue: Any, error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        gm.matmul(SQUARE, SQUARE, epilogue=gm.Epilogue(**epilogue))


def test_what_has_no_epilogue_says_so() -> None:
    bias = gm.Epilogue(bias=np.ones(3, np.float32))
    with pytest.raises(ValueError, match="activation is 'tanh'; it must be None or one of relu"):
        gm.Epilogue(activation="tanh")
    with pytest.raises(ValueError, match="beta is 2, but there is no C"):
        gm.Epilogue(beta=2)
    with pytest.raises(TypeError, match="give a gemmule\\.Epilogue"):
        gm.matmul(SQUARE, SQUARE, epilogue="gelu")  # type: ignore[call-overload]
    with pytest.raises(TypeError, match=r"results of float64.*this one is int64"):
        gm.matmul(np.ones((3, 3), int), np.ones((3, 3), int), epilogue=bias)
    with pytest.raises(ValueError, match=r"x\[None\]"):
        gm.matmul(SQUARE, SQUARE[0], epilogue=bias)
    with pytest.raises(ValueError, match="with device='cuda'"):
        gm.matmul(SQUARE, SQUARE, epilogue=bias, device="cuda")
    with pytest.raises(ValueError, match="out overlaps an input"):
        gm.matmul(SQUARE, SQUARE, epilogue=gm.Epilogue(C=(c := SQUARE.copy())), out=c)
    with pytest.raises(ValueError, match="an epilogue goes with matmul"):
        gm.plan("matvec", SQUARE, SQUARE[0], epilogue=bias)
    plan = gm.plan("matmul", SQUARE, SQUARE, epilogue=bias)
    with pytest.raises(ValueError, match="Make another plan"):
        plan(np.ones((4, 3), np.float32), SQUARE)
    with pytest.raises(ValueError, match="Make another plan"):
        plan(SQUARE, SQUARE, epilogue=gm.Epilogue(activation="relu"))


@pytest.mark.parametrize("shape", [(0, 3), (3, 0)])
def test_sizes_of_nothing(shape: tuple[int, int]) -> None:
    a, b = np.ones((shape[0], 2)), np.ones((2, shape[1]))
    got = gm.matmul(a, b, epilogue=gm.Epilogue(bias=np.ones(shape[1]), activation="silu"))
    assert got.shape == shape
    nothing = gm.matmul(np.ones((2, 0)), np.ones((0, 3)), epilogue=gm.Epilogue(bias=np.arange(3.0)))
    assert (nothing == np.arange(3.0)).all()


def test_codes_and_scaled_products_have_epilogues_too() -> None:
    rng = np.random.default_rng(5)
    W, x = rng.standard_normal((24, 64), np.float32), rng.standard_normal((5, 64), np.float32)
    Q, bias = gm.quantize(W, bits=8, group_size=32), rng.standard_normal(24, np.float32)
    got = gm.matmul(x, Q.T, epilogue=gm.Epilogue(bias=bias, activation="silu"))
    plain = gm.matmul(x, Q.T).astype(np.float64) + bias
    assert np.allclose(got, PLAIN["silu"](plain), atol=1e-5)
    A, B = (
        rng.integers(-99, 99, (5, 40)).astype(np.int8),
        rng.integers(-9, 9, (40, 24)).astype(np.int8),
    )
    scaled = {"scale_a": 0.01, "scale_b": 0.5, "out_dtype": "float16"}
    half = bias.astype(np.float16)
    got = gm.matmul(A, B, epilogue=gm.Epilogue(bias=half, activation="relu"), **scaled)
    exact = np.maximum(0.005 * (A.astype(int) @ B) + half, 0)
    assert got.dtype == np.float16
    assert (abs(got - exact) <= 2.0**-10 * exact + 1e-6).all()


def test_tensors_of_pytorch() -> None:
    torch = pytest.importorskip("torch")
    a, b = torch.randn(6, 20, dtype=torch.bfloat16), torch.randn(20, 8, dtype=torch.bfloat16)
    bias = torch.randn(8, dtype=torch.bfloat16)
    epilogue = gm.Epilogue(bias=bias, activation="gelu")
    got = gm.matmul(a, b, epilogue=epilogue)
    wanted = torch.nn.functional.gelu(a.double() @ b.double() + bias)
    assert got.dtype == torch.bfloat16
    assert torch.allclose(got.double(), wanted, rtol=2.0**-7, atol=1e-4)
    with pytest.raises(ValueError, match="an epilogue computes without PyTorch's knowledge"):
        gm.matmul(a.requires_grad_(), b, epilogue=epilogue)
    with torch.no_grad():
        assert torch.equal(gm.matmul(a, b, epilogue=epilogue), got)
