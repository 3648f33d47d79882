"""What a measurement depends on besides the code: machine, versions, threads, clocks, commit."""

from __future__ import annotations

import datetime as dt
import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from gemmule.timing.machine import cache_bytes
from gemmule_lab.records.rows import Ceiling, Environment

PACKAGES = (
    "gemmule", "numpy", "numba", "llvmlite", "scipy", "torch", "onnxruntime", "llama-cpp-python",
    "cupy-cuda12x", "cupy-cuda13x", "jax", "triton", "cuda-core", "cuda-bindings",
    "nvidia-cuda-nvrtc", "nvmath-python", "ml_dtypes",
)  # fmt: skip


def capture_environment(
    device: str,
    backend: str,
    *,
    ceilings: Mapping[str, Ceiling],
    threads: int,
    gpus: Sequence[str] = (),
    caches: Mapping[str, int] | None = None,
) -> Environment:
    """Return the environment of a run on `device` (``backend``: ``cpu`` or ``cuda``).

    gpus, caches: what a GPU back end knows (names, bytes of its L2); a CPU's own are read here.
    Versions are those of installed packages that matter.
    """
    return Environment(
        device=device,
        backend=backend,
        cpu=cpu_name(),
        gpus=tuple(gpus),
        system=platform.platform(),
        python=platform.python_version(),
        versions={name: found for name in PACKAGES if (found := version_of(name))},
        commit=_commit(),
        threads=threads,
        clocks=_cpu_clocks(),
        ceilings=dict(ceilings),
        timestamp=dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        caches=_cpu_caches() if backend == "cpu" else caches or {},
    )


def cpu_name() -> str:
    """Return the CPU's model name."""
    from gemmule import backends

    return backends.get("cpu").machine("cpu").name


def _cpu_clocks() -> dict[str, str]:
    found = {}
    for line in _lines(Path("/proc/cpuinfo")):
        if line.startswith("cpu MHz"):
            found["cpu"] = f"{float(line.split(':', 1)[1]):.0f} MHz"
            break
    governor = _lines(Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"))
    if governor:
        found["governor"] = governor[0].strip()
    if hasattr(os, "getloadavg"):
        found["load"] = f"{os.getloadavg()[0]:.2f}"
    return found


def _cpu_caches() -> dict[str, int]:
    return {f"L{level}": size for level, size in cache_bytes().items()}


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:  # not Linux, or not told in this container
        return []


def version_of(package: str) -> str | None:
    """Return the version of an installed package, None where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """Return the commit of the source tree this package lies in, ``+`` if it was changed since."""
    folder = Path(__file__).parent
    try:
        head = _git(folder, "rev-parse", "HEAD")
        return head + ("+" if _git(folder, "status", "--porcelain", ".") else "")
    except (OSError, subprocess.SubprocessError):  # an installed package, or no git
        return None


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    return done.stdout.strip()
