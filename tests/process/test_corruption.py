"""A sample of the corruption campaign: damaged files of every kind, writers that are killed."""

from __future__ import annotations

import collections
from pathlib import Path

import pytest

import corruption

CASES, SEED = 150, 15


@pytest.mark.parametrize("name", corruption.KINDS)
def test_damaged_files_are_refused_or_read_right(name: str, tmp_path: Path) -> None:
    kind = corruption.KINDS[name]()
    path = tmp_path / f"damaged{kind.suffix}"
    counts: collections.Counter[str] = collections.Counter()
    for index in range(CASES):
        happened = corruption.case(kind, name, SEED, index, path)
        assert happened in ("refused", "right"), f"{name} case {index} of seed {SEED}: {happened}"
        counts[happened] += 1
    assert counts["right"]  # some damage hits what nobody reads, or makes another sound file


@pytest.mark.parametrize("name", corruption.KINDS)
def test_the_judge_accepts_what_is_sound(name: str, tmp_path: Path) -> None:
    kind = corruption.KINDS[name]()
    path = tmp_path / f"sound{kind.suffix}"
    for content in kind.sound:
        path.write_bytes(content)
        assert kind.judge(content, kind.read(path))


@pytest.mark.parametrize("name", ["npy", "npz", "safetensors", "mat", "mtx"])
def test_the_judge_sees_a_wrong_element(name: str, tmp_path: Path) -> None:
    kind = corruption.KINDS[name]()
    path = tmp_path / f"sound{kind.suffix}"
    for content in kind.sound:
        path.write_bytes(content)
        wrong = kind.read(path).copy()
        wrong[..., -1] += 1
        assert not kind.judge(content, wrong)


def test_killed_writers_leave_whole_files() -> None:
    for name in corruption.writers():
        assert corruption.killed(name, 5, SEED) == 0
