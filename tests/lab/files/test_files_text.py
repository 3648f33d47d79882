"""Matrix Market files: every form read as SciPy reads it, every damaged line named."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.io
import scipy.sparse

from gemmule_lab.files.matrices import read_matrix

RNG = np.random.default_rng(7)
GENERAL = RNG.standard_normal((5, 7))
SQUARE = RNG.standard_normal((6, 6)) + 1j * RNG.standard_normal((6, 6))
LARGEST = np.array([[2**63 - 1, -(2**63)], [0, 10**18]])
MATRICES = {
    "real": GENERAL,
    "integer": (100 * GENERAL).astype(np.int64),
    "integer of 64 bits": LARGEST,
    "unsigned-integer": np.array([[2**64 - 1, 0, 1]], np.uint64),
    "complex": SQUARE[:, :4],
    "symmetric": (SQUARE + SQUARE.T).real,
    "complex symmetric": SQUARE + SQUARE.T,
    "skew-symmetric": (SQUARE - SQUARE.T).real,
    "integer skew-symmetric": np.array([[0, -3, 4], [3, 0, 5], [-4, -5, 0]]),
    "hermitian": SQUARE + SQUARE.conj().T,
    "extremes": np.array([[np.inf, -np.inf, np.nan, 5e-324, 1.7976931348623157e308, -0.0]]),
    "one": np.ones((1, 1)),
}


def of_text(folder: Path, text: bytes) -> Any:
    path = folder / "a.mtx"
    path.write_bytes(text)
    return read_matrix(str(path), limit_bytes=1 << 30)


@pytest.mark.parametrize("name", MATRICES)
@pytest.mark.parametrize("sparse", [False, True])
def test_every_form_as_scipy_reads_it(tmp_path: Path, name: str, sparse: bool) -> None:
    buffer = io.BytesIO()
    matrix = MATRICES[name]
    scipy.io.mmwrite(buffer, scipy.sparse.coo_matrix(matrix) if sparse else matrix)
    theirs = scipy.io.mmread(io.BytesIO(buffer.getvalue()))
    theirs = theirs if isinstance(theirs, np.ndarray) else theirs.toarray()
    ours = of_text(tmp_path, buffer.getvalue())
    np.testing.assert_array_equal(ours, theirs)
    assert ours.dtype == theirs.dtype
    assert ours.flags.f_contiguous


def test_patterns_comments_blank_lines_and_repeated_entries(tmp_path: Path) -> None:
    pattern = b"%%MatrixMarket matrix coordinate pattern symmetric\n% c\n\n2 2 2\n1 1\n2 1\n"
    assert of_text(tmp_path, pattern).tolist() == [[1, 1], [1, 0]]
    loose = b"%%MatrixMarket MATRIX Array Real General\r\n2 2\r\n 1\n\n% c\n2e0\t\r\n+.5\nInf"
    assert of_text(tmp_path, loose).tolist() == [[1, 0.5], [2, np.inf]]
    twice = b"%%MatrixMarket matrix coordinate real general\n1 2 3\n1 2 1.5\n1 2 2\n1 1 7\n"
    assert of_text(tmp_path, twice).tolist() == [[7, 3.5]]


@pytest.mark.parametrize("sizes", [b"0 0", b"0 3", b"3 0"])
def test_empty_matrices_are_legal(tmp_path: Path, sizes: bytes) -> None:
    """SciPy's parser divides by the number of columns: the process died of SIGFPE."""
    for form, count in ((b"array", b""), (b"coordinate", b" 0")):
        text = b"%%MatrixMarket matrix " + form + b" real general\n" + sizes + count + b"\n"
        assert of_text(tmp_path, text).shape == tuple(int(s) for s in sizes.split())


WIDE = "line 3: '9.*of integer int64 numbers"
FAULTS = {
    # SciPy's parser ran past the end of its block here: the process died of SIGSEGV.
    "NUL among the numbers": (
        b"array real general\n%\n2 1\n1.0\n2.0\0\0\n",
        r"line 5: '2\.0\\x00\\x00' is no line",
    ),
    "symmetric, not square": (b"array real symmetric\n2 3\n1\n2\n3\n", "symmetric and 2 x 3"),
    "two numbers in one": (b"array real general\n1 1\n1.5.5\n", "line 3: '1.5.5'"),
    "two on a line": (b"array real general\n2 1\n1 2\n", "line 3: '1 2'"),
    "a file separator": (b"coordinate real general\n1 1 1\n1\x1c1\x1c5\n", r"line 3: '1\\x1c1"),
    "words": (b"array real general\n1 1\none\n", "line 3: 'one'"),
    "a float for an integer": (b"array integer general\n1 1\n1.0\n", "line 3: '1.0'"),
    "hexadecimal": (b"array real general\n1 1\n0x1p3\n", "line 3: '0x1p3'"),
    "65 bits": (b"array integer general\n1 1\n9223372036854775808\n", WIDE),
    "thousands of digits": (b"array integer general\n1 1\n" + b"9" * 5000 + b"\n", WIDE),
    "too few": (b"array real general\n2 2\n1\n2\n3\n", "3 of 4 entries"),
    "too many": (b"array real general\n1 1\n1\n2\n", "more than the 1 entries"),
    "row 0": (b"coordinate real general\n2 2 1\n0 1 5\n", r"\(0, 1\), outside of 2 x 2"),
    "row 3": (b"coordinate real general\n2 2 1\n3 1 5\n", r"\(3, 1\), outside of 2 x 2"),
    "above the diagonal": (b"coordinate real symmetric\n2 2 1\n1 2 5\n", r"\(1, 2\); only"),
    "skew diagonal": (b"coordinate real skew-symmetric\n2 2 1\n1 1 5\n", r"\(1, 1\); only"),
    "hermitian reals": (b"array real hermitian\n1 1\n5\n", "only complex"),
    "a pattern in full": (b"array pattern general\n1 1\n", "does not have"),
    "no sizes": (b"array real general\n% only this\n", "before the line of its sizes"),
    "negative sizes": (b"array real general\n-2 -2\n1\n", "sizes must stand there"),
    "two of three sizes": (b"coordinate real general\n2 2\n", "3 sizes must stand there"),
    "endless": (b"array real general\n99999999999999 99999999999999\n", "no file can hold"),
    "unknown field": (b"array quaternion general\n1 1\n1\n", "field 'quaternion'"),
    "unknown symmetry": (b"array real round\n1 1\n1\n", "symmetry 'round'"),
    "a vector": (b"", "first line must be"),
    "a line without end": (b"array real general\n1 1\n" + b"1" * 100_000, "a line of more than"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_named_with_their_line(tmp_path: Path, fault: str) -> None:
    text, words = FAULTS[fault]
    with pytest.raises(ValueError, match=words):
        of_text(tmp_path, b"%%MatrixMarket matrix " + text)


def test_a_large_claim_costs_no_memory(tmp_path: Path) -> None:
    text = b"%%MatrixMarket matrix array real general\n100000 100000\n1\n"
    with pytest.raises(ValueError, match="80,000,000,000 bytes in memory"):
        of_text(tmp_path, text)
