"""Planted faults: the list is current, watched, repeatable. And the page of what campaigns say."""

from __future__ import annotations

import ast
import itertools
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import campaign_record
import mutation
from checkout import ROOT


def test_every_listed_fault_fits_its_file_and_is_watched() -> None:
    faults = list(mutation.by_hand())
    assert len(faults) >= 90
    assert not mutation.outdated()
    for fault in faults:
        text = (ROOT / fault.path).read_text()
        assert fault.apply(text) != text
        if fault.path.endswith(".py"):
            ast.parse(fault.apply(text))
        for argument in mutation.watching(fault):
            if argument.startswith("tests/"):
                assert (ROOT / argument.partition("::")[0]).is_file(), argument


def test_mechanical_faults_repeat_by_their_seed() -> None:
    first, again, other = (list(mutation.mechanical(95, seed)) for seed in (7, 7, 8))
    assert first == again != other
    assert len({(fault.path, fault.start) for fault in first}) == 95
    kinds = {fault.kind for fault in (*first, *other)}
    assert kinds >= {"operator", "constant", "statement", "guard"}
    for fault in first:
        assert mutation.watching(fault)
        assert " -> [" in str(fault)


AHEAD = """{
  for (int r = 0; r < R; ++r)
  // excerpt
  if (r < 3) ptx::prefetch_l2(a + 2 * r);
}
"""


@pytest.mark.parametrize(
    ("path", "text", "wanted"),
    [
        ("a.py", "x = a < b + 12\n", {("<", "<="), ("+", "-"), ("12", "13")}),
        ("a.py", 'x = "a < b"  # 1 + 1\n', set()),
        ("a.py", "x = zip(a, b, strict=True)\n", set()),
        ("a.py", "x = lru_cache(maxsize=8)\n", set()),
        ("a.py", "@dataclass(slots=True)\nclass A: ...\n", set()),
        ("a.py", '"""Words: 3 < 4."""\nx = not y\n', {("not", "")}),
        (
            "a.cu",
            "  if (i < n && j >= 2) ++i;\n",
            {("<", "<="), ("&&", "||"), (">=", ">"), ("2", "3")},
        ),
        ("a.cu", "  Vec<int, 4> v;  // 5 + 5\n", {("4", "5")}),
        ("a.cu", "void __launch_bounds__(2 * f(3), 1) k(int n = 7);\n", {("7", "8")}),
        ("a.cu", f"  for (int u = 7;;)\n{AHEAD}  ++u;\n", {("7", "8")}),
        ("a.cu", "  for (int r = 0;;) ptx::pin(a[r]);\n", set()),
    ],
)
def test_operators_and_constants_of_the_code_alone_change(
    path: str, text: str, wanted: set[tuple[str, str]]
) -> None:
    assert {(old, new) for _, old, new, _ in mutation.tokens_of(path, text)} == wanted


def test_statements_are_left_out_whole() -> None:
    text = (
        "def f(a: int) -> int:\n    'Words.'\n    a += 1\n    if a:\n        g(a)\n    return a\n"
    )
    left_out = [old for _, old, _, _ in mutation.statements_of("a.py", text)]
    assert left_out == ["a += 1", "return a", "g(a)"]
    text = "def f(a):\n    if a:\n        return None\n    g(a)\n    return None\n"
    left_out = [old for _, old, _, _ in mutation.statements_of("a.py", text)]
    assert left_out == ["g(a)", "return None"]
    kernel = "  if (t) f(1);\n  __syncthreads();\n  static_assert(N);\n  return g();\n"
    kernel += "  ptx::pdl_launch_dependents();\n"
    left_out = [old.strip() for _, old, *_ in mutation.statements_of("a.cu", kernel)]
    assert left_out == ["if (t) f(1);", "__syncthreads();"]


def test_guards_become_false() -> None:
    text = (
        "def f(a):\n    if a < 0:\n        raise ValueError(\n            a\n        )\n"
        "    if a:\n        a = 3\n    for b in a:\n        if b: continue\n"
        "        if c: return\n        else: g()\n"
    )
    assert [(old, new) for _, old, new, _ in mutation.guards_of("a.py", text)] == [
        ("a < 0", "False"),
        ("b", "False"),
    ]
    kernel = "  if (t >= n) return;\n  if (t) f(1);\n  // if (t) return;\n  if (a(b)) continue;\n"
    dropped = [old for _, old, *_ in mutation.guards_of("a.cu", kernel)]
    assert dropped == ["if (t >= n) return;", "if (a(b)) continue;"]


def test_new_axes_come_one_place_aside() -> None:
    text = "b = a[..., None] * c[None, :, 2]\nd = a[:, None] + a[0, 1] + a[None]\n"
    moved = {(old, new) for _, old, new, _ in mutation.new_axes_of("a.py", text)}
    assert moved == {
        ("..., None", "None, ..."),
        ("None, :, 2", ":, None, 2"),
        (":, None", "None, :"),
    }


def test_a_file_of_which_nothing_is_said_is_watched_by_the_tests_that_import_it() -> None:
    assert "tests/storage/test_rates.py" in mutation.importing("src/gemmule/storage/rates.py")
    nobodys = "src/gemmule/backends/cpu/blas_threads.py"
    assert "tests/backends_cpu/test_cpu_pool.py" in mutation.importing(nobodys)
    for path in sorted((ROOT / "src" / "gemmule").rglob("*.py")):
        if path.stem not in ("__init__", "__main__") and "rungs" not in path.parts:
            for test in mutation.importing(str(path.relative_to(ROOT))):
                assert (ROOT / test).is_file()
    timing = {"host_times", "margins", "prompt_times"}  # their figures are all that they give
    for path in sorted((ROOT / "tools").rglob("*.py")):
        if path.stem not in timing:
            assert mutation.importing(str(path.relative_to(ROOT)))


