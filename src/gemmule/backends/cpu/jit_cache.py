"""Compiled kernels on disk: ``<cache>/numba/<digest>/<kernel>-<key>.bin``.

The digest covers the sources of all CPU rungs and of this back end, the versions of Python, Numba
and llvmlite and the CPU, so an edited helper or another machine never meets stale code. An entry is
a SHA-256 followed by what Numba serialised; a truncated or damaged one is compiled again.

Numba serialises with pickle, so entries are as trusted as ``__pycache__``: they are read only from
folders that belong to this user, are no symbolic links and cannot be written by others. In any
other case the cache is off, with one `GemmuleWarning`.

This module imports Numba: `gemmule.backends.cpu.jit` imports it when the first kernel is built.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import pickle
import platform
import re
import stat
import tempfile
import warnings
from pathlib import Path
from typing import Any

import llvmlite
import llvmlite.binding
import numba
from numba.core.compiler import CompileResult
from numba.core.runtime import rtsys
from numba.core.serialize import dumps

from gemmule.errors import GemmuleWarning
from gemmule.settings import cache_folder
from gemmule.storage.atomic import check_private

log = logging.getLogger("gemmule")
_PACKAGE = Path(__file__).parents[2]
_DIGEST_BYTES = 32


def source_files() -> list[Path]:
    """Return the files whose text decides what the kernels compile to."""
    rungs = (path for path in (_PACKAGE / "rungs").rglob("*.py") if "cuda" not in path.parts)
    own = Path(__file__).parent.rglob("*.py")
    return sorted([*rungs, *own])


def source_digest(files: list[Path]) -> str:
    """Return 32 hexadecimal digits that change with any of `files`, the versions or the CPU."""
    sha = hashlib.sha256()
    versions = (platform.python_version(), numba.__version__, llvmlite.__version__)
    cpu = llvmlite.binding.get_host_cpu_name()
    sha.update(repr((versions, cpu, os.uname().machine)).encode())
    for path in files:
        text = path.read_bytes()
        sha.update(f"{path.name}:{len(text)}:".encode() + text)
    return sha.hexdigest()[:32]


@functools.cache
def kernel_folder() -> Path | None:
    """Return the private folder of compiled kernels, made if need be; None: the cache is off."""
    top = cache_folder()
    folder = top / "numba" / source_digest(source_files())
    try:
        top.mkdir(mode=0o700, parents=True, exist_ok=True)
        for step in (folder.parent, folder):
            step.mkdir(mode=0o700, exist_ok=True)
            check_private(step)
        handle, probe = tempfile.mkstemp(dir=folder, prefix="probe-")
        os.close(handle)
        Path(probe).unlink()
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
        return any(folder.glob("*.bin"))
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


class KernelCache:
    """The cache object that one Numba dispatcher asks before it compiles.

    It has the methods of Numba's own cache; nothing in Numba's configuration is changed.
    """

    def __init__(self, folder: Path, kernel_key: str) -> None:
        self._folder = folder
        self._kernel_key = kernel_key

    @property
    def cache_path(self) -> str:
        """The folder, as Numba's statistics show it."""
        return str(self._folder)

    def enable(self) -> None:
        """Do nothing: the cache is on while it is attached."""

    def disable(self) -> None:
        """Do nothing: a dispatcher without a cache simply has none attached."""

    def flush(self) -> None:
        """Do nothing: entries are never stale (see the module's digest)."""

    def load_overload(self, signature: Any, target_context: Any) -> Any:
        """Return the compiled code for a signature, or None when it must be compiled."""
        # All that loading needs. Numba's refresh would import what compiling needs, for 0.25 s with
        # SciPy installed; a compilation does that itself.
        rtsys.initialize(target_context)
        path = self._entry(signature, target_context.codegen())
        payload = _read_checked(path)
        if payload is None:
            return None
        try:
            reduced = pickle.loads(payload)  # noqa: S301  (see the module docstring)
            return CompileResult._rebuild(target_context, *reduced)
        except Exception as error:  # whatever a foreign entry raises, compiling again is right
            log.debug("compiled kernel %s does not load (%s); compiling again", path.name, error)
            return None

    def save_overload(self, signature: Any, result: Any) -> None:
        """Write compiled code to disk, atomically; a full or read-only disk costs one warning."""
        if result.lifted or result.library.has_dynamic_globals:
            return  # such code holds addresses of this process
        payload = dumps(result._reduce())
        path = self._entry(signature, result.codegen)
        try:
            _write_atomically(path, hashlib.sha256(payload).digest() + payload)
        except OSError as error:
            _warn_off(f"{self._folder} cannot be written ({error.strerror})")

    def _entry(self, signature: Any, codegen: Any) -> Path:
        key = repr((self._kernel_key, str(signature), codegen.magic_tuple()))
        name = re.sub(r"\W+", "_", self._kernel_key.split(":")[0].rpartition(".")[2])
        return self._folder / f"{name}-{hashlib.sha256(key.encode()).hexdigest()[:32]}.bin"


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
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix="new-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        Path(temporary).replace(path)
    except OSError:
        Path(temporary).unlink(missing_ok=True)
        raise
