"""Sources of matrices: a file, or one matrix of a file that holds several; and their checks."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

_MEMBER = re.compile(r"(?P<path>.+?\.(?:safetensors|npz|mat)):(?P<member>.+)", re.IGNORECASE)
_MAX_ELEMENTS = 1 << 46  # 70 trillion: beyond any file, far below where byte counts overflow
_NAMES_SHOWN = 20


@dataclass(frozen=True, slots=True)
class Source:
    """A file, and the name of the matrix in it where the file holds several."""

    path: Path
    member: str | None = None

    def __str__(self) -> str:
        return f"{self.path}:{self.member}" if self.member else str(self.path)


def parse_source(text: str) -> Source:
    """Return the source that `text` names: ``FILE`` or ``FILE:MATRIX``.

    An existing file of exactly that name wins, so a colon in a file's name does no harm.

    >>> parse_source("model.safetensors:layer.0.weight").member
    'layer.0.weight'
    """
    match = _MEMBER.fullmatch(text)
    if match is None or Path(text).is_file():
        return Source(Path(text))
    return Source(Path(match["path"]), match["member"])


def pick(source: Source, names: Iterable[str], what: str) -> str:
    """Return the member to read: the one asked for, or the only one there is."""
    known = list(names)
    if source.member in known:
        return str(source.member)
    if source.member is None and len(known) == 1:
        return known[0]
    shown = ", ".join(known[:_NAMES_SHOWN]) + (" ..." if len(known) > _NAMES_SHOWN else "")
    listing = f"It holds {len(known)}: {shown}." if known else "It holds none."
    if source.member is None:
        raise ValueError(f"{source.path}: say which {what}, as {source.path}:NAME. {listing}")
    raise ValueError(f"{source.path} has no {what} called {source.member!r}. {listing}")


def check_size(source: Source, nbytes: int, limit: int) -> None:
    """Raise ValueError where a matrix would take more than `limit` bytes."""
    if nbytes > limit:
        raise ValueError(
            f"{source} takes {nbytes:,} bytes in memory, and {limit:,} are available to it. "
            "Store the matrix as .npy or .safetensors: those are read in blocks."
        )


def check_shape(source: Source, shape: Sequence[object]) -> None:
    """Raise ValueError for a shape that is no shape, or that no file can hold."""
    sizes = [size for size in shape if type(size) is int and 0 <= size <= _MAX_ELEMENTS]
    if len(sizes) != len(shape) or math.prod(sizes) > _MAX_ELEMENTS:
        raise ValueError(f"{source} claims shape {tuple(shape)}, which no file can hold.")
