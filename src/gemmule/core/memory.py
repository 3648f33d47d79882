"""Memory of the host: how much is available, blocks that begin at a cache line, maps of files."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

GROUP = Path("/sys/fs/cgroup")
_GROUP_FILES = (  # of version 2 and of version 1
    ("memory.max", "memory.current"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
)
SMALL_BYTES = 64 * 2**20  # below this nothing is asked
LINE_BYTES = 64


def available_bytes(group: Path = GROUP) -> int:
    """Return the bytes that can be taken now without swapping.

    The least of what Linux calls available and of what the process's control group leaves; where
    neither is told, half of the machine's memory.
    """
    found = [size for size in (_meminfo(), _control_group(group)) if size is not None]
    return min(found, default=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2)


def require(nbytes: int, purpose: str) -> None:
    """Raise MemoryError, with what is needed and what there is, unless `nbytes` more fit."""
    if nbytes < SMALL_BYTES:
        return
    room = available_bytes()
    if nbytes > room:
        raise MemoryError(
            f"{purpose} takes {nbytes:,} bytes, and {room:,} are available on this machine. "
            "Convert and multiply a part of the rows at a time."
        )


def whole_lines(nbytes: int) -> NDArray[np.uint8]:
    """Return `nbytes` uninitialised bytes that begin with a cache line.

    NumPy's large arrays begin 16 bytes behind one, so that each vector register of 64 bytes is
    loaded from two lines.
    """
    raw = np.empty(nbytes + LINE_BYTES, np.uint8)
    start = -raw.ctypes.data % LINE_BYTES
    return raw[start : start + nbytes]


def check_map(array: Any) -> None:
    """Raise ValueError where an array lies in a map of a file that no longer reaches so far.

    Reading there ends the process (SIGBUS), and nothing in Python can catch that. What becomes
    shorter after this was asked is not seen: ask before each block.
    """
    base = array
    while isinstance(base, np.ndarray) and not isinstance(base, np.memmap):
        base = base.base
    held = getattr(base, "_mmap", None)
    if array is None or not isinstance(held, mmap.mmap):
        return
    first = np.frombuffer(held, np.uint8).ctypes.data
    _, end = np.lib.array_utils.byte_bounds(array)
    needed = base.offset - base.offset % mmap.ALLOCATIONGRANULARITY + end - first
    if held.size() < needed:  # asks the file that was opened, whatever its name stands for now
        raise ValueError(
            f"{base.filename or 'the file of a memory map'} became shorter while it was mapped: "
            f"{needed:,} bytes of it are read, and it has {held.size():,}. Write files that others "
            "read under another name, then rename them."
        )


def _meminfo() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvail"))
    except (OSError, ValueError, IndexError, StopIteration):
        return None


def _control_group(group: Path) -> int | None:
    found = []
    for limit, used in _GROUP_FILES:
        try:
            allowed, taken = (int((group / name).read_text()) for name in (limit, used))
        except (OSError, ValueError):  # no such file, or "max": no limit
            continue
        found.append(max(0, allowed - taken))
    return min(found, default=None)
