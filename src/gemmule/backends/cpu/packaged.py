"""Object code that a wheel brings: kernels for usual x86-64 CPUs, which nobody need compile.

``objects/<target>-<digest>`` beside this module holds the kernels of one target, made of the
sources that have the digest; edited sources never meet it. It is a SHA-256 of the rest, the number
of kernels, for each its key, place and size, and the object files. A file that is damaged counts as
not there. Files of a package are as trusted as the modules beside them.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from gemmule.backends.cpu import elf, features

log = logging.getLogger("gemmule")
FOLDER = Path(__file__).with_name("objects")
_DIGEST_BYTES, _COUNT, _ENTRY = 32, struct.Struct("<I"), struct.Struct("<16sII")

# Every feature that rungs, and forms of kernels, are chosen by.
_NARROW = frozenset(("avx2", "fma", "f16c"))
_WIDE = _NARROW | {"avx512f", "avx512bw", "avx512dq", "avx512vnni"}
ASKED = _WIDE | {"avx512bf16", "avx512fp16", "amx-tile", "amx-int8", "amx-bf16"}
# What LLVM may use besides where it compiles for x86-64-v3 and -v4, in Linux's words.
_V3 = frozenset(("avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"))
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}


class Target(NamedTuple):
    """What code is built for: LLVM's CPU, what it has of `ASKED`, and what else a CPU must have."""

    name: str
    cpu: str
    features: frozenset[str]
    needed: frozenset[str]

    def variables(self) -> dict[str, str]:
        """Return the environment in which kernels are compiled for this target."""
        words = ",".join(f"+{word}" for word in sorted(self.features))
        return {"NUMBA_CPU_NAME": self.cpu, "NUMBA_CPU_FEATURES": words}


TARGETS = (
    Target("avx2", "x86-64-v3", _NARROW, _V3),
    Target("avx512", "x86-64-v4", _WIDE, _V4),
    Target("avx512bf16", "x86-64-v4", _WIDE | {"avx512bf16"}, _V4),
    Target("amx", "x86-64-v4", ASKED, _V4),
)


@functools.cache
def target() -> Target | None:
    """Return the target whose code is what would be compiled here, or None.

    Forms of kernels are chosen by the features that are there: fewer or more is another target.
    """
    if elf.unavailable() is not None:
        return None
    asked, present = features.target_features()[0] & ASKED, features.host_features()
    fitting = (one for one in TARGETS if one.features == asked and one.needed <= present)
    return next(fitting, None)


def object_code(digest: str, key: str) -> bytes | None:
    """Return the object file of a kernel, by its key of 32 hexadecimal digits, or None.

    digest: of the sources here.
    """
    if not FOLDER.is_dir():
        return None
    return built(digest).get(bytes.fromhex(key))


@functools.cache
def built(digest: str) -> Mapping[bytes, bytes]:
    """Return the object files that the package brings for this processor, by their keys."""
    one = target()
    if one is None:
        return {}
    try:
        content = (FOLDER / f"{one.name}-{digest}").read_bytes()
        return unpacked(content)
    except (OSError, ValueError) as error:
        log.debug("no object code of the package serves here: %s", error)
        return {}


def packed(entries: Mapping[str, bytes]) -> bytes:
    """Return the content of a file: object files by their keys of 32 hexadecimal digits."""
    table, at = [_COUNT.pack(len(entries))], _COUNT.size + len(entries) * _ENTRY.size
    for key, content in sorted(entries.items()):
        table.append(_ENTRY.pack(bytes.fromhex(key), at, len(content)))
        at += len(content)
    rest = b"".join([*table, *(content for _, content in sorted(entries.items()))])
    return hashlib.sha256(rest).digest() + rest


def unpacked(content: bytes) -> dict[bytes, bytes]:
    """Return the object files of a file's content by key; ValueError where it is damaged."""
    rest = content[_DIGEST_BYTES:]
    if hashlib.sha256(rest).digest() != content[:_DIGEST_BYTES]:
        raise ValueError("the file of object code is damaged")
    (count,) = _COUNT.unpack_from(rest)
    table = (_ENTRY.unpack_from(rest, _COUNT.size + i * _ENTRY.size) for i in range(count))
    return {key: rest[at : at + size] for key, at, size in table}
