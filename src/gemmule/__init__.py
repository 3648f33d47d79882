"""gemmule: matrix-vector and matrix-matrix products at the limit of the hardware, from Python."""

from __future__ import annotations

import warnings

from gemmule.api import asarray, gemm, gemv, grouped_matmul, matmul, matvec, plan, vecmat
from gemmule.arrays.prepared import PreparedMatrix
from gemmule.arrays.preparing import prepare
from gemmule.core.epilogue import Epilogue
from gemmule.core.interpreter import UNTRIED, is_free_threaded
from gemmule.core.registry import ladder
from gemmule.errors import CompileError, DeviceError, GemmuleWarning
from gemmule.plan import Plan
from gemmule.quant.matrix import QuantizedMatrix
from gemmule.quant.quantize import quantize
from gemmule.quant.stack import QuantizedStack, quantize_experts

__version__ = "0.2.0"

__all__ = [
    "CompileError",
    "DeviceError",
    "Epilogue",
    "GemmuleWarning",
    "Plan",
    "PreparedMatrix",
    "QuantizedMatrix",
    "QuantizedStack",
    "__version__",
    "asarray",
    "gemm",
    "gemv",
    "grouped_matmul",
    "ladder",
    "matmul",
    "matvec",
    "plan",
    "prepare",
    "quantize",
    "quantize_experts",
    "vecmat",
]


if is_free_threaded():
    warnings.warn(UNTRIED, GemmuleWarning, stacklevel=2)


def __dir__() -> list[str]:
    """List the public names alone; the package's modules stay importable."""
    return __all__
