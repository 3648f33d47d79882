"""Registers of AVX-512 in pairs of AVX2's: kernels of wide vectors run on any processor, slowly.

A plugin for a process of its own (``pytest -p wide_emulation``): what is compiled while it is there
stands for another processor's code. Vectors of 64 bytes are LLVM's to take apart; instructions that
kernels call by name are spelt out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gemmule.backends.cpu import features, ir, jit_cache, simd

WIDE = {"avx512f", "avx512bw", "avx512dq", "avx512vl"}


def _looked_up(builder: Any, index: Any, *tables: Any) -> Any:
    """Emit the elements of one table or two that the lowest bits of each lane of `index` name."""
    element, count = tables[0].type.element, len(tables) * tables[0].type.count
    room = builder.alloca(ir.ArrayType(element, count))
    for number, table in enumerate(tables):
        at = builder.gep(room, [ir.IntType(32)(0), ir.IntType(32)(number * table.type.count)])
        builder.store(table, builder.bitcast(at, table.type.as_pointer()), align=1)
    found = tables[0].type(ir.Undefined)
    for lane in range(tables[0].type.count):
        place = ir.IntType(32)(lane)
        number = builder.and_(builder.extract_element(index, place), index.type.element(count - 1))
        number = builder.zext(number, ir.IntType(64))
        value = builder.load(builder.gep(room, [ir.IntType(32)(0), number]))
        found = builder.insert_element(found, value, place)
    return found


SPELT_OUT: dict[str, Callable[..., Any]] = {
    "llvm.x86.avx512.permvar.hi.512": lambda b, table, index: _looked_up(b, index, table),
    "llvm.x86.avx512.permvar.sf.512": lambda b, table, index: _looked_up(b, index, table),
    "llvm.x86.avx512.vpermi2var.hi.512": lambda b, one, index, other: _looked_up(
        b, index, one, other
    ),
}


def pytest_configure(config: Any) -> None:
    """Let rungs and kernels find a processor with wide registers."""
    present = features.target_features()[0] | WIDE
    features.target_features = lambda: (present, None)
    jit_cache.identity = lambda: features.identity() + "wide vectors in pairs"
    called = simd.called

    def spelt_out(builder: Any, name: str, result: Any, *arguments: Any) -> Any:
        made = SPELT_OUT.get(name)
        if made is not None:
            return made(builder, *arguments)
        return called(builder, name, result, *arguments)

    simd.called = spelt_out
