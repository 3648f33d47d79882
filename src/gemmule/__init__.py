"""gemmule: matrix-vector and matrix-matrix products at the limit of the hardware, from Python."""

from __future__ import annotations

from gemmule.api import asarray, gemm, gemv, matmul, matvec, plan, vecmat
from gemmule.arrays.prepared import PreparedMatrix
from gemmule.arrays.preparing import prepare
from gemmule.core.registry import ladder
from gemmule.errors import CompileError, DeviceError, GemmuleWarning
from gemmule.plan import Plan
from gemmule.quant.matrix import QuantizedMatrix
from gemmule.quant.quantize import quantize

__version__ = "0.2.0"

__all__ = [
    "CompileError",
    "DeviceError",
    "GemmuleWarning",
    "Plan",
    "PreparedMatrix",
    "QuantizedMatrix",
    "__version__",
    "asarray",
    "gemm",
    "gemv",
    "ladder",
    "matmul",
    "matvec",
    "plan",
    "prepare",
    "quantize",
    "vecmat",
]


def __dir__() -> list[str]:
    """List the public names alone; the package's modules stay importable."""
    return __all__
