"""Kernels compiled ahead by processes beside: NVRTC compiles one at a time in each of them.

A compiler, ``python -m gemmule.tuning.compiling``, gets one kernel after the other as a line of
JSON on standard input, puts it into the cache on disk and answers with an empty line.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import TypeAlias

from gemmule.backends.cuda import nvrtc

# -P: the folder where the user happens to be is no place for code.
COMMAND = (sys.executable, "-P", "-m", "gemmule.tuning.compiling")
MOST = 16  # processes; one core is left to who measures

Kernels: TypeAlias = tuple[str, tuple[str, ...], str, tuple[str, ...]]
"""A source, the kernels of it, the architecture and the macros, as `nvrtc.compile_file` has it."""


class Compilers:
    """Processes that fill the cache of compiled kernels while the block lasts.

    Nothing that goes wrong in one of them is told: who needs the kernel compiles it then.
    """

    def __init__(self, count: int | None = None, command: Sequence[str] = COMMAND) -> None:
        cores = len(os.sched_getaffinity(0)) - 1
        self._count = max(1, min(MOST, cores)) if count is None else count
        self._command, self._asked = list(command), dict[Kernels, Future[None]]()
        self._children: list[subprocess.Popen[str]] = []
        self._idle: queue.SimpleQueue[subprocess.Popen[str]] = queue.SimpleQueue()
        self._pool = ThreadPoolExecutor(self._count, "gemmule-compile")

    def __enter__(self) -> Compilers:
        """Begin; processes start as they are needed."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the processes, whatever they are at: entries of the cache are whole or absent."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        for child in self._children:
            child.kill()
        self._pool.shutdown(wait=True)
        for child in self._children:
            child.communicate()

    def ask(self, kernels: Kernels) -> Future[None]:
        """Return what is done once the cache has these kernels, or will not get them from here."""
        if kernels not in self._asked:
            self._asked[kernels] = self._pool.submit(self._compile, kernels)
        return self._asked[kernels]

    def running(self) -> int:
        """Return how many processes there are."""
        return sum(child.poll() is None for child in self._children)

    def _compile(self, kernels: Kernels) -> None:
        with contextlib.suppress(OSError, ValueError):  # ValueError: its pipe is closed
            child = self._child()
            if child.stdin is None or child.stdout is None:
                return
            child.stdin.write(json.dumps(kernels) + "\n")
            child.stdin.flush()
            if child.stdout.readline():
                self._idle.put(child)

    def _child(self) -> subprocess.Popen[str]:
        with contextlib.suppress(queue.Empty):
            return self._idle.get_nowait()
        pipe, quiet = subprocess.PIPE, subprocess.DEVNULL
        child = subprocess.Popen(
            self._command, stdin=pipe, stdout=pipe, stderr=quiet, text=True, start_new_session=True
        )
        self._children.append(child)
        return child


def main() -> None:
    """Compile what standard input names, line by line."""
    for line in sys.stdin:
        source, names, arch, defines = json.loads(line)
        with contextlib.suppress(Exception):
            nvrtc.compile_file(Path(source), tuple(names), arch, tuple(defines))
        print(flush=True)


if __name__ == "__main__":
    main()
