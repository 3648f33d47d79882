"""What the compiler made of a CUDA kernel: its machine instructions, and how wide its loads are.

Disassembled by NVIDIA's nvdisasm, which needs neither GPU nor driver: from the PyPI package
``nvidia-cuda-nvdisasm`` or the CUDA toolkit.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

PACKAGE = "nvidia-cuda-nvdisasm"
_SECTION = re.compile(r"^\s*\.section\s+\.text\.([^\s,]+)")
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]+)")
# Loads of global memory, also those that go on to shared memory.
_LOAD = re.compile(r"LDG(STS)?\b")
_WIDTHS = {"256": 32, "128": 16, "64": 8, "U16": 2, "S16": 2, "U8": 1, "S8": 1}


@functools.cache
def disassembler() -> Path | None:
    """Return nvdisasm's path, or None where it is not installed."""
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    candidates = [Path(str(f.locate())) for f in files if f.name == "nvdisasm"]
    folders = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    candidates += [Path(folder) / "bin" / "nvdisasm" for folder in folders if folder]
    candidates += [Path(found) for found in [shutil.which("nvdisasm")] if found]
    return next((path for path in candidates if os.access(path, os.X_OK)), None)


def instructions(cubin: bytes) -> dict[str, tuple[str, ...]]:
    """Return the opcodes, with their modifiers, of every kernel of a cubin, by symbol.

    RuntimeError where nvdisasm is missing or does not understand the cubin.
    """
    program = disassembler()
    if program is None:
        raise RuntimeError(f"nvdisasm was not found. Install it: pip install {PACKAGE}")
    with tempfile.TemporaryDirectory(prefix="gemmule-sass-") as folder:
        path = Path(folder) / "kernels.cubin"
        path.write_bytes(cubin)
        # Where branches lead is not asked for, and takes nvdisasm nearly half of its time.
        command = [str(program), "--print-code", "--no-dataflow", str(path)]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"nvdisasm: {done.stderr.strip()[:500]}")
    return parse(done.stdout)


def parse(listing: str) -> dict[str, tuple[str, ...]]:
    """Return symbol -> opcodes of a listing.

    >>> parse("\\t.section .text.f,\\"ax\\"\\n  /*0000*/  @!P0 LDG.E.128 R4, [R2.64] ;")
    {'f': ('LDG.E.128',)}
    """
    found: dict[str, list[str]] = {}
    current: list[str] = []
    for line in listing.splitlines():
        if section := _SECTION.match(line):
            current = found.setdefault(section[1], [])
        elif instruction := _INSTRUCTION.match(line):
            current.append(instruction[1])
    return {symbol: tuple(opcodes) for symbol, opcodes in found.items()}


def load_widths(opcodes: Iterable[str]) -> Mapping[int, int]:
    """Return how many loads of global memory there are of each width in bytes.

    >>> dict(load_widths(["LDG.E.128.CONSTANT", "LDG.E.U16", "LDG.E", "LDS.128", "STG.E.128"]))
    {16: 1, 2: 1, 4: 1}
    """
    widths: Counter[int] = Counter()
    for opcode in opcodes:
        if _LOAD.match(opcode):
            parts = opcode.split(".")
            widths[next((_WIDTHS[part] for part in parts if part in _WIDTHS), 4)] += 1
    return widths
