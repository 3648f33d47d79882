"""What rungs for GPUs say of a product, as it was when their coefficients and proofs were made.

Which products and parameters a rung takes, the memory it asks for, the additions its error bound
counts and the terms of its time are formulas that no result depends on: a wrong one makes a poor
choice, or lets a poor product pass. ``data/declared.toml`` has digests of them for random products.
Who means to change one refits its coefficients, and then writes the file again:

    PYTHONPATH=tests:tools python tests/rungs/test_declared.py
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from checkout import ROOT
from gemmule.core.problem import Problem
from gemmule.core.registry import device_rungs
from gemmule.core.rung import CudaRung, DeviceRung
from gemmule.oracle.problems import make_problem
from proofs import proofs

FILE = ROOT / "tests" / "data" / "declared.toml"
PRODUCTS, SETS = 48, 3
MACHINE = proofs.proof_machine()
RUNGS = {f"{rung.folder}/{rung.name}": rung for rung in device_rungs()}


def products(rung: DeviceRung) -> Iterator[Problem]:
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


def declared(rung: DeviceRung) -> dict[str, str]:
    """Return a digest of each of the rung's formulas."""
    found: dict[str, list[Any]] = {"takes": [], "memory": [], "chain": [], "terms": []}
    for index, problem in enumerate(products(rung)):
        sets = list(itertools.islice(rung.space(problem), 4096))
        taken = rung.mismatch(problem) is None
        found["takes"].append([taken, len(sets), *sets[:: max(1, len(sets) // SETS)]])
        if not taken:
            continue
        arithmetic = rung.arithmetic(problem)
        for params in (sets[(index * 7 + i) * 5 % len(sets)] for i in range(SETS)):
            found["chain"].append([arithmetic.chain(problem, params), str(arithmetic.per_add)])
            if isinstance(rung, CudaRung):
                found["memory"].append(rung.workspace(problem, params, MACHINE))
                steps = rung.steps(problem, params, MACHINE)
                found["memory"].append([(*one.grid, *one.block, one.smem) for one in steps])
            else:
                found["memory"].append(rung.workspace(problem, params))
            if rung.terms is not None:
                some = rung.terms(problem, params, MACHINE)
                found["terms"].append([{k: f"{v:.9g}" for k, v in one.items()} for one in some])
    assert found["chain"], f"{rung} takes none of these products"
    return {what: digest(values) for what, values in found.items()}


def digest(values: list[Any]) -> str:
    return hashlib.sha256(json.dumps(values, default=str).encode()).hexdigest()[:12]


@functools.cache
def recorded() -> dict[str, dict[str, str]]:
    return tomllib.loads(FILE.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", RUNGS)
def test_what_a_rung_says_is_what_it_was_fitted_and_proved_by(name: str) -> None:
    assert declared(RUNGS[name]) == recorded().get(name), f"{__doc__}"


def test_no_rung_is_recorded_that_is_gone() -> None:
    assert set(recorded()) == set(RUNGS)


def main() -> None:
    """Write the record."""
    lines = ["# Digests of what rungs declare: see tests/rungs/test_declared.py."]
    for name, rung in sorted(RUNGS.items()):
        told = ", ".join(f'{what} = "{value}"' for what, value in declared(rung).items())
        lines.append(f'"{name}" = {{ {told} }}')
    FILE.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
