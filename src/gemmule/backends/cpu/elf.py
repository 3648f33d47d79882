"""Object code in memory, without a linker: 64-bit ELF for x86-64 as LLVM writes it.

The parts of a file that are used at run time are copied one behind the other to fresh pages, with
the places that point to each other and to functions of the C library filled in; the pages are then
made readable and executable, and never writable again. They stay for the life of the process.
"""

from __future__ import annotations

import ctypes
import mmap
import struct
import sys
from typing import NamedTuple

_HEADER, _SECTION, _SYMBOL, _RELOCATION = "<16sHHIQQQIHHHHHH", "<IIQQQQIIQQ", "<IBBHQQ", "<QQq"
_SYMBOLS, _RELOCATIONS, _NO_BITS, _USED = 2, 4, 8, 2
_UNDEFINED = 0
_R64, _PC32, _PLT32, _GOTPCREL, _PC64, _GOTPCRELX, _REX_GOTPCRELX = 1, 2, 4, 9, 24, 41, 42
_BY_TABLE = (_GOTPCREL, _GOTPCRELX, _REX_GOTPCRELX)
_STUB = b"\xff\x25\x02\x00\x00\x00\x90\x90"  # jmp to the address that lies behind it
_KEPT: list[mmap.mmap] = []


class ObjectError(ValueError):
    """An object file that cannot be loaded."""


class _Section(NamedTuple):
    kind: int
    flags: int
    at: int
    size: int
    link: int
    info: int
    align: int


def load(content: bytes, name: str) -> int:
    """Return the address of the function `name` of an object file."""
    try:
        return _load(content, name)
    except (struct.error, IndexError, KeyError, OverflowError) as error:
        raise ObjectError(f"no object code that can be loaded: {error!r}") from error


def _load(content: bytes, name: str) -> int:
    sections = _sections(content)
    places, used = {}, 0
    for i, one in enumerate(sections):
        if one.flags & _USED:
            used = -(-used // max(one.align, 1)) * max(one.align, 1)
            places[i] = used
            used += one.size
    symbols = _symbols(content, sections)
    outside = sorted({text for text, section, _ in symbols if section == _UNDEFINED and text})
    stubs = -(-used // 16) * 16
    pages = mmap.mmap(-1, stubs + 16 * len(outside) + 1)
    base = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    for i, at in places.items():
        one = sections[i]
        if one.kind != _NO_BITS:
            pages[at : at + one.size] = content[one.at : one.at + one.size]
    targets = {}
    for k, text in enumerate(outside):
        at = stubs + 16 * k
        pages[at : at + 16] = _STUB + struct.pack("<Q", _function(text))
        targets[text] = at
    addresses = [
        targets.get(text, 0) if section == _UNDEFINED else places.get(section, 0) + value
        for text, section, value in symbols
    ]
    for one in sections:
        if one.kind == _RELOCATIONS and one.info in places:
            _relocate(pages, base, content, one, places[one.info], addresses, stubs)
    length = len(pages)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mprotect(
        ctypes.c_void_p(base), ctypes.c_size_t(length), mmap.PROT_READ | mmap.PROT_EXEC
    ):
        raise OSError(ctypes.get_errno(), "the system does not let memory be executed")
    _KEPT.append(pages)
    found = {text: at for (text, section, _), at in zip(symbols, addresses, strict=True) if section}
    return base + found[name]


def _sections(content: bytes) -> list[_Section]:
    head = struct.unpack_from(_HEADER, content)
    ident, machine, start, size, count = head[0], head[2], head[6], head[11], head[12]
    if ident[:6] != b"\x7fELF\x02\x01" or machine != 62:
        raise ObjectError("no ELF file for x86-64")
    made = []
    for i in range(count):
        raw = struct.unpack_from(_SECTION, content, start + i * size)
        made.append(_Section(raw[1], raw[2], raw[4], raw[5], raw[6], raw[7], raw[8]))
    return made


def _symbols(content: bytes, sections: list[_Section]) -> list[tuple[str, int, int]]:
    """Return each symbol's name, section and value."""
    table = next(one for one in sections if one.kind == _SYMBOLS)
    names = sections[table.link].at
    made = []
    for at in range(table.at, table.at + table.size, 24):
        name, _, _, section, value, _ = struct.unpack_from(_SYMBOL, content, at)
        text = content[names + name : content.index(0, names + name)].decode("ascii")
        made.append((text, section, value))
    return made


def _relocate(
    pages: mmap.mmap,
    base: int,
    content: bytes,
    table: _Section,
    place: int,
    addresses: list[int],
    stubs: int,
) -> None:
    """Fill in the places of one section that point to symbols."""
    for at in range(table.at, table.at + table.size, 24):
        offset, info, more = struct.unpack_from(_RELOCATION, content, at)
        kind, target, spot = info & 0xFFFFFFFF, addresses[info >> 32], place + offset
        if kind in _BY_TABLE:
            if target < stubs:
                raise ObjectError("an address is wanted from a table that is not made")
            struct.pack_into("<i", pages, spot, target + 8 + more - spot)
        elif kind in (_PC32, _PLT32):
            struct.pack_into("<i", pages, spot, target + more - spot)
        elif kind == _PC64:
            struct.pack_into("<q", pages, spot, target + more - spot)
        elif kind == _R64:
            struct.pack_into("<Q", pages, spot, base + target + more)
        else:
            raise ObjectError(f"relocation {kind} is not known")


def _function(name: str) -> int:
    """Return the address of a function of the C library, or of GCC's."""
    for library in (None, "libm.so.6", "libgcc_s.so.1"):
        try:
            found = getattr(ctypes.CDLL(library), name)
        except (OSError, AttributeError):
            continue
        return ctypes.cast(found, ctypes.c_void_p).value or 0
    raise ObjectError(f"no library has the function {name}")


def unavailable() -> str | None:
    """Return why object code cannot be loaded here, or None."""
    import platform

    if sys.platform != "linux" or platform.machine() != "x86_64":
        return "object code is loaded on Linux x86-64 only"
    return None
