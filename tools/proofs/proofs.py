"""The keys of proofs: which kernels a rung consists of, compiled how, launched how.

A *variant* is one rung with one dtype signature (and quantisation, where it is quantised). Its
kernels are those that the whole declared parameter space launches over a fixed list of problems;
its key digests their cubin, as the pinned NVRTC builds it, and every launch's geometry. A rung that
adds a bias where it is told to has a second variant of each, of the same kernels compiled for that,
with the default parameters: what it changes comes after all sums. Of a rung that calls a library,
the key digests what the library is told of these problems.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from gemmule.backends.cuda import nvrtc
from gemmule.core.canonical import Call, Options, canonical
from gemmule.core.epilogue import FUNCTIONS
from gemmule.core.operand import Form, c_strides
from gemmule.core.problem import FLOAT4, FLOAT4_DTYPE, Problem, QuantSpec
from gemmule.core.registry import device_rungs
from gemmule.core.rung import (
    CudaRung,
    DeviceRung,
    LibraryRung,
    Machine,
    Signature,
    Step,
    with_bias,
    with_epilogue,
    with_scales,
)
from gemmule.oracle.problems import float4_spec, make_problem
from gemmule.storage import built, evidence, sources

# The architecture of the device that proves; others are compiled and emulated.
PROOF_ARCH = "sm_90a"
MATVEC_SIZES = (
    (1, 1),
    (3, 5),
    (33, 65),
    (130, 257),
    (1000, 4096),
    (4096, 4096),
    (65536, 96),
    (7, 70000),
)
MATMUL_SIZES = (
    (1, 1, 1),
    (33, 17, 65),
    (130, 257, 96),
    (512, 512, 512),
    (4096, 16, 4096),
    (5, 70000, 40),
)
GROUPS = (128, 32, -1, None, 48)


@dataclass(frozen=True, slots=True)
class Launch:
    """One step of one problem with one parameter set."""

    problem: int
    params: tuple[tuple[str, object], ...]
    step: Step


@dataclass(frozen=True, slots=True)
class Variant:
    """One rung with one signature, its kernels and its launches, or what a library is told."""

    rung: DeviceRung
    name: str
    kernels: tuple[str, ...]
    defines: tuple[str, ...]
    launches: tuple[Launch, ...]
    told: tuple[Any, ...] = ()

    def geometry_digest(self) -> str:
        """Return a digest of every launch but the kernels' machine code."""
        rows = []
        for launch in self.launches:
            step = launch.step
            row = [launch.problem, sorted(map(str, launch.params)), step.kernel, step.grid]
            row += [step.block, step.smem, step.cluster, step.pdl]
            rows.append([*row, list(map(asdict, step.maps))] if step.maps else row)
        return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


def named_rungs(
    names: Collection[str] = (), without: Collection[str] = ()
) -> tuple[DeviceRung, ...]:
    """Return the CUDA rungs called `names` (default: all) but `without`; ValueError for others."""
    rungs = device_rungs()
    unknown = {*names, *without} - {rung.name for rung in rungs}
    if unknown:
        raise ValueError(
            f"no cuda rung is called {min(unknown)!r}; see gemmule ladder --backend cuda."
        )
    return tuple(r for r in rungs if r.name in (names or (r.name,)) and r.name not in without)


def kernel_rungs(
    names: Collection[str] = (), without: Collection[str] = ()
) -> tuple[CudaRung, ...]:
    """Return those of `named_rungs` that have kernels of their own."""
    return tuple(r for r in named_rungs(names, without) if isinstance(r, CudaRung))


def proof_machine(arch: str = PROOF_ARCH) -> Machine:
    """Return the fixed machine that geometry is asked for: an H200's figures, whatever is here."""
    return Machine("cuda", "reference", arch, 132, 4.5e12, 60 * 2**20, 227 * 1024, 1.8e-6)


def fixed_problems(rung: DeviceRung, signature: Signature) -> Iterator[Problem]:
    """Yield the problems whose launches enter a variant's key."""
    sizes = [(m, n, 1) for m, n in MATVEC_SIZES] if rung.op == "matvec" else list(MATMUL_SIZES)
    quants = [None] if not rung.quantized else list(quant_specs(signature))
    layouts_b = rung.layouts_b if rung.op != "matvec" else ("row",)
    batch = {"batch": 8} if rung.op == "grouped" else {}
    for (m, n, k), layout_a, layout_b, quant in itertools.product(
        sizes, rung.layouts, layouts_b, quants
    ):
        problem = make_problem(
            rung.op, m, n, k, signature, layout_a=layout_a, layout_b=layout_b, quant=quant, **batch
        )
        for alignment in {problem.alignment, 16 if problem.alignment == 16 else 1}:
            given = alignment == problem.alignment
            candidate = problem if given else replace(problem, alignment=alignment)
            if rung.mismatch(candidate) is None:
                yield candidate


