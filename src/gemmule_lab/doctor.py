"""What this machine offers gemmule, what is missing, and how to get it."""

from __future__ import annotations

import ctypes
import difflib
import importlib
import importlib.util
import os
import platform
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gemmule import settings
from gemmule.errors import INSTALL
from gemmule_lab.records.environment import version_of

if TYPE_CHECKING:
    from gemmule.core.rung import Machine
    from gemmule_lab.served import Served

OK, NOTE, FAIL = "ok", "note", "FAIL"
CPU_FEATURES = (
    "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16", "amx_tile",
    "amx_bf16", "amx_int8",
)  # fmt: skip
OPTIONAL = ("torch", "cupy-cuda13x", "cupy-cuda12x", "jax", "scipy", "nvidia-ml-py")
CUDA_WHEELS = ("cuda-core", "cuda-bindings", "nvidia-cuda-nvrtc", "nvidia-cuda-runtime")
CUDA_FIX = f"{INSTALL['cuda13']} (driver 580 or newer), or the same of 12"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report: part, ok | note | FAIL, what was found, what to do about it."""

    part: str
    status: str
    found: str
    fix: str = ""


def examine(tell: Callable[[str], None] = lambda part: None) -> list[Finding]:
    """Return what was found, part by part; a check that itself fails is a finding too.

    A FAIL is only given where the CPU part of gemmule does not work. Takes about ten seconds the
    first time, when kernels are compiled. tell: is called with the name of each part.
    """
    found: list[Finding] = []
    with _sound_settings(found):
        for check in CHECKS:
            tell(f"checking {check.__name__.strip('_').replace('_', ' ')}")
            found += safely(check)
    return found


def safely(check: Callable[[], Iterator[Finding]]) -> list[Finding]:
    """Return what a check finds; one that breaks is a finding itself."""
    name = check.__name__.strip("_")
    try:
        return list(check())
    except Exception as error:  # a report on a broken machine must not itself break
        return [Finding(name, FAIL, f"{type(error).__name__}: {error}", "reinstall gemmule")]


@contextmanager
def _sound_settings(found: list[Finding]) -> Iterator[None]:
    """Tell which variables are set, and what is wrong with one, which is then as if unset."""
    given = {name: value for name, value in os.environ.items() if name.startswith("GEMMULE_")}
    for name, value in sorted(given.items()):
        read = settings.VARIABLES.get(name)
        try:
            if read is None:
                near = difflib.get_close_matches(name, settings.VARIABLES, 1)
                words = f"unset it{f', or did you mean {near[0]}?' if near else ''}"
                found.append(Finding("settings", NOTE, f"{name} is no variable of gemmule", words))
            else:
                read()
                found.append(Finding("settings", OK, f"{name}={value}"))
        except ValueError as error:
            found.append(Finding("settings", FAIL, str(error), f"unset {name}, or set it so"))
            del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(given)


def _python() -> Iterator[Finding]:
    version, place = version_of("gemmule") or "not installed", Path(__file__).parents[1]
    yield Finding("gemmule", OK, f"{version} in {place}")
    system = f"{platform.system()} {platform.machine()}"
    words = "" if system == "Linux x86_64" else "only Linux x86_64 is tested"
    yield Finding("Python", _noted(words), f"{platform.python_version()} on {system}", words)


def _noted(reason: str | None) -> str:
    return NOTE if reason else OK


def _numpy() -> Iterator[Finding]:
    import numpy as np
    import threadpoolctl

    libraries = (lib for lib in threadpoolctl.threadpool_info() if lib.get("user_api") == "blas")
    words = "; ".join(
        f"{lib['internal_api']} {lib.get('version')}, {lib['num_threads']} threads"
        for lib in libraries
    )
    yield Finding("NumPy", OK, f"{np.__version__}, BLAS: {words or 'not recognised'}")


def _compiler() -> Iterator[Finding]:
    version = version_of("llvmlite")
    if version is None:
        words = "not installed: only the NumPy rungs run"
        yield Finding("LLVM", NOTE, words, "pip install llvmlite")
        return
    yield Finding("LLVM", OK, f"llvmlite {version} compiles CPU kernels")


def _processor() -> Iterator[Finding]:
    from gemmule import backends

    machine = backends.get("cpu").machine("cpu")
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    flags = next((line for line in text.splitlines() if line.startswith("flags")), "").split()
    present = [name for name in CPU_FEATURES if name in flags]
    threads = len(os.sched_getaffinity(0))
    cache = machine.cache_bytes >> 20
    yield Finding("CPU", OK, f"{machine.name}, {threads} threads, {cache} MiB last-level cache")
    yield _threads()
    if importlib.util.find_spec("llvmlite") is not None:
        yield planned_calls()
    words = "kernels run, but slowly: AVX2 and FMA are what they are built for"
    words = "" if {"avx2", "fma"} <= {*present} else words
    yield Finding("CPU features", _noted(words), " ".join(present) or "none of those used", words)


def _threads() -> Finding:
    """Tell whose threads help with products, and which rates the choices are made by."""
    if importlib.util.find_spec("llvmlite") is None:
        return Finding("CPU threads", NOTE, "NumPy's own alone", "pip install llvmlite")
    from gemmule.backends.cpu import launch, pool, threads

    measured = launch.machine().rates.measured
    model = f"device model of {measured}" if measured else "default device model"
    words = "" if measured else "gemmule tune --device-model measures this CPU in five seconds"
    found = f"{threads.thread_count()} a product; helpers: {pool.helpers()}; {model}"
    return Finding("CPU threads", _noted(words), found, words)


def planned_calls() -> Finding:
    """Tell how planned products are called, and why not as builtin functions."""
    from gemmule.backends.cpu.calls import builtin
    from gemmule.settings import builtin_enabled

    reason = builtin.unusable() if builtin_enabled() else "GEMMULE_BUILTIN is 0"
    words = "as builtin functions" if reason is None else f"through Python: {reason}"
    return Finding("CPU calls", _noted(reason), f"planned products {words}")


def _caches() -> Iterator[Finding]:
    from gemmule.settings import cache_folder

    folder = cache_folder()
    if importlib.util.find_spec("llvmlite") is None:
        return
    from gemmule.backends.cpu import jit_cache

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        kernels = jit_cache.kernel_folder()
    if kernels is None:
        reason = str(caught[0].message) if caught else f"{folder} cannot be written"
        yield Finding("cache", NOTE, reason, "set GEMMULE_CACHE to a folder of your own")
        return
    files = list(kernels.glob("*"))
    size = sum(path.stat().st_size for path in files)
    yield Finding("cache", OK, f"{folder}, {len(files)} compiled CPU kernels, {size >> 10:,} KiB")


def _products() -> Iterator[Finding]:
    """Compute one product of each kind and compare it with NumPy's, exactly."""
    import numpy as np

    import gemmule as gm

    A = np.arange(63 * 65, dtype=np.float32).reshape(63, 65) % 7 - 3
    x = np.arange(65, dtype=np.float32) % 5 - 2
    results = {
        "matvec": (gm.matvec(A, x), A @ x),
        "vecmat": (gm.vecmat(x, A.T), A @ x),
        "matmul": (gm.matmul(A, A.T), A @ A.T),
        "int8": (gm.matvec(A.astype(np.int8), x.astype(np.int8)), (A @ x).astype(np.int32)),
        "float16": (gm.matvec(A.astype(np.float16), x.astype(np.float16)), (A @ x)),
    }
    wrong = [name for name, (ours, theirs) in results.items() if not np.array_equal(ours, theirs)]
    if wrong:
        yield Finding("CPU products", FAIL, f"wrong: {', '.join(wrong)}", "run gemmule verify")
    else:
        yield Finding("CPU products", OK, f"{', '.join(results)} are exact")


