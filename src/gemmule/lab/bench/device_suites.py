"""Named sets of products to measure on a GPU: operations, shapes, dtypes; as data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

FLOATS = ("float16", "bfloat16", "float32", "float64")
SQUARES = tuple((n, n) for n in (512, 1024, 2048, 4096, 8192, 16384))
MATVEC_SHAPES = (
    *SQUARES,
    (65536, 1024),
    (262144, 128),  # tall
    (1024, 65536),
    (128, 262144),  # wide
    (4095, 4095),
    (8191, 1025),  # odd: no row but the first is aligned
    (4096, 14336),
    (2112, 7168),
    (152064, 3584),  # layers of language models
)
MATMUL_SHAPES = (
    *((n, n, n) for n in (512, 1024, 2048, 4096, 8192)),
    (4096, 4096, 16),
    (8192, 8192, 128),  # few columns
    (1000, 3000, 2000),
    (1023, 1025, 1027),  # no multiple of a tile; odd
    (16384, 1024, 2048),
    (1024, 16384, 2048),
)
CHAINED = (*SQUARES, (2112, 7168), (4096, 14336))
QUICK = ((1024, 1024), (4096, 4096), (8192, 8192))


@dataclass(frozen=True, slots=True)
class Product:
    """One thing to measure. shape: rows and columns of A; width: columns of B, 1 for a vector."""

    op: str
    shape: tuple[int, int]
    dtype: str
    width: int = 1

    @property
    def title(self) -> str:
        """The product in words."""
        rows, columns = self.shape
        words = {"matvec": "A x", "vecmat": "x A", "matmul": f"A B, {self.width} columns"}
        return f"{rows} x {columns}, {words[self.op]}, {self.dtype}"


@dataclass(frozen=True, slots=True)
class Suite:
    """A title, the products, and the peers that run beside ours unless others are asked for.

    rungs: those to time, by name; None is what a plan chooses.
    """

    title: str
    products: tuple[Product, ...]
    peers: tuple[str, ...] = ("torch",)
    rungs: tuple[str | None, ...] = (None,)


def _vectors(shapes: tuple[tuple[int, int], ...], dtypes: tuple[str, ...]) -> Iterator[Product]:
    for shape in shapes:
        for dtype in dtypes:
            for op in ("matvec", "vecmat"):
                yield Product(op, shape, dtype)


def _matrices(dtypes: tuple[str, ...]) -> Iterator[Product]:
    for rows, columns, width in MATMUL_SHAPES:
        for dtype in dtypes:
            yield Product("matmul", (rows, columns), dtype, width)


CUDA_SUITES = {
    "quick": Suite("a first look", tuple(_vectors(QUICK, ("float16", "float32")))),
    "matvec": Suite(
        "60 matrices, each by a vector from either side", tuple(_vectors(MATVEC_SHAPES, FLOATS))
    ),
    "chained": Suite(
        "each call begun before the one in front of it has ended, and the same in turn",
        tuple(Product("matvec", shape, dtype) for shape in CHAINED for dtype in FLOATS),
        rungs=("streamed_rows", "early_rows"),
    ),
    "matmul": Suite(
        "matrices by matrices", tuple(_matrices(("bfloat16", "float16", "float32", "float64")))
    ),
}


def narrowed(
    suite: Suite, ops: tuple[str, ...], dtypes: tuple[str, ...], sizes: tuple[int, ...]
) -> tuple[Product, ...]:
    """Return the suite's products of the given operations, dtypes and square sizes.

    ValueError when none is left.
    """
    kept = tuple(
        product
        for product in suite.products
        if (not ops or product.op in ops)
        and (not dtypes or product.dtype in dtypes)
        and (not sizes or (product.shape[0] == product.shape[1] and product.shape[0] in sizes))
    )
    if not kept:
        raise ValueError("the suite has no product of these operations, formats and sizes.")
    return kept