def quant_specs(signature: Signature) -> Iterator[QuantSpec]:
    """Yield the quantisations that the fixed problems of a signature meet."""
    if FLOAT4_DTYPE in signature:
        pairs = itertools.product((False, True), ("row", "mma16"), range(len(FLOAT4)))
        yield from (float4_spec(one, transposed=turned, layout=way) for turned, way, one in pairs)
        return
    bits = 4 if "uint4" in signature else 8
    for group, zeros, transposed, scale, layout in itertools.product(
        GROUPS, (False, True), (False, True), ("float32", "float16"), ("row", "mma16")
    ):
        yield QuantSpec(bits, group, zeros, layout, scale, transposed)


def variants(rung: DeviceRung, machine: Machine | None = None) -> Iterator[Variant]:
    """Yield every variant of a CUDA rung."""
    for signature in signatures(rung):
        yield variant_of(rung, signature, machine)
        if isinstance(rung, CudaRung) and rung.adds:
            yield variant_of(rung, signature, machine, end=evidence.WITH_BIAS)
    if isinstance(rung, CudaRung):
        for signature, end in _more(rung):
            yield variant_of(rung, signature, machine, end=end)


def variant_of(
    rung: DeviceRung, signature: Signature, machine: Machine | None = None, *, end: str = ""
) -> Variant:
    """Return the variant of one of the rung's `signatures`, or of those that it has scaled.

    end: of its name, where its kernels add a bias, apply scales or an epilogue.
    """
    name = evidence.variant_named(signature) + end
    if isinstance(rung, LibraryRung):
        told = tuple(rung.spec(p, packed_call(p)) for p in fixed_problems(rung, signature))
        return Variant(rung, name, (), (), (), told)
    launches = tuple(_launches(rung, signature, machine or proof_machine(), end))
    kernels = tuple(dict.fromkeys(launch.step.kernel for launch in launches))
    defines = tuple(dict.fromkeys(d for launch in launches for d in launch.step.defines))
    return Variant(rung, name, kernels, defines, launches)


def signatures(rung: DeviceRung) -> Iterator[Signature]:
    """Yield the signatures that have a variant, in order; `variants` costs far more."""
    for signature in rung.signatures:
        if isinstance(rung, LibraryRung) or any(_launches(rung, signature, proof_machine())):
            yield signature


def names(rung: DeviceRung) -> Iterator[str]:
    """Yield the names of the rung's variants, in order."""
    for signature in signatures(rung):
        yield evidence.variant_named(signature)
        if isinstance(rung, CudaRung) and rung.adds:
            yield evidence.variant_named(signature) + evidence.WITH_BIAS
    if isinstance(rung, CudaRung):
        for signature, end in _more(rung):
            yield evidence.variant_named(signature) + end


def _more(rung: CudaRung) -> Iterator[tuple[Signature, str]]:
    """Yield dtypes, and the ends of names, of variants that scale or have an epilogue."""
    yield from ((signature, evidence.SCALED) for signature in rung.scaled)
    more = evidence.SCALED if rung.scaled else ""
    ends = (more + end for end in evidence.FINISHED.values())
    yield from itertools.product(rung.finished, ends)


def _scaled_with(steps: tuple[Step, ...], function: str) -> tuple[Step, ...]:
    return with_epilogue(with_scales(steps), function)


_COMPILED: dict[str, Callable[[tuple[Step, ...]], tuple[Step, ...]]] = {
    evidence.WITH_BIAS: with_bias,
    evidence.SCALED: with_scales,
    **{
        end: functools.partial(with_epilogue, function=function)
        for function, end in evidence.FINISHED.items()
    },
    **{
        evidence.SCALED + end: functools.partial(_scaled_with, function=function)
        for function, end in evidence.FINISHED.items()
    },
}


def _launches(
    rung: CudaRung, signature: Signature, machine: Machine, end: str = ""
) -> Iterator[Launch]:
    for index, problem in enumerate(fixed_problems(rung, plain_of(rung, signature, end))):
        given = replace(problem, out=signature[2])
        one = end and not rung.by_blocks  # whose kernels scale within their loops
        for params in [rung.check_params(given, None)] if one else rung.space(given):
            frozen = tuple(sorted(params.items()))
            steps = rung.steps(given, params, machine)
            for step in _COMPILED[end](steps) if end else steps:
                yield Launch(index, frozen, step)


