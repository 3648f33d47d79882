"""Find one tensor in a GGUF file, which need not be trusted.

Every count is held to the size of the file. Metadata are stepped over, not kept, so that a file
takes no memory but for the tensor itself.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import mmap
import struct
from pathlib import Path
from typing import NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from gemmule.quant.files import FilePath

# Of ggml_type: name, weights and bytes of a block.
TYPES = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 40),
    10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292), 16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136), 24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4),
    27: ("I64", 1, 8), 28: ("F64", 1, 8), 29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17), 40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
}  # fmt: skip
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # of metadata
_TEXT, _ARRAY, _UINT32 = 8, 9, 4
_SHORTEST_ENTRY, _SHORTEST_TENSOR = 13, 24  # bytes
_MOST_SIZES, _LONGEST_NAME = 4, 1 << 16  # of a tensor
_NAMED = 20  # tensors that an error names at most


class Tensor(NamedTuple):
    """One tensor: its type, its sizes (the last one counts rows), and its bytes in the file."""

    kind: str
    sizes: tuple[int, ...]
    data: NDArray[np.uint8]


def find(path: FilePath, name: str) -> Tensor:
    """Return the tensor of a name; ValueError for another file or name, OSError as `open`."""
    with Path(path).open("rb") as file:
        if not file.seek(0, 2):
            raise ValueError(f"{path} is not a readable GGUF file: it is empty")
        held = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    try:
        return _Reader(held).tensor(name)
    except (ValueError, struct.error) as error:
        raise ValueError(f"{path} is not a readable GGUF file: {error}") from None
    except KeyError as missing:
        raise ValueError(f"{path} has no tensor {name!r}; it holds {missing.args[0]}") from None


class _Reader:
    """A file and how far it was read."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.size, self.at = data, len(data), 0

    def tensor(self, name: str) -> Tensor:
        """Return the tensor of a name; KeyError, holding some of the names, where none has it."""
        if self.data[:4] != b"GGUF":
            self.refuse("it does not begin with GGUF")
        self.at = 4
        version = self.number("I")
        if version not in (2, 3):
            self.refuse(f"its version is {version}, or of another byte order; read are 2 and 3")
        tensors, entries = self.number("Q"), self.number("Q")
        self.expect(entries, _SHORTEST_ENTRY, "entries of metadata")
        alignment = 32
        for _ in range(entries):
            alignment = self.entry() or alignment
        self.expect(tensors, _SHORTEST_TENSOR, "tensors")
        wanted, found, reached = name.encode("utf-8", "surrogatepass"), None, 0
        names: list[str] = []
        for _ in range(tensors):
            own = self.text("the name of a tensor")
            sizes = tuple(self.number("Q") for _ in range(self.number("I", _MOST_SIZES)))
            kind, start = self.number("I"), self.number("Q")
            title, weights, nbytes = TYPES.get(kind, (f"number {kind}", 1, 0))
            end = start + math.prod(sizes) // weights * nbytes
            reached = max(reached, end)
            if own == wanted and found is not None:
                self.refuse(f"two tensors are called {name!r}")
            if own == wanted:
                found = title, sizes, start, end
            elif len(names) < _NAMED:
                names.append(own.decode("utf-8", "replace"))
        begin = -(-self.at // alignment) * alignment
        if begin + reached > self.size:
            self.refuse(f"its tensors end at {begin + reached}, but it has {self.size} bytes")
        if found is None:
            more = "" if tensors <= _NAMED else ", ..."
            raise KeyError(", ".join(names) + more or "none")
        title, sizes, start, end = found
        data = np.frombuffer(self.data, np.uint8)[begin + start : begin + end]
        return Tensor(title, sizes, data)

    def entry(self) -> int | None:
        """Step over one entry of the metadata; return the alignment where it holds that."""
        key, kind = self.text("a key"), self.number("I")
        if key != b"general.alignment":
            self.skip(kind)
            return None
        alignment = self.number("I") if kind == _UINT32 else 0
        if alignment < 1 or alignment & (alignment - 1):
            self.refuse("its alignment is no power of two")
        return alignment

    def skip(self, kind: int) -> None:
        """Step over a value, which may be an array of values that are none."""
        count = 1
        if kind == _ARRAY:
            kind, count = self.number("I"), self.number("Q")
        if kind == _TEXT:
            self.expect(count, 8, "strings")
            for _ in range(count):
                self.text("a string")
        elif kind in _SIZES:
            self.expect(count, _SIZES[kind], "numbers")
            self.at += count * _SIZES[kind]
        else:
            self.refuse(f"a value is of the unknown kind {kind}")

    def text(self, what: str) -> bytes:
        """Return a string, or the beginning of a long one."""
        length = self.number("Q")
        self.expect(length, 1, f"bytes of {what}")
        start, self.at = self.at, self.at + length
        return self.data[start : min(self.at, start + _LONGEST_NAME)]

    def number(self, form: str, most: int = 2**64) -> int:
        """Return the next number, of 4 ("I") or 8 ("Q") bytes."""
        (value,) = struct.unpack_from(f"<{form}", self.data, self.at)
        self.at += 4 if form == "I" else 8
        if value > most:
            self.refuse(f"it claims {value} where {most} are the most")
        return int(value)

    def expect(self, count: int, size: int, what: str) -> None:
        """Require room in the file for so many of something."""
        if count * size > self.size - self.at:
            self.refuse(f"it claims {count} {what}, but has {self.size - self.at} more bytes")

    def refuse(self, why: str) -> NoReturn:
        """Raise ValueError."""
        raise ValueError(why)
