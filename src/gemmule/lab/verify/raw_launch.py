"""Launching a CUDA rung on an oracle's inputs, as they lie: the arguments for device or emulator.

The public path cannot reach every stride and alignment that a rung must survive; here the struct of
args.cuh is packed straight from the inputs' arrays.
"""

from __future__ import annotations

from typing import Any

from gemmule.backends.cuda import launch_args
from gemmule.core.canonical import Call
from gemmule.core.operand import View
from gemmule.oracle.inputs import Inputs


def element_view(array: Any) -> View:
    """Return shape and element strides of an ndarray."""
    return View(array.shape, tuple(step // array.itemsize for step in array.strides))


def call_of(inputs: Inputs) -> Call:
    """Return the canonical call over the inputs' own arrays."""
    problem = inputs.case.problem
    b, out = element_view(inputs.b), element_view(inputs.out)
    if problem.quant is not None:
        a = View((problem.m, problem.reduction), (0, 0))
    else:
        a = element_view(inputs.a)
    if problem.batch > 1:
        a = a if len(a.shape) == 3 else View((problem.batch, *a.shape), (0, *a.strides))
        rank = 2 if problem.op == "matvec" else 3
        b = b if len(b.shape) == rank else View((problem.batch, *b.shape), (0, *b.strides))
    return Call(problem.op, problem, a, b, out, out.shape)


def parts(inputs: Inputs) -> list[Any]:
    """Return the arrays whose addresses the struct begins with; None stands for a null address."""
    if inputs.case.problem.quant is None:
        return [inputs.a, inputs.b, inputs.out]
    q = inputs.a
    return [q.codes, q.scales, q.zeros, q.perm, inputs.b, inputs.out]


def arguments(
    inputs: Inputs, addresses: list[int], work: int, alpha: float = 1.0, beta: float = 0.0
) -> bytes:
    """Return the packed struct for arrays at these addresses (in the order of `parts`)."""
    problem, call = inputs.case.problem, call_of(inputs)
    quantized = problem.quant is not None
    pack = launch_args.pack_quantized if quantized else launch_args.pack
    packed = bytearray(pack(problem, call))
    words = [*addresses, work]
    for i, word in enumerate(words):
        packed[8 * i : 8 * i + 8] = int(word).to_bytes(8, "little")
    launch_args.SCALARS.pack_into(packed, len(packed) - launch_args.SCALARS.size, alpha, beta)
    return bytes(packed)
