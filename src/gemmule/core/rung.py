"""The frozen `Rung` of each back end: one kernel, what it takes, its space, and how it runs."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

from gemmule.core import architectures
from gemmule.core.canonical import Call
from gemmule.core.device_model import DeviceModel, Terms
from gemmule.core.host_rates import DEFAULT_RATES, HostRates
from gemmule.core.packing import HostPacking, Packing, TensorMap
from gemmule.core.problem import FLOAT4_DTYPE, FLOAT8_CODES, UNIT_ROUNDOFF, Problem

Params = Mapping[str, Any]
Signature = tuple[str, str, str]  # dtype names of A, of x or B, of the result

RUNGS_FOLDER = Path(__file__).parents[1] / "rungs"
HEADERS_FOLDER = RUNGS_FOLDER / "_cuda"
BACKENDS = ("cpu", "cuda")


@dataclass(frozen=True, slots=True)
class Machine:
    """The device a plan is for, as far as heuristics need to know it.

    `units`: CPU threads or GPU multiprocessors. `read_bytes_per_s`: the read ceiling, measured
    where a measurement is stored, else a datasheet lead. `call_s`: cost of the smallest kernel.
    `rates`: of a CPU. `clock_hz`: a GPU's highest, 0 where it is not known. `model`: the
    coefficients that rungs count with, None for those known of the device (`storage.models`).
    """

    backend: str
    name: str
    arch: str
    units: int
    read_bytes_per_s: float
    cache_bytes: int
    shared_bytes: int = 0
    call_s: float = 2e-6
    rates: HostRates = DEFAULT_RATES
    clock_hz: float = 0.0
    model: DeviceModel | None = None


MOST_PER_ADD = 2.0  # unit roundoffs an addition, of sums that are float32's: tensor cores cut off
ACTIVATION_GROUP = 32  # terms of a sum that share a scale of 8-bit activations
EXACT_COLUMNS = 16  # of codes beside halves: up to so many columns no weight is rounded


def may_round_weights(problem: Problem) -> bool:
    """Tell whether codes may be rounded, each weight once, to the dtype of x."""
    tokens = problem.n if problem.op != "grouped" else problem.m // max(problem.batch, 1)
    return tokens > EXACT_COLUMNS and problem.quant is not None and not problem.quant.exact


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """How a rung rounds, from which the oracle derives its error bound.

    accumulator: dtype name of the running sum. chain(problem, params): most additions any product
    passes through before it is in the result. product: dtype whose rounding each product suffers
    (None when products are exact or fused). inputs: dtype that the operands are rounded to first
    (``"tf32"``), else None. per_add: extra factor on the accumulator's unit roundoff (2 for tensor
    cores, which truncate). unordered: the order of additions may differ from run to run.
    activations_bits: what x is rounded to, with a scale for every `ACTIVATION_GROUP` terms.
    """

    accumulator: str
    chain: Callable[[Problem, Params], int]
    product: str | None = None
    inputs: str | None = None
    per_add: float = 1.0
    unordered: bool = False
    activations_bits: int | None = None

    @property
    def at_least_float32(self) -> bool:
        """Whether sums keep float32 or better, from operands that are not rounded first."""
        wide = self.accumulator in ("float32", "float64", "complex64", "complex128")
        exact = self.accumulator.startswith(("int", "uint"))
        whole = wide and self.per_add <= MOST_PER_ADD
        return (exact or whole) and self.inputs is None and self.activations_bits is None

    @property
    def accumulator_u(self) -> float:
        """Unit roundoff of the accumulator; 0 for integers."""
        return UNIT_ROUNDOFF.get(self.accumulator, 0.0) * self.per_add


@dataclass(frozen=True, slots=True)
class Constraint:
    """One condition on problem and parameters, with the words that explain it."""

    text: str
    holds: Callable[[Problem, Params], bool]


@dataclass(frozen=True, slots=True)
class Step:
    """One kernel launch: the name expression that NVRTC instantiates, and its geometry.

    grid counts thread blocks (not clusters); smem is dynamic shared memory in bytes; `defines` go
    to the compiler; `maps` are parameters after the struct. Grid y and z never carry a size of the
    problem: they end at 65,535.
    """

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    smem: int = 0
    cluster: tuple[int, int, int] = (1, 1, 1)
    pdl: bool = False
    defines: tuple[str, ...] = ()
    maps: tuple[TensorMap, ...] = ()


@dataclass(frozen=True, slots=True)
class ByIndex:
    """A grouped product that finds its rows by indices of a dtype; gated: it gives silu(gate) up.

    index: None where rows are sorted, and it is gated. out: the dtype of the result.
    """

    index: str | None
    gated: bool
    out: str


def with_bias(steps: tuple[Step, ...]) -> tuple[Step, ...]:
    """Return a rung's steps with kernels that add a bias, whose address ends their struct."""
    return tuple(replace(step, defines=(*step.defines, "BIAS")) for step in steps)


