"""Which fast path a launcher offers: none, one on host arrays, or one on PyTorch's CUDA tensors."""

from __future__ import annotations

import sys

from gemmule.backends.base import HostRun, Run
from gemmule.core.canonical import Call
from gemmule.core.operand import Form
from gemmule.dispatch.host import FastPath, bound_call


def bind(run: Run, call: Call, a: Form, b: Form, device: str) -> FastPath | None:
    """Return the fast path of a prepared launcher, or None where there is none."""
    if isinstance(run, HostRun):
        return FastPath(bound_call(run, call, a, b))
    if "torch" not in sys.modules or device == "cpu":
        return None
    from gemmule.dispatch import torch as torch_calls  # only where PyTorch is

    return torch_calls.bind(run, call, a, b, int(device[5:]))
