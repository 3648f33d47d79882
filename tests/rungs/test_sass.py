"""Where a rung claims 16-byte loads, its machine code has them: read from the compiled kernels."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import sass
from gemmule.backends.cuda import nvrtc
from gemmule.core.problem import QuantSpec
from gemmule.core.registry import all_rungs
from gemmule.core.rung import HEADERS_FOLDER, Rung
from gemmule.oracle.problems import make_problem
from proofs import proofs

pytestmark = pytest.mark.skipif(
    sass.disassembler() is None, reason=f"nvdisasm is missing: pip install {sass.PACKAGE}"
)
HALVES, BYTES = ("float16",) * 3, ("int8", "int8", "int32")


@dataclass(frozen=True)
class Claim:
    """A rung at one point of its space: at least so many 16-byte loads of A and of x or B."""

    rung: str
    loads: int
    params: Mapping[str, Any] = field(default_factory=dict)
    signature: tuple[str, str, str] = HALVES

    def __str__(self) -> str:
        words = [f"{k}={v}" for k, v in self.params.items()]
        return " ".join([self.rung, self.signature[0], *words])


# Rows of halves: a load of x goes with every load of A, in the loop of several and in that of one.
CLAIMS = (
    *(
        Claim(rung, 2 * (values // 8 + 1), {"values": values})
        for rung in ("p_threads_vector", "two_step", "y_blocks")
        for values in (8, 16, 32)
    ),
    Claim("p_threads_vector", 2 * (2 + 1), {"values": 32}, BYTES),
    *(Claim("warp_vector", 2 * (loads + 1), {"loads": loads}) for loads in (1, 2, 4)),
    # x comes from shared memory, where one load of each block's share puts it.
    *(Claim("vector_shared_x", 1 + values // 8 + 1, {"values": values}) for values in (8, 16, 32)),
    Claim("streamed_rows", 2),
    Claim("streamed_rows", 2, signature=BYTES),
    Claim("clustered_columns", 1),
    Claim("split_columns", 1),
    Claim("vector_tile", 2, signature=("float32",) * 3),
    # 16 or 32 codes make one load; as many halves of x make two or four.
    Claim("int8_codes", 1 + 2, {"values": 16}, ("uint8", "float16", "float16")),
    Claim("int4_codes", 1 + 4, {"values": 32}, ("uint4", "float16", "float16")),
    Claim("product_table_int8", 1, {"values": 16}, ("uint8", "float16", "float16")),
    # product_table_int4 loads 8 bytes at most: 16 codes.
)


def problem_of(rung: Rung, signature: tuple[str, str, str]) -> Any:
    quant = None
    if rung.quantized:
        quant = QuantSpec(4 if signature[0] == "uint4" else 8, None, False, "row", "float32", False)
    return make_problem(rung.op, 4096, 4096, 4096, signature, layout_a=rung.layouts[0], quant=quant)


def loads_of(claim: Claim, source: Path | None = None) -> int:
    """Return how many 16-byte loads the kernel of the product has."""
    rung = next(r for r in all_rungs("cuda") if r.name == claim.rung)
    problem = problem_of(rung, claim.signature)
    params = rung.check_params(problem, claim.params)
    steps = rung.steps(problem, params, proofs.proof_machine())
    (kernel,) = {s.kernel for s in steps if s.kernel.startswith(claim.rung)}
    module, _ = nvrtc.build(source or rung.source_path, (kernel,), proofs.PROOF_ARCH)
    opcodes = sass.instructions(module.cubin)[module.symbols[kernel]]
    return sass.load_widths(opcodes).get(16, 0)


@pytest.mark.parametrize("claim", CLAIMS, ids=str)
def test_claimed_loads_are_16_bytes_wide(claim: Claim) -> None:
    assert loads_of(claim) >= claim.loads


@pytest.mark.parametrize(("alignment", "kept"), [("sizeof(T) * N", True), ("sizeof(T)", False)])
def test_vectors_aligned_to_two_bytes_are_caught(
    alignment: str, kept: bool, tmp_path: Path, limit: Callable[..., None]
) -> None:
    """Plant the document's mistake: vectors read as a struct of halves, aligned as one half."""
    for header in HEADERS_FOLDER.glob("*.cuh"):
        shutil.copy(header, tmp_path)
    edits = (
        ("ptx.cuh", "struct alignas(sizeof(T) * N) Vec {", f"struct alignas({alignment}) Vec {{"),
        ("rows.cuh", "return ptx::ld_stream((const Piece*)p);", "return *(const Piece*)p;"),
    )
    for name, old, new in edits:
        text = (tmp_path / name).read_text()
        assert text.count(old) == 1
        (tmp_path / name).write_text(text.replace(old, new))
    claim = next(c for c in CLAIMS if c.rung == "two_step")
    source = next(r for r in all_rungs("cuda") if r.name == claim.rung).source_path
    limit(nvrtc, HEADERS_FOLDER=tmp_path)
    assert (loads_of(claim, source) >= claim.loads) == kept


@pytest.mark.parametrize("name", ["naive", "shared_tile"])
def test_without_fma_products_and_sums_are_instructions_of_their_own(name: str) -> None:
    rung = next(r for r in all_rungs("cuda") if r.name == name)
    problem = problem_of(rung, ("float32",) * 3)
    counts = {}
    for fma in (True, False):
        params = rung.check_params(problem, {"fma": fma})
        (step,) = rung.steps(problem, params, proofs.proof_machine())
        module, _ = nvrtc.build(rung.source_path, (step.kernel,), proofs.PROOF_ARCH)
        opcodes = sass.instructions(module.cubin)[module.symbols[step.kernel]]
        counts[fma] = Counter(opcode.partition(".")[0] for opcode in opcodes)
    fused, apart = counts[True], counts[False]
    products = fused["FFMA"] - apart["FFMA"]
    assert products > 0
    assert apart["FMUL"] - fused["FMUL"] >= products
    assert apart["FADD"] - fused["FADD"] >= products


def test_the_documents_kernels_compile_for_turing() -> None:
    """The pages say so, and that nothing was run there."""
    found = [r for r in all_rungs("cuda") if r.source.startswith("document 00")]
    assert len(found) == 19
    for rung in found:
        int4 = "uint4" if rung.name.endswith("int4") or rung.name.startswith("int4") else "uint8"
        signature = (int4, "float16", "float16") if rung.quantized else ("float32",) * 3
        problem = problem_of(rung, signature)
        steps = rung.steps(problem, rung.check_params(problem, None), proofs.proof_machine())
        module, _ = nvrtc.build(rung.source_path, tuple({s.kernel for s in steps}), "sm_75")
        assert module.cubin
