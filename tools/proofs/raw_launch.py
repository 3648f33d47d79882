"""Launching a CUDA rung on an oracle's inputs, as they lie: the arguments for device or emulator.

The public path cannot reach every stride and alignment that a rung must survive; here the struct of
args.cuh is packed straight from the inputs' arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gemmule.backends.cuda import launch_args
from gemmule.oracle.inputs import Inputs
from gemmule.tuning.operands import call_over


def parts(inputs: Inputs) -> list[Any]:
    """Return the arrays whose addresses the struct begins with; None stands for a null address."""
    if inputs.case.problem.quant is None:
        ends = [] if inputs.ends is None else [inputs.ends]
        return [inputs.a, inputs.b, inputs.out, *ends]
    grouped = inputs.ends is not None
    q, x = (inputs.b, inputs.a) if grouped else (inputs.a, inputs.b)
    held = [q.codes, q.scales, q.zeros, q.perm, x, inputs.out]
    return [*held, inputs.ends] if grouped else held


def arguments(
    inputs: Inputs,
    addresses: list[int],
    work: int,
    alpha: float = 1.0,
    beta: float = 0.0,
    bias: int | None = None,
) -> bytes:
    """Return the packed struct for arrays at these addresses (in the order of `parts`).

    bias: the address that kernels compiled to add one take as well.
    """
    problem = inputs.case.problem
    call = call_over(problem, inputs.a, inputs.b, inputs.out)
    packed = bytearray(launch_args.pack(problem, call))
    launch_args.place(packed, addresses if inputs.ends is not None else [*addresses, work])
    launch_args.SCALARS.pack_into(packed, len(packed) - launch_args.SCALARS.size, alpha, beta)
    return bytes(packed) + (b"" if bias is None else launch_args.BIAS.pack(bias))


def epilogue_of(around: Any, addresses: Sequence[int]) -> bytes:
    """Return the end of the struct of kernels that finish: operands' places at these addresses."""
    places = {}
    for (name, one), address in zip(around.operands.items(), addresses, strict=True):
        steps = [
            0 if n == 1 else s // one.itemsize for n, s in zip(one.shape, one.strides, strict=True)
        ]
        places[name] = (address, (*[0] * (3 - len(steps)), *steps))
    floor = 0.0 if around.activation == "relu" else float("-inf")
    return launch_args.EPILOGUE.pack(*launch_args.epilogue(places, floor))


def tail_of(scales: Any, addresses: list[int], rows: int) -> bytes:
    """Return the end of the struct of kernels that scale: where scales lie, and their steps.

    scales: vectors, or matrices of scales by blocks; rows: of A.
    """
    if scales[0].ndim == 2:
        of_a, of_b = ((s.shape, tuple(step // s.itemsize for step in s.strides)) for s in scales)
        steps = launch_args.block_steps(of_a, of_b, rows)
        return launch_args.BLOCK_SCALES.pack(*addresses, *steps)
    return launch_args.SCALES.pack(*addresses, *(int(one.size > 1) for one in scales))
