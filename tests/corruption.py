"""Damaged files of every kind that is read, and writers that are killed: a campaign by seed.

``python tests/corruption.py [--cases N] [--seed S] [KIND ...]`` damages sound files at random and
reads them. Each kind has a judge that knows what the damaged bytes mean without our reader: NumPy,
SciPy, the safetensors library, or a slow strict reader below. A case is *refused* (a named error),
*right* (the judge reads the same), or one of the four that must not be: *wrong*, *crashed*, *hung*
(or seconds of work over a small file), *raised* (an error of another kind, such as that memory ran
out). Readers run in children of little memory, so that a crash is a line in the table. Then writers
of each kind are killed at random moments: a reader must find a whole file.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import contextlib
import functools
import io
import json
import os
import random
import re
import resource
import secrets
import signal
import struct
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import foreign_files
from campaign_record import keep

HANG_S = 20
BUSY_S = 2  # of processor time, for files of some kilobytes
ASKED_BYTES = 256 << 20  # that a reader may ask for, beside what was there before
ROOM_BYTES = 3 << 30  # that it gets
BAD = ("wrong", "crashed", "hung", "raised")
WORDS = (0, 1, 2, 7, 14, 15, 127, 255, 2**15, 2**16, 2**31 - 1, 2**31, 2**32 - 1)
TOKENS = (
    b"-1", b"0", b"1e999", b"nan", b"inf", b"99999999999999999999", b"0x10", b"1.5.5", b"\0", b"%",
    b"", b"-", b"1e", b"true", b"null", b"[]", b"{}", b"1 2", b"\n", b"\xff", b'"', b"2147483648",
)  # fmt: skip


def mutated(sound: bytes, rng: random.Random) -> bytes:
    """Return `sound` with one to three random changes, never unchanged."""
    while True:
        data = bytearray(sound)
        for _ in range(rng.randint(1, 3)):
            _change(data, rng)
        if data != sound:
            return bytes(data)


def _change(data: bytearray, rng: random.Random) -> None:
    # Heads are short and matter most, so half of the damage falls on the first 300 bytes.
    reach = min(len(data), 300) if rng.random() < 0.5 else len(data)
    place = rng.randint(0, max(reach - 1, 0))
    kind = rng.randrange(10)
    if kind <= 1 and data:
        data[place] ^= 1 << rng.randrange(8)
    elif kind == 2:
        data[place : place + 1] = bytes([rng.randrange(256)])
    elif kind == 3:
        del data[place:]
    elif kind == 4:
        data += rng.randbytes(rng.randint(1, 20))
    elif kind == 5:
        del data[place : place + rng.randint(1, 9)]
    elif kind == 6:
        place = place // 4 * 4 if rng.randrange(2) else place
        size = rng.choice(["<I", ">I", "<Q"])
        words = WORDS if size != "<Q" else (*WORDS, 2**40, 2**63)
        data[place : place + struct.calcsize(size)] = struct.pack(size, rng.choice(words))
    elif kind == 7:
        tokens = list(re.finditer(rb"[-+.\w]+", data[:4096]))
        if tokens:
            token = rng.choice(tokens)
            data[token.start() : token.end()] = rng.choice(TOKENS)
    elif kind == 8:
        data[place:place] = rng.choice(TOKENS)
    else:
        other = rng.randint(0, max(reach - 1, 0))
        span = rng.randint(1, 64)
        data[place:place] = data[other : other + span]


# --- what damaged bytes mean, without our readers -----------------------------------------------

MATRIX = np.random.default_rng(5).standard_normal((6, 5))


@dataclass(frozen=True)
class Kind:
    """One kind of file: sound examples, our reader, and what its answer is compared with.

    read: path -> our answer; ValueError or TypeError refuse. judge: (content, answer) -> whether
    the answer is right.
    """

    suffix: str
    sound: tuple[bytes, ...]
    read: Callable[[Path], Any]
    judge: Callable[[bytes, Any], bool]


def same(ours: Any, theirs: Any) -> bool:
    return (
        ours.shape == theirs.shape
        and ours.dtype.kind == theirs.dtype.kind
        and np.ascontiguousarray(ours).tobytes() == np.ascontiguousarray(theirs).tobytes()
    )


def read_matrix(path: Path) -> Any:
    from gemmule_lab.files.matrices import read_matrix

    return read_matrix(str(path), limit_bytes=1 << 26)


def npy() -> Kind:
    sound = []
    arrays = MATRIX, np.asfortranarray(MATRIX.astype("f4")), MATRIX.astype(">i2"), MATRIX[0]
    for array, version in zip(arrays, ((1, 0), (1, 0), (2, 0), (2, 0)), strict=True):
        buffer = io.BytesIO()
        np.lib.format.write_array(buffer, array, version)
        sound.append(buffer.getvalue())
    return Kind(
        ".npy", tuple(sound), read_matrix, lambda data, ours: same(ours, np.load(io.BytesIO(data)))
    )


def mapped() -> Kind:
    """A sound file that is mapped, then cut as short as the damaged one, then multiplied."""
    import gemmule as gm
    from gemmule_lab.files import matrices, multiply

    big, vector = np.resize(MATRIX, (96, 512)).astype("f4"), np.resize(MATRIX, 512).astype("f4")
    buffer = io.BytesIO()
    np.save(buffer, big)
    sound = buffer.getvalue()

    def in_blocks(path: Path, turned: bool) -> Any:
        job = multiply.Job("matvec", matrices.read_matrix(str(path)), vector)
        parts, out = multiply.blocks(job, 1 << 15), np.empty(96, "f4")
        for part in multiply.multiply(job, out, parts):
            if part.start == 0:
                cut(path)  # what is under way
        return out

    def by_map(path: Path, turned: bool) -> Any:
        map_ = np.load(path, mmap_mode="r")
        cut(path)
        return gm.vecmat(vector, map_.T) if turned else gm.matvec(map_, vector)

    def in_panels(path: Path, turned: bool) -> Any:
        map_ = np.load(path, mmap_mode="c")[:, ::2]
        cut(path)
        return gm.matvec(map_, vector[::2])

    def quantised(path: Path, turned: bool) -> Any:
        map_ = np.load(path, mmap_mode="r")
        cut(path)
        return gm.matvec(gm.quantize(map_, 8, -1), vector)

    length = len(sound)

    def cut(path: Path) -> None:
        os.truncate(path, length)

    def read(path: Path) -> Any:
        nonlocal length
        way = (path.read_bytes() or b"\0")[-1]  # of an empty file the first
        length = path.stat().st_size
        path.write_bytes(sound)
        ways = (in_blocks, by_map, in_panels, quantised)
        return way % 4, ways[way % 4](path, way % 8 > 3)

    def judge(data: bytes, ours: Any) -> bool:
        way, found = ours
        wanted = big[:, ::2] @ vector[::2] if way == 2 else big @ vector
        return np.allclose(found, wanted, atol=5 if way == 3 else 1e-3)

    ends = [sound[:-1] + bytes([end]) for end in range(8)]  # the last byte chooses the way
    return Kind(".npy", tuple(ends), read, judge)


def npz() -> Kind:
    sound = []
    for save in (np.savez, np.savez_compressed):
        buffer = io.BytesIO()
        save(buffer, A=MATRIX.astype("f4"))
        sound.append(buffer.getvalue())

    def judge(data: bytes, ours: Any) -> bool:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:  # which compares checksums
            (name,) = [n for n in archive.namelist() if n.endswith(".npy")]
            return same(ours, np.load(io.BytesIO(archive.read(name))))

    return Kind(".npz", tuple(sound), read_matrix, judge)


def safetensors() -> Kind:
    import safetensors.numpy

    arrays = {"A": MATRIX.astype("f4")}, {"weight.0": MATRIX.astype("f2")}

    def judge(data: bytes, ours: Any) -> bool:
        ((_, entry),) = safetensors.deserialize(data)
        raw = np.ascontiguousarray(ours).tobytes()
        return list(ours.shape) == entry["shape"] and raw == bytes(entry["data"])

    sound = tuple(safetensors.numpy.save(a, metadata={"k": "v"}) for a in arrays)
    return Kind(".safetensors", sound, read_matrix, judge)


SCIPY = """
import io, sys, struct, warnings
import numpy as np, scipy.io
warnings.simplefilter("ignore")
while head := sys.stdin.buffer.read(8):
    data = sys.stdin.buffer.read(struct.unpack("<Q", head)[0])
    try:
        names = [n for n, _, _ in scipy.io.whosmat(io.BytesIO(data)) if not n.startswith("__")]
        (name,) = names
        array = np.asarray(scipy.io.loadmat(io.BytesIO(data), variable_names=[name])[name])
        wide = array.astype("c16" if array.dtype.kind == "c" else array.dtype.kind + "8")
        reply = f"{array.shape}\\n".encode() + np.asfortranarray(wide).tobytes("F")
    except Exception as error:
        reply = b""
    sys.stdout.buffer.write(struct.pack("<Q", len(reply)) + reply)
    sys.stdout.buffer.flush()
