"""``python tools/native_wheel.py <any-wheel>``: a wheel for Linux x86-64 with kernels built ahead.

For each target of `gemmule.backends.cpu.packaged` the kernels that default choices need are
compiled from the wheel's own sources, by a process in which the CPU passes for one of the target.
The new wheel is the old one with these files; it is written beside it. Needs what gemmule needs.

Where this machine lacks what a target has, kernels of rungs are compiled and not run: what calls
them meets functions that do nothing, and their results are dropped.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gemmule.backends.cpu.packaged import Target

TAG = "py3-none-manylinux_2_17_x86_64.manylinux2014_x86_64"
MOST_BYTES = 4_000_000
THREADS = (1, 2, 16)  # choices differ by them
VARIABLES = ("NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES", "NUMBA_ENABLE_AVX")
_DIGEST_BYTES = 32


def main() -> None:
    """Read the command line, and build."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheel", type=Path, help="gemmule-<version>-py3-none-any.whl")
    parser.add_argument("--target", help="Only this target, and few kernels: for a check.")
    given = parser.parse_args()
    print(built(given.wheel, given.target))


def built(wheel: Path, only: str | None = None) -> Path:
    """Write the wheel with object code beside another without; return its path."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder / "package")
        for target in _printed(folder, "targets").split():
            if only in (None, target):
                threads = THREADS if only is None else THREADS[1:2]
                for count in threads:
                    _printed(folder, "record", target, str(count), "" if only is None else "few")
                print(_printed(folder, "pack", target).strip())
        objects = folder / "package/gemmule/backends/cpu/objects"
        size = sum(path.stat().st_size for path in objects.iterdir())
        if size > MOST_BYTES:
            raise SystemExit(f"{size:,} bytes of object code; at most {MOST_BYTES:,} are wanted")
        return zipped(folder / "package", wheel.with_name(wheel.name.replace("py3-none-any", TAG)))


def _printed(folder: Path, *arguments: str) -> str:
    """Return what a process prints that imports the unpacked wheel."""
    code = f"import native_wheel; native_wheel.in_child({arguments!r}, {str(folder)!r})"
    places = (folder / "package", Path(__file__).parent)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, places))}
    for name in VARIABLES:
        environment.pop(name, None)
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**environment, "PYTHONDONTWRITEBYTECODE": "1", "GEMMULE_TUNE": "0"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return done.stdout


def in_child(arguments: tuple[str, ...], folder: str) -> None:
    """Do one step: name the targets, record the kernels of one, or pack what was recorded."""
    from gemmule.backends.cpu import packaged

    what, *rest = arguments
    if what == "targets":
        print(*(target.name for target in packaged.TARGETS))
        return
    target = next(one for one in packaged.TARGETS if one.name == rest[0])
    cache = Path(folder) / target.name
    os.environ["GEMMULE_CACHE"] = str(cache)
    if what == "record":
        _record(target, int(rest[1]), few=bool(rest[2]))
    else:
        print(_pack(target.name, cache))


def _record(target: Target, processors: int, *, few: bool) -> None:
    """Compute a product of each kind as a CPU of the target would, so that it is compiled."""
    from gemmule.backends.cpu import amx, features, packaged, shares, threads
    from gemmule_lab import warming

    present = features.host_features()
    wanted = target.features | target.needed
    if not wanted <= present or ("amx-tile" in wanted and amx.refusal() is not None):
        _run_no_rung()
        put(amx, "refusal", lambda: None)
        put(features, "host_features", lambda: present | wanted)
    if "avx512bf16" in target.features and "amx-tile" not in target.features:
        put(features, "processor_vendor", lambda: "AuthenticAMD")  # whose have no tiles
    put(threads, "usable_processors", lambda: processors)
    os.environ.update(target.variables())
    if packaged.target() != target:
        raise SystemExit(f"this passes for {packaged.target()}, not for {target}")
    # Helpers are OpenBLAS's threads or own ones, as NumPy's release has it.
    shares.lent.address(1)
    shares.work.entry(int, for_python=True)
    dtypes, bits = (("float16",), ()) if few else (warming.DTYPES, warming.BITS)
    for _ in warming.warm(dtypes, bits):
        pass


def _run_no_rung() -> None:
    """Compile kernels and run others: of the back end the same for this CPU, of rungs nothing."""
    from gemmule.backends.cpu import jit_cache
    from gemmule.backends.cpu.jit import Kernel, kernel

    load = jit_cache.loaded

    @kernel
    def nothing(*words: int) -> int:
        return 0

    def loaded(wanted: Kernel, parameters: tuple[Any, ...], *, for_python: bool = False) -> int:
        load(wanted, parameters, for_python=for_python)
        stated = {name: os.environ.pop(name) for name in VARIABLES if name in os.environ}
        run = nothing if wanted.key.startswith("gemmule.rungs.") else wanted
        made = jit_cache.compiled(run, parameters, for_python)
        os.environ.update(stated)
        return jit_cache._placed(made)

    put(jit_cache, "loaded", loaded)


def put(module: Any, name: str, value: Any) -> None:
    """Put a value in the place of one that a module has; SystemExit where it has none."""
    if not hasattr(module, name):
        raise SystemExit(f"{module.__name__} has no {name}")
    setattr(module, name, value)


def _pack(name: str, cache: Path) -> str:
    """Write the file of a target into the package; return what it holds, in words."""
    from gemmule.backends.cpu import packaged
    from gemmule.backends.cpu.jit_cache import source_digest

    made = {
        path.stem.rpartition("-")[2]: path.read_bytes()[_DIGEST_BYTES:]
        for path in cache.glob("kernels/*/*.o")
    }
    content = packaged.packed(made)
    packaged.FOLDER.mkdir(exist_ok=True)
    (packaged.FOLDER / f"{name}-{source_digest()}").write_bytes(content)
    return f"{name}: {len(made)} kernels, {len(content):,} bytes"


def zipped(folder: Path, wheel: Path) -> Path:
    """Write the files of an unpacked wheel as a wheel for one platform."""
    (about,) = folder.glob("*.dist-info")
    text = (about / "WHEEL").read_text()
    told = "".join(f"Tag: py3-none-{one}\n" for one in TAG.removeprefix("py3-none-").split("."))
    text = text.replace("Tag: py3-none-any\n", told)
    (about / "WHEEL").write_text(text.replace("Is-Purelib: true", "Is-Purelib: false"))
    record, rows = about / "RECORD", []
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path != record)
    for path in files:
        digest = base64.urlsafe_b64encode(hashlib.sha256(path.read_bytes()).digest()).decode()
        name = path.relative_to(folder).as_posix()
        rows.append(f"{name},sha256={digest.rstrip('=')},{path.stat().st_size}\n")
    record.write_text("".join([*rows, f"{record.relative_to(folder).as_posix()},,\n"]))
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in (*files, record):  # one date, so that the same files make the same wheel
            entry = zipfile.ZipInfo(path.relative_to(folder).as_posix())
            entry.external_attr, entry.compress_type = 0o644 << 16, zipfile.ZIP_DEFLATED
            archive.writestr(entry, path.read_bytes())
    return wheel


if __name__ == "__main__":
    main()
