"""Files that appear complete or not at all, and small ones that are read with care."""

from __future__ import annotations

import os
import secrets
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

MAX_BYTES = 65_536
# Names of files that a write left behind when it was cut off begin so.
LEFT_OVER = ".new-"


def replace_text(path: Path, text: str) -> None:
    """Write `text` to `path` in UTF-8, keeping the permissions of a file that is there already.

    It has reached the disk on return. OSError where the folder does not exist or cannot be written.
    """
    mode = path.stat().st_mode & 0o777 if path.exists() else 0o644
    _replace(path, text.encode(), mode)


def small_file(path: Path) -> bytes:
    """Return the content of a regular file of at most MAX_BYTES; never wait for a pipe."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(handle, "rb") as file:
        state = os.fstat(handle)
        if not stat.S_ISREG(state.st_mode) or state.st_size > MAX_BYTES:
            raise ValueError(f"{path} is no regular file of at most {MAX_BYTES:,} bytes")
        return file.read(MAX_BYTES)


def write_atomically(path: Path, data: bytes) -> bool:
    """Replace `path` by `data` in one step; False when the folder cannot be written."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _replace(path, data)
    except OSError:
        return False
    return True


def _replace(path: Path, data: bytes, mode: int | None = None) -> None:
    """Give a new file the name of the old; with a mode only once it has reached the disk."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=LEFT_OVER)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            if mode is not None:
                file.flush()
                os.fsync(handle)
                os.fchmod(handle, mode)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


@contextmanager
def new_file(path: Path, *, replace: bool, taken: str) -> Iterator[IO[bytes]]:
    """Yield a binary file that becomes `path` when the block ends without an error.

    Until then, and after an error, `path` is untouched; the file's mode follows the umask. Raises
    FileExistsError, which ends in the words of `taken`, when something of that name exists, also
    when it appeared during the block, unless `replace`.
    """
    # As mkstemp: a random name, created exclusively, in the same folder. But mkstemp's mode 0600
    # would stay with the file, and a saved matrix is as public as any other file its owner writes.
    scratch = path.with_name(f".{path.name[:100]}.{secrets.token_hex(8)}.tmp")
    descriptor = os.open(scratch, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        with os.fdopen(descriptor, "w+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if replace:
            scratch.replace(path)
        elif not _linked(scratch, path):
            raise FileExistsError(f"{path} exists already; {taken}.")
    finally:
        scratch.unlink(missing_ok=True)


def _linked(scratch: Path, path: Path) -> bool:
    """Give a file another name unless that is taken; a hard link decides atomically."""
    try:
        os.link(scratch, path)
    except FileExistsError:
        return False
    except OSError:  # a file system without hard links: the check is all there is
        if path.exists():
            return False
        scratch.replace(path)
    return True