"""


class Scipy:
    """SciPy's opinion on a MATLAB file, from a child that it may take down with it."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[bytes] | None = None

    def __call__(self, data: bytes) -> bytes | None:
        """Return shape and numbers, or None where SciPy refuses or dies."""
        if self._child is None or self._child.poll() is not None:
            self._child = subprocess.Popen(
                [sys.executable, "-c", SCIPY],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._child.stdin.write(struct.pack("<Q", len(data)) + data)
            self._child.stdin.flush()
        head = self._child.stdout.read(8)
        if len(head) < 8:
            self._child.wait()
            return None
        return self._child.stdout.read(struct.unpack("<Q", head)[0]) or None


def mat() -> Kind:
    import scipy.io

    sound = []
    for array in (MATRIX, MATRIX.astype("f4"), (9 * MATRIX).astype("i2"), MATRIX + 1j):
        for version, compressed in (("5", False), ("5", True), ("4", False)):
            buffer = io.BytesIO()
            scipy.io.savemat(buffer, {"A": array}, format=version, do_compression=compressed)
            sound.append(buffer.getvalue())
    peer = Scipy()

    def judge(data: bytes, ours: Any) -> bool:
        theirs = peer(data)
        if theirs is None:
            # SciPy refuses or dies of what only our reader takes: then the numbers must be those
            # that lie in the sound file, or in the damaged one.
            return bool(ours.size) and _lies_in(ours, data)
        wide = ours.astype("c16" if ours.dtype.kind == "c" else ours.dtype.kind + "8")
        if wide.dtype.kind == "c":
            # SciPy adds imag * 1j in old files: that loses -0.0, and NaN and its bits spread.
            shape, _, raw = theirs.partition(b"\n")
            with np.errstate(all="ignore"):
                added = (wide.real + wide.imag * 1j).ravel("F")
            parts = np.frombuffer(raw, "c16")
            equal = any(np.array_equal(parts, p, equal_nan=True) for p in (added, wide.ravel("F")))
            return equal and shape == str(ours.shape).encode()
        shape, _, raw = theirs.partition(b"\n")
        if wide.dtype.kind == "f" and raw != wide.tobytes("F"):
            # A class of floats may be stored as integers, which SciPy gives as they are.
            return any(
                raw == wide.astype(t).tobytes("F") for t in ("i8", "u8") if np.isfinite(wide).all()
            )
        return shape == str(ours.shape).encode() and raw == wide.tobytes("F")

    return Kind(".mat", tuple(sound), read_matrix, judge)


def _lies_in(array: Any, data: bytes) -> bool:
    import zlib

    pieces = [data]
    with contextlib.suppress(zlib.error):
        pieces.append(zlib.decompressobj().decompress(data[136:], 1 << 20))
    for order in "<>":
        for kind in ("f8", "f4", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8"):
            part = array.real if array.dtype.kind == "c" else array
            with np.errstate(all="ignore"):
                stored = part.astype(order + kind)
            if np.array_equal(stored.astype(part.dtype), part, equal_nan=True):
                raw = stored.tobytes("F")
                if any(raw in piece for piece in pieces):
                    return True
    return False


def mtx() -> Kind:
    import scipy.io
    import scipy.sparse

    sound = []
    square = MATRIX[:5]
    for array in (
        MATRIX,
        (9 * MATRIX).astype("i4"),
        square + square.T,
        square - square.T,
        square + 1j * square.T,
        scipy.sparse.coo_matrix(np.where(MATRIX > 0, MATRIX, 0)),
        scipy.sparse.coo_matrix(np.where(square + square.T > 0, square + square.T, 0)),
    ):
        buffer = io.BytesIO()
        scipy.io.mmwrite(buffer, array)
        sound.append(buffer.getvalue())
    return Kind(".mtx", tuple(sound), read_matrix, lambda data, ours: same(ours, slow_mtx(data)))


def slow_mtx(data: bytes) -> Any:
    """Read a Matrix Market file line by line, number by number."""
    first, *rest = data.split(b"\n")
    form, field, symmetry = first.decode("latin-1").lower().split()[2:]
    lines = [line.split() for line in rest if line.strip() and not line.startswith(b"%")]
    rows, cols, *_ = (int(word) for word in lines[0])
    dtype = {"complex": "c16", "integer": "i8", "unsigned-integer": "u8"}.get(field, "f8")
    out = np.zeros((rows, cols), dtype)

    def value(words: list[bytes]) -> Any:
        if field == "complex":
            return complex(float(words[0]), float(words[1]))
        if field == "pattern":
            return 1.0
        return int(words[0]) if field.endswith("integer") else float(words[0])

    if form == "coordinate":
        places = [(int(i) - 1, int(j) - 1, words) for i, j, *words in lines[1:]]
    else:
        skew = symmetry == "skew-symmetric"
        first_row = (lambda j: 0) if symmetry == "general" else (lambda j: j + skew)
        order = [(i, j) for j in range(cols) for i in range(first_row(j), rows)]
        places = [(*at, words) for at, words in zip(order, lines[1:], strict=True)]
    mirror = {"symmetric": lambda v: v, "skew-symmetric": lambda v: -v}.get(symmetry, np.conj)
    for i, j, words in places:
        assert i >= 0
        assert j >= 0
        pairs = [((i, j), value(words))]
        if symmetry != "general" and i != j:
            pairs.append(((j, i), mirror(value(words))))
        for at, number in pairs:
            # Repeated entries are summed; in full files a -0.0 stays one.
            out[at] = out[at] + number if form == "coordinate" else number
    return out


def quantised() -> Kind:
    import safetensors

    import gemmule as gm
    from gemmule.quant.matrix import QuantizedMatrix

    sound = []
    for bits, group, options in (
        (4, 4, {}),
        (8, -1, {"symmetric": True}),
        (4, None, {"scale_dtype": "bfloat16"}),
        (8, 2, {"perm": np.arange(5)[::-1]}),
    ):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "q.safetensors")
            gm.quantize(MATRIX, bits, group, **options).save(path)
            sound.append(path.read_bytes())

    def judge(data: bytes, ours: Any) -> bool:
        theirs = dict(safetensors.deserialize(data))
        parts = {n: getattr(ours, n) for n in ("codes", "scales", "zeros", "perm")}
        parts = {name: part for name, part in parts.items() if part is not None}
        with np.errstate(over="ignore"):
            shaped = ours.dequantize().shape == ours.shape
        return shaped and {n: (list(p.shape), p.tobytes()) for n, p in parts.items()} == {
            n: (t["shape"], bytes(t["data"])) for n, t in theirs.items()
        }

    return Kind(".safetensors", tuple(sound), QuantizedMatrix.load, judge)


def tuned() -> Kind:
    from gemmule import backends
    from gemmule.core.problem import Problem
    from gemmule.core.registry import all_rungs
    from gemmule.storage import tuned as store

    machine, problem = backends.get("cpu").machine("cpu"), Problem("matvec", 512, 512)
    rung = next(r for r in all_rungs("cpu") if r.params and r.refusal(problem) is None)
    params = list(rung.space(problem))[-1]
    with tempfile.TemporaryDirectory() as folder:
        path = store.save(
            machine, problem, store.Tuned(rung, params, 1e-3, "2026-11-22"), Path(folder)
        )
        assert path is not None
        sound = path.read_bytes()

    def judge(data: bytes, ours: Any) -> bool:
        if ours is None:
            return True
        legal = any(dict(ours.params) == declared for declared in ours.rung.space(problem))
        return legal and ours.rung.refusal(problem) is None and 0 < ours.time_s < 3600

    return Kind(".json", (sound,), lambda path: store._read(path, machine, problem), judge)


def compiled() -> Kind:
    """Entries of CPU kernels and of cubins: a damaged one is compiled again, never loaded."""
    import hashlib

    from gemmule.backends.cpu import jit_cache
    from gemmule.backends.cuda import nvrtc

    payload = random.Random(3).randbytes(3000)
    module = nvrtc.Module(payload, {"f<float>": "_Z1fIfEvv", "g<float>": "_Z1gIfEvv"})
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "a.cubin")
        nvrtc._write(path, module)
        cubin = path.read_bytes()
    kernel = hashlib.sha256(payload).digest() + payload

    def read(path: Path) -> Any:
        path.chmod(0o600)
        return jit_cache._read_checked(path), nvrtc._read(path)

    return Kind(
        ".bin",
        (kernel, cubin),
        read,
        lambda data, ours: ours[0] in (None, payload) and ours[1] in (None, module),
    )


