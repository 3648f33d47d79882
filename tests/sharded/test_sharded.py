"""Matvecs over several GPUs, every rank's buffers in this process, kernels under the emulator."""

from __future__ import annotations

import ctypes
import itertools
import random
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gemmule as gm
from cuemu.build import RUNGS, Module, compile_cu, device_array
from gemmule.arrays.interop import quantized_form
from gemmule.core.canonical import Options, canonical
from gemmule.core.operand import Form, alignment_of
from gemmule.core.problem import numpy_dtype
from gemmule.core.registry import cuda_rungs
from gemmule.sharded.product import PeerProduct
from gemmule.sharded.rows import STATE_BYTES, Rows, Seat, half_words, words_of
from proofs.proofs import proof_machine

DTYPES = ("float16", "bfloat16", "float32", "float64")
SEND, GATHER, WHOLE = "send", "gather", "whole"  # which blocks of a grid run


class Rank:
    """One GPU: its state, its share of the rows, and its kernel."""

    def __init__(self, world: World, index: int) -> None:
        first, count = world.rows.first(index), world.rows.counts[index]
        self.state, self.alarm = (
            device_array(STATE_BYTES // 8, np.uint64),
            device_array(1, np.uint64),
        )
        self.state[:], self.alarm[:] = 0, 0
        places = tuple(box.ctypes.data for box in world.inboxes)
        own = (self.state.ctypes.data, self.alarm.ctypes.data)
        self.seat = Seat(index, places, *own, world.half, world.patience_s)
        n = world.A.shape[1]
        self.operands, form = self._part(world.A[first : first + count], world.quantized)
        self.x = device_array(n, world.x_dtype)
        self.out = device_array(world.rows.total, world.x_dtype)
        vector = Form.packed((n,), self.x.dtype.name)
        self.product = PeerProduct(form, vector, world.rows, self.seat, proof_machine(), world.rung)
        self.source = self.product.rung.source_path
        self.copy: Path | None = None  # a library of its own runs beside others

    def _part(self, rows: np.ndarray[Any, Any], quantized: bool) -> tuple[Any, Form]:
        """Put this rank's rows somewhere; return their addresses and form."""
        if quantized:
            self.q = gm.quantize(rows, bits=4, group_size=32, scale_dtype="float16").to(
                layout="mma16"
            )
            zeros = 0 if self.q.zeros is None else self.q.zeros.ctypes.data
            form = self.q.kept(quantized_form)
            return (self.q.codes.ctypes.data, self.q.scales.ctypes.data, zeros, 0), form
        self.A = device_array((max(len(rows), 1), rows.shape[1]), rows.dtype)
        self.A[: len(rows)] = rows
        place = self.A.ctypes.data
        strides = (rows.shape[1], 1)
        return (place,), Form(rows.shape, strides, rows.dtype.name, alignment_of(place))

    def module(self) -> Module:
        step = self.product.step
        built = compile_cu(self.source, [step.kernel], defines=step.defines)
        return built if self.copy is None else Module(self.copy, [step.kernel])

    def launch(self, blocks: str = WHOLE, seed: int = 0) -> None:
        """Run these blocks of the grid to their end; the others are another launch."""
        step = self.product.step
        operands = (*self.operands, self.x.ctypes.data)
        packed = bytearray(self.product.packed(operands, self.out.ctypes.data))
        at = len(packed) - 4 * self.seat.room - 4
        row_blocks = int.from_bytes(packed[at : at + 4], "little")
        grid = {SEND: row_blocks, GATHER: step.grid[0] - row_blocks, WHOLE: step.grid[0]}[blocks]
        if blocks == GATHER:
            packed[at : at + 4] = bytes(4)
        if not grid:
            return
        self.module().launch(
            step.kernel,
            grid=(grid, 1, 1),
            block=step.block,
            cluster=step.cluster,
            args=[bytes(packed)],
            seed=seed,
            cooperative=blocks == WHOLE,
        )

    def tell(self) -> None:
        """Send what a rank without rows sends first; its blocks would go on to gather."""
        number = int(self.state[0]) // 64 + 1
        at = self.product.rows.total * words_of(self.product.dtype)
        for place in self.seat.inboxes:
            word = ctypes.c_uint64.from_address(place + 8 * (at + number % 2 * self.seat.half))
            word.value = number << 32


class World:
    """Several ranks, a matrix shared out to them, and what its products have to be."""

    def __init__(
        self,
        counts: tuple[int, ...],
        n: int,
        dtype: str = "float32",
        *,
        rung: str | None = None,
        patience_s: float = 5.0,
        quantized: bool = False,
    ) -> None:
        self.rows, self.rung, self.patience_s = Rows(counts), rung, patience_s
        self.quantized, self.x_dtype = quantized, numpy_dtype(dtype)
        self.half = half_words(self.rows.total, len(counts))
        self.inboxes = [device_array(2 * self.half, np.uint64) for _ in counts]
        for box in self.inboxes:
            box[:] = 0
        rng = np.random.default_rng(len(counts) * n)
        whole = rng.integers(-4, 5, (self.rows.total, n))
        self.A = whole.astype(np.float32 if quantized else self.x_dtype)
        self.ranks = [Rank(self, index) for index in range(len(counts))]

    def show(self, seed: int) -> np.ndarray[Any, Any]:
        """Give every rank the vector of this number; return the product."""
        x = np.random.default_rng(seed).integers(-3, 4, self.A.shape[1])
        for rank in self.ranks:
            rank.x[:] = x
            rank.out.view(np.uint8)[:] = 0xA5
        exact: np.ndarray[Any, Any] = self.A.astype(np.float64) @ x
        return exact


def right(rank: Rank, exact: np.ndarray[Any, Any]) -> None:
    assert rank.alarm[0] == 0
    np.testing.assert_array_equal(rank.out.astype(np.float64), exact)


def in_any_order(world: World, products: int = 4) -> None:
    """Let the ranks send and gather in any order; whoever gathers last gathers first next."""
    order = list(world.ranks)
    for number in range(products):
        exact = world.show(number)
        random.Random(number).shuffle(order)
        for rank in order:
            rank.launch(SEND, seed=number)
            if not world.rows.counts[rank.seat.rank]:
                rank.tell()
        for rank in order[::-1]:
            rank.launch(GATHER, seed=number)
            right(rank, exact)
            assert rank.state.tolist() == [64 * (number + 1), 0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_results_reach_every_rank(dtype: str) -> None:
    in_any_order(World((5, 3), 72, dtype))


def test_a_rank_without_rows_takes_part() -> None:
    in_any_order(World((4, 0, 9), 72))
    in_any_order(World((0, 3), 7, "float64"), 2)


def test_the_blocks_of_a_cluster_send_once() -> None:
    in_any_order(World((2, 3), 4096, rung="clustered_rows"), 2)


def test_the_quickest_rung_that_sends_is_chosen() -> None:
    machine, chosen = proof_machine(), set()
    sending = {rung.name: rung for rung in cuda_rungs() if rung.sends}
    for dtype, m, k in itertools.product(DTYPES, (16, 512, 32768), (128, 4096, 16384)):
        forms = Form.packed((m, k), dtype), Form.packed((k,), dtype)
        counts = Rows((m,))
        problem = canonical("matvec", *forms, None, Options()).problem
        suggested = {
            name: rung.suggest(problem, machine)
            for name, rung in sending.items()
            if rung.refusal(problem) is None
        }
        times = {name: one.expected_s for name, one in suggested.items() if one}
        found = PeerProduct(*forms, counts, Seat(0, (0,), 0, 0, 4096), machine)
        assert times[found.rung.name] == min(times.values())
        chosen.add(found.rung.name)
    assert len(chosen) > 1


@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
def test_complex_rows_are_refused(dtype: str) -> None:
    forms = Form.packed((64, 128), dtype), Form.packed((128,), dtype)
    with pytest.raises(TypeError, match="no kernel sends"):
        PeerProduct(
            *forms, Rows((64,)), Seat(0, (0,), 0, 0, 4096), proof_machine(), "streamed_rows"
        )


def test_quantised_rows() -> None:
    """The codes' rounding is the same whoever multiplies them."""
    world = World((33, 16), 64, "float16", quantized=True)
    assert world.ranks[0].product.rung.name == "fragment_codes"
    for number in range(2):
        world.show(number)
        for rank in world.ranks:
            rank.launch(SEND)
        for rank in world.ranks:
            rank.launch(GATHER)
        x = world.ranks[0].x.astype(np.float64)
        exact = np.concatenate([rank.q.dequantize().astype(np.float64) @ x for rank in world.ranks])
        for rank in world.ranks:
            np.testing.assert_allclose(rank.out.astype(np.float64), exact, rtol=2e-3, atol=2e-2)
            np.testing.assert_array_equal(rank.out, world.ranks[0].out)


def test_a_fast_rank_overwrites_nothing() -> None:
    """It sends the next product while another has yet to gather this one, and no more."""
    fast_and_slow(World((6, 6), 40))


def fast_and_slow(world: World) -> None:
    fast, slow = world.ranks
    first = world.show(1)
    fast.launch(SEND)
    slow.launch(SEND)
    fast.launch(GATHER)
    right(fast, first)
    second = world.show(2)
    fast.launch(SEND)
    slow.launch(GATHER)
    right(slow, first)
    slow.launch(SEND)
    for rank in (slow, fast):
        rank.launch(GATHER)
        right(rank, second)


def test_a_late_rank_is_named_and_its_rows_are_nan() -> None:
    late(World((3, 2, 4), 24, patience_s=0.02))


def late(world: World) -> None:
    for number in range(3):  # both halves of the inboxes hold old words of everyone
        exact = world.show(number)
        for rank in world.ranks[: 3 if number < 2 else 2]:
            rank.launch(SEND)
        if number == 2:
            break
        for rank in world.ranks:
            rank.launch(GATHER)
    waiting = world.ranks[0]
    waiting.launch(GATHER)
    assert int(waiting.alarm[0]) == 3 << 32 | (1 + 2)
    np.testing.assert_array_equal(waiting.out[:5].astype(np.float64), exact[:5])
    assert np.isnan(waiting.out[5:]).all()
    assert waiting.state.tolist() == [64 * 3, 1], "later products wait no more"


def test_a_rank_without_rows_is_missed_too() -> None:
    world = World((3, 0, 4, 0), 24, patience_s=0.02)
    world.show(0)
    for rank in world.ranks[:3]:
        rank.launch(SEND)
    world.ranks[1].tell()
    world.ranks[0].launch(GATHER)
    assert int(world.ranks[0].alarm[0]) == 1 << 32 | (1 + 3)


def at_once(world: World, products: int) -> None:
    """Run every rank's whole grids in a thread of its own; a pause makes now one rank late."""
    exact = [world.show(number) for number in range(products)]
    faults: list[BaseException] = []

    def work(rank: Rank) -> None:
        pause = random.Random(rank.seat.rank)
        try:
            for number in range(products):
                rank.x[:] = np.random.default_rng(number).integers(-3, 4, rank.x.size)
                if pause.random() < 0.3:
                    threading.Event().wait(0.02)
                rank.launch(WHOLE, seed=number)
                right(rank, exact[number])
        except BaseException as fault:
            faults.append(fault)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in world.ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not faults, faults


def test_ranks_at_the_same_time(tmp_path: Path) -> None:
    world = World((5, 4), 40)
    library = world.ranks[0].module()._library._name
    for rank in world.ranks:
        rank.copy = tmp_path / f"{rank.seat.rank}.so"
        shutil.copy(library, rank.copy)
    at_once(world, 12)


FAULTS = {
    "one half for all products": ("number & 1 ? p.half : 0", "0"),
    "an old word will do": ("if ((u32)(found[k] >> 32) != wanted)", "if (found[k] == 0)"),
    "a rank keeps its results": ("if (q < p.world)", "if (q == 0)"),
    "a block's share is lost": ("block ? 1 : 64 - (blocks - 1)", "block ? 1 : 63 - (blocks - 1)"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_seen(fault: str, tmp_path: Path) -> None:
    for header in RUNGS.glob("*.cuh"):
        shutil.copy(header, tmp_path)
    text = (tmp_path / "peers.cuh").read_text()
    assert FAULTS[fault][0] in text
    (tmp_path / "peers.cuh").write_text(text.replace(*FAULTS[fault]))
    seen = 0
    for check, counts in ((fast_and_slow, (6, 6)), (late, (3, 2, 4))):
        world = World(counts, 24, patience_s=0.02)
        for rank in world.ranks:
            rank.source = Path(shutil.copy(rank.source, tmp_path))
        try:
            check(world)
        except AssertionError:
            seen += 1
    assert seen, f"{fault}: nothing noticed"
