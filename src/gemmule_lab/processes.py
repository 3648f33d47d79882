"""Child processes of the lab's own modules, and the programs of the CUDA toolkit."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path


def python_module(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module in a child: nothing is imported from its folder."""
    return [sys.executable, "-P", "-m", module, *arguments]


def environment_of_child(module: str = __name__, **more: str) -> dict[str, str]:
    """Return this process's environment, in which a child imports a module from where we do."""
    names = dict.fromkeys(name.partition(".")[0] for name in (__name__, module))
    found = [importlib.util.find_spec(name) for name in names]
    homes = [str(Path(one.origin).parents[1]) for one in found if one and one.origin]
    path = os.pathsep.join([*homes, *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, **more}


def in_toolkit(tool: str) -> Path | None:
    """Return the path of a program of the CUDA toolkit, None where it is in no usual place."""
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    places = (Path(home) / "bin" / tool for home in (*homes, "/usr/local/cuda"))
    return next((place for place in places if os.access(place, os.X_OK)), None)