def evidence() -> Kind:
    from gemmule.storage import evidence as records

    lines = [
        json.dumps(
            {
                "schema": 1,
                "folder": "matvec",
                "rung": name,
                "variant": "float32",
                "arch": "sm_90a",
                "key": 64 * "a",
                "device": "NVIDIA H200",
                "date": "2026-11-22",
                "cases": 193,
                "worst_ratio": 0.5,
            }
        )
        for name in ("one", "two", "three", "four")
    ]
    sound = ("\n".join(lines) + "\n").encode()

    def judge(data: bytes, ours: Any) -> bool:
        kept = data.split(b"\n")
        untouched = {json.loads(line)["rung"] for line in lines if line.encode() in kept}
        legal = all(r.cases > 0 and 0 <= r.worst_ratio <= 1 and r.rung.isprintable() for r in ours)
        return legal and untouched <= {r.rung for r in ours} and len(ours) <= len(kept)

    return Kind(".jsonl", (sound,), lambda path: list(records.read_file(path)), judge)


def _foreign(name: str) -> Kind:
    return Kind(*getattr(foreign_files, name)())


KINDS: dict[str, Callable[[], Kind]] = {
    kind.__name__: kind
    for kind in (npy, mapped, npz, safetensors, mat, mtx, quantised, tuned, compiled, evidence)
}
for _name in ("gguf", "gptq", "awq", "hqq"):
    KINDS[_name] = functools.partial(_foreign, _name)


