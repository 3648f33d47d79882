"""Writing files atomically, and reading small files that may be hostile."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

MAX_BYTES = 65_536
# Names of files that a write left behind when it was cut off begin so.
LEFT_OVER = ".new-"
_BEGUN_S = 60  # after which a writer, if it lives, has its lock


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


def check_private(folder: Path) -> None:
    """Raise PermissionError unless `folder` is a real folder that only this user writes."""
    state = folder.lstat()
    if not stat.S_ISDIR(state.st_mode):
        raise PermissionError(f"{folder} is not a folder, or is a symbolic link")
    if state.st_uid != os.geteuid():
        raise PermissionError(f"{folder} belongs to user {state.st_uid}, not {os.geteuid()}")
    if state.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"{folder} can be written by others; chmod 700 it")


def _replace(path: Path, data: bytes, mode: int | None = None) -> None:
    """Give a new file the name of the old; with a mode only once it has reached the disk."""
    import tempfile

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
    _remove_left_over(path)
    scratch = path.with_name(f".{path.name[:100]}.{os.urandom(8).hex()}.tmp")
    descriptor = os.open(scratch, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        with os.fdopen(descriptor, "w+b") as file:
            with contextlib.suppress(OSError):  # some file systems have no locks
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield file
            file.flush()
            os.fsync(file.fileno())
        if replace:
            scratch.replace(path)
        elif not _linked(scratch, path):
            raise FileExistsError(f"{path} exists already; {taken}.")
    finally:
        scratch.unlink(missing_ok=True)


def _remove_left_over(path: Path) -> None:
    """Remove what earlier writers of `path` left behind, which were killed: they hold no lock."""
    left = re.compile(re.escape(f".{path.name[:100]}.") + r"[0-9a-f]{16}\.tmp")
    with contextlib.suppress(OSError):
        for one in [one for one in path.parent.iterdir() if left.fullmatch(one.name)]:
            with contextlib.suppress(OSError), _opened(one) as file:
                state = os.fstat(file.fileno())
                ours = stat.S_ISREG(state.st_mode) and state.st_uid == os.geteuid()
                if ours and time.time() - state.st_mtime > _BEGUN_S:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    one.unlink()


def _opened(path: Path) -> IO[bytes]:
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    return os.fdopen(os.open(path, flags), "r+b")


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
