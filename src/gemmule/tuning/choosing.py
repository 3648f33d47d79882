"""The choice that a plan runs: among the proved, and checked where nothing proves it here."""

from __future__ import annotations

from gemmule.choose import choose
from gemmule.core.canonical import Call, Options
from gemmule.core.choice import Choice
from gemmule.core.rung import Machine
from gemmule.storage import evidence


def chosen(call: Call, machine: Machine, device: str, options: Options) -> Choice:
    """Choose for a call; what is proved on other architectures alone is checked on the device.

    Where the check fails the next best is chosen. What the caller names is not checked.
    """
    while True:
        choice = choose(call, machine, options.rung, options.params, scaled=options.scaled)
        if options.rung is not None or machine.backend == "cpu":
            return choice
        if evidence.covers(choice.rung, choice.problem, machine.arch):
            return choice
        from gemmule.tuning import first_use  # late: it loads the oracle

        if first_use.passes(choice, device):
            return choice