# --- the campaign -------------------------------------------------------------------------------


def case(kind: Kind, name: str, seed: int, index: int, path: Path) -> str:
    """Damage one file, read and judge it; return what happened."""
    rng = random.Random(f"{seed} {name} {index}")
    content = mutated(rng.choice(kind.sound), rng)
    path.write_bytes(content)
    begun, asked = time.process_time(), _peak_bytes()
    try:
        ours = kind.read(path)
    except (ValueError, TypeError):
        ours = None
        answer = "refused"
    except Exception as error:
        return f"raised {type(error).__name__}"
    else:
        answer = ""
    if time.process_time() - begun > BUSY_S:
        return "hung"
    if _peak_bytes() - asked > ASKED_BYTES:
        return "raised by memory"
    if answer:
        return answer
    try:
        right = kind.judge(content, ours)
    except Exception:  # the judge refuses what we took
        right = False
    return "right" if right else "wrong"


def _peak_bytes() -> int:
    """Return the most memory that this process ever had, or asked for, in addresses."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("VmPeak:")[2].split()[0])


def child(name: str, seed: int, start: int, end: int, folder: Path) -> None:
    """Judge cases in order, telling where it is before each, so that a death has a name."""
    kind = KINDS[name]()
    path = folder / f"damaged{kind.suffix}"
    for content in kind.sound:  # what is loaded and compiled for the first is no file's doing
        path.write_bytes(content)
        kind.judge(content, kind.read(path))
    held = 4096 * int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (held + ROOM_BYTES, held + ROOM_BYTES))
    print("ready", flush=True)
    for index in range(start, end):
        print(index, end=" ", flush=True)
        print(case(kind, name, seed, index, path), flush=True)


def campaign(name: str, cases: int, seed: int, jobs: int = 1) -> collections.Counter[str]:
    """Return how often each thing happened; print every case that must not be."""
    counts: collections.Counter[str] = collections.Counter()
    ends = [cases * job // jobs for job in range(jobs + 1)]

    def part(job: int) -> None:
        start, end = ends[job], ends[job + 1]
        with tempfile.TemporaryDirectory() as folder:
            while start < end:
                numbers = [str(number) for number in (seed, start, end)]
                command = [sys.executable, __file__, "--child", name, *numbers, folder]
                running = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
                start = _followed(running, name, start, end, counts)

    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        list(pool.map(part, range(jobs)))
    return counts


def _followed(
    running: subprocess.Popen[str],
    name: str,
    start: int,
    cases: int,
    counts: collections.Counter[str],
) -> int:
    """Count a child's cases until it ends; return where the next one has to begin."""
    import select

    assert running.stdout is not None
    assert running.stdout.readline() == "ready\n"  # imports may take longer than a case
    ended = "crashed"
    while start < cases:
        if not select.select([running.stdout], [], [], HANG_S)[0]:
            running.kill()
            ended = "hung"
        line = running.stdout.readline().split(maxsplit=1)
        if len(line) < 2:
            break
        start += 1
        counts[line[1].split()[0]] += 1
        if line[1].startswith(BAD):
            print(f"{name}: case {line[0]} {line[1].strip()}", flush=True)
    running.wait()
    if start < cases:
        counts[ended] += 1
        print(f"{name}: case {start} {ended} (status {running.returncode})", flush=True)
        start += 1
    return start


