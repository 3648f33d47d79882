"""Instruction kinds are told apart, and the hottest loop is the one that multiplies."""

from __future__ import annotations

from pathlib import Path

import pytest

from checkout import ROOT
from children import printed
from gemmule.backends.cpu import jit
from pages.instructions import hottest_loop, kind_of

ASSEMBLY = """
	.text
kernel:
	pushq	%rbx
.LBB0_1:                                # outer
	vpxord	%zmm9, %zmm9, %zmm9
.LBB0_2:
	vmovups	(%rsi,%rax,4), %zmm0            # a ( b )
	vfmadd231ps	(%rdx,%rax,4), %zmm0, %zmm1
	vfmadd231ps	64(%rdx){1to16}, %zmm0, %zmm2
	addq	$16, %rax
	cmpq	%rax, %rcx
	jne	.LBB0_2
	decq	%rbx
	jne	.LBB0_1
.LBB0_3:
	vmovss	(%rsi), %xmm0
	vfmadd231ss	(%rdx), %xmm0, %xmm1
	jne	.LBB0_3
	retq
"""


def test_the_innermost_loop_with_the_widest_products_counts() -> None:
    mix = hottest_loop(ASSEMBLY)
    assert mix is not None
    assert dict(mix.counts) == {"multiply-add": 2, "load": 1, "scalar": 3}
    assert (mix.width, mix.folded, mix.arithmetic, mix.total) == (64, 2, 2, 6)


def test_a_function_without_a_loop_has_no_mix() -> None:
    assert (
        hottest_loop("f:\n\tvmulps\t%zmm0, %zmm1, %zmm2\n\tjmp\t.LBB0_9\n.LBB0_9:\n\tret") is None
    )


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("vpdpbusd\t(%rax){1to16}, %zmm1, %zmm2", "dot product"),
        ("vfnmadd213ps\t%ymm0, %ymm1, %ymm2", "multiply-add"),
        ("vmulps\t%zmm0, %zmm1, %zmm2", "multiply"),
        ("vsubps\t%zmm0, %zmm1, %zmm2", "add"),
        ("vpmulld\t%zmm0, %zmm1, %zmm2", "multiply"),
        ("vcvtdq2ps\t%zmm0, %zmm1", "convert"),
        ("vcvtph2ps\t(%rax), %zmm1", "convert"),
        ("vpmovzxwd\t(%rax), %zmm1", "convert"),
        ("vpermps\t%zmm0, %zmm1, %zmm2", "look-up, shuffle"),
        ("vpsrld\t$4, %zmm0, %zmm1", "shift, logic"),
        ("vpslld\t$16, %zmm0, %zmm1", "shift, logic"),
        ("vpshufb\t%zmm0, %zmm1, %zmm2", "look-up, shuffle"),
        ("vmovups\t(%rax), %zmm0", "load"),
        ("vmovdqu8\t(%rax), %zmm0 {%k1} {z}", "load"),
        ("vmovups\t%zmm0, 64(%rax)", "store"),
        ("vmovdqu8\t%zmm0, (%rax) {%k1}", "store"),
        ("vextractf128\t$1, %ymm0, (%rax)", "store"),
        ("vmovaps\t%zmm0, %zmm1", "scalar"),
        ("prefetcht0\t(%rax)", "prefetch"),
        ("movq\t%rax, 8(%rsp)", "scalar"),
        ("addq\t$64, %rax", "scalar"),
    ],
)
def test_kinds(line: str, kind: str) -> None:
    assert kind_of(line) == kind


TOOLS = ROOT / "tools"
SCRIPT = """
import numpy as np, gemmule as gm
from pages.instructions import mix_of_run
A, x = np.ones((8, 256), np.float32), np.ones(256, np.float32)
mix = mix_of_run(lambda: gm.matvec(A, x, rung="four_rows"))
print(mix.counts["multiply-add"], mix.width)
print(mix_of_run(lambda: gm.matvec(A, x, rung="four_rows")))
"""


@pytest.mark.skipif(jit.unavailable() is not None, reason="kernels need llvmlite")
def test_a_rung_compiled_anew_shows_its_loop(tmp_path: Path) -> None:
    said = printed(SCRIPT, GEMMULE_CACHE=tmp_path, GEMMULE_DEVICE="cpu")
    first, second = said.splitlines()
    products, width = (int(word) for word in first.split())
    assert products >= 4, "four rows take four multiply-adds a turn at least"
    assert width in (16, 32, 64)
    assert second == "None", "nothing is compiled twice"
