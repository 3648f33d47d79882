"""Unproved configurations in a process of their own: a fault or a hang ends that process alone.

The child, ``python -m gemmule.tuning.child``, gets one JSON object on standard input and answers
with one on its last line of output; nothing it says is believed beyond numbers and a reason.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass
from typing import Any

from gemmule.core.problem import Problem
from gemmule.storage.decode import decode
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
    if done.returncode != 0 or not lines or not lines[-1].startswith("{"):
        said = done.stderr.strip().splitlines()[-1:] or ["it said nothing"]
        how = f"its process ended with status {done.returncode}"
        return LaunchFailed(candidate, f"{how}: {said[0][:300]}")
    told = _outcome(candidate, lines[-1])
    return told or LaunchFailed(candidate, "its process answered nonsense")


@dataclass(frozen=True, slots=True)
class Answer:
    """What the child tells of a configuration: its time and ratio, or what failed and why."""

    kind: str
    text: str = ""
    seconds: float = 0.0
    ratio: Ratio | None = None


def answer_of(outcome: Measured | Failure) -> dict[str, Any]:
    """Return an outcome as the child prints it."""
    kind = type(outcome).__name__
    if isinstance(outcome, Measured):
        return asdict(Answer(kind, seconds=outcome.seconds, ratio=outcome.ratio))
    return asdict(Answer(kind, outcome.text))


def _outcome(candidate: Candidate, line: str) -> Measured | Failure | None:
    """Return the outcome that the child told, or None when it told none."""
    try:
        answer = decode(Answer, json.loads(line), "the answer")
    except (ValueError, RecursionError):
        return None
    if answer.kind == "Measured" and answer.ratio is not None:
        plausible = min(answer.seconds, *astuple(answer.ratio)) > 0
        return Measured(candidate, answer.seconds, answer.ratio) if plausible else None
    kind = KINDS.get(answer.kind)
    return None if kind is None else kind(candidate, answer.text[:400])