def _ended(fault: mutation.Fault | None, arguments: list[str], *failed: str) -> Any:
    return SimpleNamespace(
        fault=fault, arguments=arguments, processor_s=0.1, folder=Path(), failed=lambda: failed
    )


def test_a_test_that_fails_without_any_fault_kills_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        mutation, "Child", lambda fault, arguments, folder: _ended(fault, arguments)
    )
    faults = list(mutation.by_hand())[:3]
    (judged := tmp_path / "judged").touch()
    run = mutation.Run(faults, judged)
    for name in ("tests/a.py::sound", "tests/a.py::broken", "tests/a.py::named[2]"):
        trials, child = run.next(Path())
        run.after(trials, _ended(child.fault, child.arguments, name), "killed")
    assert not run.waiting
    assert not run.found
    # A name that only the fault gives is found nowhere: then each runs alone, by its function.
    trials, child = run.next(Path())
    assert child.fault is None
    assert len(child.arguments) == 3
    run.after(trials, child, "killed (ended with 4)")
    while run.killed or run.waiting:
        trials, child = run.next(Path())
        if child.fault is not None:
            assert (child.fault, child.arguments[-1]) == (
                faults[1],
                "--deselect=tests/a.py::broken",
            )
            run.after(trials, child, "survived")
        elif "tests/a.py::named[2]" in child.arguments:
            run.after(trials, child, "killed (ended with 4)")
        elif "tests/a.py::broken" in child.arguments:
            run.after(trials, _ended(None, child.arguments, "tests/a.py::broken"), "killed")
        else:
            run.after(trials, child, "survived")
    verdicts = {faults[0]: "killed", faults[1]: "survived", faults[2]: "killed"}
    again = mutation.Run([*faults, *list(mutation.by_hand())[3:4]], judged)
    assert dict(run.found) == dict(again.found) == verdicts
    assert len(again.waiting) == 1  # what was not judged yet


def test_a_campaign_replaces_its_last_record(tmp_path: Path) -> None:
    file = tmp_path / "reliability.jsonl"
    for what, cases, bad in (("b", 1, 0), ("a", 2, 0), ("b", 3, 1)):
        campaign_record.keep(what, cases, bad, "python x", "words", file=file)
    kept = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(one["what"], one["cases"], one["bad"]) for one in kept] == [("a", 2, 0), ("b", 3, 1)]


def test_a_campaign_in_several_runs_is_their_sum(tmp_path: Path) -> None:
    file = tmp_path / "reliability.jsonl"
    for seed, cases, bad in ((1, 5, 1), (2, 30, 0)):
        campaign_record.keep("a", cases, bad, f"python x {seed}", "words", file=file, add=True)
    campaign_record.keep("b", 7, 0, "python y", "words", file=file, add=True)
    kept = {one["what"]: one for one in campaign_record.read(file)}
    assert (kept["a"]["cases"], kept["a"]["bad"], kept["b"]["cases"]) == (35, 1, 7)
    assert kept["a"]["command"] == "python x 1; python x 2"


def test_the_page_counts_what_the_records_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT / "tools")])
    from pages import reliability

    (tmp_path / "docs").mkdir()
    (tmp_path / reliability.PAGE).write_text((ROOT / reliability.PAGE).read_text())
    file = tmp_path / reliability.RECORD
    file.parent.mkdir()
    for name, cases, bad in (("tuned", 70, 0), ("compiled", 30, 2), ("npy", 1000, 0)):
        what = f"damaged files: {name}"
        campaign_record.keep(what, cases, bad, "python c.py", "words", file=file)
    assert reliability.update(tmp_path) == [tmp_path / reliability.PAGE]
    assert reliability.update(tmp_path) == []
    text = (tmp_path / reliability.PAGE).read_text()
    assert "| damaged files: npy | 1,000 | 0 | words | `python c.py` |" in text
    assert "damaged files: 1,100 cases, 2 bad" in text
    assert "damaged files: tuned, damaged files: compiled: 100 cases, 2 bad" in text
    assert "no device on record" in text


def test_conditions_lose_one_part_and_calls_an_option_that_is_handed_on() -> None:
    text = "if a < 0 or b and c:\n    f(a, bits=bits, size=2, method=method)\n    g(b=b.c)\n"
    assert {(old, new) for _, old, new, _ in mutation.conditions_of("a.py", text)} == {
        ("a < 0 or b and c", "b and c"),
        ("a < 0 or b and c", "a < 0"),
        ("b and c", "c"),
        ("b and c", "b"),
    }
    ends = [new for *_, new, _ in mutation.conditions_of("a.py", "x = 0 <= y < f(z)\n")]
    assert ends == ["y < f(z)", "0 <= y"]
    dropped = [(old, new) for _, old, new, _ in mutation.keywords_of("a.py", text)]
    assert dropped == [(", bits=bits", ""), (", method=method", "")]


def test_a_variable_becomes_another_of_its_statement() -> None:
    text = "def f(a, b):\n    size = len(a)\n    return g(a, size, b.c)\n"
    found = [(old, new) for _, old, new, _ in mutation.names_of("a.py", text)]
    assert sorted(found) == sorted(itertools.permutations(("a", "b", "size"), 2))


def test_tests_named_after_a_module_watch_it() -> None:
    fault = mutation.Fault("src/gemmule/quant/second_order.py", 0, "", "", "by hand")
    assert "tests/quant/test_second_order.py" in mutation.watching(fault)
    assert "tests/quant/test_quant.py" in mutation.watching(fault)
