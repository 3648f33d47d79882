"""Device memory of products in panels, kept from one to the next.

Taking 192 MiB from the driver and giving them back takes 1.1 ms (H200, November 2026), which a
product of a gigabyte of codes would wait for at both ends.
"""

from __future__ import annotations

import threading

from gemmule.backends.cuda import driver
from gemmule.backends.cuda.device_array import DeviceArray

KEPT_BYTES = 256 << 20  # of each device, at most

_rooms: dict[int, DeviceArray] = {}
_lock = threading.Lock()


def take_room(nbytes: int, most: int, ordinal: int) -> DeviceArray:
    """Return a block of a device's memory for one product, between `nbytes` and `most` bytes.

    Give it back with `give_room` once nothing uses it any more. DeviceError where it does not fit.
    """
    with _lock:
        kept = _rooms.pop(ordinal, None)
    if kept is not None and nbytes <= kept.shape[0] <= most:
        return kept
    del kept  # so that both never lie there
    return DeviceArray.empty((max(1, nbytes),), "uint8", ordinal)


def give_room(room: DeviceArray) -> None:
    """Keep a block for the next product, unless it is large or another one is kept."""
    if room.shape[0] <= KEPT_BYTES:
        with _lock:
            _rooms.setdefault(room.ordinal, room)


def room_bytes(ordinal: int) -> int:
    """Return the bytes that are kept on a device: what a product may count as free."""
    kept = _rooms.get(ordinal)
    return 0 if kept is None else kept.shape[0]


def _let_go(ordinal: int) -> None:
    with _lock:
        kept = _rooms.pop(ordinal, None)
    del kept


driver.when_short(_let_go)
