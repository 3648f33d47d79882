"""Work in a forked child, whose exit status says how it ended."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable


def start_fork(work: Callable[[], object]) -> int:
    """Fork, and return the child's number; it ends with 0 unless the work raises or gives False."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = int(work() is False)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return child


def status_of(child: int) -> int:
    """Wait for a child, and return its exit status, or less than 0: the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
