"""The environment variables of the package, read here and nowhere else.

=========================  ================================================================
``GEMMULE_CACHE``          folder for compiled kernels and tuning results; default
                           ``$XDG_CACHE_HOME/gemmule``, else ``~/.cache/gemmule``
``GEMMULE_DEVICE``         device of operands that name none, ``cpu`` or ``cuda[:index]``
``GEMMULE_ARCH``           an older architecture, such as ``sm_80``, that GPUs are to stand in for:
                           kernels are compiled, chosen and refused as there; read when a
                           GPU is first used
``GEMMULE_DEVICE_BUDGET``  most bytes that one product of host operands takes on a GPU,
                           such as ``20GB`` or ``512MiB``; default: nine tenths of what is
                           free there
``GEMMULE_TUNE``           ``0``: ignore stored tuning results; ``1``, the default: use
                           them
``GEMMULE_POOL``           whose threads help with CPU products: ``blas``, the default:
                           NumPy's OpenBLAS's where they can be borrowed; ``own``: the
                           package's own
``GEMMULE_BUILTIN``        ``0``: planned CPU products never go by builtin functions,
                           which rely on the binary interfaces of CPython and NumPy;
                           ``1``, the default: they do where those are known
=========================  ================================================================
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def cache_folder() -> Path:
    """Return the cache folder of the package; it need not exist.

    ValueError where ``GEMMULE_CACHE`` names the home of a user that the system does not know.
    Example: with ``GEMMULE_CACHE=/scratch/me`` this is ``Path("/scratch/me")``.

    >>> from gemmule.settings import cache_folder
    >>> cache_folder().is_absolute()
    True
    """
    given = os.environ.get("GEMMULE_CACHE")
    if given:
        try:
            return Path(given).expanduser().absolute()
        except RuntimeError:
            raise ValueError(
                f"GEMMULE_CACHE is {given!r}, and the home of {Path(given).parts[0]} is unknown "
                "here; set it to a folder, or unset it."
            ) from None
        except FileNotFoundError:
            raise ValueError(
                f"GEMMULE_CACHE is {given!r}, and the folder that it is relative to is gone; set "
                "it to a whole path, or unset it."
            ) from None
    base = os.environ.get("XDG_CACHE_HOME")
    if base and Path(base).is_absolute():  # the XDG specification ignores relative paths
        return Path(base) / "gemmule"
    try:
        return Path.home() / ".cache" / "gemmule"
    except RuntimeError:  # no home: a user id without an entry in the password database
        return Path("/nonexistent/gemmule")


_DEVICE_KEY: Any = os.environ.encodekey("GEMMULE_DEVICE")
_IN_MEMORY: Any = getattr(os.environ, "_data", None)


def default_device() -> str | None:
    """Return ``GEMMULE_DEVICE``, or None when it is unset; ValueError when it is malformed."""
    # Every product asks. The environment's own dict answers in a tenth of the time of its `get`,
    # which raises and catches a KeyError where the name is unset.
    if _IN_MEMORY is not None and _DEVICE_KEY not in _IN_MEMORY:
        return None
    given = os.environ.get("GEMMULE_DEVICE")
    if not given:
        return None
    if not re.fullmatch(r"cpu|cuda(:\d+)?", given):
        raise ValueError(f"GEMMULE_DEVICE is {given!r}; it must be cpu, cuda or cuda:<index>.")
    return given


def stand_in() -> str | None:
    """Return ``GEMMULE_ARCH``, or None when it is unset; ValueError where it is no such name."""
    given = os.environ.get("GEMMULE_ARCH")
    if not given:
        return None
    if not re.fullmatch(r"sm_\d{2,3}", given):
        raise ValueError(f"GEMMULE_ARCH is {given!r}; it must name an architecture, such as sm_80.")
    return given


def numba_threads() -> int | None:
    """Return ``NUMBA_NUM_THREADS``, or None where it is unset or no positive number."""
    given = os.environ.get("NUMBA_NUM_THREADS", "")
    return int(given) if given.isdecimal() and int(given) > 0 else None


def tuning_enabled() -> bool:
    """Return False when ``GEMMULE_TUNE`` is ``0``: stored tuning results are then ignored.

    ValueError for anything but ``0``, ``1`` and the empty string, which is the default.
    """
    return _switched_on("GEMMULE_TUNE", "ignore stored tuning results", "use them")


def builtin_enabled() -> bool:
    """Return False when ``GEMMULE_BUILTIN`` is ``0``: no product is made a builtin function.

    ValueError as for `tuning_enabled`.
    """
    return _switched_on("GEMMULE_BUILTIN", "call no product as a builtin function", "where it can")


def _switched_on(name: str, off: str, on: str) -> bool:
    given = os.environ.get(name) or "1"
    if given not in ("0", "1"):
        raise ValueError(f"{name} is {given!r}; it must be 0 ({off}) or 1 ({on}, the default).")
    return given == "1"


_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def device_budget() -> int | None:
    """Return ``GEMMULE_DEVICE_BUDGET`` in bytes, or None when it is unset; ValueError if malformed.

    A number, with or without a unit: ``20000000000``, ``20GB``, ``1.5 GiB``, ``512m``.
    """
    given = os.environ.get("GEMMULE_DEVICE_BUDGET")
    if not given:
        return None
    seen = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?", given.strip().lower())
    size = 0.0 if seen is None else float(seen[1]) * (_UNITS | _BINARY)[seen[2] or ""]
    if size < 1:
        raise ValueError(
            f"GEMMULE_DEVICE_BUDGET is {given!r}; it must be a size in bytes such as 20GB, 512MiB "
            "or 20000000000."
        )
    return int(size)


def borrows_threads() -> bool:
    """Return False when ``GEMMULE_POOL`` is ``own``: no other library's threads are used.

    Other values than ``own`` and ``blas``: ValueError.
    """
    given = os.environ.get("GEMMULE_POOL") or "blas"
    if given not in ("blas", "own"):
        raise ValueError(f"GEMMULE_POOL is {given!r}; it must be 'blas' or 'own'.")
    return given == "blas"


@contextmanager
def without_tuning() -> Iterator[None]:
    """Ignore stored tuning results for a while, as ``GEMMULE_TUNE=0`` does."""
    before = os.environ.get("GEMMULE_TUNE")
    os.environ["GEMMULE_TUNE"] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ["GEMMULE_TUNE"]
        else:
            os.environ["GEMMULE_TUNE"] = before


VARIABLES = {
    "GEMMULE_CACHE": cache_folder,
    "GEMMULE_DEVICE": default_device,
    "GEMMULE_ARCH": stand_in,
    "GEMMULE_DEVICE_BUDGET": device_budget,
    "GEMMULE_TUNE": tuning_enabled,
    "GEMMULE_POOL": borrows_threads,
    "GEMMULE_BUILTIN": builtin_enabled,
}
"""What reads each variable; ValueError, with the rule, for one that is malformed."""