def with_scales(steps: tuple[Step, ...]) -> tuple[Step, ...]:
    """Return a rung's steps with kernels that scale; both scales' addresses end their struct."""
    return tuple(replace(step, defines=(*step.defines, "SCALES")) for step in steps)


def with_epilogue(steps: tuple[Step, ...], function: str) -> tuple[Step, ...]:
    """Return the steps of a rung that finishes, compiled for one of `FUNCTIONS` of epilogues."""
    more = f"EPILOGUE={function}"
    return tuple(replace(step, defines=(*step.defines, more)) for step in steps)


@dataclass(frozen=True, slots=True)
class Suggestion:
    """What a rung's heuristic proposes for a problem: parameters and the expected time."""

    params: Mapping[str, Any]
    expected_s: float


def _no_suggestion(problem: Problem, machine: Machine) -> Suggestion | None:
    return None


def _never(problem: Problem, machine: Machine) -> bool:
    return False


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Rung:
    """One kernel: what it teaches, what it takes, and its search space.

    The loader fills `name` and `folder` from the path, and from the folder `quantized`, and `op`
    but for quantised rungs. `params` is the declared search space, name
    -> values, the first value being the default. `layouts` are those of A that the rung takes (see
    `gemmule.core.problem`), `layouts_b` those of B. `after` names the rung it adds its idea to, on
    the same ladder; `branch` says why it is no step of that rung's line but leaves it (another
    memory order, another shape, an alternative that loses): empty for a step. `batched` rungs take
    a leading batch axis; for the others the back end loops. `by_name_only` rungs are neither chosen
    by plans nor tried by the tuner unless they are named: what they gain depends on the calls
    around them; those with a `precision` are for calls that name it. A `vendor` rung calls the
    library that users have anyway: the choice, unless another was tuned; but not where it `waits`:
    where each product waits for threads of a team, also for one that the system does not run.
    `seconds`, `terms`: how long it takes, and the terms by which that grows, with the coefficients
    of `counts_with` in a device's model. `choices`: the parameters that are compared for a
    problem. How a rung runs is told by `CpuRung`, `CudaRung` and
    `LibraryRung`.
    """

    backend: ClassVar[str] = ""

    title: str
    idea: str
    source: str
    signatures: tuple[Signature, ...]
    arithmetic: Callable[[Problem], Arithmetic]
    op: str = ""
    layouts: tuple[str, ...] = ("row",)
    layouts_b: tuple[str, ...] = ("row", "col")
    after: str | None = None
    branch: str = ""
    params: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    constraints: tuple[Constraint, ...] = ()
    quantized: bool = False
    accepts_quant: Callable[[Problem], bool] | None = None
    batched: bool = False
    suggest: Callable[[Problem, Machine], Suggestion | None] = _no_suggestion
    seconds: Callable[[Problem, Params, Machine], float] | None = None
    terms: Callable[[Problem, Params, Machine], Terms] | None = None
    counts_with: str = ""
    choices: Callable[[Problem, Machine], Iterable[Params]] | None = None
    by_name_only: bool = False
    precision: str = ""
    vendor: bool = False
    waits: Callable[[Problem, Machine], bool] = _never
    name: str = ""
    folder: str = ""

    def __repr__(self) -> str:
        return f"<rung {self.folder}/{self.name} ({self.backend}): {self.title}>"

    @property
    def path(self) -> Path:
        """The rung's Python file."""
        return RUNGS_FOLDER / self.folder / self.backend / f"{self.name}.py"

    @property
    def source_path(self) -> Path:
        """The file that holds the kernel."""
        return self.path

    def defaults(self) -> dict[str, Any]:
        """Return the first value of every parameter."""
        return {name: values[0] for name, values in self.params.items()}

    def space(self, problem: Problem) -> Iterator[dict[str, Any]]:
        """Yield every declared parameter combination that the constraints allow."""
        conditions = [constraint.holds for constraint in self.constraints]
        for params in self._combinations:
            for holds in conditions:
                if not holds(problem, params):
                    break
            else:
                yield params.copy()

    @functools.cached_property
    def _combinations(self) -> tuple[dict[str, Any], ...]:
        """Every declared parameter combination, whatever the constraints say."""
        every = itertools.product(*self.params.values())
        return tuple(dict(zip(self.params, values, strict=True)) for values in every)

    def refusal(self, problem: Problem) -> str | None:
        """Return why the rung does not take `problem` on this machine, or None when it does."""
        return self.mismatch(problem)

    def mismatch(self, problem: Problem) -> str | None:
        """Return why `problem` is none that the rung is made for, whatever machine this is."""
        if problem.op != self.op:
            return f"it computes {self.op}, not {problem.op}"
        if self.quantized != (problem.quant is not None):
            return "it needs a quantised matrix" if self.quantized else "the matrix is quantised"
        if (problem.a, problem.b, problem.out) not in self.signatures:
            wanted = f"{problem.a} x {problem.b} -> {problem.out}"
            return f"it does not take dtypes {wanted}"
        if problem.layout_a not in self.layouts:
            return f"it reads A as {' or '.join(self.layouts)}, not {problem.layout_a}"
        if self.op != "matvec" and problem.layout_b not in self.layouts_b:
            return f"it reads B as {' or '.join(self.layouts_b)}, not {problem.layout_b}"
        if self.accepts_quant is not None and not self.accepts_quant(problem):
            return "it does not take this quantisation"
        if not any(True for _ in self.space(problem)):
            return "no parameters fit: " + "; ".join(c.text for c in self.constraints)
        return None

    def check_params(self, problem: Problem, params: Params | None) -> dict[str, Any]:
        """Return a full, legal parameter set: the defaults overlaid with `params`.

        Raises ValueError for an unknown name, a value outside the declared space, or a broken
        constraint. Values missing in `params` are filled so that the constraints hold.
        """
        given = dict(params or {})
        for name, value in given.items():
            if name not in self.params:
                known = ", ".join(self.params) or "none"
                raise ValueError(f"rung {self.name} has no parameter {name!r}; it has: {known}.")
            if value not in self.params[name]:
                raise ValueError(
                    f"rung {self.name}: {name}={value!r} is outside its declared values "
                    f"{self.params[name]}."
                )
        chosen = {**self.defaults(), **given}
        broken = [c.text for c in self.constraints if not c.holds(problem, chosen)]
        if not broken:
            return chosen
        for candidate in self.space(problem):
            if all(candidate[name] == value for name, value in given.items()):
                return candidate
        raise ValueError(
            f"rung {self.name} cannot run {problem.describe()} with {chosen}: {'; '.join(broken)}."
        )


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class CpuRung(Rung):
    """A kernel for CPUs: ``bind(problem, params) -> run(A, x, y)`` over NumPy views.

    `available` says what this processor lacks for it, or None. `packing`: what prepared operands
    spare it. `job(problem, params, A, B)`: what a builtin function is bound to for operands like A
    and x or B (a `Job` of `backends.cpu.calls`), or None. `fresh(problem)`: a function (A, x or B)
    that makes its result, of matrices without gaps. `rows_apart`: each row of the result has the
    same bits whatever rows are computed with it. `layouts_out`: those of C that it writes; into
    others what it wrote is copied.
    """

    backend: ClassVar[str] = "cpu"

    bind: Callable[[Problem, Params], Callable[..., None]]
    available: Callable[[], str | None] = field(default=lambda: None)
    packing: HostPacking | None = None
    job: Callable[[Problem, Params, Any, Any], Any | None] | None = None
    fresh: Callable[[Problem], Callable[[Any, Any], Any] | None] = field(default=lambda _: None)
    rows_apart: bool = False
    layouts_out: tuple[str, ...] = ("row",)

    def refusal(self, problem: Problem) -> str | None:
        """Return why the rung does not take `problem` on this machine, or None when it does."""
        return self.mismatch(problem) or self.available()


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class CudaRung(Rung):
    """A kernel for GPUs: ``steps(problem, params, machine)`` are its launches.

    `workspace` is in bytes. `presets` are named points of the search space. `spills`: it may keep
    registers in memory. `archs`: those of the listed that it is compiled for. `packing`: what
    prepared operands spare it. `sends`: compiled with PEERS it sends results to several GPUs
    (`_cuda/peers.cuh`). `adds`: compiled with BIAS it adds a number to each row (`_cuda/bias.cuh`).
    `scaled`: the dtypes of the operands and the results that it has compiled with SCALES
    (`_cuda/scales.cuh`); `by_blocks`: scales of A's rows, or 128 of them, by 128 steps of the sum,
    and of B's 128 columns by those. `finished`: those with EPILOGUE (`_cuda/epilogue.cuh`), with
    SCALES as well where the rung scales.
    `routed`: the launch of a grouped product of few rows that nobody sorted
    (`_cuda/few_rows.cuh`), or None where there is none.
    """

    backend: ClassVar[str] = "cuda"

    steps: Callable[[Problem, Params, Machine], tuple[Step, ...]]
    workspace: Callable[[Problem, Params, Machine], int] = lambda problem, params, machine: 0
    sends: bool = False
    adds: bool = False
    scaled: tuple[Signature, ...] = ()
    by_blocks: bool = False
    finished: tuple[Signature, ...] = ()
    presets: Mapping[str, Params] = field(default_factory=dict)
    archs: tuple[str, ...] = architectures.LISTED
    spills: bool = False
    packing: Packing | None = None
    routed: Callable[[Problem, Params, Machine, ByIndex], Step | None] | None = None

    @property
    def source_path(self) -> Path:
        """The file that holds the kernel: the ``.cu`` beside the Python file."""
        return self.path.with_suffix(".cu")

    def runs_on(self, arch: str) -> bool:
        """Tell whether a device of an architecture, listed or not, has what the kernels need."""
        return architectures.like(arch) in self.archs

    def refusal_scaled(self, problem: Problem) -> str | None:
        """Return why the rung does not take `problem` with scales on this machine, or None."""
        if (problem.a, problem.b, problem.out) not in self.scaled:
            return f"it scales no {problem.a} x {problem.b} -> {problem.out}"
        if self.by_blocks and problem.layout_out != "row":
            return "it scales by blocks into rows alone"
        return self.refusal(replace(problem, out=self.unscaled(problem)))

    def refusal_finished(self, problem: Problem) -> str | None:
        """Return why the rung does not take `problem` with an epilogue on this machine, or None."""
        if (problem.a, problem.b, problem.out) not in self.finished:
            return f"it finishes no {problem.a} x {problem.b} -> {problem.out}"
        return self.refusal_scaled(problem) if self.scaled else self.refusal(problem)

    def unscaled(self, problem: Problem) -> str:
        """Return the dtype of the result of which `problem` is scaled: that of a plain product."""
        return next(out for a, b, out in self.signatures if (a, b) == (problem.a, problem.b))


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class LibraryRung(Rung):
    """A product of a library for GPUs: ``bind(problem, call, params) -> run(a, b, out, ...)``.

    `spec` is what the library is told of a product, a frozen dataclass. `available` says what is
    missing for it on this machine, or None. `workspace`: bytes beside the library's. Also where a
    kernel of another rung stands for the library: `archs` are then those that it runs on.
    """

    backend: ClassVar[str] = "cuda"

    spec: Callable[[Problem, Call], Any]
    bind: Callable[[Problem, Call, Params], Callable[..., None]]
    available: Callable[[], str | None]
    workspace: Callable[[Problem, Params], int] = lambda problem, params: 0
    archs: tuple[str, ...] = architectures.LISTED

    def runs_on(self, arch: str) -> bool:
        """Tell whether a device of an architecture, listed or not, has what it needs."""
        return self.archs == architectures.LISTED or architectures.like(arch) in self.archs

    def refusal(self, problem: Problem) -> str | None:
        """Return why the rung does not take `problem` on this machine, or None when it does."""
        return self.mismatch(problem) or self.available()