def _driver() -> Iterator[Finding]:
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        words = "install NVIDIA's driver if this machine has a GPU"
        yield Finding("CUDA driver", NOTE, "not found: products run on the CPU", words)
        return
    version, count = ctypes.c_int(), ctypes.c_int()
    library.cuDriverGetVersion(ctypes.byref(version))
    label = f"CUDA {version.value // 1000}.{version.value % 1000 // 10}"
    status = library.cuInit(0) or library.cuDeviceGetCount(ctypes.byref(count))
    if status != 0 or count.value == 0:
        found = f"{label}, but no usable GPU (driver status {status})"
        yield Finding("CUDA driver", NOTE, found, "check nvidia-smi and CUDA_VISIBLE_DEVICES")
        return
    yield Finding("CUDA driver", OK, f"{label}, {count.value} GPU(s): {_gpu_names(library, count)}")


def _gpu_names(library: ctypes.CDLL, count: ctypes.c_int) -> str:
    names = []
    for index in range(count.value):
        buffer = ctypes.create_string_buffer(256)
        library.cuDeviceGetName(buffer, 256, index)
        names.append(buffer.value.decode(errors="replace"))
    return ", ".join(names)


def _architectures() -> Iterator[Finding]:
    """Tell of each GPU what it is compiled for and what it is served, where the driver starts."""
    from gemmule import backends
    from gemmule.backends.cuda import driver
    from gemmule.errors import DeviceError

    try:
        count = driver.device_count()
    except DeviceError:  # which other findings tell
        return
    for ordinal in range(count):
        try:
            yield from service(backends.get("cuda").machine(f"cuda:{ordinal}"))
        except DeviceError as error:
            yield Finding("GPU", NOTE, str(error), "use another device, or the CPU")


