"""Python in a process of its own, which finds this checkout's packages and the tests' helpers."""

from __future__ import annotations

import os
import subprocess
import sys

from checkout import ROOT, SOURCE, TESTS

SEARCHED = os.pathsep.join(map(str, (SOURCE, TESTS, ROOT / "tools")))


def ended(*arguments: object, timeout: float = 240, **environment: object) -> Ended:
    """Run Python with these arguments, and with variables beside those of this process."""
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": SEARCHED, **{k: str(v) for k, v in environment.items()}},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def printed(code: str, *arguments: object, timeout: float = 240, **environment: object) -> str:
    """Return what code prints in a process that has to end well."""
    done = ended("-c", code, *arguments, timeout=timeout, **environment)
    assert done.returncode == 0, (done.returncode, done.stdout[-1000:], done.stderr[-3000:])
    return done.stdout


Ended = subprocess.CompletedProcess[str]
