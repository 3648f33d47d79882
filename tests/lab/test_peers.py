"""Peers are refused unless they compute A B: every classic mix-up is planted and must be caught."""

from __future__ import annotations

import dataclasses
import tracemalloc

import numpy as np
import pytest

from gemmule.core.problem import Problem, QuantSpec
from gemmule_lab.peers.cpu_float import PEERS as FLOAT
from gemmule_lab.peers.cpu_quantized import PEERS as QUANTIZED_ONLY
from gemmule_lab.peers.cpu_quantized import pack_bits
from gemmule_lab.peers.eigen import PEERS as EIGEN
from gemmule_lab.peers.ggml import PEERS as GGML
from gemmule_lab.peers.ggml import blocks
from gemmule_lab.peers.peer import Peer, Prepared, as_float64, check
from gemmule_lab.peers.registry import select

PLAIN = {p.name: p for p in (*FLOAT, *EIGEN)}
QUANTIZED = (*QUANTIZED_ONLY, *GGML)


def wrong(compute, **changes) -> Peer:
    def prepare(problem: Problem, a, b: np.ndarray) -> Prepared:
        return Prepared(lambda: None, lambda: compute(problem, as_float64(a), b.astype(np.float64)))

    peer = Peer("planted", "cpu", lambda: None, lambda p: None, prepare, lambda: "made up")
    return dataclasses.replace(peer, **changes)


