"""The source files that a rung depends on, and digests of them.

Files are read as text: nothing is imported or compiled, so a look-up may ask. Of Python imports
those count that hold kernels and their geometry, `gemmule.rungs` and `gemmule.backends`; the words
in which rungs are written (`gemmule.core`), NumPy, LLVM and the toolkit's headers do not.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path

from gemmule.core.rung import Rung

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"\n]+)"', re.MULTILINE)
_IMPORT = re.compile(r"^[ \t]*import[ \t]+(gemmule\.[\w.]+)", re.MULTILINE)
_FROM = re.compile(
    r"^[ \t]*from[ \t]+(gemmule\.[\w.]+)[ \t]+import[ \t]+(\([^)]*\)|[^\n]*)", re.MULTILINE
)
_COMMENT = re.compile(r"#[^\n]*")
_ROOMS = ("rungs", "backends")


def sources(rung: Rung) -> tuple[Path, ...]:
    """Return the rung's files and all that they include or import, at any depth, sorted."""
    return _closure([rung.path, rung.source_path], rung.path.parents[3])


def kernel_digest(rung: Rung) -> str:
    """Return a digest of the text that a rung's kernels are compiled from: no Python is in it."""
    package = rung.path.parents[3]
    return digest_of(_closure([rung.source_path], package), package)


def _closure(todo: list[Path], package: Path) -> tuple[Path, ...]:
    found: set[Path] = set()
    while todo:
        path = todo.pop()
        if path not in found:
            found.add(path)
            todo += _named_in(path, package)
    return tuple(sorted(found))


def rung_digest(rung: Rung) -> str:
    """Return a digest of the text of `sources`: any edit there makes tuned entries stale.

    Read once a process; `forget_digests` reads again. OSError where a file of the rung is gone.
    """
    return _digest(rung.path, rung)


@lru_cache(maxsize=1024)
def _digest(path: Path, rung: Rung) -> str:
    return digest_of(sources(rung), path.parents[3])


def digest_of(files: Iterable[Path], root: Path) -> str:
    """Return the SHA-256 of files by their places below `root` and their contents."""
    digest = hashlib.sha256()
    for path in files:
        text = path.read_bytes()
        digest.update(f"{path.relative_to(root).as_posix()}:{len(text)}:".encode() + text)
    return digest.hexdigest()


def forget_digests() -> None:
    """Read the rungs' files again at the next look-up."""
    _digest.cache_clear()


def _named_in(path: Path, package: Path) -> Iterator[Path]:
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        yield from _imported(text, package)
        return
    for name in _INCLUDE.findall(text):
        # As NVRTC looks for them. What lies in neither place is a header of the CPU emulator's.
        places = (path.parent / name, package / "rungs" / "_cuda" / name)
        yield from [place for place in places if place.is_file()][:1]


def _imported(text: str, package: Path) -> Iterator[Path]:
    names = set(_IMPORT.findall(text))
    for module, what in _FROM.findall(text):
        words = _COMMENT.sub("", what).strip("() \n").replace("\n", " ").split(",")
        names.update(f"{module}.{word.split()[0]}" for word in words if word.split())
    for name in names:
        parts = name.split(".")[1:]
        if parts[0] not in _ROOMS:
            continue
        for depth in (len(parts), len(parts) - 1):  # a module, or something in one
            file = package.joinpath(*parts[:depth]).with_suffix(".py")
            if file.is_file():
                yield file
                break