# --- writers that are killed --------------------------------------------------------------------


def writers() -> dict[str, tuple[str, Callable[[Path, int], Any], Callable[[Path], Any]]]:
    """Return name -> (file name, write version 0 or 1, read what was written)."""
    import gemmule as gm
    from gemmule.backends.cpu import jit_cache
    from gemmule.storage import tuned as store
    from gemmule_lab.files.output import new_matrix

    matrices = [np.full((300, 300), float(v)) for v in range(2)]
    held = [gm.quantize(m, 8, -1) for m in matrices]

    def result(path: Path, version: int) -> None:
        with new_matrix(path, (300, 300), "float64", force=True) as out:
            out[:] = version

    def whole(path: Path) -> int:
        matrix = read_matrix(path)
        assert matrix.shape == (300, 300)
        (version,) = np.unique(matrix)
        return int(version)

    def versions(path: Path) -> int:
        return [bytes([v]) * 100_000 for v in range(2)].index(path.read_bytes())

    def plain(write: Callable[[Path, bytes], Any], path: Path, version: int) -> None:
        write(path, bytes([version]) * 100_000)

    return {
        "result .npy": ("y.npy", result, whole),
        "result .safetensors": ("y.safetensors", result, whole),
        "quantised": (
            "q.safetensors",
            lambda path, version: held[version].save(path, overwrite=True),
            lambda path: int(gm.QuantizedMatrix.load(path, mmap=False).dequantize()[0, 0]),
        ),
        "tuned, cubins, evidence": (
            "t.json", functools.partial(plain, store.write_atomically), versions
        ),
        "compiled": ("c.bin", functools.partial(plain, jit_cache._write_atomically), versions),
    }  # fmt: skip


