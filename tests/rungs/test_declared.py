"""What rungs say of a product, as it was when they were fitted, proved and measured.

Which products and parameters a rung takes, the memory it asks for, the additions its error bound
counts and the terms of its time are formulas that no result depends on: a wrong one makes a poor
choice, or lets a poor product pass. ``data/declared.toml`` has digests of them for random products;
of CPUs for one with AVX2, whatever this is. Who means to change one of them refits or measures what
depends on it, and then writes the file again:

    PYTHONPATH=tests:tools python tests/rungs/test_declared.py
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from checkout import ROOT
from children import ended
from gemmule.backends.cpu.jit import unavailable
from gemmule.core.host_rates import HostRates
from gemmule.core.problem import Problem
from gemmule.core.registry import all_rungs
from gemmule.core.rung import CudaRung, LibraryRung, Machine, Rung
from gemmule.oracle.problems import make_problem
from proofs import proofs

FILE = ROOT / "tests" / "data" / "declared.toml"
PRODUCTS, SETS = 48, 3
MACHINE = proofs.proof_machine()
CPU = Machine("cpu", "reference", "x86_64", 8, 5e10, 32 << 20, rates=HostRates.default(8))
PLAIN = {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx2,+fma,+f16c"}


def named(backend: str) -> dict[str, Rung]:
    return {f"{backend}/{one.folder}/{one.name}": one for one in all_rungs(backend)}


def products(rung: Rung) -> Iterator[Problem]:
    """Yield random products of a rung's dtypes and layouts, small ones and large ones."""
    rng = np.random.default_rng(list(f"{rung.folder}/{rung.name}".encode()))
    for index in range(PRODUCTS):
        signature = rung.signatures[index % len(rung.signatures)]
        m, n, k = (int(2.0**x) for x in rng.uniform(0, (15, 8 + 7 * (index % 2), 13)))
        if index % 4:  # what many rungs want
            m, n, k = -(-m // 16) * 16, -(-n // 16) * 16, -(-k // 256) * 256
        m, n, k = (m, k, 1) if rung.op == "matvec" else (m, n, k)
        lies = {"layout_a": str(rng.choice(rung.layouts))}
        if rung.op != "matvec":
            lies["layout_b"] = str(rng.choice(rung.layouts_b))
        batch = int(rng.integers(2, 9)) if rung.op == "grouped" or index % 8 == 7 else 1
        specs = list(proofs.quant_specs(signature)) if rung.quantized else [None]
        every = [
            make_problem(rung.op, m, n, k, signature, **lies, quant=specs[i], batch=batch)
            for i in rng.permutation(len(specs))
        ]
        problem = next((one for one in every if rung.mismatch(one) is None), every[0])
        yield problem if index % 12 else replace(problem, alignment=min(problem.alignment, 4))


def declared(rung: Rung) -> dict[str, str]:
    """Return a digest of each of the rung's formulas."""
    found: dict[str, list[Any]] = {"takes": [], "memory": [], "chain": [], "time": []}
    for index, problem in enumerate(products(rung)):
        sets = list(itertools.islice(rung.space(problem), 4096))
        taken = rung.mismatch(problem) is None
        found["takes"].append([taken, len(sets), *sets[:: max(1, len(sets) // SETS)]])
        if not taken:
            continue
        arithmetic = rung.arithmetic(problem)
        if rung.backend == "cpu":
            made = rung.suggest(problem, CPU)
            told = None if made is None else [dict(made.params), f"{made.expected_s:.9g}"]
            found["time"].append(told)
        for params in (sets[(index * 7 + i) * 5 % len(sets)] for i in range(SETS)):
            found["chain"].append([arithmetic.chain(problem, params), str(arithmetic.per_add)])
            if isinstance(rung, CudaRung):
                found["memory"].append(rung.workspace(problem, params, MACHINE))
                steps = rung.steps(problem, params, MACHINE)
                found["memory"].append([(*one.grid, *one.block, one.smem) for one in steps])
            elif isinstance(rung, LibraryRung):
                found["memory"].append(rung.workspace(problem, params))
            if rung.terms is not None:
                some = rung.terms(problem, params, MACHINE)
                found["time"].append([{k: f"{v:.9g}" for k, v in one.items()} for one in some])
    assert found["chain"], f"{rung} takes none of these products"
    return {what: digest(values) for what, values in found.items() if values}


def digest(values: list[Any]) -> str:
    return hashlib.sha256(json.dumps(values, default=str).encode()).hexdigest()[:12]


@functools.cache
def on_a_plain_cpu() -> dict[str, dict[str, str]]:
    """Return what CPU rungs declare in a process that compiles for AVX2."""
    done = ended(__file__, "cpu", **PLAIN)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, dict[str, str]] = json.loads(done.stdout)
    return found


@functools.cache
def recorded() -> dict[str, dict[str, str]]:
    return tomllib.loads(FILE.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", named("cuda"))
def test_what_a_rung_says_is_what_it_was_fitted_and_proved_by(name: str) -> None:
    assert declared(named("cuda")[name]) == recorded().get(name), f"{__doc__}"


@pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))
@pytest.mark.parametrize("name", named("cpu"))
def test_what_a_cpu_rung_says_is_what_it_was_measured_by(name: str) -> None:
    assert on_a_plain_cpu()[name] == recorded().get(name), f"{__doc__}"


def test_no_rung_is_recorded_that_is_gone() -> None:
    assert set(recorded()) == {*named("cuda"), *named("cpu")}


def main() -> None:
    """Write the record, or print what CPU rungs declare."""
    if sys.argv[1:] == ["cpu"]:
        print(json.dumps({name: declared(one) for name, one in named("cpu").items()}))
        return
    every = {name: declared(one) for name, one in named("cuda").items()} | on_a_plain_cpu()
    lines = ["# Digests of what rungs declare: see tests/rungs/test_declared.py."]
    for name, values in sorted(every.items()):
        told = ", ".join(f'{what} = "{value}"' for what, value in values.items())
        lines.append(f'"{name}" = {{ {told} }}')
    FILE.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
