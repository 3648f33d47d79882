"""docs/reliability.md: what was run against this package, from the records of the runs."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from gemmule.storage import evidence
from pages.markdown import update_markers

PAGE, RECORD = Path("docs") / "reliability.md", Path("evidence") / "reliability.jsonl"
TESTS = "`make test`"
APART = "environments: "

# A line: promise | campaigns whose record counts, or a figure in words | command
_ROWS = """
right values from every rung | gpu:cases | `python -m proofs`
exact where sums are integers | equality of every bit in each test of a rung | tests
all sizes, not multiples alone | sizes around each rung's own block sizes | tests
64-bit offsets | gpu:beyond | `python -m extremes`
componentwise accuracy | gpu:ratio | `python -m proofs`
low precision as stated | a bound derived from each rung's arithmetic | tests
NaN and infinity by the IEEE rule | one at a time, at every edge, in each rung | tests
beta = 0 reads nothing | run:gemv and gemm | `python tests/scalars_campaign.py`
any strides | five arrangements of every operand, and those of the tests | tests
inputs and padding untouched | canaries around the operands of every judged case | tests
the same bits again | gpu:runs | `python -m extremes`
a batch is a loop | bit for bit (batch invariance) | tests
bad input is refused | a typed error that names the argument | tests
conforms to public interfaces | run:suites of others | `python tests/external_campaign.py`
no memory error on a GPU | gpu:sanitized | `python -m sanitizer`
no memory error on a CPU | the emulator under AddressSanitizer; guards | tests
quantised round trips | run:damaged files: quantised | `python tests/corruption.py`
hostile files are safe | run:damaged files | `python tests/corruption.py`
a corrupt cache is a miss | run:damaged files: tuned+compiled | `python tests/corruption.py`
writers lose nothing | run:killed writers | `python tests/corruption.py`
a tuned choice is never wrong | each candidate is judged before it is timed | tests
faults are survived \
| run:forks beside 8 busy threads: compile+import+kernels & run:calls by threads \
| `python tests/fork_campaign.py`, `python tests/threads_campaign.py`
Ctrl-C leaves a process that works | run:interrupts | `python tests/interrupts_campaign.py`
the same bits in every environment | run:environments | `python tests/environments_campaign.py`
no code from data | no pickle, eval or shell: ruff's rules S | `make check`
the tests see faults | run:planted faults | `make mutants`
"""
ROWS = tuple(
    tuple(TESTS if part.strip() == "tests" else part.strip() for part in line.split(" | "))
    for line in _ROWS.strip().splitlines()
)


def update(root: Path) -> list[Path]:
    """Rewrite the tables of the page where they are not up to date; return what changed."""
    found = _lines(root / RECORD)
    apart = [one for one in found if one["what"].startswith(APART)]
    tables = {
        "campaigns": _campaign_table([one for one in found if one not in apart]),
        "environments": _environment_table(apart),
        "gpu": _gpu_table(root),
        "promises": _promise_table(root, found),
    }
    changed = (root / PAGE).is_file() and update_markers(root / PAGE, tables)
    return [root / PAGE] if changed else []


def _lines(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _campaign_table(found: list[dict[str, Any]]) -> str:
    rows = ["| what | cases | bad | of what kind | repeat |", "|---|---:|---:|---|---|"]
    for one in found:
        rows.append(
            f"| {one['what']} | {one['cases']:,} | {one['bad']:,} | {one['detail']} | "
            f"`{one['command'].strip()}` |"
        )
    machines = sorted({f"{one['machine']}, {one['date']}" for one in found})
    return "\n".join([*rows, "", f"Ran on: {'; '.join(machines) or 'nothing is on record'}.", ""])


def _environment_table(found: list[dict[str, Any]]) -> str:
    rows = ["| environment | products | bad | compared with |", "|---|---:|---:|---|"]
    for one in found:
        name = one["what"].removeprefix(APART)
        rows.append(f"| {name} | {one['cases']:,} | {one['bad']:,} | {one['detail']} |")
    return "\n".join([*rows, ""])


def _gpu_table(root: Path) -> str:
    rows = ["| device | what | figure |", "|---|---|---|"]
    for gpu in _gpus(root):
        rows += [f"| {gpu.name} | {name} | {figure} |" for name, figure in _gpu(gpu).values()]
    return "\n".join([*rows, ""])


def _gpus(root: Path) -> list[Path]:
    """Return the folders of devices that proved something."""
    return [p for p in sorted((root / "evidence").glob("*")) if any(evidence.read_device(p))]


def _gpu(gpu: Path) -> dict[str, tuple[str, str]]:
    """Return what one device recorded: key -> (what, figure)."""
    records = list(evidence.read_device(gpu))
    tools = Counter(line["tool"] for line in _lines(gpu / "sanitized.jsonl"))
    extremes = _lines(gpu / "extremes.jsonl")
    beyond = [line for line in extremes if "elements" in line]
    cases = sum(record.cases for record in records)
    worst = max((record.worst_ratio for record in records), default=0.0)
    clean = ", ".join(f"{tool} {count}" for tool, count in sorted(tools.items()))
    return {
        "cases": (
            "variants of rungs proved by the oracle",
            f"{len(records):,} variants, {cases:,} cases",
        ),
        "ratio": ("largest error over its bound", f"{worst:.3f}"),
        "sanitized": ("variants clean under compute-sanitizer", clean or "none"),
        "runs": ("rungs and dtypes run 100 times", f"{len(extremes) - len(beyond):,}"),
        "beyond": ("products of more than 2^31 elements, right", f"{len(beyond):,}"),
    }


def _promise_table(root: Path, found: list[dict[str, Any]]) -> str:
    devices = [_gpu(path) for path in _gpus(root)]
    rows = ["| # | promise | figure | repeat |", "|---:|---|---|---|"]
    for number, (promise, key, command) in enumerate(ROWS, 1):
        rows.append(f"| {number} | {promise} | {_figure(key, devices, found)} | {command} |")
    return "\n".join([*rows, ""])


def _figure(
    key: str, devices: list[dict[str, tuple[str, str]]], found: list[dict[str, Any]]
) -> str:
    if " & " in key:
        return "; ".join(_figure(one, devices, found) for one in key.split(" & "))
    if key.startswith("gpu:"):
        shown = [": ".join(device[key[4:]]) for device in devices]
        return "; ".join(shown) or "no device on record"
    if not key.startswith("run:"):
        return key
    key = key[4:]
    names = [key.partition(":")[0] + ": " + one for one in key.partition(": ")[2].split("+")]
    starts = tuple(names) if ": " in key else (key,)
    counted = [one for one in found if one["what"].startswith(starts)]
    if not counted:
        return "no run on record"
    cases, bad = (sum(int(one[name]) for one in counted) for name in ("cases", "bad"))
    return f"{', '.join(starts)}: {cases:,} cases, {bad:,} bad"
