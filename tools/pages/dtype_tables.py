"""The tables of docs/dtypes.md: the dtype of a result, and the longest sums of 8-bit integers."""

from __future__ import annotations

from gemmule.core.problem import BYTES, DTYPES, longest_int32_sum, result_dtype

SHORT = {"float8_e4m3fn, float8_e5m2": "float8", "int16, int32, int64": "int16 to int64"}


def results() -> str:
    """Return a Markdown table of result dtypes; dtypes whose rows are alike share one."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for name in DTYPES:
        rows.setdefault(tuple(_result(name, other) for other in DTYPES), []).append(name)
    groups = list(rows.values())
    titles = [SHORT.get(name, name) for name in map(", ".join, groups)]
    lines = [f"| | {' | '.join(titles)} |", "|---|" + "---|" * len(titles)]
    for title, group in zip(titles, groups, strict=True):
        cells = [" or ".join(sorted({_result(group[0], b) for b in other})) for other in groups]
        lines.append(f"| **{title}** | {' | '.join(cells)} |")
    return "\n".join(lines)


def _result(a: str, b: str) -> str:
    try:
        return result_dtype(a, b)
    except TypeError:
        return "-"


def longest() -> str:
    """Return a Markdown table of how many terms a sum in int32 may have."""
    lines = ["| operands | longest sum in int32 |", "|---|---:|"]
    pairs = [(a, b) for i, a in enumerate(BYTES) for b in BYTES[i:]]
    lines += [f"| {a} by {b} | {longest_int32_sum(a, b):,} |" for a, b in pairs]
    return "\n".join(lines)
