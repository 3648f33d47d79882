"""What an installed gemmule must do with no GPU: multiply, and compile a kernel by NVRTC."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import gemmule as gm
from gemmule.backends.cuda.nvrtc import compile_file
from gemmule_lab.report.ladder_table import REFERENCE_GPU, examples

here = Path(gm.__file__)
if "site-packages" not in here.parts:
    raise SystemExit(f"gemmule comes from {here}, not from the installed wheel")

A = np.arange(12.0).reshape(3, 4)
if gm.matvec(A, np.ones(4)).tolist() != [6.0, 22.0, 38.0]:
    raise SystemExit("the product is wrong")
print(f"gemmule {gm.__version__} multiplies, from {here.parent}")

rung = gm.ladder("matvec", backend="cuda")[0]
problem = examples(rung, 4096)[0]
step = rung.steps(problem, rung.defaults(), REFERENCE_GPU)[0]
module = compile_file(rung.source_path, (step.kernel,), "sm_90a", step.defines)
print(f"{step.kernel}: cubin of {len(module.cubin):,} bytes, SHA-256 {module.digest()[:16]}")
