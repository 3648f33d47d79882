"""PTX by NVRTC itself: cuda.core would ask the driver first whether it is new enough to load it.

A driver that is not says so where the kernels are loaded; without one PTX can be compiled all the
same, as cubins can.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class RefusedError(Exception):
    """NVRTC's log of a program that it did not compile."""


def compiled(
    source: str, name: str, options: Sequence[bytes], names: Sequence[str]
) -> tuple[bytes, dict[str, str]]:
    """Return a program's PTX, ended as text of C is, and each kernel's symbol.

    name: of the program; names: of the kernels, as `nvrtc.compile_file` has them. RefusedError
    where it does not compile.
    """
    from cuda.bindings import nvrtc

    program = _done(nvrtc.nvrtcCreateProgram(source.encode(), name.encode(), 0, [], []))
    try:
        for one in names:
            _done(nvrtc.nvrtcAddNameExpression(program, one.encode()))
        (code,) = nvrtc.nvrtcCompileProgram(program, len(options), list(options))
        if int(code):
            log = bytearray(_done(nvrtc.nvrtcGetProgramLogSize(program)))
            _done(nvrtc.nvrtcGetProgramLog(program, log))
            raise RefusedError(log.rstrip(b"\0").decode(errors="replace"))
        symbols = {
            one: _done(nvrtc.nvrtcGetLoweredName(program, one.encode())).decode() for one in names
        }
        text = bytearray(_done(nvrtc.nvrtcGetPTXSize(program)))
        _done(nvrtc.nvrtcGetPTX(program, text))
        return bytes(text).rstrip(b"\0") + b"\0", symbols
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _done(result: tuple[Any, ...]) -> Any:
    """Return the value of a call's result tuple; RefusedError where the call failed."""
    if int(result[0]):
        raise RefusedError(f"NVRTC answered {result[0].name}")
    return result[1] if len(result) > 1 else None