def service(machine: Machine) -> Iterator[Finding]:
    """Tell what a GPU, here or made up, is compiled for, and who proved what it is served."""
    from gemmule_lab import served

    words, advice = served.compiled_for(machine)
    yield Finding("GPU", _noted(advice), words, advice)
    yield _times(machine)
    found = list(served.served(machine))
    told = {
        served.HERE: ", ".join(dict.fromkeys(_rung(o) for o in found if o.how == served.HERE)),
        served.ELSEWHERE: served.who_proved(found),
        served.LIBRARY: ", ".join(o.product for o in found if o.how == served.LIBRARY),
    }
    for how, words in told.items():
        count = sum(one.how == how for one in found)
        text = words if how == served.ELSEWHERE else f"{how}: {words}"
        if count:
            yield Finding("GPU products", OK, f"{count} of {len(found)} usual ones {text}")
    missing = [one for one in found if one.how == served.NOT]
    if missing:
        names = ", ".join(one.product for one in missing)
        yield Finding("GPU products", NOTE, f"not served: {names}", missing[0].reason)


def _times(machine: Machine) -> Finding:
    """Tell whose times choices of kernels on a GPU are made by."""
    from gemmule.storage import models

    other = models.borrowed(machine)
    if other:
        words = f"those of {other}; none were measured here"
        command = "gemmule tune --device-model --device cuda measures them here, in minutes"
        return Finding("GPU times", NOTE, words, command)
    day = models.of(machine).measured
    return Finding("GPU times", OK, f"measured here on {day}" if day else "shipped for this GPU")


def _rung(one: Served) -> str:
    return "" if one.choice is None else one.choice.rung.name


def _wheels() -> Iterator[Finding]:
    versions = {name: version_of(name) for name in CUDA_WHEELS}
    missing = [name for name in ("cuda-core", "cuda-bindings") if versions[name] is None]
    found = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    if missing:
        yield Finding("CUDA packages", NOTE, f"missing: {', '.join(missing)}", CUDA_FIX)
    else:
        yield Finding("CUDA packages", OK, found)


def _nvrtc() -> Iterator[Finding]:
    """Compile one line of CUDA C++; that needs no GPU."""
    if version_of("cuda-bindings") is None:
        return
    try:
        from cuda.bindings import nvrtc

        source = b'extern "C" __global__ void probe(float* y) { y[threadIdx.x] = 1.0f; }'
        status, program = nvrtc.nvrtcCreateProgram(source, b"probe.cu", 0, [], [])
        options = [b"--gpu-architecture=sm_90a"]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        _, major, minor = nvrtc.nvrtcVersion()
        nvrtc.nvrtcDestroyProgram(program)
    except Exception as error:  # the loader raises its own classes, by version
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        yield Finding("NVRTC", NOTE, f"does not load: {reason}", CUDA_FIX)
        return
    version = f"{major}.{minor}"
    if int(status) != 0:
        yield Finding("NVRTC", NOTE, f"{version} does not compile (status {status})", CUDA_FIX)
        return
    yield Finding("NVRTC", OK, f"{version} compiles for sm_90a")


def cublas_library() -> Iterator[Finding]:
    """Open the vendor's library; that needs no GPU."""
    from gemmule.backends.cuda.library import cublas

    reason = cublas.missing()
    if reason is None:
        yield Finding("cuBLAS", OK, f"{cublas.version()}, what plans multiply matrices by")
        return
    yield Finding("cuBLAS", NOTE, "not found: matrices are multiplied by our own", cublas.INSTALL)


def _optional() -> Iterator[Finding]:
    found = [f"{name} {version}" for name in OPTIONAL if (version := version_of(name))]
    yield Finding("also here", OK, ", ".join(found) or "none of torch, cupy, jax, scipy")


CHECKS = (
    _python,
    _numpy,
    _compiler,
    _processor,
    _caches,
    _products,
    _driver,
    _wheels,
    _nvrtc,
    _architectures,
    cublas_library,
    _optional,
)


def show(findings: list[Finding]) -> None:
    """Print the findings as a table."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    colours = {OK: "green", NOTE: "yellow", FAIL: "bold red"}
    table = Table(show_header=False, box=None, pad_edge=False)
    for finding in findings:
        detail = Text(finding.found)
        if finding.fix:
            detail.append(f"\n-> {finding.fix}", style="cyan")
        table.add_row(Text(finding.status, style=colours[finding.status]), finding.part, detail)
    Console().print(table)


def in_plain_words() -> int:
    """Print the findings where rich is not installed; return the exit code."""
    found = examine()
    for finding in found:
        fix = f"\n{'':6}-> {finding.fix}" if finding.fix else ""
        print(f"{finding.status:5} {finding.part}: {finding.found}{fix}")
    return int(any(finding.status == FAIL for finding in found))