def transposed_data(problem: Problem, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return a.reshape(a.shape[::-1]).T @ b  # row-major data read as column-major


def tail_forgotten(problem: Problem, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return a[:, :-1] @ b[:-1]


def rounded_to_half(problem: Problem, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return (a @ b * 1.001).astype(np.float16)


def one_nan(problem: Problem, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    result = a @ b
    result[-1] = np.nan
    return result


def swapped_nibbles(problem: Problem, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return a[:, np.arange(a.shape[1]) ^ 1] @ b


def test_right_results_pass() -> None:
    right = wrong(lambda problem, a, b: a @ b)
    for op, layout in (("matvec", "row"), ("matvec", "col"), ("matmul", "strided")):
        assert check(right, Problem(op, 64, 64, 64, layout_a=layout)) is None
    rounds = dataclasses.replace(right, activation_bits=8)
    assert check(rounds, Problem("matvec", 64, 64)) is None


@pytest.mark.parametrize("op", ["matvec", "matmul"])
@pytest.mark.parametrize(
    "compute", [transposed_data, tail_forgotten, rounded_to_half, one_nan, swapped_nibbles]
)
def test_mix_ups_are_refused(op: str, compute) -> None:
    assert "differ from A B" in (check(wrong(compute), Problem(op, 64, 64, 64)) or "")


@pytest.mark.parametrize("compute", [transposed_data, one_nan, swapped_nibbles])
def test_rounded_activations_excuse_no_mix_up(compute) -> None:
    planted = wrong(compute, activation_bits=8)
    assert "differ from A B" in (check(planted, Problem("matmul", 64, 64, 64)) or "")


def test_b_times_a_is_refused() -> None:
    swapped = wrong(lambda problem, a, b: b.T @ a.T)
    assert "shape" in (check(swapped, Problem("matmul", 64, 64, 64)) or "")
    raises = wrong(lambda problem, a, b: b @ a)
    assert "ValueError" in (check(raises, Problem("matmul", 64, 64, 64)) or "")


@pytest.mark.parametrize("op", ["matvec", "matmul"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16", "int64"])
def test_plain_peers_pass_in_every_layout(op: str, dtype: str) -> None:
    served = set()
    for layout in ("row", "col", "strided"):
        for layout_b in ("row", "col"):
            problem = Problem(
                op, 96, 80, 64, a=dtype, b=dtype, out=dtype, layout_a=layout, layout_b=layout_b
            )
            for peer in PLAIN.values():
                if peer.absent() is None and peer.refuses(problem) is None:
                    assert check(peer, problem) is None, (peer.name, problem)
                    served.add(peer.name)
    expected = {"torch"} if dtype == "bfloat16" else {"numpy"}
    assert expected <= served | {n for n, p in PLAIN.items() if p.absent()}


@pytest.mark.parametrize("op", ["matvec", "matmul"])
@pytest.mark.parametrize("layout", ["row", "col"])
@pytest.mark.parametrize("layout_b", ["row", "col"])
def test_what_is_timed_of_a_plain_peer_copies_no_operand(
    op: str, layout: str, layout_b: str
) -> None:
    """A copy in the timed call would make the peer slower than it is."""
    rng = np.random.default_rng(0)
    problem = Problem(op, 300, 250, 200, layout_a=layout, layout_b=layout_b)
    orders = {"row": "C", "col": "F"}
    shape = (problem.reduction,) if op == "matvec" else (problem.k, problem.n)
    a = np.asarray(rng.random((problem.m, problem.reduction), np.float32), order=orders[layout])
    b = np.asarray(rng.random(shape, np.float32), order=orders[layout_b])
    for peer in PLAIN.values():
        if peer.absent() is None and peer.refuses(problem) is None:
            prepared = peer.prepare(problem, a, b)
            prepared.call()
            tracemalloc.start()
            prepared.call()
            _, most = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            assert most < 10_000 < a.nbytes, peer.name


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [-1, 32, 128])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_quantised_peers_read_our_codes(bits: int, group: int, zeros: bool, dtype: str) -> None:
    spec = QuantSpec(bits, group, zeros, "row", "float32", False)
    name = "uint4" if bits == 4 else "uint8"
    for op in ("matvec", "matmul"):
        problem = Problem(op, 512, 1024, 1024, a=name, b=dtype, out=dtype, quant=spec)
        for peer in QUANTIZED:
            if peer.absent() is None and peer.refuses(problem) is None:
                assert check(peer, problem) is None, (peer.name, problem)


def test_absent_peers_are_named_with_the_reason() -> None:
    right = wrong(lambda problem, a, b: a @ b)
    gone = dataclasses.replace(right, name="gone", absent=lambda: "libfoo not installed")
    other = dataclasses.replace(right, name="other", refuses=lambda problem: "it needs int3")
    bad = dataclasses.replace(wrong(one_nan), name="bad")
    present, absences = select(Problem("matvec", 8, 8), peers=[right, gone, other, bad])
    assert [p.name for p in present] == ["planted"]
    assert [(a.name, a.reason) for a in absences[:2]] == [
        ("gone", "libfoo not installed"),
        ("other", "it needs int3"),
    ]
    assert absences[2].name == "bad"
    assert "1 of 192" in absences[2].reason


def test_modes_state_threads_and_version() -> None:
    for peer in (*PLAIN.values(), *QUANTIZED):
        if peer.absent() is None:
            assert "threads" in peer.mode(), peer.name


def test_pack_bits_puts_the_earlier_code_lower() -> None:
    codes = np.array([[1, 2, 3, 0, 2]], np.uint8)
    assert pack_bits(codes, 2).tolist() == [[1 | 2 << 2 | 3 << 4, 2]]
    assert pack_bits(codes, 4).tolist() == [[0x21, 0x03, 0x02]]
    assert pack_bits(codes, 8).tolist() == codes.tolist()


def read_block(data: bytes, kind: str) -> list[float]:
    """Return the 32 weights of one block, read byte by byte as the GGUF format states them."""
    (scale,) = np.frombuffer(data[:2], np.float16).astype(float)
    if kind == "Q8_0":
        return [scale * int(np.int8(np.uint8(byte))) for byte in data[2:]]
    offset = 0.0 if kind == "Q4_0" else float(np.frombuffer(data[2:4], np.float16)[0])
    nibbles = data[2:] if kind == "Q4_0" else data[4:]
    codes = [byte & 15 for byte in nibbles] + [byte >> 4 for byte in nibbles]
    lowest = 8 if kind == "Q4_0" else 0
    return [scale * (code - lowest) + offset for code in codes]


@pytest.mark.parametrize(("kind", "size"), [("Q4_0", 18), ("Q4_1", 20), ("Q8_0", 34)])
def test_ggml_blocks_hold_our_weights(kind: str, size: int) -> None:
    rng = np.random.default_rng(4)
    bits = int(kind[1])
    codes = rng.integers(0, 1 << bits, (3, 96)).astype(np.uint8)
    scales = 2.0 ** rng.integers(-3, 2, (3, 3))
    zeros = rng.integers(0, 16, (3, 3)).astype(np.float32)
    stored = blocks(codes, scales, zeros if kind == "Q4_1" else None, bits)
    scales, zeros = (np.repeat(values, 32, axis=1) for values in (scales, zeros))
    assert stored.shape == (3, 3, size)
    zero = zeros if kind == "Q4_1" else float(1 << (bits - 1))
    expected = (codes - zero) * scales
    read = [[w for block in row for w in read_block(block.tobytes(), kind)] for row in stored]
    np.testing.assert_array_equal(read, expected)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"bits": 8, "has_zeros": True}, "no zero points"),
        ({"group_size": 48}, "blocks of 32"),
        ({"transposed": True}, "transposed"),
    ],
)
def test_ggml_refuses_what_its_formats_cannot_hold(changes: dict, words: str) -> None:
    spec = QuantSpec(4, 32, False, "row", "float32", False)
    problem = Problem("matvec", 64, 96, a="uint4", quant=spec)
    assert GGML[0].refuses(problem) is None
    refusal = GGML[0].refuses(
        dataclasses.replace(problem, quant=dataclasses.replace(spec, **changes))
    )
    assert words in (refusal or "")
    assert "float64" in (GGML[0].refuses(dataclasses.replace(problem, b="float64")) or "")
    assert "blocks of 32" in (GGML[0].refuses(dataclasses.replace(problem, n=80)) or "")
