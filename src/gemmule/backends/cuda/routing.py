"""Grouped products of rows that nobody sorted: what runs in front of the product and behind it.

Kernels sort the slots by their experts and gather the rows of A in that order, the product is any
rung's, and one delivers its sums: to their slots, weighted and added up, or through a gate. Of few
slots some rungs do all that themselves, but for weighted sums, and of sorted rows the gate. All is
in the order of the caller's stream, each started before the one in front has ended where the device
can; no host learns what the indices are.
"""

from __future__ import annotations

import contextlib
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from gemmule.backends.cuda import arrays as device_arrays
from gemmule.backends.cuda import driver, launch_args, nvrtc, starter
from gemmule.backends.cuda.convert import CTYPE
from gemmule.backends.cuda.grouped import GroupedLauncher
from gemmule.backends.cuda.starter import Start, cuda_rung
from gemmule.core.grouped import Routed
from gemmule.core.operand import Form, Operand
from gemmule.core.problem import ITEMSIZE
from gemmule.core.rung import ByIndex, Step

SOURCE = Path(__file__).with_suffix(".cu")
ARGS = struct.Struct("<8Q13q")
SORTERS, THREADS = 1024, 256
FEW_SLOTS, FEW_EXPERTS = 256, 4096  # that each block sorts for itself
TAIL = struct.Struct("<qQ")  # behind the QuantArgs of a rung that sorts for itself
INDEX = {"int32": "int", "int64": "long long"}
BITS = {2: "unsigned short", 4: "unsigned", 8: "unsigned long long"}


@dataclass(frozen=True, slots=True)
class Given:
    """The operands of a call; `weights`, and `indices` or `ends`, may be None."""

    a: Operand
    w: Operand
    indices: Operand | None
    weights: Operand | None
    ends: Operand | None


class Kernels(NamedTuple):
    """What is started in turn. itself: `multiply` reads rows and writes results where they lie."""

    before: list[Start]
    multiply: Start
    deliver: Start
    itself: bool


