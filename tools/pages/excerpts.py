"""What the pages of the CUDA ladders show of each rung: the heart of its code, telling counters.

The code is found by two pieces of text, the last line's and, before it, the nearest first line's,
in the rung's .cu or a header that it includes; so what a page shows cannot differ from what runs.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gemmule.core.rung import HEADERS_FOLDER, Rung

MOST_LINES = 30
_INCLUDE = re.compile(r'#include "([\w./]+)"')


@dataclass(frozen=True, slots=True)
class Section:
    """first, last: texts of the first and last line of the heart; counters: those that explain."""

    first: str
    last: str
    counters: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Heart:
    """Some lines of a kernel, and the file they come from."""

    path: Path
    code: str


_ACCESS = ("sectors a load request", "L1 hits, %")
_STREAM = ("load requests, thousands", "occupancy, %", "issue slots used, %")
_SHARED = ("L1 hits, %", "shared-memory passes, millions", "issue slots used, %")
_TENSOR = ("warp instructions, millions", "FMA pipe, %", "tensor pipe, %")
_MULTIPLY = Section(
    "for (int k = threadIdx.x; k < at.count", "atomicAdd((Acc*)p.work", (*_ACCESS, "occupancy, %")
)
_TURN = "sum[r] = dot(va[u][r]"
_COLUMNS = ("sectors a load request", "occupancy, %", "warp instructions, millions")

SECTIONS: Mapping[str, Mapping[str, Section]] = {
    "matvec": {
        "thread_per_row": Section("const TA* a = (const TA*)p.a", "finish((TY*)p.y",
                                  (*_ACCESS, "occupancy, %")),
        "shared_x": Section("for (i64 first = 0", "nobody may overwrite",
                            ("load requests, thousands", *_ACCESS)),
        "warp_per_row": Section("Acc sum = 0", "if (lane == 0) finish", (*_ACCESS, "occupancy, %")),
        "p_threads": Section("const unsigned mask", "if (t == 0) finish",
                             (*_ACCESS, "occupancy, %")),
        "p_threads_vector": Section("for (; j + (L - 1) * stride", "sum += wide<Acc>(av[l][k])",
                                    ("load requests, thousands", "warp instructions, millions")),
        "two_step": Section("sum = share_of_row", "if (t == 0) finish",
                            ("occupancy, %", "shared-memory passes, millions")),
        "vector_shared_x": Section("for (i64 first = 0; first < p.n; first += TILE)",
                                   "sum += av[k] * xv[k]", _SHARED),
        "y_blocks": Section("const i64 pieces = p.n / W", "((Acc*)p.work)[(batch",
                            ("warp instructions, millions", "DRAM written, MB")),
        "warp_vector": Section("for (; j + (LOADS - 1) * stride", "sums[l] += wide<Acc>(av[l][k])",
                               ("load requests, thousands", "warp instructions, millions")),
        "streamed_rows": Section("Chunk<TA> va[U][R];", _TURN, _STREAM),
        "early_rows": Section("if (j + u * STEP < last) ptx::prefetch_l2",
                              "ptx::pdl_launch_dependents();", _STREAM),
        "clustered_rows": Section("push(&inbox[rank]", "total += inbox[c]", _STREAM),
        "col_transposed": Section("const TA* a = (const TA*)p.a", "finish((TY*)p.y", _ACCESS),
        "block_multiply_transposed": _MULTIPLY,
        "transpose_then": Section(
            "__shared__ TA tile[kTile][kTile + 1]", "copy[column * p.m + row] = tile",
            ("DRAM read, MB", "DRAM written, MB", "sectors a load request")),
    },
    "vecmat": {
        "thread_per_row": Section("const TA* a = (const TA*)p.a", "finish((TY*)p.y", _ACCESS),
        "shared_x": Section("for (i64 first = 0", "nobody may overwrite",
                            ("load requests, thousands", "warp instructions, millions")),
        "col_thread_per_row": Section("const TA* a = (const TA*)p.a", "finish((TY*)p.y",
                                      (*_ACCESS, "occupancy, %")),
        "block_multiply": Section("const BlockPlace at(p, WIDTH)", "multiply_block<Acc",
                                  ("sectors a load request", "occupancy, %")),
        "clustered_columns": Section("collect<S>(sum, parts, skew);", "s += inbox[r][c]",
                                     _COLUMNS),
        "block_columns": Section(" va[U];", "sum[i] += wide<Acc>(va[u].v[i])", _COLUMNS),
        "split_columns": Section("collect<S>(sum, parts, skew);", "work[c] = s;", _COLUMNS),
    },
    "matmul": {
        "naive": Section("for (i64 l = 0; l < p.k", "sum = add_product<FMA>(sum",
                         ("load requests, thousands", "L1 hits, %", "FMA pipe, %")),
        "shared_tile": Section("for (i64 first = 0", "nobody reads them",
                               ("load requests, thousands", *_SHARED)),
        "rectangular_tile": Section("for (int l = 0; l < TILE", "right += v *", _SHARED),
        "register_tile": Section("for (int l = 0; l < DEPTH", "sum[r][c] += column[r]",
                                 ("shared-memory passes, millions", "FMA pipe, %")),
        "vector_tile": Section("const bool more = first + DEPTH", "b.store(bs[now ^ 1])",
                               ("load requests, thousands", "FMA pipe, %", "issue slots used, %")),
        "tensor_core": Section("for (int l = 0; l < DEPTH; l += 16)", "mma(sum[r][c], fa[r]",
                               _TENSOR),
        "tensor_core_int8": Section("const u32 low0 = __byte_perm", "w[3] = __byte_perm",
                                    ("bank conflicts, % of passes", "tensor pipe, %")),
        "few_columns": Section("for (int j = 0; j < N; ++j) {", "sum[r * N + j] = dot(v[r]",
                               ("DRAM read, MB", "warp instructions, millions", "FMA pipe, %")),
        "few_columns_tensor": Section("for (int i = 0; i < 4; i += 2) {", "mma(d, rows, column",
                                      _TENSOR),
    },
    "quantized": {
        "int8_codes": Section("const typename Read::Piece piece", "sum += row.scale(group) * part",
                              ("DRAM read, MB", "issue slots used, %")),
        "int4_codes": Section("__device__ __forceinline__ int code_of", "else return piece[k / 2]",
                              ("DRAM read, MB", "warp instructions, millions")),
        "product_table_int8": Section("const i64 entry = (i64)", "((float*)p.work)[entry]",
                                      (*_ACCESS, "L2 hits, %")),
        "product_table_int4": Section("const typename Read::Piece piece", "sum += table[",
                                      (*_ACCESS, "L2 hits, %")),
        "any_codes": Section("const i64 group = p.groups > 1", "return Acc(wide<float>",
                             ("DRAM read, MB", "issue slots used, %")),
        "any_columns": Section("const i64 blocks = gridDim.x", "multiply_any<",
                               ("DRAM read, MB", "L2 hits, %")),
        "fragment_codes": Section("for (int j = 0; j < Shape::steps; ++j) {", "multiply(d, a,",
                                  ("DRAM read, MB", "issue slots used, %", "tensor pipe, %")),
        "transposed_fragments": Section("const Words codes = turned", "columns come first",
                                        ("DRAM read, MB", "issue slots used, %")),
        "clustered_fragments": Section("float total = 0;", "Meet::push(",
                                       ("DRAM read, MB", "occupancy, %")),
        "fragment_columns": Section("u32 a[4];", "for (int k = 0; k < NT; ++k) multiply(d[k]",
                                    ("L2 hits, %", "issue slots used, %", "tensor pipe, %")),
    },
}  # fmt: skip


def heart(rung: Rung, section: Section) -> Heart | None:
    """Return the lines that a section names, or None where no file of the rung holds them."""
    for path in _files(rung.source_path):
        lines = path.read_text(encoding="utf-8").splitlines()
        code = _between(lines, section.first, section.last)
        if code is not None:
            return Heart(path, code)
    return None


def _between(lines: list[str], first: str, last: str) -> str | None:
    ends = [i for i, line in enumerate(lines) if last in line]
    for end in ends:
        begins = [i for i in range(max(0, end - MOST_LINES + 1), end + 1) if first in lines[i]]
        if begins:
            kept = [x for x in lines[begins[-1] : end + 1] if not x.startswith("#pragma unroll")]
            return textwrap.dedent("\n".join([*kept, *_closing(kept)]))
    return None


def _closing(lines: Sequence[str]) -> list[str]:
    """Return the braces that would close those that the lines leave open."""
    stack: list[str] = []
    for line in lines:
        code = line.partition("//")[0]
        for character in code:
            if character == "{":
                stack.append(code[: len(code) - len(code.lstrip())])
            elif character == "}" and stack:
                stack.pop()
    return [f"{indent}}}" for indent in reversed(stack)]


def _files(source: Path) -> Iterator[Path]:
    """Yield a kernel's file and the headers it includes, nearest first."""
    waiting, seen = [source], {source}
    while waiting:
        path = waiting.pop(0)
        yield path
        for name in _INCLUDE.findall(path.read_text(encoding="utf-8")):
            header = HEADERS_FOLDER / name
            if header.is_file() and header not in seen:
                seen.add(header)
                waiting.append(header)
