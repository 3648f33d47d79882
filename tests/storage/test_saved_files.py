"""Files that release 0.1.0 wrote: each loads and multiplies as it did, or is passed over.

`tests/data/saved` was written by commit 216e327, the products in it computed by that commit.
"""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gemmule as gm
from gemmule.core.problem import Problem
from gemmule.core.registry import ladder
from gemmule.storage import tuned
from gemmule.storage.sources import rung_digest
from gemmule_lab.records.results import read

SAVED = Path(__file__).parents[1] / "data" / "saved"
PRODUCTS: dict[str, Any] = json.loads((SAVED / "products.json").read_text())
TUNED = SAVED / "tuned_matvec.json"


def vector(size: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(1).standard_normal(size).astype(np.float32)


def unpickled(name: str) -> Any:
    return pickle.loads((SAVED / f"{name}.pickle").read_bytes())


@pytest.mark.parametrize("path", sorted(SAVED.glob("*.safetensors")), ids=lambda path: path.stem)
@pytest.mark.parametrize("mmap", [True, False])
def test_saved_matrices_multiply_as_they_did(path: Path, mmap: bool) -> None:
    matrix = gm.QuantizedMatrix.load(path, mmap=mmap)
    product = gm.matvec(matrix, vector(matrix.shape[1]))
    np.testing.assert_allclose(product, PRODUCTS[path.stem], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "layout", "saved"),
    [("matrix", "row", "int4_groups"), ("fragments", "mma16", "int8_rows")],
)
def test_pickled_matrices_multiply_as_they_did(name: str, layout: str, saved: str) -> None:
    matrix = unpickled(name)
    assert isinstance(matrix, gm.QuantizedMatrix)
    assert matrix.layout == layout
    product = gm.matvec(matrix.to(layout="row"), vector(matrix.shape[1]))
    np.testing.assert_allclose(product, PRODUCTS[saved], rtol=1e-5, atol=1e-5)
    loaded = gm.QuantizedMatrix.load(SAVED / f"{saved}.safetensors")
    np.testing.assert_array_equal(matrix.dequantize(), loaded.dequantize())


def test_pickled_prepared_matrices_multiply_as_they_did() -> None:
    right, turned = unpickled("prepared"), unpickled("prepared_turned")
    assert (right.side, turned.side) == ("right", "right")
    np.testing.assert_allclose(np.eye(8, dtype=np.float32) @ right, PRODUCTS["prepared"])
    left = turned.T
    np.testing.assert_allclose(left @ np.eye(12, dtype=np.float32), PRODUCTS["prepared"])


def test_a_saved_layer_multiplies_as_it_did() -> None:
    torch = pytest.importorskip("torch")
    from gemmule.torch.linear import QuantLinear

    layer = QuantLinear(70, 6, bits=4, group_size=32)
    layer.load_state_dict(torch.load(SAVED / "layer.pt", weights_only=True))
    with torch.no_grad():
        product = layer(torch.from_numpy(vector(70)))
    np.testing.assert_allclose(product.numpy(), PRODUCTS["layer"], rtol=1e-5, atol=1e-5)


def test_a_tuned_entry_counts_while_its_rung_is_as_it_was(
    tmp_path: Path, setting: Callable[..., None]
) -> None:
    record = json.loads(TUNED.read_text())
    a, x = np.ones((96, 200), np.float32), np.ones(200, np.float32)
    machine = gm.plan("matvec", a, x).choice.machine
    entry = tmp_path / "tuned" / f"{tuned.key(machine, Problem(**record['fields']))}.json"
    entry.parent.mkdir()
    setting(GEMMULE_CACHE=tmp_path)
    shutil.copy(TUNED, entry)
    rung = next(one for one in ladder("matvec", "cpu") if one.name == record["rung"])
    if record["digest"] != rung_digest(rung):  # edited since: then plans choose as without it
        assert tuned.lookup(machine, Problem(**record["fields"])) is None
    entry.write_text(json.dumps(record | {"digest": rung_digest(rung)}))
    found = tuned.lookup(machine, Problem(**record["fields"]))
    assert found is not None
    assert (found.rung, dict(found.params)) == (rung, record["params"])


def test_a_results_file_is_read() -> None:
    results = read(SAVED / "bench_quick.jsonl")
    assert len(results.rows) == len((SAVED / "bench_quick.jsonl").read_text().splitlines()) - 1
    assert {row.problem.op for row in results.rows} == {"matvec"}
