"""Read and write named arrays in the safetensors format, strictly.

A file is untrusted input: `read_tensors` checks every number in it before it is used, reads
nothing but the bytes the header names, and raises ValueError for anything that is not a plain,
gap-free file of the dtypes below. NumPy is the only import, dtypes it lacks apart (ml_dtypes).
Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import io
import json
import math
import os
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gemmule.storage.atomic import new_file
from gemmule.storage.lines import without_duplicates

FilePath: TypeAlias = str | os.PathLike[str]
Tensors: TypeAlias = dict[str, NDArray[Any]]

# What the format calls its dtypes, and NumPy or ml_dtypes.
TAGS = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "BOOL": "bool",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
    "I8": "int8", "I16": "int16", "I32": "int32", "I64": "int64",
    "U8": "uint8", "U16": "uint16", "U32": "uint32", "U64": "uint64",
}  # fmt: skip
_WRITTEN = "U8", "I32", "F16", "BF16", "F32", "F8_E4M3", "F8_E8M0"
_TAG_TO_NAME = {tag: TAGS[tag] for tag in _WRITTEN}
_NAME_TO_TAG = {name: tag for tag, name in _TAG_TO_NAME.items()}
NOT_NUMPYS = ("bfloat16", "float8_e4m3fn", "float8_e8m0fnu")
_MAX_HEADER_BYTES = 1 << 16
"""A header of a handful of arrays takes under 1 KiB; the cap bounds what a hostile one can cost."""
_MAX_DIMENSION = 1 << 40
_SUFFIX, _INDEX = ".safetensors", ".safetensors.index.json"
_MAX_INDEX_BYTES = 1 << 26
_ALIGNMENT = 64
_TAKEN = "pass overwrite=True to replace it"
"""Data start on a cache line, so that a mapped array can be read with aligned vector loads."""


def named_dtype(name: str) -> np.dtype[Any]:
    """Return the NumPy dtype called ``name``; those NumPy lacks come from ml_dtypes.

    Raises ImportError, saying what to install, when one of these is asked for without ml_dtypes.
    """
    if name not in NOT_NUMPYS:
        return np.dtype(name)
    try:
        import ml_dtypes
    except ImportError as error:
        raise ImportError(
            f"NumPy has no {name}; install the package ml_dtypes to use it"
        ) from error
    found: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
    return found


def model_files(path: FilePath) -> Path | dict[str, Path]:
    """Return a model's only safetensors file, or the file of each tensor where it has several.

    path: the file, the ``.safetensors.index.json`` of a model in several, or a folder that holds
    either. The index is untrusted as well: it names files beside it, or there is a ValueError.
    """
    given = Path(path)
    if given.is_dir():
        found = [*given.glob(f"*{_INDEX}")] or [*given.glob("*.safetensors")]
        if len(found) != 1:
            raise ValueError(
                f"{given} holds {len(found)} models; give the path of a .safetensors file, or of "
                f"the {_INDEX} of several"
            )
        given = found[0]
    if not given.name.endswith(".json"):
        return given
    with given.open("rb") as file:
        text = file.read(_MAX_INDEX_BYTES + 1)
    try:
        if len(text) > _MAX_INDEX_BYTES:
            raise ValueError(f"it has more than {_MAX_INDEX_BYTES:,} bytes")
        names: Any = _parse_json(text).get("weight_map")
        if not _is_object(names) or not all(_is_name(name) for name in names.values()):
            raise ValueError("weight_map must map tensors to names of files beside it")
    except ValueError as error:
        raise ValueError(f"{given} is no index of a model's files: {error}") from None
    return {tensor: given.parent / name for tensor, name in names.items()}


def check_floats(folder: FilePath) -> None:
    """Raise ValueError where a folder holds no model of transformers whose weights are floats.

    Only ``config.json`` is read, and that there are weights is seen: this is done in a moment.
    """
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise ValueError(f"{folder} has no config.json; give a model's folder of transformers")
    try:
        config = _parse_json(path.read_bytes()[: _MAX_INDEX_BYTES + 1])
    except ValueError as error:
        raise ValueError(f"{path} is no model's configuration: {error}") from None
    if lacking := [key for key in ("model_type", "architectures") if not config.get(key)]:
        raise ValueError(
            f"{path} has no {' and no '.join(lacking)}, so it is not known how the model is built; "
            "give a folder that save_pretrained of transformers wrote"
        )
    if config.get("quantization_config"):
        raise ValueError(
            f"{folder} is quantised already: quantise the folder of floats that it was made of, "
            "or multiply by its codes, with gemmule.torch.load_checkpoint"
        )
    model_files(folder)


def _is_name(value: object) -> bool:
    return isinstance(value, str) and Path(value).name == value and value.endswith(_SUFFIX)


def check_target(path: FilePath, *, overwrite: bool) -> None:
    """Raise ValueError for another suffix, FileExistsError for a name that is taken."""
    target = Path(path)
    if target.suffix.lower() != ".safetensors":
        raise ValueError(
            f"{target} has suffix {target.suffix!r}; a quantised matrix is saved as .safetensors."
        )
    if target.exists() and not overwrite:
        raise FileExistsError(f"{target} exists already; {_TAKEN}.")


def write_tensors(
    path: FilePath, tensors: Tensors, metadata: Mapping[str, str], *, overwrite: bool = False
) -> None:
    """Write arrays and string metadata to ``path`` as safetensors, all or nothing.

    ``tensors``: C-contiguous arrays of the dtypes above, laid down in the given order without gaps.
    The file appears under its name only when it is complete and on disk; an existing file is
    replaced only with ``overwrite``, else FileExistsError, and kept when writing fails. Its mode
    follows the umask. Raises OSError as `open` does.
    """
    target = Path(path)
    header = _header(tensors, metadata)
    with new_file(target, replace=overwrite, taken=_TAKEN) as file:
        file.write(header)
        for tensor in tensors.values():
            file.write(tensor.reshape(-1).view(np.uint8).data)


def _header(tensors: Tensors, metadata: Mapping[str, str]) -> bytes:
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    offset = 0
    for name, tensor in tensors.items():
        entries[name] = {
            "dtype": _NAME_TO_TAG[tensor.dtype.name],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.nbytes],
        }
        offset += tensor.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    return struct.pack("<Q", len(text)) + text


class Stored(NamedTuple):
    """The format's name of a tensor's dtype, its shape, and its first byte in the file."""

    tag: str
    shape: tuple[int, ...]
    start: int


def stored_tensors(path: Path) -> dict[str, Stored]:
    """Return the tensors of any safetensors file whose header the format's own library found sound.

    The library refuses gaps, overlaps, surplus bytes and sizes that disagree with the dtype; what
    it does not give is where a tensor lies in the file, so the header is read once more for that.
    Raises ValueError for a file that is not sound, or names something twice; OSError as `open`.
    """
    import safetensors

    try:
        with safetensors.safe_open(path, "numpy") as checked:
            names = set(checked.keys())
        with path.open("rb") as file:
            length: int = struct.unpack("<Q", file.read(8))[0]
            header = json.loads(file.read(length), object_pairs_hook=without_duplicates)
    except (ValueError, safetensors.SafetensorError) as error:
        raise ValueError(f"{path} is not a readable .safetensors file: {error}.") from None
    return {
        name: Stored(one["dtype"], tuple(one["shape"]), 8 + length + one["data_offsets"][0])
        for name, one in header.items()
        if name in names
    }


def read_tensors(path: FilePath, *, mmap: bool) -> tuple[Tensors, dict[str, str]]:
    """Read a safetensors file: its arrays by name, and its metadata.

    With ``mmap`` the arrays are read-only views of the mapped file, which must not change while
    they live (a file cut short under its map ends the process with SIGBUS). Without, they are
    copies. Raises ValueError, naming file and fault, for everything but a well-formed file: wrong
    header length, malformed JSON, duplicate or unknown keys, unknown dtypes, sizes that disagree
    with byte ranges, gaps, overlaps, missing or surplus bytes. Raises OSError as `open` does.
    """
    with Path(path).open("rb") as file:
        try:
            size = os.fstat(file.fileno()).st_size
            entries, metadata, start = _read_header(file, size)
            ranges = {name: _checked_entry(name, entry) for name, entry in entries.items()}
            spans = ((name, begin, end) for name, (_, _, begin, end) in ranges.items())
            _check_cover(spans, size - start)
            data = _data(file, start, size - start, mmap)
        except ValueError as error:
            raise ValueError(f"{os.fspath(path)}: {error}") from error
    tensors = {
        name: data[begin:end].view(dtype).reshape(shape)
        for name, (dtype, shape, begin, end) in ranges.items()
    }
    return tensors, metadata


def _data(file: io.BufferedReader, start: int, nbytes: int, mmap: bool) -> NDArray[np.uint8]:
    if nbytes == 0:
        return np.empty(0, np.uint8)
    if mmap:
        # A plain ndarray on top keeps the map alive without passing the memmap class on.
        return np.asarray(np.memmap(file, np.uint8, "r", start, (nbytes,)))
    data = np.empty(nbytes, np.uint8)
    file.seek(start)
    if file.readinto(data.data) != nbytes:
        raise ValueError("the file became shorter while it was read")
    return data


def _read_header(file: io.BufferedReader, size: int) -> tuple[dict[str, Any], dict[str, str], int]:
    """Return tensor entries, metadata and where the data start."""
    prefix = file.read(8)
    if len(prefix) < 8:
        raise ValueError(f"not a safetensors file: {size} bytes, the header length alone takes 8")
    length: int = struct.unpack("<Q", prefix)[0]
    if not 2 <= length <= min(_MAX_HEADER_BYTES, size - 8):
        raise ValueError(
            f"header length is {length}, but must lie in 2..{_MAX_HEADER_BYTES} and within the "
            f"file's {size} bytes; the file is cut short or of another kind"
        )
    entries = _parse_json(file.read(length))
    metadata = entries.pop("__metadata__", {})
    if not _is_object(metadata) or not all(isinstance(v, str) for v in metadata.values()):
        raise ValueError("__metadata__ must map strings to strings")
    return entries, metadata, 8 + length


def _parse_json(text: bytes) -> dict[str, Any]:
    if text[:1] != b"{":
        raise ValueError("the header must begin with '{'")
    try:
        parsed = json.loads(
            text.decode("utf-8"),
            object_pairs_hook=without_duplicates,
            parse_constant=_refuse_constant,
        )
    except RecursionError:
        raise ValueError("the header nests too deeply") from None
    except ValueError as error:
        raise ValueError(f"the header is malformed: {error}") from None
    if not _is_object(parsed):
        raise ValueError("the header must be a JSON object")
    return parsed  # type: ignore[no-any-return]


def _is_object(value: object) -> bool:
    return isinstance(value, dict)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _checked_entry(name: str, entry: Any) -> tuple[np.dtype[Any], tuple[int, ...], int, int]:
    """Check one tensor's entry on its own: dtype, shape, first byte, end byte."""
    if not _is_object(entry) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"tensor {name!r} needs exactly dtype, shape and data_offsets")
    tag, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(tag, str) or tag not in _TAG_TO_NAME:
        raise ValueError(f"tensor {name!r} has dtype {tag!r}; known are {', '.join(_TAG_TO_NAME)}")
    if not _are_counts(shape) or len(shape) > 2 or any(d > _MAX_DIMENSION for d in shape):
        raise ValueError(f"tensor {name!r} has shape {shape!r}; needs at most two sizes >= 0")
    if not _are_counts(offsets) or len(offsets) != 2:
        raise ValueError(f"tensor {name!r} has data_offsets {offsets!r}; needs [begin, end]")
    dtype = named_dtype(_TAG_TO_NAME[tag])
    nbytes = math.prod(shape) * dtype.itemsize
    if offsets[1] - offsets[0] != nbytes:
        raise ValueError(
            f"tensor {name!r} of dtype {tag} and shape {shape} takes {nbytes} bytes, but "
            f"data_offsets are {offsets}"
        )
    return dtype, tuple(shape), offsets[0], offsets[1]


def _are_counts(values: object) -> bool:
    # type() and not isinstance(): JSON's true is an int to isinstance.
    return isinstance(values, list) and all(type(v) is int and v >= 0 for v in values)


def _check_cover(spans: Iterable[tuple[str, int, int]], nbytes: int) -> None:
    """Require that the byte ranges cover the data exactly once: no gap, no overlap, no surplus."""
    position = 0
    for name, begin, end in sorted(spans, key=lambda span: span[1:]):
        if begin != position:
            fault = "overlaps the one before" if begin < position else "leaves a gap before it"
            raise ValueError(f"tensor {name!r} starts at byte {begin} of the data: it {fault}")
        position = end
    if position != nbytes:
        raise ValueError(f"the tensors take {position} bytes, but the file holds {nbytes}")
