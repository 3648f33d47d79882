"""``gemmule advise``: what it measures, what it decides, and what it says."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import gemmule as gm
from gemmule.quant.files import model_files
from gemmule.timing import clock
from gemmule.timing.sampler import Ratio
from gemmule_lab import cli
from gemmule_lab.demo import advise
from gemmule_lab.demo.advise import COLUMNS, Cost, Settings, decide


@pytest.fixture(autouse=True)
def quick_clock(limit: Callable[..., None]) -> None:
    """No figure is judged here, and settling takes most of the time."""
    limit(clock, LONGEST_SETTLING_S=0.0)


SLOW, SAME, FAST = (
    Ratio(0.5, 0.4, 0.6, 9, 0.95),
    Ratio(1.1, 0.9, 1.3, 9, 0.95),
    Ratio(2, 1.9, 2.1, 9, 0.95),
)


def cost(int8: list[Ratio], int4: list[Ratio]) -> Cost:
    gains = {("int8", c): g for c, g in zip(COLUMNS, int8, strict=True)}
    gains |= {("int4", c): g for c, g in zip(COLUMNS, int4, strict=True)}
    return Cost((64, 64), {}, gains, {"float16": 8192, "int8": 4600, "int4": 2500}, True)


@pytest.mark.parametrize(
    ("name", "error", "int8", "int4", "take", "why"),
    [
        ("fc", 0.1, [FAST] * 4, [FAST] * 4, "int4", "up to 2.00x"),
        ("fc", 0.1, [FAST] * 4, [FAST, SAME, SAME, SAME], "int4", "up to 2.00x"),
        ("fc", 0.1, [FAST] * 4, [FAST, SLOW, SAME, SAME], "int8", "int4 is slower at 16 columns"),
        ("fc", 0.2, [FAST] * 4, [FAST] * 4, "int8", "int4 has error 0.200, above 0.12"),
        (
            "fc",
            np.nan,
            [SAME] * 4,
            [FAST] * 4,
            "float16",
            "int4 has error nan, above 0.12; int8 is not",
        ),
        ("fc", 0.1, [SLOW] * 4, [SAME] * 4, "float16", "int8 is slower at 1, 16 columns"),
        ("fc", 0.1, [FAST] * 4, [FAST, SAME, SLOW, SLOW], "int4", "up to"),
        ("word_embeddings.weight", 0.1, [FAST] * 4, [FAST] * 4, "float16", "looked up"),
    ],
)
def test_decisions(
    name: str, error: float, int8: list[Ratio], int4: list[Ratio], take: str, why: str
) -> None:
    found, reason = decide(name, {"int8": 0.01, "int4": error}, cost(int8, int4), 0.12)
    assert found == take
    assert why in reason


def test_the_memory_told_is_that_of_all_weights() -> None:
    rng = np.random.default_rng(5)
    costs = {
        shape: Cost(
            shape, {}, {}, {form: int(rng.integers(1, 10**6)) for form in advise.FORMATS}, True
        )
        for shape in ((64, 64), (48, 160), (7, 512))
    }
    for _ in range(20):
        advices, plain, advised = [], 0, 0
        for number in range(int(rng.integers(1, 9))):
            shape = [*costs][rng.integers(len(costs))]
            take = ("float16", "int8", "int4")[rng.integers(3)]
            advices.append(advise.Advice(f"w{number}", shape, {}, take, ""))
            plain += 2 * shape[0] * shape[1]
            kept = 2 * shape[0] * shape[1] if take == "float16" else costs[shape].nbytes[take]
            advised += kept
        assert advise.total_bytes(advices, costs) == (plain, advised)


def test_advice_on_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, rng = tmp_path / "m.safetensors", np.random.default_rng(0)
    normal = rng.standard_normal((48, 64)).astype(np.float32)
    spiked = normal.copy()
    spiked[:, 5] *= 100  # one column takes the range of its group
    save_file(
        {
            "a.weight": normal,
            "spiked.weight": spiked,
            "bias": normal[0],
            "ids": np.ones((2, 2), int),
        },
        path,
    )
    assert cli.run(["advise", str(path), "--seconds", "0.05", "--max-error", "0.15"]) == 0
    text = capsys.readouterr().out
    assert text.partition("other work")[0].count("48 x 64") == 3  # one shape timed, two weights
    assert "2 weights" in text
    assert re.search(r"prompts of 512: at most [\d,]+ tokens/s, in float16 [\d,]+\.\s*$", text)
    assert "ids" not in text
    costs: dict[tuple[int, int], Cost] = {}
    plain, other = advise.advise(path, Settings(seconds=0.05), costs)
    assert plain.errors["int4"] < 0.12 < 5 * plain.errors["int4"]
    assert plain.errors["int8"] < 0.1 * plain.errors["int4"]
    assert other.errors["int4"] != plain.errors["int4"]
    assert set(costs[48, 64].seconds) == {(f, c) for f in advise.FORMATS for c in COLUMNS}
    assert costs[48, 64].nbytes["int4"] < costs[48, 64].nbytes["int8"] < 48 * 64 * 2


def test_weights_without_codes_are_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And hide none of the others, in whatever file of the model they lie."""
    normal = np.random.default_rng(0).standard_normal((48, 64)).astype(np.float32)
    wide = np.where(np.arange(64) == 5, np.float32(1e30), normal)
    masked = np.where(np.arange(64) == 5, -np.inf, normal).astype(np.float32)
    files = {"1.safetensors": {"masked": masked, "good": normal}, "2.safetensors": {"wide": wide}}
    for name, tensors in files.items():
        save_file(tensors, tmp_path / name)
    index = {tensor: name for name, tensors in files.items() for tensor in tensors}
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": index}))
    assert cli.run(["advise", str(tmp_path), "--seconds", "0.05"]) == 0
    lines = capsys.readouterr().out.splitlines()
    reasons = {line.split()[1]: line for line in lines if line.startswith("│") and "48 x" in line}
    assert "W[0, 5] is -inf" in reasons["masked"]
    assert "overflows float16" in reasons["wide"]
    assert "nan" not in reasons["good"]
    assert "3 weights" in lines[-1]
    assert model_files(path) == model_files(tmp_path)


def test_codes_are_no_weights_to_advise_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "m.safetensors"
    gm.quantize(np.ones((8, 64), np.float32)).save(path)
    assert cli.run(["advise", str(path)]) == 2
    assert "is quantised already: codes belongs" in capsys.readouterr().err
    ones = np.ones((2, 2), np.float32)
    save_file({"up.norm": ones, "up.qweight": ones.astype(np.int32)}, path)
    with pytest.raises(ValueError, match=r"up\.qweight belongs to a matrix of codes"):
        advise.weights_of(path)


def test_a_file_without_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "m.safetensors"
    save_file({"bias": np.ones(3, np.float32)}, path)
    assert cli.run(["advise", str(path)]) == 2
    assert "holds no 2-D weight" in capsys.readouterr().err
