"""The code that the page of a CPU ladder shows of a rung: one function of its files, as it runs.

By itself that is the first kernel of the rung's file, or else its `run` on arrays. Where the loop
that is worth reading lies in a file that rungs share, `ELSEWHERE` names it.
"""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator
from pathlib import Path

from gemmule.core.rung import RUNGS_FOLDER, Rung
from pages.excerpts import Excerpt

MOST_LINES = 50
_ALONG = "_cpu_rows.py"
ELSEWHERE = {  # ladder/rung: (file below the rungs, function)
    "matvec/threads": (_ALONG, "_share"),
    "matvec/split_rows": (_ALONG, "_stretch"),
    "vecmat/panel_threads": (_ALONG, "_share"),
    "vecmat/split_columns": (_ALONG, "_stretch"),
    "vecmat/prefetched_columns": ("vecmat/cpu/prefetched_columns.py", "add"),
    "matmul/cache_blocks": ("matmul/cpu/cache_blocks.py", "blocked"),
    "matmul/packed": ("matmul/cpu/_packed_blocks.py", "multiply_block"),
    "matmul/packed_threads": ("matmul/cpu/_packed_blocks.py", "block_share"),
    "matmul/few_columns": ("matmul/cpu/_few_kernels.py", "along"),
    "matmul/tile_products": ("matmul/cpu/_tile_blocks.py", "block"),
    "quantized/unpack_loop": ("quantized/cpu/plain/kernels.py", "weight"),
    "quantized/column_loop": ("quantized/cpu/plain/kernels.py", "loop"),
    "quantized/threads": ("quantized/cpu/_product.py", "_share"),
    "quantized/four_rows": ("quantized/cpu/plain/kernels.py", "four_rows"),
    "quantized/panels": ("quantized/cpu/plain/kernels.py", "weights"),
    "quantized/vector_decode": ("quantized/cpu/vector/rows.py", "rows"),
    "quantized/vector_panels": ("quantized/cpu/vector/panels.py", "panels"),
    "quantized/few_columns": ("quantized/cpu/vector/rows.py", "tiles"),
    "quantized/int8_activations": ("quantized/cpu/vector/activations.py", "quantise"),
    "quantized/sixteen_rows": ("quantized/cpu/tiles/kernels.py", "tiles"),
    "quantized/sixteen_rows_int8": ("quantized/cpu/tiles/kernels.py", "quantise"),
    "quantized/tile_registers": ("quantized/cpu/amx/floats.py", "tiles"),
    "quantized/tile_registers_int8": ("quantized/cpu/amx/int8.py", "tiles"),
    "quantized/packed_codes": ("quantized/cpu/blocks/decode.py", "decode"),
    "quantized/dequantise_blas": ("quantized/cpu/plain/products.py", "_multiply_by_blas"),
}


def shown(rung: Rung) -> Excerpt | None:
    """Return the function that a rung's page shows, None where its file has none of its own.

    ValueError where the one that is named is not there, or too long to be read on a page.
    """
    name = f"{rung.folder}/{rung.name}"
    if name in ELSEWHERE:
        file, function = ELSEWHERE[name]
        return Excerpt(RUNGS_FOLDER / file, function_text(RUNGS_FOLDER / file, function))
    text = rung.path.read_text("utf-8")
    functions = list(_functions(ast.parse(text)))
    kernels = [one.name for one in functions if _is_kernel(one)]
    own = [*kernels, *(one.name for one in functions if one.name == "run")]
    return Excerpt(rung.path, function_text(rung.path, own[0])) if own else None


def _functions(tree: ast.AST) -> Iterator[ast.FunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def _is_kernel(function: ast.FunctionDef) -> bool:
    return any(isinstance(d, ast.Name) and d.id == "kernel" for d in function.decorator_list)


def function_text(path: Path, name: str) -> str:
    """Return a function of a file without its types and what is said above its body."""
    text = path.read_text("utf-8")
    found = next((one for one in _functions(ast.parse(text)) if one.name == name), None)
    if found is None:
        raise ValueError(f"{path} has no function {name}; mend ELSEWHERE in {__file__}.")
    told = ast.get_docstring(found) is not None
    body = found.body[1 if told and len(found.body) > 1 else 0 :]
    lines = text.splitlines()[body[0].lineno - 1 : found.end_lineno]
    if len(lines) > MOST_LINES:
        raise ValueError(f"{name} of {path} has more than {MOST_LINES} lines; show another.")
    taken = found.args
    names = [one.arg for one in (*taken.posonlyargs, *taken.args)]
    names += ["*", *(one.arg for one in taken.kwonlyargs)] * bool(taken.kwonlyargs)
    head = textwrap.wrap(f"def {name}({', '.join(names)}):", 96, subsequent_indent=" " * 8)
    return "\n".join([*head, textwrap.indent(textwrap.dedent("\n".join(lines)), "    ")])
