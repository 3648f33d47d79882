"""Unproved configurations in a process of their own: a fault or a hang ends that process alone.

The child, ``python -m gemmule.tuning.child``, gets one JSON object on standard input and answers
with one on its last line of output; nothing it says is believed beyond numbers and a reason.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from gemmule.core.problem import Problem
from gemmule.timing.sampler import Ratio
from gemmule.tuning.outcomes import (
    Candidate,
    CompileFailed,
    Failure,
    LaunchFailed,
    Measured,
    Skipped,
    Timeout,
    Wrong,
)

CHILD_TIMEOUT_S = 60.0
CHILD_SECONDS = 3.0  # of timing, once the configuration is verified
# -P: the folder where the user happens to be is no place for code.
COMMAND = (sys.executable, "-P", "-m", "gemmule.tuning.child")
KINDS: dict[str, type[Failure]] = {
    kind.__name__: kind for kind in (CompileFailed, LaunchFailed, Wrong, Skipped)
}


def measure_apart(
    problem: Problem,
    device: str,
    candidate: Candidate,
    seed: int,
    *,
    timeout_s: float = CHILD_TIMEOUT_S,
    command: Sequence[str] = COMMAND,
) -> Measured | Failure:
    """Verify and time a candidate against the default in a child process.

    `Timeout` when the child needs longer than `timeout_s` (it is killed), `LaunchFailed` when it
    dies or answers nonsense.
    """
    request = {
        "problem": asdict(problem),
        "device": device,
        "folder": candidate.rung.folder,
        "rung": candidate.rung.name,
        "params": dict(candidate.params),
        "seed": seed,
        "seconds": CHILD_SECONDS,
    }
    try:
        done = subprocess.run(
            list(command),
            input=json.dumps(request),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Timeout(candidate, f"not done after {timeout_s:g} s; its process was ended")
    lines = done.stdout.strip().splitlines()
    answer = _answer(lines[-1]) if lines and done.returncode == 0 else None
    if answer is None:
        said = done.stderr.strip().splitlines()[-1:] or ["it said nothing"]
        how = f"its process ended with status {done.returncode}"
        return LaunchFailed(candidate, f"{how}: {said[0][:300]}")
    return _outcome(candidate, answer) or LaunchFailed(candidate, "its process answered nonsense")


def answer_of(outcome: Measured | Failure) -> dict[str, Any]:
    """Return an outcome as the child prints it."""
    if isinstance(outcome, Measured):
        return {"kind": "Measured", "seconds": outcome.seconds, "ratio": asdict(outcome.ratio)}
    return {"kind": type(outcome).__name__, "text": outcome.text}


def _answer(line: str) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _outcome(candidate: Candidate, answer: dict[str, Any]) -> Measured | Failure | None:
    """Return the outcome that the child told, or None when it told none."""
    kind = answer.get("kind")
    if kind == "Measured":
        numbers, seconds = answer.get("ratio"), answer.get("seconds")
        try:
            ratio = Ratio(**numbers)  # type: ignore[arg-type]
            values = [float(v) for v in (seconds, *asdict(ratio).values())]
        except (TypeError, ValueError):
            return None
        plausible = all(math.isfinite(v) and v > 0 for v in values)
        return Measured(candidate, values[0], ratio) if plausible else None
    if isinstance(kind, str) and kind in KINDS:
        return KINDS[kind](candidate, str(answer.get("text", ""))[:400])
    return None
