"""The process in which one unproved configuration is tried: ``python -m gemmule.tuning.child``."""

from __future__ import annotations

import json
import sys

from gemmule.core.registry import all_rungs
from gemmule.storage.tuned import problem_of
from gemmule.tuning.isolated import answer_of
from gemmule.tuning.outcomes import Candidate
from gemmule.tuning.tuner import settle_apart


def main() -> None:
    """Read a request from standard input, measure, and print the outcome as one line of JSON."""
    request = json.load(sys.stdin)
    problem, device = problem_of(request["problem"]), request["device"]
    rungs = all_rungs("cpu" if device == "cpu" else "cuda")
    wanted = (request["folder"], request["rung"])
    rung = next(r for r in rungs if (r.folder, r.name) == wanted)
    params = rung.check_params(problem, request["params"])
    candidate = Candidate(rung, params, None, proved=False)
    outcome = settle_apart(problem, device, candidate, request["seed"], request["seconds"])
    print(json.dumps(answer_of(outcome)), flush=True)


if __name__ == "__main__":
    main()
