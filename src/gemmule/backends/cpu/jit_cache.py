"""Compiled kernels on disk: ``<cache>/kernels/<digest>/<kernel>-<key>.o``.

The digest covers the sources of all CPU rungs and of this back end, and the CPU, so an edited
helper or another machine never meets stale code. An entry is a SHA-256 followed by an object file;
a truncated or damaged one is compiled again. What the package itself brings
(`gemmule.backends.cpu.packaged`) is looked at first.

Machine code is as trusted as ``__pycache__``: it is read only from folders that belong to this
user, are no symbolic links and cannot be written by others. In any other case the cache is off,
with one `GemmuleWarning`.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import logging
import os
import re
import stat
import warnings
from pathlib import Path
from types import FunctionType
from typing import Any, Protocol

from gemmule.backends.cpu import elf, packaged
from gemmule.backends.cpu.features import identity
from gemmule.core.waiting import Wait
from gemmule.errors import GemmuleWarning
from gemmule.settings import cache_folder
from gemmule.storage.atomic import check_private

log = logging.getLogger("gemmule")
ENTRY = "gemmule_kernel"
_WAIT = Wait("CPU kernels", "gemmule warm")


class Source(Protocol):
    """What is compiled: a kernel's function, and the key that tells it apart in every process."""

    function: FunctionType

    @property
    def key(self) -> str:
        """Name of the kernel on disk."""
        ...


_PACKAGE = Path(__file__).parents[2]
_DIGEST_BYTES = 32


def source_files() -> list[Path]:
    """Return the files whose text decides what the kernels compile to."""
    rungs = (path for path in (_PACKAGE / "rungs").rglob("*.py") if "cuda" not in path.parts)
    own = Path(__file__).parent.rglob("*.py")
    return sorted([*rungs, *own])


@functools.cache
def source_digest() -> str:
    """Return 32 hexadecimal digits that change with any of the files; read once a process."""
    sha = hashlib.sha256()
    for path in source_files():
        text = path.read_bytes()
        sha.update(f"{path.name}:{len(text)}:".encode() + text)
    return sha.hexdigest()[:32]


@functools.cache
def digest_beside(file: str) -> tuple[str, ...]:
    """Return digits that change with a file whose text `source_digest` leaves out, else nothing."""
    path = Path(file)
    told = _PACKAGE / "rungs" in path.parents or Path(__file__).parent in path.parents
    if told or not path.is_file():
        return ()
    return (hashlib.sha256(path.read_bytes()).hexdigest()[:16],)


@functools.cache
def kernel_folder() -> Path | None:
    """Return the private folder of compiled kernels, made if need be; None: the cache is off."""
    top = cache_folder()
    here = hashlib.sha256(f"{source_digest()} {identity()}".encode()).hexdigest()[:32]
    folder = top / "kernels" / here
    try:
        top.mkdir(mode=0o700, parents=True, exist_ok=True)
        for step in (folder.parent, folder):
            step.mkdir(mode=0o700, exist_ok=True)
            check_private(step)
        if not os.access(folder, os.W_OK):
            raise PermissionError(errno.EACCES, "it cannot be written")
    except OSError as error:
        if _is_filled(folder):
            return folder  # it is read; what is missing there is compiled, with a warning
        _warn_off(f"{folder} cannot be used ({error})")
        return None
    return folder


def _is_filled(folder: Path) -> bool:
    """Tell whether a folder that cannot be written is private and holds compiled kernels."""
    try:
        for step in (folder.parent, folder):
            check_private(step)
        return any(folder.glob("*.o"))
    except OSError:
        return False


@functools.cache
def _warn_off(reason: str) -> None:
    warnings.warn(
        f"the cache of compiled CPU kernels is off: {reason}. Kernels are compiled anew in every "
        "process; set GEMMULE_CACHE to a folder of your own that only you can write.",
        GemmuleWarning,
        stacklevel=2,
    )


def loaded(kernel: Source, parameters: tuple[Any, ...], *, for_python: bool = False) -> int:
    """Return the address of a kernel's machine code, from the disk where it lies there."""
    forms = " ".join("int" if one is int else repr(one._fields) for one in parameters)
    forms += " for Python" if for_python else ""
    digest = hashlib.sha256(f"{kernel.key} of {forms}".encode()).hexdigest()[:32]
    brought = packaged.object_code(source_digest(), digest)
    address = None if brought is None else _loadable(brought)
    if address is not None:
        return address
    name = re.sub(r"\W+", "_", kernel.function.__name__)
    folder = kernel_folder()
    path = None if folder is None else folder / f"{name}-{digest}.o"
    payload = None if path is None else _read_checked(path)
    address = None if payload is None else _loadable(payload)
    if address is not None:
        return address
    made = compiled(kernel, parameters, for_python)
    if path is not None:
        try:
            _write_atomically(path, hashlib.sha256(made).digest() + made)
        except OSError as error:
            _warn_off(f"{folder} cannot be written ({error.strerror})")
    return _placed(made)


def compiled(kernel: Source, parameters: tuple[Any, ...], for_python: bool) -> bytes:
    """Return a kernel's object code, made anew."""
    with _WAIT.measured():
        from gemmule.backends.cpu.assembler import object_code
        from gemmule.backends.cpu.language import module_of

        return object_code(str(module_of(kernel, parameters, ENTRY, for_python=for_python)))


def _loadable(content: bytes) -> int | None:
    """Return where object code was put in memory; None where it is none, or needs what is not."""
    try:
        return _placed(content)
    except ValueError as error:
        log.debug("a compiled kernel does not load (%s); compiling again", error)
        return None


def _placed(content: bytes) -> int:
    """Put object code in memory, and return the address of its function."""
    if elf.unavailable() is None:
        return elf.load(content, ENTRY)
    from gemmule.backends.cpu.assembler import placed

    return placed(content, ENTRY)


def _read_checked(path: Path) -> bytes | None:
    """Return an entry's payload if it is whole and this user's own file, else None."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    with os.fdopen(handle, "rb") as file:
        state = os.fstat(file.fileno())
        others = stat.S_IWGRP | stat.S_IWOTH
        if not stat.S_ISREG(state.st_mode) or state.st_uid != os.geteuid():
            return None
        content = b"" if state.st_mode & others else file.read()
    digest, payload = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    return payload if hashlib.sha256(payload).digest() == digest else None


def _write_atomically(path: Path, content: bytes) -> None:
    import tempfile  # late, as most processes compile nothing

    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix="new-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        Path(temporary).replace(path)
    except OSError:
        Path(temporary).unlink(missing_ok=True)
        raise