class RoutedLauncher:
    """A prepared product with what surrounds it.

    product: of the rows in order, None without experts. forms: of A, indices and weights, and of
    rows, ends and sums. early: whether kernels are started before the one in front has ended.
    """

    def __init__(
        self,
        routed: Routed,
        product: GroupedLauncher | None,
        given: tuple[Form, Form | None, Form | None],
        forms: tuple[Form, Form, Form],
        *,
        early: bool,
    ) -> None:
        self.routed, self.product, self.given = routed, product, given
        self.forms, self.early = forms, early
        slots, experts = routed.slots, routed.experts
        sorting = 4 * (2 * experts + 2 * slots) if routed.sorts else 0
        rows = slots * forms[0].strides[0] * ITEMSIZE[forms[0].dtype] if routed.sorts else 0
        sums = slots * forms[2].strides[0] * ITEMSIZE[forms[2].dtype]
        self.places = [0, _whole(sorting), _whole(sorting) + _whole(rows)]
        self.bytes = self.places[2] + sums
        self._ready: dict[tuple[int, bool, int], Kernels] = {}

    def __call__(self, given: Given, out: Operand) -> None:
        """Launch on operands of the prepared forms, on the caller's stream of their device."""
        ordinal = device_arrays.ordinal_of(out)
        stream = device_arrays.current_stream(out, ordinal)
        memory, owner = device_arrays.workspace(out, self.bytes)
        coded = given.w.form.quant is not None
        matrix = launch_args.packed_addresses(given.w.array.matrix) if coded else given.w.pointer
        others = (given.indices, given.weights, given.ends)
        indices, weights, ends = (0 if one is None else one.pointer for one in others)
        start = self.starter(ordinal, out.form)
        current = driver.is_current(ordinal)
        with contextlib.nullcontext() if current else driver.on_device(ordinal):
            start(stream, memory, given.a.pointer, matrix, indices, weights, ends, out.pointer)
        del owner  # its allocator reuses the memory in stream order

    def starter(self, ordinal: int, out: Form) -> Start:
        """Return ``start(stream, memory, a, w, indices, weights, ends, result)`` of addresses.

        w: of codes the four of the matrix, packed. ends: of no account with indices.
        """
        routed, (rows_form, _, sums_form) = self.routed, self.forms
        to_rows, to_sums = self.places[1:]
        a_steps, out_steps = _steps_of(self.given[0]), _steps_of(out)
        sizes = routed.slots, routed.top_k, routed.experts, routed.k, routed.columns
        lines = rows_form.strides[0], sums_form.strides[0]
        numbers = (*sizes, *a_steps, *lines, *out_steps)
        a_bytes, out_bytes = ITEMSIZE[self.given[0].dtype], ITEMSIZE[out.dtype]
        # What begins at whole vectors, but for the address that is added to it.
        a_starts = (a_steps[0] | a_steps[1]) * a_bytes | (0 if a_steps[2] == 1 else 1)
        together = 16 // ITEMSIZE[sums_form.dtype]
        out_starts = (out_steps[0] | out_steps[1]) * out_bytes
        if out_steps[2] != 1 or routed.columns % together:
            together = 1
        sorts, product, coded = routed.sorts, self.product, self.product and self.product.quantized
        combined, to_places = self.given[2] is not None, 4 * (routed.experts + routed.slots)

        def start(
            stream: int,
            memory: int,
            a: int,
            w: Any,
            indices: int,
            weights: int,
            ends: int,
            result: int,
        ) -> None:
            rows, sums = memory + to_rows, memory + to_sums
            if sorts:
                ends = memory
            wide = not (a | a_starts) & 15
            several = 1 if (result | out_starts) & (together * out_bytes - 1) else together
            ready = self._ready.get((ordinal, wide, several))
            if ready is None:
                ready = self._loaded(ordinal, wide, several, out)
            before, multiply, deliver, itself = ready
            packed = ARGS.pack(indices, weights, a, result, memory, rows, sums, ends, *numbers)
            for one in before:
                one(stream, packed)
            if itself:
                pair = (w, a) if coded else (a, w)
                if combined:
                    multiply(stream, *pair, sums, indices, (memory + to_places,))
                else:
                    multiply(stream, *pair, result, indices if sorts else ends)
            elif product is not None:
                left = rows if sorts else a
                if coded:
                    multiply(stream, w, left, sums, ends)
                else:
                    multiply(stream, left, w, sums, ends)
            if product is not None or sorts:
                deliver(stream, packed)

        return start

    def alone(self, ordinal: int, out: Form) -> Start | None:
        """Return ``start(stream, left, right, result, indices or ends)`` where one launch is all.

        A and result begin at whole 16 bytes. None where there are more launches.
        """
        if self.given[2] is not None:
            return None
        several = 16 // ITEMSIZE[self.forms[2].dtype]  # of no account without a kernel behind
        ready = self._loaded(ordinal, True, several, out)
        return ready.multiply if ready.itself else None

    def _loaded(self, ordinal: int, wide: bool, several: int, out: Form) -> Kernels:
        """Load the kernels in front of the product, its own, and the one behind it."""
        itself = self._itself(ordinal, out) if wide else None
        before = [] if itself else self._sorting(wide)
        after = [self._deliver(several, out.dtype, gated=self.routed.gated and itself is None)]
        if itself and self.given[2] is None:
            after = []
        surrounding = [*before, *after]
        names = tuple(step.kernel for step in surrounding)
        arch = driver.device_info(ordinal).arch
        module = nvrtc.compile_file(SOURCE, names, arch) if names else None
        starts = [
            starter.whole_starter(starter.loaded(module, (step,), bytes(ARGS.size), ordinal))
            for step in surrounding
            if module is not None
        ]
        multiply = itself or (_nothing if self.product is None else self.product.starter(ordinal))
        deliver: Start = starts[-1] if after else _nothing
        found = Kernels(starts[: len(before)], multiply, deliver, itself is not None)
        self._ready[ordinal, wide, several] = found
        return found

    def _itself(self, ordinal: int, out: Form) -> Start | None:
        """Return what starts a product that does it all; None where none does.

        It finds the rows of few slots, and has a gate.
        """
        product, routed, (a, indices, weights) = self.product, self.routed, self.given
        if product is None or (indices is not None and routed.slots > FEW_SLOTS):
            return None
        choice, of_slot = product.choice, _of_slot(a, routed.top_k)
        rung, quant = cuda_rung(choice), choice.problem.quant
        to_slot = _of_slot(out, routed.top_k) if weights is None else self.forms[2].strides[0]
        if rung.routed is None or of_slot is None or to_slot is None:
            return None
        index = None if indices is None else indices.dtype
        way = ByIndex(index, routed.gated, routed.out if weights is None else routed.sums)
        step = rung.routed(choice.problem, choice.params, choice.machine, way)
        if step is None:
            return None
        y_step = out.strides[-1] if weights is None else 1
        row = a.strides[0 if len(a.shape) == 2 else 1]
        each = routed.top_k if len(a.shape) == 2 else 1  # slots of a row
        if quant is None:
            given = {"a_row": row, "c_row": to_slot, "c_col": y_step}
            template, words = launch_args.changed(product.template, given), "4Q"
        else:
            stored = launch_args.stored_numbers(quant, routed.k)[:3]
            sizes = routed.n, routed.k, routed.slots, *stored, routed.experts
            steps = 1, row, y_step, to_slot
            template, words = launch_args.QUANT.pack(*[0] * 7, *sizes, *steps, 1.0, 0.0), "32s3Q"
        if indices is not None:
            template += TAIL.pack(each, 0)
        module = starter.kernels(rung, (step,), choice.machine.arch)
        starter.check_shared(module, (step,), choice.machine)
        loaded = starter.loaded(module, (step,), template, ordinal)
        return starter.starter(loaded, words, "Q" if weights is not None else "")

    def _sorting(self, wide: bool) -> list[Step]:
        """Return the steps that sort the slots and gather their rows."""
        routed, (a, indices, _) = self.routed, self.given
        if indices is None:
            return []
        copies = f"{BITS[ITEMSIZE[a.dtype]]}, {str(wide).lower()}"
        index, blocks = INDEX[indices.dtype], (routed.slots, 1, 1)
        if routed.slots <= FEW_SLOTS and routed.experts <= FEW_EXPERTS:
            return [Step(f"sort_and_gather<{index}, {copies}>", blocks, (THREADS, 1, 1))]
        sort = Step(f"sort_slots<{index}>", (1, 1, 1), (SORTERS, 1, 1))
        gather = Step(f"gather_rows<{copies}>", blocks, (THREADS, 1, 1), pdl=self.early)
        return [sort, gather] if routed.experts and routed.k else [sort]

    def _deliver(self, several: int, out: str, *, gated: bool) -> Step:
        routed, weights = self.routed, self.given[2]
        dtypes = self.forms[2].dtype, out, "float32" if weights is None else weights.dtype
        flags = f"{str(gated).lower()}, {str(weights is not None).lower()}, {several}"
        kernel = f"deliver<{', '.join(CTYPE[dtype] for dtype in dtypes)}, {flags}>"
        rows = routed.slots if weights is None else routed.slots // routed.top_k
        blocks = rows * -(-routed.columns // (THREADS * several)), 1, 1
        return Step(kernel, blocks, (THREADS, 1, 1), pdl=self.early and routed.experts > 0)


def _nothing(*given: Any) -> None:
    """Multiply no experts."""


def _steps_of(form: Form) -> tuple[int, int, int]:
    """Return the elements from token to token, from slot to slot, and from column to column."""
    if len(form.strides) == 3:
        token, slot, column = form.strides
        return token, slot, column
    return form.strides[0], 0, form.strides[1]


def _of_slot(form: Form, top_k: int) -> int | None:
    """Return the elements from slot to slot, or of (tokens, k) from token to token, if even."""
    if len(form.strides) == 2:
        return form.strides[0]
    token, slot, _ = form.strides
    return slot if form.shape[0] <= 1 or token == top_k * slot else None


def _whole(nbytes: int) -> int:
    """Return a multiple of 256 bytes that holds so many."""
    return -(-nbytes // 256) * 256
