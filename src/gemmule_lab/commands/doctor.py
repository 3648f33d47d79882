"""``gemmule doctor``: what works here, what is missing, and how to get it."""

from __future__ import annotations

import click


@click.command()
def doctor() -> None:
    """Check Python, NumPy, LLVM, the CPU, the caches, and the GPU's driver and compiler.

    The exit code is 0 when everything that CPU products need works, with or without a GPU.
    """
    from gemmule_lab import doctor as checks
    from gemmule_lab.cli import WrongResultError

    findings = checks.examine()
    checks.show(findings)
    broken = [finding.part for finding in findings if finding.status == checks.FAIL]
    if broken:
        raise WrongResultError(f"does not work: {', '.join(broken)}.")


COMMAND = doctor