def plain_of(rung: CudaRung, signature: Signature, end: str) -> Signature:
    """Return the signature of the plain product behind one with this end of its name."""
    if not end.startswith(evidence.SCALED):
        return signature
    a, b, out = signature
    return a, b, rung.unscaled(Problem("matmul", 1, 1, a=a, b=b, out=out))


def signature_of(variant: Variant) -> Signature:
    """Return the dtypes of A, of x or B, and of the result."""
    a, b, out = variant.name.split(",")[:3]
    return a, b, out


def adds_bias(variant: Variant) -> bool:
    """Tell whether the variant's kernels add a bias."""
    return variant.name.endswith(evidence.WITH_BIAS)


def scales(variant: Variant) -> bool:
    """Tell whether the variant's kernels apply scales."""
    return evidence.SCALED in variant.name


def activations(variant: Variant) -> tuple[str | None, ...]:
    """Return the activations that the variant's kernels apply in epilogues; none of others."""
    found = [f for f, end in evidence.FINISHED.items() if variant.name.endswith(end)]
    return tuple(how for how, function in FUNCTIONS.items() if function in found)


def packed_call(problem: Problem) -> Call:
    """Return the call of a matmul on operands packed in the problem's layouts.

    Of codes as of floats of the dtype of B, which is what a library multiplies.
    """
    if problem.quant is not None:
        return packed_call(replace(problem, a=problem.b, quant=None))
    shapes = ((problem.m, problem.k), (problem.k, problem.n), (problem.m, problem.n))
    layouts = (problem.layout_a, problem.layout_b, problem.layout_out)
    forms = []
    for shape, layout, dtype in zip(
        shapes, layouts, (problem.a, problem.b, problem.out), strict=True
    ):
        whole = (problem.batch, *shape) if problem.batch > 1 else shape
        strides = c_strides(whole)
        if layout == "col":
            strides = (*strides[:-2], 1, shape[0])
        forms.append(Form(whole, strides, dtype, problem.alignment))
    options = Options(out_dtype=problem.out, literal=True)
    return canonical("matmul", forms[0], forms[1], forms[2], options)


def key(variant: Variant, *, anew: bool = False) -> str:
    """Return the variant's key; CompileError unless the pinned NVRTC is what compiles here.

    The cubin is built where no earlier build of the same inputs is on record, or `anew`.
    """
    if isinstance(variant.rung, LibraryRung):
        told = [asdict(one) for one in variant.told]
        return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()
    text = f"{_cubin_digest(variant, anew)} {variant.geometry_digest()}"
    return hashlib.sha256(text.encode()).hexdigest()


def _cubin_digest(variant: Variant, anew: bool) -> str:
    rung = variant.rung
    known = {} if anew else built.cubins(built.path_of((rung.folder, rung.name)))
    found = known.get(inputs_digest(variant))
    if found is not None:
        return found
    what = (rung.source_path, variant.kernels, PROOF_ARCH, variant.defines)
    module = nvrtc.build(*what)[0] if anew else nvrtc.compile_file(*what)
    return module.digest()


def inputs_digest(variant: Variant, arch: str | None = None) -> str:
    """Return a digest of all that a variant's cubin depends on; arch: else the proofs' own."""
    text = json.dumps(
        [
            sources.kernel_digest(variant.rung),
            variant.kernels,
            variant.defines,
            PROOF_ARCH if arch is None else arch,
            nvrtc.recipe(),
        ]
    )
    return hashlib.sha256(text.encode()).hexdigest()


def remember(rungs: Iterable[CudaRung], root: Path | None = None) -> None:
    """Write which cubins the variants of some rungs have, as built here; earlier lines go."""
    for rung in rungs:
        path = built.path_of((rung.folder, rung.name), root)
        builds = [
            built.Built(one.name, inputs_digest(one), _cubin_digest(one, anew=False))
            for one in variants(rung)
        ]
        built.write(path, builds)


def is_pinned() -> bool:
    """Tell whether NVRTC here is the one whose cubins are the keys."""
    return nvrtc.compiler_version() == evidence.PINNED_NVRTC


def keys(
    rungs: tuple[DeviceRung, ...] | None = None, workers: int = 2, *, anew: bool = False
) -> dict[tuple[str, str, str], str]:
    """Return the current key of every variant: (folder, rung, variant) -> key.

    anew: build every cubin here, whatever is on record.
    """
    chosen = device_rungs() if rungs is None else rungs
    todo = [variant for rung in chosen for variant in variants(rung)]
    with ThreadPoolExecutor(workers) as pool:
        found = list(pool.map(functools.partial(key, anew=anew), todo))
    return {
        (v.rung.folder, v.rung.name, v.name): value for v, value in zip(todo, found, strict=True)
    }
