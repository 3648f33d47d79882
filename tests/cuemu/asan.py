"""Runs a function in a child process under AddressSanitizer.

    asan.run("test_cuemu:stray_read", 33)

calls `test_cuemu.stray_read(33)` where `compile_cu(..., asan=True)` works, and returns its JSON
value. Arrays of `device_array` have their exact size, so the first byte past an end is seen.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

from cuemu.build import EmulationError
from cuemu.toolchain import BuildError

_OPTIONS = (
    "detect_leaks=0:detect_stack_use_after_return=0:abort_on_error=0:allocator_may_return_null=1"
)


def run(target: str, *args: object, timeout_s: float = 120.0) -> object:
    """Call `module:function` with JSON arguments in the child and return its JSON result.

    Raises EmulationError of kind "asan" with the report's summary, or of the kernel's own kind.
    """
    found = subprocess.run(
        ["g++", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True
    ).stdout.strip()
    if not Path(found).is_absolute():
        raise BuildError("libasan.so was not found; install the sanitizer runtime of g++")
    environment = dict(os.environ)
    environment |= {"LD_PRELOAD": str(Path(found).resolve()), "ASAN_OPTIONS": _OPTIONS}
    environment |= {
        "PYTHONMALLOC": "malloc",
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
    }
    done = subprocess.run(
        [sys.executable, "-m", "cuemu.asan", target, json.dumps(args)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    if done.returncode == 0:
        answer = json.loads(done.stdout.splitlines()[-1])
        if "kind" in answer:
            raise EmulationError(answer["kind"], answer["text"])
        return answer["value"]
    report = [line.strip() for line in done.stderr.splitlines()]
    lines = [line for line in report if line.startswith(("SUMMARY", "#0", "#1")) or "ERROR" in line]
    if any("AddressSanitizer" in line for line in lines):
        raise EmulationError("asan", "\n".join(lines[:6]))
    raise RuntimeError(f"{target} failed in the child process:\n{done.stderr[-3000:]}")


def _child(target: str, arguments: str) -> dict[str, object]:
    module, function = target.split(":")
    try:
        return {"value": getattr(importlib.import_module(module), function)(*json.loads(arguments))}
    except EmulationError as error:
        return {"kind": error.kind, "text": error.text}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(_child(sys.argv[1], sys.argv[2])) + "\n")
