"""How shares are claimed: the kernels of the callers and of their helpers. See `pool`.

The pool is one stretch of memory, given by its address. Everyone who works on a product has a
number, the caller 0, and a range of the shares that is its own; whoever is done with its range
takes from the others'. So what one thread reads of a matrix it reads again in the next product, out
of its own core's caches, and no two threads are at one counter as long as all are there.

A slot's serial number is even while a product is open. A helper reads it, then what the slot says,
then the number again: where both are equal and even, what it read belongs together. A range has a
word that is compared and swapped: the serial number and the next share to claim (28 bits). A word
of an older product says that nothing of the range was claimed yet. Every range is claimed to its
end before a product is closed, so that who comes late claims nothing.
"""

from __future__ import annotations

from typing import Any

from gemmule.backends.cpu.atomics import (
    add,
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
from gemmule.backends.cpu.intrinsics import call_c, load
from gemmule.backends.cpu.jit import kernel

_int32 = load("int32", "int64")

# Words of the pool's memory, in bytes; what different threads write lies on lines of its own.
SIGNAL, SLEEPERS, STOP, ALIVE = 0, 128, 256, 384
QUEUE, TEAM, RUNNING, START, WAIT, LEAVE, GONE = 264, 272, 280, 288, 296, 304, 312
PARALLEL, NUMBER, MEMBER = 320, 328, 336  # see `openmp`
PENDING, SUBMITTING = 448, 456
_LONE, _DOUBT = 512, 520
# A slot begins at a multiple of its size, so that its address and a helper's number are one word.
SLOT, SLOTS, SLOTS_AT = 1024, 8, 1024
SERIAL, _TASK, _WORDS, _COUNT, _LIMIT, _DUE, HOME, RANGES = 0, 8, 16, 24, 32, 40, 48, 56
_DONE, _JOINED = 128, 256
_OWNED, ENTRIES, CUT, _ENDED = 384, 392, 400, 408
MEMORY = SLOTS_AT + SLOTS * SLOT
RANGE_BYTES = 128  # two lines, as processors fetch them in pairs
_SHARE_BITS = 28
_SHARE = (1 << _SHARE_BITS) - 1
# How long a helper looks for the next product before it sleeps. Long enough for the next call of
# a loop in Python, short beside what another library's threads lose by it.
_SPIN_NS = 20_000
_FAN = 4  # helpers that each helper wakes: all are awake after two or three steps
_PATIENCE_NS = 5_000  # a caller that waits for a last share spins so long, then gives way
# How long from its first share on everyone leaves the others' ranges to them: threads are called
# one after the other. Who has not come by then, when one's own range is done, is not there.
_GRACE_NS = 2_000
# A helper that the system stops within a share, as it does beside other busy processes, keeps its
# caller waiting for a slice of 3 to 30 ms, and what it does is half of the product at most. What
# such waits lost is weighed against what helpers did since: as long as they lost more, products go
# alone for twice as long as was lost, at most 100 ms. 2,000 products of 1024 x 1024 float32 beside
# two busy processes on two cores took 0.26 ms on average with helpers, 0.13 alone; of 4096 x 4096
# 5.5 and 8.3, and beside seven 20 (Xeon with AMX, 2026-11).
_LATE_NS = 100_000  # which helpers may always be: to wake a thread takes so long
_MOST_DOUBT_NS = 100_000_000


@kernel
def claim(slot: int, serial: int, owner: int, people: int, count: int) -> Any:
    """Return a share of a range that is now the caller's, or -1: none is left there."""
    at, now = read(slot + RANGES) + owner * RANGE_BYTES, serial << _SHARE_BITS
    first, end = owner * count // people, (owner + 1) * count // people
    while True:
        word = read(at)
        number = word & _SHARE
        ahead = word - number - now  # right also when serial numbers begin anew
        if ahead > 0:
            return -1
        if ahead < 0:
            number = first
        if number >= end:
            return -1
        if swap_if(at, word, now + number + 1) != 0:
            return number


@kernel
def work_on(
    pool: int, slot: int, serial: int, me: int, people: int, count: int, task: int, words: int
) -> Any:
    """Claim shares until none is left, one's own first; return how many were done.

    Then those of who was called last, as it will come last.
    """
    due, done, until = read(slot + _DUE), 0, now_ns() + _GRACE_NS
    for step in range(people):
        some = 0
        while me == 0 or read(pool + LEAVE) == 0:
            number = claim(slot, serial, (people + me - step) % people, people, count)
            if number < 0:
                break
            call_c(task, (words, number))
            some += 1
        if some > 0:
            add(slot + _DONE, some)
            done += some
        if step > 0 or (me > 0 and some == 0):  # who comes late takes what is left at once
            continue
        if me > 0 and count <= people:
            break  # what is left are single shares of who will be there in no time
        while now_ns() < until:
            if read(slot + _DONE) == due if me == 0 else read(slot + SERIAL) != serial:
                return done
            pause()
    return done


@kernel
def help_others(pool: int, slot: int, me: int) -> Any:
    """Work on a slot's shares until none is left or all must leave; return how many were done.

    me: the helper's number, from 1; 0 for who has none yet: it gets the next of the product.
    """
    serial = read(slot + SERIAL)
    if serial & 1 or read(pool + LEAVE) != 0:
        return 0
    count, limit = read(slot + _COUNT), read(slot + _LIMIT)
    task, words = read(slot + _TASK), read(slot + _WORDS)
    if read(slot + SERIAL) != serial:
        return 0
    people, now = min(limit + 1, count), serial << _SHARE_BITS
    while me == 0:
        word = read(slot + _JOINED)
        joined = word & _SHARE
        ahead = word - joined - now
        if ahead < 0:
            joined = 0
        if ahead > 0 or joined + 1 >= people:
            return 0
        if swap_if(slot + _JOINED, word, now + joined + 1) != 0:
            me = joined + 1
            if me + 1 < people and read(pool + SLEEPERS) > 0:
                wake(pool + SIGNAL, _FAN)
    return work_on(pool, slot, serial, me, people, count, task, words) if me < people else 0


@kernel
def work(pool: int) -> None:
    """Help wherever shares are left, until the pool is stopped."""
    while read(pool + STOP) == 0:
        seen = read(pool + SIGNAL)
        done = 0
        for i in range(SLOTS):
            done += help_others(pool, pool + SLOTS_AT + i * SLOT, 0)
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
def lent(place: int) -> None:
    """Help at a slot: what a borrowed thread runs, perhaps long after the product is done.

    place: the slot's address plus the helper's number.
    """
    me = place & (SLOT - 1)
    slot = place - me
    pool = read(slot + HOME)
    help_others(pool, slot, me)
    add(pool + PENDING, -1)


@kernel
def member(slot: int) -> None:
    """Work on a slot as one of an OpenMP team, whose first thread is the caller itself."""
    pool = read(slot + HOME)
    me = call_c(read(pool + NUMBER), ()) & (SLOT - 1)
    if me > 0:
        help_others(pool, slot, me)
    else:
        count, task, words = read(slot + _COUNT), read(slot + _TASK), read(slot + _WORDS)
        people = min(read(slot + _LIMIT) + 1, count)
        work_on(pool, slot, read(slot + SERIAL), 0, people, count, task, words)
        write(slot + _ENDED, now_ns())


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
            call_c(read(pool + START), (0, 0))
        call_c(read(pool + QUEUE), (1, entries))
    add(pool + SUBMITTING, -1)


@kernel
def stop(pool: int) -> None:
    """Send the pool's own threads home."""
    write(pool + STOP, 1)
    add(pool + SIGNAL, 1)
    wake(pool + SIGNAL, 1 << 20)


@kernel
def _alone(pool: int, task: int, words: int, count: int, begun: int) -> Any:
    """Run shares, the last first, for as long as helpers are in doubt; return what is left."""
    end, now = begun + read(pool + _LONE), begun
    while count > 0 and now < end:
        count -= 1
        call_c(task, (words, count))
        now = now_ns()
    add(pool + _LONE, begun - now)
    return count


@kernel
def _judge(pool: int, worked: int, waited: int) -> None:
    """Weigh how long a caller worked, and then waited for helpers, in nanoseconds."""
    lost, doubt = waited - 2 * worked - _LATE_NS, read(pool + _DOUBT)
    if lost > 0:
        doubt = min(2 * (doubt + lost), _MOST_DOUBT_NS)
        write(pool + _LONE, doubt)
        write(pool + _DOUBT, doubt)
    elif doubt > 0:
        write(pool + _DOUBT, max(doubt - worked, 0))


@kernel
def run_shares(pool: int, helpers: int, task: int, words: int, count: int) -> None:
    """Run ``task(words, number)`` for all numbers below `count`, with up to `helpers` helpers.

    pool: address of the pool's memory, read only where helpers is not 0. For use in kernels.
    """
    slot, begun = 0, 0
    if helpers > 0 and count > 1:
        begun = now_ns()
        if read(pool + _LONE) > 0:
            count = _alone(pool, task, words, count, begun)
    if helpers > 0 and count > 1:
        for i in range(SLOTS):
            at = pool + SLOTS_AT + i * SLOT
            if read(at + _OWNED) == 0 and swap_if(at + _OWNED, 0, 1) != 0:
                slot = at
                break
    if slot == 0:  # alone, or more callers than slots
        for number in range(count):
            call_c(task, (words, number))
        return
    if read(pool + QUEUE) != 0:  # no more than there are in OpenBLAS's team
        helpers = min(helpers, max(_int32(read(pool + TEAM), 0) - 1, 0))
    serial, due = read(slot + SERIAL) + 1, read(slot + _DUE) + count
    people = min(helpers + 1, count)
    write(slot + _DUE, due)
    write(slot + _TASK, task)
    write(slot + _WORDS, words)
    write(slot + _COUNT, count)
    write(slot + _LIMIT, helpers)
    write(slot + SERIAL, serial)
    if read(pool + PARALLEL) != 0:
        # All of the team, however few have a share: who is not of a team GNU's library ends, and
        # to start threads anew takes 40 us each.
        call_c(read(pool + PARALLEL), (read(pool + MEMBER), slot, 0, 0))
        ended = read(slot + _ENDED)
    else:
        if read(pool + QUEUE) != 0:
            _borrow(pool, slot, people - 1)
        else:
            add(pool + SIGNAL, 1)
            if read(pool + SLEEPERS) > 0:
                wake(pool + SIGNAL, min(_FAN, helpers))
        work_on(pool, slot, serial, 0, people, count, task, words)
        ended = now_ns()
    while read(slot + _DONE) != due:
        pause()
        if now_ns() > ended + _PATIENCE_NS:
            give_way()
    _judge(pool, ended - begun, now_ns() - ended)
    write(slot + SERIAL, serial + 1)
    write(slot + _OWNED, 0)
