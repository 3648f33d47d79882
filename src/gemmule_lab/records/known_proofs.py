"""Which recorded proof stands behind a rung on a problem, for the rows of measurements."""

from __future__ import annotations

import functools
from collections.abc import Mapping

from gemmule.core.problem import Problem
from gemmule.core.rung import Rung
from gemmule.storage import evidence


@functools.cache
def _keys() -> Mapping[tuple[str, str, str], str]:
    return {(r.folder, r.rung, r.variant): r.key for r in evidence.read()}


def proof_of(rung: Rung, problem: Problem) -> str | None:
    """Return the first sixteen digits of the recorded key of the variant, or None without one."""
    key = _keys().get((rung.folder, rung.name, evidence.variant_of(problem)))
    return None if key is None else key[:16]
