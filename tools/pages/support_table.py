"""The README's table of what is served: element types by product, on a CPU and on a GPU."""

from __future__ import annotations

from collections.abc import Iterable

from gemmule.core.problem import FLOAT4_DTYPE
from gemmule.core.registry import ladder
from gemmule.core.rung import BACKENDS
from gemmule.storage import evidence

ROWS = {
    "float64": ("float64",),
    "float32": ("float32",),
    "float16, bfloat16": ("float16", "bfloat16"),
    "float8 (e4m3, e5m2)": ("float8_e4m3fn", "float8_e5m2"),
    "int8, uint8": ("int8", "uint8"),
    "16 to 64 bit integers": ("int16", "uint16", "int32", "uint32", "int64", "uint64"),
    "complex64, complex128": ("complex64", "complex128"),
    "8-bit weights": ("uint8",),
    "4-bit weights": ("uint4",),
    "4-bit floats (MXFP4, NVFP4)": (FLOAT4_DTYPE,),
}
WEIGHTS = ("8-bit weights", "4-bit weights", "4-bit floats (MXFP4, NVFP4)")
PRODUCTS = {"A x": "matvec", "x A": "vecmat", "A B": "matmul"}
LIBRARIES = frozenset(
    {"blas", "upcast_blocks", "blas_upcast", "cublas", "dequantise_blas", "dequantise_library"}
)  # rungs which leave the sums to a vendor's library


def support() -> str:
    """Return a Markdown table: who computes each product of each element type."""
    proved = {(record.folder, record.rung, record.variant) for record in evidence.read()}
    titles = [f"{product}, {backend.upper()}" for backend in BACKENDS for product in PRODUCTS]
    titles = [title.replace("CUDA", "GPU") for title in titles]
    lines = [f"| elements | {' | '.join(titles)} |", "|---|" + "---|" * len(titles)]
    for name, dtypes in ROWS.items():
        cells = [
            _cell("quantized" if name in WEIGHTS else op, backend, dtypes, proved)
            for backend in BACKENDS
            for op in PRODUCTS.values()
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(op: str, backend: str, dtypes: Iterable[str], proved: set[tuple[str, str, str]]) -> str:
    """Return who computes a product in every one of some element types."""
    ours, theirs = True, True
    for dtype in dtypes:
        serving = {
            rung.name in LIBRARIES
            for rung in ladder(op, backend)
            for signature in rung.signatures
            if signature[0] == dtype
            and (
                backend == "cpu"
                or (rung.folder, rung.name, evidence.variant_named(signature)) in proved
            )
        }
        ours, theirs = ours and False in serving, theirs and True in serving
    return {(True, True): "own, library", (True, False): "own", (False, True): "library"}.get(
        (ours, theirs), "-"
    )