def killed(name: str, kills: int, seed: int) -> int:
    """Kill a writer so many times; return how often its file was not whole afterwards."""
    file_name, write, read = writers()[name]
    rng, torn = random.Random(f"{seed} {name}"), 0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, file_name)
        write(path, 0)
        for _ in range(kills):
            pid = os.fork()
            if pid == 0:
                for version in range(10**9):
                    write(path, version % 2)
            time.sleep(rng.uniform(0, 0.01))
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            try:
                read(path)
            except Exception as error:
                torn += 1
                print(f"{name}: {type(error).__name__}: {error}", flush=True)
    return torn


def main() -> int:
    """Run the campaign and print a table; 1 where something happened that must not."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"{', '.join(KINDS)}, writers")
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--jobs", type=int, default=1, help="children that read side by side")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(10**6))
    parser.add_argument("--record", action="store_true", help="keep the outcome in the evidence")
    given = parser.parse_args()
    print(f"seed {given.seed}", flush=True)
    command = f"python tests/corruption.py --cases {given.cases} --seed {given.seed}"
    bad = 0
    chosen = given.kinds or [*KINDS, "writers"]
    for name in [name for name in chosen if name != "writers"]:
        counts = campaign(name, given.cases, given.seed, given.jobs)
        wrong, files = sum(counts[word] for word in BAD), sum(counts.values())
        bad += wrong
        shown = ", ".join(f"{counts[word]} {word}" for word in ("refused", "right", *BAD))
        print(f"{name}: {files} files, {shown}", flush=True)
        if given.record:
            keep(f"damaged files: {name}", files, wrong, f"{command} {name}", shown)
    for name in writers() if "writers" in chosen else ():
        torn = killed(name, given.kills, given.seed)
        bad += torn
        print(f"{name}: {given.kills} writers killed, {torn} files not whole", flush=True)
        if given.record:
            whole = "a reader found a whole file after each"
            again = f"python tests/corruption.py --kills {given.kills} --seed {given.seed} writers"
            keep(f"killed writers: {name}", given.kills, torn, again, whole)
    return 1 if bad else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2], *(int(a) for a in sys.argv[3:6]), Path(sys.argv[6]))
    else:
        sys.exit(main())
