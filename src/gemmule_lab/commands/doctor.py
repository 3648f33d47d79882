"""``gemmule doctor``: what works here, what is missing, and how to get it."""

from __future__ import annotations

from typing import Any

from gemmule_lab.commands import _options as options


@options.command("maintain", "Say what works here, what is missing, and what to do.")
def doctor() -> Any:
    """Check Python, NumPy, LLVM, the CPU, the caches, and the GPU's driver and compiler.

    The exit code is 0 when everything that CPU products need works, with or without a GPU.
    """
    from gemmule_lab import doctor as checks
    from gemmule_lab.cli import WrongResultError
    from gemmule_lab.progress import working

    with working("checking") as tell:
        findings = checks.examine(tell)
    checks.show(findings)
    broken = [finding.part for finding in findings if finding.status == checks.FAIL]
    if broken:
        raise WrongResultError(f"does not work: {', '.join(broken)}.", findings)
    return findings


COMMAND = doctor
