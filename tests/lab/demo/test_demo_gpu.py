"""The demo's second half: what it measures on a GPU, in which order, and what it says of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gemmule.core.problem import Problem
from gemmule_lab.commands import demo as command
from gemmule_lab.demo import gpu
from gemmule_lab.demo.run import Outcome
from gemmule_lab.harness.bench import Measurement
from gemmule_lab.harness.products import Product
from gemmule_lab.peers.registry import all_peers
from gemmule_lab.records import results
from gemmule_lab.records.rows import Row, Speedup
from lab_rows import machine, result_row

DEVICE = machine(3000.0, "Test GPU")


def row(product: Product, us: float, over: dict[str, float]) -> Row:
    one = result_row("ours", us, Problem("matvec", *product.shape), over=over, group=product.title)
    return replace(one, environment=DEVICE.id)


class FakeBench:
    """A GPU's bench that takes as many us for a product as its bits: codes beside floats."""

    backend, device = "cuda", "Test GPU"

    def __init__(self, peers: bool = True) -> None:
        self.peers, self.asked = peers, []

    def environment(self, max_seconds: float) -> Any:
        return DEVICE

    def ceilings_again(self, max_seconds: float) -> Any:
        return DEVICE.ceilings

    def prepared(self, product: Product) -> Measurement:
        rung = SimpleNamespace(rung=SimpleNamespace(name="ours"))
        sets: Any = SimpleNamespace(product=product, plan=lambda: rung)
        plain: Any = SimpleNamespace() if product.form.bits else None
        return Measurement(product.title, sets, plain=plain)

    def measure(self, what: Measurement, environment: Any) -> Any:
        product = what.sets.product  # type: ignore[attr-defined]
        self.asked.append((product, dict(what.beside), what.plain))
        us = float(product.form.bits or 16)
        over = dict.fromkeys(what.beside, 16 / us)
        if self.peers:
            over["torch on bfloat16" if product.form.bits else "torch"] = 16 / us
            if product.form.bits == 4 and product.shape in gpu.LLAMA.shapes:
                over[gpu.PACKED] = 3.0
        return [row(product, us, over)], []


def sentence(rows: Sequence[Row]) -> str:
    told = gpu.story("Test GPU", rows)
    assert told is not None
    return " ".join(told.sentences)


def measured(bench: Any, path: Path | None = None, seconds: float = 60) -> Outcome:
    outcome = Outcome(path=path)
    titles = list(gpu.measure(bench, DEVICE, outcome, seconds))
    assert titles == [product.title for _, product in gpu.products()]
    return outcome


def test_every_weight_of_both_layers_is_multiplied_in_three_formats_by_one_to_512_tokens() -> None:
    found = [product for _, product in gpu.products()]
    assert len(set(found)) == len(found) == 7 * 3 * 4
    assert {p.shape for p in found} >= {(4096, 4096), (1024, 4096), (14336, 4096), (4096, 14336)}
    assert {p.width for p in found} == {1, 16, 128, 512}
    for layer in (found[:48], found[48:]):  # all of one token first
        assert [p.width for p in layer] == sorted(p.width for p in layer)
    known = {peer.name for peer in all_peers("cuda")}
    assert set(gpu.PEERS) <= known
    weights = sum(m * n * count for (m, n), count in gpu.LLAMA.weights)
    assert 32 * weights / 1e9 == pytest.approx(7, abs=0.1)  # with its embeddings 8 billion


def test_codes_stand_beside_our_bfloat16_and_rows_are_on_disk_as_they_come(tmp_path: Path) -> None:
    bench, path = FakeBench(), tmp_path / "demo.jsonl"
    results.append(path, [DEVICE])
    outcome = measured(bench, path)
    assert len(results.read(path).rows) == len(outcome.rows) == 84
    for product, beside, plain in bench.asked:
        assert beside == ({} if product.form.bits is None else {gpu.OURS: plain})


def test_the_sentence_tells_layers_by_tokens_and_against_whom() -> None:
    told = gpu.story("Test GPU", measured(FakeBench()).rows)
    assert told is not None
    llama, packed, model, losses = told.sentences
    assert llama == (
        "On Test GPU a layer of a Llama of 8 billion weights, against PyTorch in bfloat16: "
        "int4 4.00x by 1 token, 4.00x by 16, 4.00x by 128, 4.00x by 512; "
        "int8 2.00x by 1 token, 2.00x by 16, 2.00x by 128, 2.00x by 512; "
        "bfloat16 as fast by 1 token, as fast by 16, as fast by 128, as fast by 512."
    )
    assert packed.startswith("Its int4 against PyTorch's own packed int4: 3.00x by 1 token, 3.00x")
    assert model.startswith("And a layer of the sentence model, against PyTorch in bfloat16: int4")
    assert losses == "None of 84 products is surely slower than PyTorch in bfloat16."
    assert told.tables[0].rows[0] == (
        "a layer of a Llama of 8 billion weights",
        *("1", "112 us, 1.00x", "56.0 us, 2.00x", "28.0 us, 4.00x"),
    )
    assert len(told.tables[0].rows) == 8


def test_without_pytorch_codes_are_held_against_our_own_bfloat16() -> None:
    told = sentence(measured(FakeBench(peers=False)).rows)
    assert "against our own bfloat16: int4 4.00x by 1 token" in told
    assert "bfloat16 as fast" not in told
    assert "packed" not in told


def test_what_loses_is_in_the_sentence() -> None:
    rows = measured(FakeBench()).rows
    slow = Speedup(0.6, 0.55, 0.65, 9, 0.95, "slower")
    rows[-1] = replace(rows[-1], speedups={"torch on bfloat16": slow})
    told = sentence(rows)
    assert "in bfloat16: 1 of 84 products; worst: int4 384 x 1536 by 512 tokens, 0.60x." in told


def test_time_that_is_over_and_products_that_fail_are_told() -> None:
    assert len(measured(FakeBench(), seconds=0).left) == 84

    class Failing(FakeBench):
        def measure(self, what: Measurement, environment: Any) -> Any:
            product = what.sets.product  # type: ignore[attr-defined]
            if product.width == 512:
                raise MemoryError("no room")
            if product.width == 128:
                raise ArithmeticError("wrong by 1")
            return super().measure(what, environment)

    outcome = measured(Failing())
    assert len(outcome.left) == len(outcome.wrong) == 21
    assert gpu.left_in_words(outcome.left) == ["21 products: no room"]
    assert gpu.left_in_words(outcome.left[:1]) == [f"{outcome.left[0][0]}: no room"]
    assert "by 128" not in sentence(outcome.rows)
    assert gpu.story("Test GPU", []) is None


def test_the_command_on_a_gpu_alone(
    folder: Path, fault: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    from gemmule_lab.cli import run

    fault(command, "_gpu", lambda sound, device: FakeBench())
    assert run(["demo", "--device", "cuda", "--json"]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith('{"sentences": ["On Test GPU a layer of a Llama')
    assert "All products of a layer" in shown.err
    (page,) = (folder / "results").glob("demo-*.html")
    assert "On Test GPU a layer of a Llama" in page.read_text("utf-8")
