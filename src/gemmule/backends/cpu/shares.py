"""How shares are claimed: the kernels of the callers and of their helpers. See `pool`.

The pool is one stretch of memory, given by its address. A slot's first word holds, in one number
that is compared and swapped: the next share to claim (28 bits), how many helpers joined (12), and
which product it is (24). A helper reads the word, then what the slot says, then swaps the word:
where that succeeds, what it read belongs to the word, since a slot is filled only while its word is
closed, and closed only when every share is done.
"""

from __future__ import annotations

from typing import Any

from gemmule.backends.cpu.atomics import (
    add,
    call_int,
    call_task,
    give_way,
    now_ns,
    pause,
    read,
    sleep_while,
    swap_if,
    wake,
    write,
)
from gemmule.backends.cpu.blas_threads import ENTRY_BYTES, NEXT_AT
from gemmule.backends.cpu.intrinsics import load
from gemmule.backends.cpu.jit import kernel

_int32 = load("int32", "int64")

# Words of the pool's memory, in bytes; what different threads write lies on lines of its own.
SIGNAL, SLEEPERS, STOP, ALIVE = 0, 128, 256, 384
QUEUE, TEAM, RUNNING, START, WAIT, LEAVE = 264, 272, 280, 288, 296, 304
PENDING, SUBMITTING = 448, 456
SLOTS_AT, SLOT, SLOTS = 512, 512, 8
_DONE, _TASK, _WORDS, _COUNT, _LIMIT = 128, 256, 264, 272, 280
_OWNED, HOME, ENTRIES, CUT = 384, 288, 392, 400
MEMORY = SLOTS_AT + SLOTS * SLOT
_HELPER, _PRODUCT = 1 << 28, 1 << 40
CLOSED = (1 << 28) - 1  # as number of the next share: none is left
# How long a helper looks for the next product before it sleeps. Long enough for the next call of
# a loop in Python, short beside what another library's threads lose by it.
_SPIN_NS = 20_000
_FAN = 4  # helpers that each helper wakes: all are awake after two or three steps
_PATIENCE_NS = 5_000  # a caller that waits for a last share spins so long, then gives way


@kernel
def _claim(slot: int, count: int) -> Any:
    """Return the number of a share that is now the caller's, or -1: none is left."""
    while True:
        word = read(slot)
        number = word & CLOSED
        if number >= count:
            return -1
        if swap_if(slot, word, word + 1) != 0:
            return number


@kernel
def _help(pool: int, slot: int) -> int:
    """Work on a slot's shares until none is left or all must leave; return how many were done."""
    while True:
        if read(pool + LEAVE) != 0:
            return 0
        word = read(slot)
        number, helpers = word & CLOSED, (word >> 28) & 4095
        count, limit = read(slot + _COUNT), read(slot + _LIMIT)
        task, words = read(slot + _TASK), read(slot + _WORDS)
        if number >= count or helpers >= limit:
            return 0
        if swap_if(slot, word, word + 1 + _HELPER) != 0:
            break
    if number + 1 < count and helpers + 1 < limit and read(pool + SLEEPERS) > 0:
        wake(pool + SIGNAL, _FAN)
    done = 0
    while number >= 0:
        call_task(task, words, number)
        done += 1
        number = _claim(slot, count) if read(pool + LEAVE) == 0 else -1
    add(slot + _DONE, done)
    return done


@kernel
def work(pool: int) -> None:
    """Help wherever shares are left, until the pool is stopped."""
    while read(pool + STOP) == 0:
        seen = read(pool + SIGNAL)
        done = 0
        for i in range(SLOTS):
            done += _help(pool, pool + SLOTS_AT + i * SLOT)
        if done > 0:
            continue
        until = now_ns() + _SPIN_NS
        while read(pool + SIGNAL) == seen and now_ns() < until:
            pause()
            give_way()
        if read(pool + SIGNAL) == seen:
            add(pool + SLEEPERS, 1)
            sleep_while(pool + SIGNAL, seen & 0xFFFFFFFF)
            add(pool + SLEEPERS, -1)
    add(pool + ALIVE, -1)


@kernel
def lent(slot: int) -> None:
    """Help at a slot: what a borrowed thread runs, perhaps long after the product is done."""
    pool = read(slot + HOME)
    _help(pool, slot)
    add(pool + PENDING, -1)


@kernel
def _borrow(pool: int, slot: int, helpers: int) -> None:
    """Queue a slot's entries for OpenBLAS's threads, for as many as are not queued for already."""
    add(pool + SUBMITTING, 1)
    idle = _int32(read(pool + TEAM), 0) - 1 - read(pool + PENDING)
    count = min(helpers, idle)
    if count > 0 and read(pool + LEAVE) == 0:
        entries, cut = read(slot + ENTRIES), read(slot + CUT)
        if cut != count:
            if cut > 0:
                write(entries + (cut - 1) * ENTRY_BYTES + NEXT_AT, entries + cut * ENTRY_BYTES)
            write(entries + (count - 1) * ENTRY_BYTES + NEXT_AT, 0)
            write(slot + CUT, count)
        add(pool + PENDING, count)
        if _int32(read(pool + RUNNING), 0) == 0:  # a fork has ended them
            call_int(read(pool + START), 0, 0)
        call_int(read(pool + QUEUE), 1, entries)
    add(pool + SUBMITTING, -1)


@kernel
def stop(pool: int) -> None:
    """Send the pool's own threads home."""
    write(pool + STOP, 1)
    add(pool + SIGNAL, 1)
    wake(pool + SIGNAL, 1 << 20)


@kernel
def run_shares(pool: int, helpers: int, task: int, words: int, count: int) -> None:
    """Run ``task(words, number)`` for all numbers below `count`, with up to `helpers` helpers.

    pool: address of the pool's memory, read only where helpers is not 0. For use in kernels.
    """
    slot = 0
    if helpers > 0 and count > 1:
        for i in range(SLOTS):
            at = pool + SLOTS_AT + i * SLOT
            if read(at + _OWNED) == 0 and swap_if(at + _OWNED, 0, 1) != 0:
                slot = at
                break
    if slot == 0:  # alone, or more callers than slots
        for number in range(count):
            call_task(task, words, number)
        return
    product = (read(slot) & ~(_PRODUCT - 1)) + _PRODUCT
    write(slot + _TASK, task)
    write(slot + _WORDS, words)
    write(slot + _COUNT, count)
    write(slot + _LIMIT, helpers)
    write(slot + _DONE, 0)
    write(slot, product)
    if read(pool + QUEUE) != 0:
        _borrow(pool, slot, min(helpers, count - 1))
    else:
        add(pool + SIGNAL, 1)
        if read(pool + SLEEPERS) > 0:
            wake(pool + SIGNAL, min(_FAN, helpers))
    done = 0
    number = _claim(slot, count)
    while number >= 0:
        call_task(task, words, number)
        done += 1
        number = _claim(slot, count)
    if read(slot + _DONE) + done < count:
        patient = now_ns() + _PATIENCE_NS
        while read(slot + _DONE) + done < count:
            pause()
            if now_ns() > patient:
                give_way()
    write(slot, product + CLOSED)
    write(slot + _OWNED, 0)
