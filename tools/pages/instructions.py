"""What a CPU kernel is made of: the instructions of its hottest loop, by kind, from its assembly.

The assembly is LLVM's (x86-64, AT&T syntax). The hottest loop is taken to be the innermost one
with the most vector arithmetic; its counts are per turn of that loop.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from gemmule.backends.cpu.assembler import assembly
from gemmule.backends.cpu.jit import _LOADED, Kernel
from gemmule.backends.cpu.jit_cache import ENTRY
from gemmule.backends.cpu.language import module_of

KINDS = (
    "multiply-add", "dot product", "multiply", "add", "convert", "look-up, shuffle",
    "shift, logic", "load", "store", "prefetch", "scalar",
)  # fmt: skip
ARITHMETIC = frozenset(KINDS[:4])
WIDTHS = {"zmm": 64, "ymm": 32, "xmm": 16}

# Mnemonic patterns of vector instructions, the first that fits counts.
_PATTERNS = tuple(
    (kind, re.compile(pattern))
    for kind, pattern in (
        ("prefetch", r"prefetch"),
        ("multiply-add", r"vfn?m(add|sub)\d"),
        ("dot product", r"vpdp|vdpbf16|vpmadd"),
        ("convert", r"vcvt|vpmov[sz]x|vpmov[dqw][bwd]"),
        ("look-up, shuffle", r"vperm|vpshuf|vpunpck|vunpck|vshuf|vbroadcast|vpbroadcast|vpalign"
                             r"|vextract|vinsert|vpinsr|vpextr|vblend|vpblend|vmovs[lh]dup|vpack"),
        ("shift, logic", r"vps[lr]|vpand|vpor|vpxor|vand|vor|vxor|vptern|vpcmp|vcmp|vpmin|vpmax"
                         r"|vmin|vmax"),
        ("multiply", r"vmul|vpmul|vdiv"),
        ("add", r"vadd|vsub|vpadd|vpsub|vhadd"),
    )
)  # fmt: skip
_JUMP = re.compile(r"j\w+\s+(\S+)$")
_MOVE = re.compile(r"v?movn?t?[audps]|vmovdq|vmov[dqs]")


@dataclass(frozen=True, slots=True)
class Mix:
    """Instructions of one turn of a loop by kind, and the widest vectors in it, in bytes.

    An instruction that works on memory counts under its arithmetic; `folded` says how many do.
    """

    counts: Mapping[str, int]
    width: int
    folded: int

    @property
    def arithmetic(self) -> int:
        """Vector multiplications, additions and dot products."""
        return sum(self.counts.get(kind, 0) for kind in ARITHMETIC)

    @property
    def rank(self) -> tuple[int, int, float]:
        """By this the hottest loop is told: products a turn, and how dense they are.

        Plain multiplications count second: those of addresses look like those of values.
        """
        fused = sum(self.counts.get(kind, 0) for kind in KINDS[:2])
        products = fused + self.counts.get("multiply", 0)
        return fused * self.width, products * self.width, products / self.total

    @property
    def total(self) -> int:
        """All instructions."""
        return sum(self.counts.values())


def hottest_loop(assembly: str) -> Mix | None:
    """Return the mix of the innermost loop with the most vector products, None without a loop.

    >>> text = ".L1:\\n vmovups (%rax), %zmm0\\n vfmadd231ps (%rbx), %zmm0, %zmm1\\n jne .L1"
    >>> mix = hottest_loop(text)
    >>> dict(mix.counts), mix.width, mix.folded
    ({'load': 1, 'multiply-add': 1, 'scalar': 1}, 64, 1)
    """
    mixes = [mix_of(body) for body in _innermost(assembly)]
    return max(mixes, key=lambda mix: mix.rank, default=None)


def _innermost(assembly: str) -> list[list[str]]:
    """Return the bodies of loops that hold no loop: from a label to the jump back to it."""
    lines = [line.split("#")[0].strip() for line in assembly.splitlines()]
    lines = [line for line in lines if line and (line.endswith(":") or not line.startswith("."))]
    places: dict[str, int] = {}
    spans: list[tuple[int, int]] = []
    for place, line in enumerate(lines):
        if line.endswith(":"):
            places[line[:-1]] = place
        elif (jump := _JUMP.match(line)) and jump[1] in places:
            spans.append((places[jump[1]], place))
    inner = [
        (low, high)
        for low, high in spans
        if not any((a, b) != (low, high) and low <= a and b <= high for a, b in spans)
    ]
    return [[x for x in lines[low : high + 1] if not x.endswith(":")] for low, high in inner]


def mix_of(instructions: Iterable[str]) -> Mix:
    """Return the mix of some instructions in AT&T syntax."""
    counts: dict[str, int] = {}
    width = folded = 0
    for line in instructions:
        kind = kind_of(line)
        counts[kind] = counts.get(kind, 0) + 1
        if kind in ARITHMETIC:
            width = max([width, *(size for name, size in WIDTHS.items() if f"%{name}" in line)])
            folded += "(" in line
    return Mix({kind: counts[kind] for kind in KINDS if kind in counts}, width, folded)


def kind_of(line: str) -> str:
    """Return the kind of one instruction; what is not of vectors is ``scalar``."""
    mnemonic, _, operands = line.partition("\t")
    if not operands:
        mnemonic, _, operands = line.partition(" ")
    if mnemonic.startswith("prefetch"):
        return "prefetch"
    if "%xmm" not in operands and "%ymm" not in operands and "%zmm" not in operands:
        return "scalar"
    for kind, pattern in _PATTERNS:
        if pattern.match(mnemonic):
            loads = kind in ("convert", "look-up, shuffle") and operands.rstrip().endswith(")")
            return "store" if loads else kind
    if _MOVE.match(mnemonic):
        if operands.rstrip().rstrip("}").split("{")[0].rstrip().endswith(")"):
            return "store"
        return "load" if "(" in operands else "scalar"
    return "scalar"


def compiled_by(run: Callable[[], Any]) -> list[str]:
    """Run something and return the assembly of every kernel loaded meanwhile, of new ones only."""
    before = set(_LOADED)
    run()
    kernels = {one.key: one for one in gc.get_objects() if isinstance(one, Kernel)}
    return [
        assembly(str(module_of(kernels[key], parameters, ENTRY, for_python=for_python)))
        for key, parameters, for_python in set(_LOADED) - before
    ]


def mix_of_run(run: Callable[[], Any]) -> Mix | None:
    """Return the hottest loop of whatever a first run compiles; None when nothing was compiled."""
    mixes = [mix for text in compiled_by(run) if (mix := hottest_loop(text)) is not None]
    return max(mixes, key=lambda mix: mix.rank, default=None)
