"""Which configurations a tuning run tries, the most promising first.

Candidates are the declared parameter sets of every rung that takes the problem with arithmetic good
enough for an automatic choice. A rung whose own heuristic expects several times the best expected
time is left out; a rung without a heuristic shows only some points of its space. Where rungs say of
all their parameters how long they take, the quickest expected come first, whichever rung's they
are: a run of little time has then tried what is likeliest to win.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from gemmule import backends
from gemmule.choose import eligible
from gemmule.core.problem import Problem
from gemmule.core.registry import all_rungs
from gemmule.core.rung import Machine, Rung, Suggestion
from gemmule.tuning.outcomes import Candidate, Skipped, same

# The heuristics are models of the memory traffic, wrong by half at times but hardly by four.
HOPELESS = 4.0
MOST_CANDIDATES = 128
MOST_OF_ONE_RUNG = 48
MOST_WITHOUT_HEURISTIC = 6


def candidates(
    problem: Problem,
    machine: Machine,
    default: Candidate,
    *,
    include_unproved: bool = False,
    only: Rung | None = None,
    seed: int = 0,
) -> tuple[list[Candidate], list[Skipped]]:
    """Return what to try besides `default`, in order of promise, and what the model rules out.

    only: try this rung's parameters and no other rung. At most `MOST_CANDIDATES` come back: where
    times are expected the quickest; else rungs take turns, so that the cap cuts the tails of their
    spaces rather than whole rungs.
    """
    rng = np.random.default_rng(seed)
    backend = backends.get(machine.backend)
    skipped: list[Skipped] = []
    by_rung: list[tuple[float, list[Candidate]]] = []
    takers = [
        (
            rung,
            rung.suggest(problem, machine),
            only is not None or backend.proved(rung, problem, machine),
        )
        for rung in ([only] if only is not None else all_rungs(machine.backend))
        if rung.refusal(problem) is None and (only is not None or eligible(rung, problem))
    ]
    expected = [s.expected_s for _, s, proved in takers if s is not None and proved]
    best = min(expected, default=default.expected_s or float("inf"))
    for rung, suggestion, proved in takers:
        if not proved and not include_unproved:
            continue
        points = _points(rung, problem, suggestion, machine, rng)
        mine = [Candidate(rung, params, expected_s, proved) for params, expected_s in points]
        mine = [one for one in mine if not same(one, default)]
        if suggestion is not None and suggestion.expected_s > HOPELESS * best:
            text = (
                f"its model expects {suggestion.expected_s * 1e6:,.1f} us, more than {HOPELESS:g} "
                f"times the {best * 1e6:,.1f} us of the most promising rung"
            )
            skipped += [Skipped(one, text) for one in mine]
        else:
            by_rung.append((float("inf") if suggestion is None else suggestion.expected_s, mine))
    return list(itertools.islice(_in_turns(by_rung), MOST_CANDIDATES)), skipped


def _points(
    rung: Rung,
    problem: Problem,
    suggestion: Suggestion | None,
    machine: Machine,
    rng: np.random.Generator,
) -> Sequence[tuple[dict[str, Any], float | None]]:
    """Return a rung's parameter sets and expected times, the quickest first.

    Where it tells of none: the suggested one, its neighbours, then others at random.
    """
    if rung.seconds is not None and suggestion is not None:
        known = [(params, rung.seconds(problem, params, machine)) for params in rung.space(problem)]
        return sorted(known, key=lambda one: one[1])[:MOST_OF_ONE_RUNG]
    centre = rung.check_params(problem, None if suggestion is None else suggestion.params)
    space = list(rung.space(problem))
    order = rng.permutation(len(space))
    ranked = sorted(order, key=lambda i: _distance(space[i], centre))  # sorted() keeps ties' order
    most = MOST_WITHOUT_HEURISTIC if suggestion is None else MOST_OF_ONE_RUNG
    expected_s = None if suggestion is None else suggestion.expected_s
    return [(space[i], expected_s) for i in ranked[:most]]


def _distance(one: Mapping[str, Any], other: Mapping[str, Any]) -> int:
    return sum(value != other[name] for name, value in one.items())


def _tells(one: Candidate) -> bool:
    """Tell whether the rung's model has a time for each of its parameters."""
    return one.rung.seconds is not None and one.expected_s is not None


def _in_turns(by_rung: Sequence[tuple[float, list[Candidate]]]) -> Iterator[Candidate]:
    """Yield one candidate of each rung in turn, the rungs by expected time, unknown ones last.

    First come all that their own expected times tell apart, by these.
    """
    told = [some for _, some in by_rung if some and _tells(some[0])]
    every = itertools.chain.from_iterable(told)
    yield from sorted(every, key=lambda one: one.expected_s or 0.0)
    others = [(first, some) for first, some in by_rung if some not in told]
    ordered = [some for _, some in sorted(others, key=lambda item: item[0])]
    for turn in itertools.zip_longest(*ordered):
        yield from (one for one in turn if one is not None)