DeviceRung: TypeAlias = CudaRung | LibraryRung


def same(*dtypes: str) -> tuple[Signature, ...]:
    """Return signatures whose operands and result share one dtype."""
    return tuple((t, t, t) for t in dtypes)


def beside_codes(*dtypes: str) -> tuple[Signature, ...]:
    """Return signatures of rows of these dtypes beside experts' codes; results may be float32."""
    codes = ("uint4", "uint8", FLOAT4_DTYPE, FLOAT8_CODES)
    return tuple((t, c, o) for c in codes for t in dtypes for o in dict.fromkeys((t, "float32")))


def floats(*dtypes: str) -> tuple[Signature, ...]:
    """Return signatures of float matrices with every mix a product of them may meet.

    For each matrix dtype: the vector in the same dtype or in float32, the result in the
    promoted dtype or, for halves, in float32; float64 stays with float64.
    """
    result: list[Signature] = []
    for a in dtypes:
        if a == "float64":
            result.append((a, a, a))
        elif a == "float32":
            result += [(a, a, a)]
        else:
            result += [(a, a, a), (a, a, "float32"), (a, "float32", "float32")]
    return tuple(result)


def integers() -> tuple[Signature, ...]:
    """Return the signatures of integer products: 8-bit to int32 or int64, others to 64 bits."""
    small = [
        (a, b, out)
        for a in ("int8", "uint8")
        for b in ("int8", "uint8")
        for out in ("int32", "int64")
    ]
    wide = [(t, t, "int64") for t in ("int16", "int32", "int64")]
    return (*small, *wide, *((t, t, "uint64") for t in ("uint16", "uint32", "uint64")))
