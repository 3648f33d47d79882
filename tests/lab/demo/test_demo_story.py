"""The demo's first screen: its sentence, its chart, and what a number format does to a model."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from gemmule.core.problem import Problem
from gemmule_lab.demo import embeddings, search, story
from gemmule_lab.demo.embeddings import SentenceModel
from gemmule_lab.demo.search import Embedded
from gemmule_lab.records.rows import Row, Speedup, Times
from gemmule_lab.report.charts import Dots
from gemmule_lab.report.plots import draw
from svg_words import SVG, faults, groups, words_of

WIDTH, WIDE = 24, 48
WORDS = ["[UNK]", "[CLS]", "[SEP]", "read", "the", "file", "un", "##read", "##able", "a", "row"]


def _row(group: str, time_us: float, ratio: float, verdict: str = "faster") -> Row:
    over = Speedup(ratio, ratio * 0.9, ratio * 1.1, 9, 0.95, verdict)
    times = Times(time_us, time_us, time_us, time_us, 9)
    problem = Problem("matvec", 8, 4)
    one = Row("cpu", problem, "a rung", "rung", "cold", times, 1.0, 1.0, group=group)
    return replace(one, speedups={"numpy on float32": over})


ROWS = [
    _row("8 x 4 (3), matvec, int4", 10.0, 2.0),
    _row("9 x 4 (1), matvec, int4", 70.0, 6.0),
    _row("8 x 4 (3), vecmat, int4", 10.0, 0.5, "slower"),
    _row("8 x 4 (3), matvec, float32", 20.0, 1.01),
]


def sentence(rows: Sequence[Row], found: Sequence[Embedded], texts: int = 0) -> str:
    return " ".join(story.sentences(rows, found, texts))


def _over(value: float, verdict: str, confidence: float = 0.95) -> Speedup:
    return Speedup(value, value, value, 9, confidence, verdict)


def test_the_sentence_tells_the_whole_model_first_then_its_layers_and_the_losses() -> None:
    one = _over(1, "same")
    plain = Embedded("float32", 400, 1.0, 0.1, one, one, 1.0, 1.0, 2, (1, 0))
    slow, fast = _over(0.75, "slower"), _over(1.31, "undecided")
    coarse = Embedded("int4", 60, 0.5, 0.1, slow, fast, 0.97123, 0.9, 1, (1, 1))
    # NumPy: 3 x 20 + 420 us, ours 3 x 10 + 70.
    assert story.sentences(ROWS, [plain, coarse], 160) == (
        "The whole model, against NumPy in float32: int4 0.75x with 160 sentences at once and "
        "about 1.3x with one at a time, 15% of the memory, cosine 0.9712.",
        "Its linear layers alone, by one vector: int4 4.80x, float32 as fast.",
        "Surely slower than NumPy in float32: 1 of 4 products; worst: int4 8 x 4 (3), x A, 0.50x.",
    )
    assert "model" not in sentence(ROWS, [])


def test_disturbed_and_single_blocks_decide_nothing() -> None:
    taken = replace(ROWS[0], flags=("the CPU was taken away during 9 of 9 blocks",))
    lone = replace(ROWS[2], speedups={"numpy on float32": _over(0.5, "slower", 0.0)})
    told = sentence([taken, ROWS[1], lone, ROWS[3]], [])
    assert "int4 undecided, float32 as fast" in told
    assert "None of 2 products is surely slower than NumPy in float32. Of 2 more nothing" in told
    assert "Nothing can be said of any product: all 1 were disturbed" in sentence([taken], [])
    assert story.times(_over(2, "faster", 0.9)) == "about 2.0x"
    model = [
        Embedded(form, 4, 1.0, 0.1, *[_over(37.2, "faster")] * 2, 1.0, 1.0, 1, (1, 1))
        for form in ("float32", "int4")
    ]
    assert "about 37.2x with one at a time" in sentence([taken], model, 2)
    assert "and 37.20x with one at a time" in sentence([taken, ROWS[1]], model, 2)


def test_what_is_even_within_what_sentences_call_even_is_no_loss() -> None:
    near = replace(ROWS[0], speedups={"numpy on float32": _over(0.98, "slower")})
    assert "None of 1 products is surely slower" in sentence([near], [])


def test_the_table_and_the_chart_hold_every_product() -> None:
    told = story.story(ROWS)
    table = told.tables[0]
    assert table.header[1:] == ("int4", "float32")
    assert table.rows == (
        ("8 x 4 (3), A x", "10.0 us, 2.00x", "20.0 us, 1.01x"),
        ("9 x 4 (1), A x", "70.0 us, 6.00x", ""),
        ("8 x 4 (3), x A", "10.0 us, 0.50x-", ""),
    )
    drawing = draw(told.chart.chart)
    assert len(groups(drawing, "dot")) == len(groups(drawing, "range")) == len(ROWS)
    xs = {}
    for one in groups(drawing, "dot"):
        ((tip,), (use,)) = (list(one.iter(f"{SVG}{name}")) for name in ("title", "use"))
        xs[tip.text] = float(use.get("x"))
    # The axis is logarithmic: 2 lies as far from 1 as 0.5 does.
    tips = ["int4: 0.500 times", "float32: 1.01 times", "int4: 2.00 times", "int4: 6.00 times"]
    assert [xs[tip] for tip in tips] == sorted(xs.values())
    (path,) = (path for one in groups(drawing, "one") for path in one)
    one = float(re.findall(r"[\d.]+", path.get("d"))[0])
    assert xs[tips[2]] - one == pytest.approx(one - xs[tips[0]], abs=0.3)
    words = {one.text for one in words_of(drawing)}
    assert {"8 x 4 (3), A x", "int4", "float32", "1×"} <= words
    assert faults(drawing) == []


def test_a_chart_needs_positive_ratios() -> None:
    for rows in ({"a": {"b": (0.0, 0.0, 1.0)}}, {}):
        with pytest.raises(ValueError, match="at least one value, and positive"):
            Dots("t", "", rows, ["b"], "")


# --- the network ----------------------------------------------------------------------------------


@pytest.fixture
def bert(limit: Callable[..., None]) -> SentenceModel:
    """A network of one narrow layer with drawn weights."""
    limit(embeddings, LAYERS=1)
    rng, tensors = np.random.default_rng(7), {}

    def drawn(*shape: int) -> Any:
        return rng.standard_normal(shape).astype(np.float32) / np.float32(math.sqrt(shape[-1]))

    for table, rows in (("word", len(WORDS)), ("position", 64), ("token_type", 2)):
        tensors[f"embeddings.{table}_embeddings.weight"] = drawn(rows, WIDTH)
    at = "encoder.layer.0."
    layers = {f"attention.self.{name}": (WIDTH, WIDTH) for name in ("query", "key", "value")}
    layers |= {"attention.output.dense": (WIDTH, WIDTH), "intermediate.dense": (WIDE, WIDTH)}
    for name, shape in {**layers, "output.dense": (WIDTH, WIDE)}.items():
        tensors[f"{at}{name}.weight"], tensors[f"{at}{name}.bias"] = drawn(*shape), drawn(shape[0])
    for name in ("embeddings", f"{at}attention.output", f"{at}output"):
        tensors[f"{name}.LayerNorm.weight"] = np.ones(WIDTH, np.float32)
        tensors[f"{name}.LayerNorm.bias"] = np.zeros(WIDTH, np.float32)
    return SentenceModel(tensors, WORDS)


def test_words_are_cut_into_the_longest_known_pieces(bert: SentenceModel) -> None:
    assert bert.tokens("Unreadable the file") == [1, 6, 7, 8, 4, 5, 2]
    assert bert.tokens("xyz!") == [1, 0, 0, 2]


def test_a_sentence_s_vector_does_not_depend_on_its_neighbours(bert: SentenceModel) -> None:
    texts = ["read the file", "a row", "unreadable file"]
    together = bert.embed(texts)
    np.testing.assert_allclose(np.linalg.norm(together, axis=1), 1, rtol=1e-6)
    for text, row in zip(texts, together, strict=True):
        np.testing.assert_allclose(bert.embed([text])[0], row, rtol=2e-5, atol=2e-6)
    assert abs(together[0] @ together[1]) < 0.999


def test_erf_is_the_error_function() -> None:
    x = np.linspace(-4, 4, 401, dtype=np.float32)
    np.testing.assert_allclose(embeddings.erf(x), [math.erf(v) for v in x], atol=5e-7)


def test_formats_are_held_against_float32(bert: SentenceModel, limit: Callable[..., None]) -> None:
    limit(search, TOGETHER_BUDGET=(0.1, 2, 3), ALONE_BUDGET=(0.1, 2, 3))
    texts = ["read the file", "a row", "unreadable file", "read a row", "the unread file"]
    found = search.compare(bert, texts)
    assert [one.format for one in found] == list(search.FORMATS)
    plain, int8, int4 = found
    assert plain.cosine == pytest.approx(1, abs=1e-6)
    assert plain.agreeing == len(texts)
    assert plain.layer_bytes == 4 * (4 * WIDTH * WIDTH + 2 * WIDTH * WIDE)
    assert int4.layer_bytes < int8.layer_bytes < plain.layer_bytes
    assert 0.9 < int4.cosine < int8.cosine < 1
    assert all(index != place for one in found for place, index in enumerate(one.nearest))
    shown = search.examples(texts, found)
    assert 0 < len(shown) <= search.EXAMPLES
    assert all(text in texts and right in texts for text, right, _ in shown)
    table = story.work_table(found, len(texts))
    assert [row[0] for row in table.rows] == list(search.FORMATS)


def test_the_sentences_are_python_s_own() -> None:
    texts = list(embeddings.sentences())
    assert len(texts) == len(set(texts)) > search.SENTENCES
    picked = search.chosen(texts)
    assert len(picked) == search.SENTENCES
    assert picked[0] == texts[0]
